"""The operator: the controller inside a cluster, on custom resources and Indexed Jobs."""
