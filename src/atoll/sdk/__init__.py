"""The client: every operation once, as a generator of effects, driven by either colour."""
