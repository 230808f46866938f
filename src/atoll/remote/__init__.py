"""Thin clients for outside systems; they move bytes and decide nothing."""
