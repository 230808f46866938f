"""Files of this machine: whose they are, and how they are written."""
