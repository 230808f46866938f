"""Ranks as Sandboxes of Modal."""
