"""The dialect of the public basilica-sdk client."""
