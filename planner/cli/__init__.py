"""The `plan` command and its reports."""

from __future__ import annotations

from planner.cli.command import main

__all__ = ["main"]
