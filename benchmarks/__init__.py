"""Drivers that measure what the documentation states. Each prints one table: `python -m benchmarks.NAME`."""
