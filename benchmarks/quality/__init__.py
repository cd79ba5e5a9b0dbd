"""Compares our plans with common methods, counted on real steps on the CPU: `python -m benchmarks.quality`."""
