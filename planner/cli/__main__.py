"""`python -m planner.cli`: the `plan` command."""

from __future__ import annotations

import sys

from planner.cli import main

sys.exit(main())
