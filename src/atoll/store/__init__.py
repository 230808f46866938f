"""Stores of trainings, events and tokens."""
