"""The Python client: each operation is one generator of effects, run blocking or async."""
