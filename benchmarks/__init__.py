"""Programs that measure the figures in the documentation. Each prints tables: `python -m benchmarks.NAME`."""

import os

os.environ.setdefault("PLANNER_RECORDINGS", "none")  # each figure is of a rehearsal of its own
