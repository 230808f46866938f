"""What runs in a rank on every backend."""
