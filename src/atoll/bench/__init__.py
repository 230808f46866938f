"""The link bench."""
