"""Programs that measure the figures in the documentation. Each prints tables: `python -m benchmarks.NAME`."""
