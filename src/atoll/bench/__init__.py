"""The link bench: measures the network between two hosts."""
