"""Our plans beside what people do today, counted on real steps on the CPU: `python -m benchmarks.quality`."""
