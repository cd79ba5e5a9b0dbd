"""Runs the command `python -m planner.snapshot` and exits with its exit code."""

from __future__ import annotations

import sys

from planner.snapshot.command import main

sys.exit(main())
