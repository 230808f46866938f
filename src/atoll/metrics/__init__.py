"""Metrics that ranks report over time, in bounded series: one for each rank and name."""
