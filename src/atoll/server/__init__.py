"""HTTP in front of the store and the controller."""
