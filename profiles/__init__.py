"""Device data: what each card holds, costs and computes, and where every number comes from."""

from __future__ import annotations

from profiles.device import DeviceProfile, ProfileError, bare, generic, known, load, matching, read

__all__ = ["DeviceProfile", "ProfileError", "bare", "generic", "known", "load", "matching", "read"]
