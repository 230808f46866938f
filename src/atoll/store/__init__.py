"""Where trainings are kept."""
