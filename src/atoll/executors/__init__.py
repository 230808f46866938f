"""Where ranks run. One backend a file; they never import each other."""
