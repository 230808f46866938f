"""Ranks as training jobs of Amazon SageMaker."""
