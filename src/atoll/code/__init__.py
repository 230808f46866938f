"""The user's project as an archive that travels to ranks."""
