"""atoll in a cluster: the controller on custom resources and Jobs, and what to apply for it."""
