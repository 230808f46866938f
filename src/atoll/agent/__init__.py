"""Code that runs inside a rank, on every backend."""
