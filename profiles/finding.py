"""Which profile is meant: by its name, by its file, or by the card at hand."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from planner.profiles.device import DeviceProfile, ProfileError, read
from planner.profiles.generic import bare, modelled_context_bytes

UNLISTED = "unlisted"
"""The name of a card at hand that no file claims."""

_DEVICES = Path(__file__).parent / "devices"


def known() -> tuple[str, ...]:
    """The names of all cards with a file in `devices/`, sorted. `load` also takes 'bare'."""
    return tuple(sorted(path.stem for path in _DEVICES.glob("*.toml")))


def load(name: str) -> DeviceProfile:
    """The profile of a card by its name, of 'bare', or of a profile file by its path (ending in '.toml').

    Raises `ProfileError` for an unknown name (with near ones) and for a file that is not well formed.
    """
    if name.endswith(".toml"):
        return read(Path(name))
    if name == "bare":
        return bare()
    if name in known():
        return read(_DEVICES / f"{name}.toml")
    choices = (*known(), "bare")
    slug = re.sub(r"[\s_]+", "-", name.strip().casefold())
    containing = [choice for choice in choices if slug in choice]
    near = containing[:3] or difflib.get_close_matches(slug, choices, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? Known are" if near else "known are"
    raise ProfileError(
        f"card '{name}' is unknown: {hint} {', '.join(choices)}; "
        "or give the path of a .toml file like them, or no card at all for a generic one of the budget's size"
    )


def own_folder() -> Path:
    """Where calibrated profiles of one's own cards are: PLANNER_DEVICES, or torch-planner/devices in the user's
    configuration (XDG_CONFIG_HOME)."""
    if own := os.environ.get("PLANNER_DEVICES"):
        return Path(own)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "torch-planner" / "devices"


def matching(cuda_device_name: str) -> DeviceProfile | None:
    """The profile of a live card by `torch.cuda.get_device_name()`, or None when no file claims that name.

    One in `own_folder` goes before those of the package; its name is then its path, so that `load` finds it again.
    'NVIDIA ' in front and letter case do not matter. Names do not tell memory sizes apart (there is an RTX 2060
    with 12 GB), so a caller that holds the card should put its `total_memory` in place of `vram_bytes`.
    """
    name = cuda_device_name.strip().casefold().removeprefix("nvidia ")
    for profile in (*_own(), *_all()):
        if any(fnmatch.fnmatchcase(name, pattern.casefold()) for pattern in profile.cuda_names):
            return profile
    return None


def _own() -> Iterator[DeviceProfile]:
    for path in sorted(own_folder().glob("*.toml")):
        yield dataclasses.replace(read(path), name=str(path))


@functools.cache
def _all() -> tuple[DeviceProfile, ...]:
    return tuple(load(name) for name in known())


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What the driver says of a card."""

    cuda_name: str
    compute_capability: tuple[int, int]
    sm_count: int
    max_threads_per_sm: int
    vram_bytes: int


def like(card: CardFacts) -> DeviceProfile:
    """A card that no file claims, scaled by multiprocessors from the most similar one that is known.

    That is one of the same compute capability, or else of the nearest below (or above), of the same family (GeForce or
    not), with the nearest number of multiprocessors. The context is modelled.
    """
    is_geforce = "geforce" in card.cuda_name.casefold()

    def distance(profile: DeviceProfile) -> tuple[bool, int, bool, float]:
        generations = _as_number(card.compute_capability) - _as_number(profile.compute_capability)
        is_other = is_geforce is not any("geforce" in name.casefold() for name in profile.cuda_names)
        return generations < 0, abs(generations), is_other, abs(math.log(profile.sm_count / card.sm_count))

    nearest = min(_all(), key=distance)
    scale = card.sm_count / nearest.sm_count
    return dataclasses.replace(
        nearest,
        name=UNLISTED,
        title=card.cuda_name,
        source=f"datasheet of the {nearest.title}, scaled from {nearest.sm_count} to {card.sm_count} multiprocessors",
        cuda_names=(),
        compute_capability=card.compute_capability,
        sm_count=card.sm_count,
        max_threads_per_sm=card.max_threads_per_sm,
        vram_bytes=card.vram_bytes,
        context_bytes=modelled_context_bytes(card.sm_count),
        context_source="modelled: 13 MiB + 3.41 MiB x multiprocessors",
        memory_bandwidth_bytes_per_s=round(nearest.memory_bandwidth_bytes_per_s * scale),
        flops_per_s={dtype: round(rate * scale) for dtype, rate in nearest.flops_per_s.items()},
        native_dtypes=tuple(d for d in nearest.native_dtypes if d != "bf16" or card.compute_capability >= (8, 0)),
        segment_addresses="unknown",
    )


def _as_number(compute_capability: tuple[int, int]) -> int:
    return 100 * compute_capability[0] + compute_capability[1]
