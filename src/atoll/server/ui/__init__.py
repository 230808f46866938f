"""The dashboard: signing in, its pages, and the answers made for a browser."""
