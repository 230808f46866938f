"""The output of ranks: written in segments, read, followed and searched."""
