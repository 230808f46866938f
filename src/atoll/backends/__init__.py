"""Where ranks run: what every backend shares, and a folder for each backend."""
