"""The command `python -m planner.snapshot`."""

from __future__ import annotations

import sys

from planner.snapshot.command import main

sys.exit(main())
