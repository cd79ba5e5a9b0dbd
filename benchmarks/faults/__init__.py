"""Planted faults, and the tests that see them: `python -m benchmarks.faults`."""
