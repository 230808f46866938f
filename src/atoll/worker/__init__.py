"""What runs beside or inside a rank. Light: no server code, torch only inside functions."""
