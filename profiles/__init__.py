"""Device data: what each card holds, costs and computes, and where every number comes from."""

from __future__ import annotations

from profiles.device import DeviceProfile, ProfileError, read
from profiles.finding import CardFacts, known, like, load, matching, own_folder
from profiles.generic import bare, generic

__all__ = [
    "CardFacts", "DeviceProfile", "ProfileError", "bare", "generic", "known", "like", "load", "matching", "own_folder",
    "read",
]  # fmt: skip
