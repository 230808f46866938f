"""Makes the world match the spec."""
