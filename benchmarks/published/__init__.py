"""Predicted beside published figures: `python -m benchmarks.published`."""
