"""Executors as a library: replicas launched from a script."""
