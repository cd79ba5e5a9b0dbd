"""Compares predictions with published figures: `python -m benchmarks.published`."""
