"""Ranks as jobs of Hugging Face Jobs."""
