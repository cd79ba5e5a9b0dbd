"""Profiles of GPUs: memory, fixed costs and rates of each card, with the source of every number."""

from __future__ import annotations

if __name__ != "planner.profiles":
    raise ImportError(f"this package cannot be imported as {__name__}: write `from planner import profiles`")

from planner.profiles.device import DeviceProfile, ProfileError, read
from planner.profiles.finding import CardFacts, known, like, load, matching, own_folder
from planner.profiles.generic import bare, generic

__all__ = [
    "CardFacts", "DeviceProfile", "ProfileError", "bare", "generic", "known", "like", "load", "matching", "own_folder",
    "read",
]  # fmt: skip
