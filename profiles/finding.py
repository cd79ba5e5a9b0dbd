"""Finds the profile of a card: by its name, by the path of its file, or by what the driver reports of the card."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from planner.profiles.device import DeviceProfile, ProfileError, read
from planner.profiles.generic import bare, modelled_context_bytes

UNLISTED = "unlisted"
"""Name of the profile for a card of this machine whose name is in no profile file."""

_DEVICES = Path(__file__).parent / "devices"


def known() -> tuple[str, ...]:
    """Returns the sorted names of all cards that have a file in `devices/`. `load` also accepts 'bare'."""
    return tuple(sorted(path.stem for path in _DEVICES.glob("*.toml")))


def load(name: str) -> DeviceProfile:
    """Returns the profile of a card.

    Args:
        name: the name of a known card or a common spelling of it, such as 'RTX 3060' or 'T4 16GB'; the name that
            the driver reports, such as 'NVIDIA H100 80GB HBM3'; 'bare'; or the path of a profile file, which ends in
            '.toml'.

    Raises:
        ProfileError: the name is unknown (the message suggests similar names), or the file is not well formed.
    """
    if name.endswith(".toml"):
        return read(Path(name))
    if name == "bare":
        return bare()
    if name in known():
        return read(_DEVICES / f"{name}.toml")
    if len(meant := _meant(name)) == 1:
        return read(_DEVICES / f"{meant[0]}.toml")
    if not meant and (profile := _of_driver_name(name, _all())) is not None:
        return profile
    choices = (*known(), "bare")
    slug = re.sub(r"[\s_]+", "-", name.strip().casefold())
    containing = meant or [choice for choice in choices if slug in choice]
    numbers = set(re.findall(r"\d{3,}", slug))
    of_its_number = [choice for choice in choices if numbers & set(choice.split("-"))]
    near = dict.fromkeys([*of_its_number, *difflib.get_close_matches(slug, choices, n=3, cutoff=0.4)])
    similar = containing[:3] or list(near)[:3]
    hint = f"did you mean {' or '.join(similar)}? The known cards are" if similar else "the known cards are"
    raise ProfileError(
        f"card '{name}' is unknown: {hint} {', '.join(choices)}; or give the path of a .toml file like those in "
        "profiles/devices, or leave the card out for a generic Ampere GPU with as much memory as the budget"
    )


def _meant(name: str) -> list[str]:
    """Returns the known cards that a name such as 'NVIDIA GeForce RTX 3060' or 'a100 80 gb' means.

    A card is meant if the card's name and memory have all words of `name`, and `name` has all words of the card's name.
    Only the family ('rtx') and the memory ('12gb') may be missing in `name`, but not 'ti', 'super' and 'laptop'.
    """
    asked = {word for word in _words(name) if not _VENDOR_WORD.fullmatch(word)}
    if asked <= _FAMILIES:
        return []
    return [
        card
        for card in known()
        if set(card.split("-")) - asked <= _FAMILIES | (sizes := _sizes(card)) and asked <= {*card.split("-"), *sizes}
    ]


def _words(name: str) -> list[str]:
    text = re.sub(r"(\d+)\s*g(i?b)?\b", r"\1gb", name.casefold())
    text = re.sub(r"(?<=rtx|gtx)(?=\d)|(?<=\d)(?=ti|super)|(?<=\dti)(?=super)", " ", text)
    return re.findall(r"[a-z0-9]+", text)


@functools.cache
def _sizes(card: str) -> frozenset[str]:
    """Returns the memory of a known card as a word, such as '12gb'."""
    return frozenset(word for word in _words(read(_DEVICES / f"{card}.toml").title) if word.endswith("gb"))


_VENDOR_WORD = re.compile(r"nvidia|geforce|tesla|quadro|gpu|generation|blackwell|pcie|sxm\d*|hbm\d\w*")
"""Words in names of cards that are not in the names of profiles."""
_FAMILIES = {"rtx", "gtx"}


def own_folder() -> Path:
    """Returns the folder of the user's calibrated profiles.

    It is the folder that the environment variable PLANNER_DEVICES names, or torch-planner/devices in the user's
    configuration folder (XDG_CONFIG_HOME, by default ~/.config).
    """
    if own := os.environ.get("PLANNER_DEVICES"):
        return Path(own)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "torch-planner" / "devices"


def matching(cuda_device_name: str) -> DeviceProfile | None:
    """Returns the profile whose `cuda_names` match the name of a card; None if there is none.

    Profiles in `own_folder` take precedence over those of the package. Their `name` is the path of their file, so that
    `load` finds them again. Cards of the same name can differ in memory (there is an RTX 2060 with 12 GB), so a caller
    that can access the card should replace `vram_bytes` by the card's `total_memory`.

    Args:
        cuda_device_name: the name from `torch.cuda.get_device_name()`. 'NVIDIA ' in front and letter case are ignored.
    """
    return _of_driver_name(cuda_device_name, (*_own(), *_all()))


def _of_driver_name(cuda_device_name: str, profiles: Iterable[DeviceProfile]) -> DeviceProfile | None:
    name = cuda_device_name.strip().casefold().removeprefix("nvidia ")
    for profile in profiles:
        if any(fnmatch.fnmatchcase(name, pattern.casefold()) for pattern in profile.cuda_names):
            return profile
    return None


def _own() -> Iterator[DeviceProfile]:
    """Yields the user's calibrated profiles."""
    for path in sorted(own_folder().glob("*.toml")):
        yield dataclasses.replace(read(path), name=str(path))


@functools.cache
def _all() -> tuple[DeviceProfile, ...]:
    """Returns all profiles of the package."""
    return tuple(load(name) for name in known())


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Facts that the driver reports of a card. `cuda_name` is its name; the other fields are as in `DeviceProfile`."""

    cuda_name: str
    compute_capability: tuple[int, int]
    sm_count: int
    max_threads_per_sm: int
    vram_bytes: int


def like(card: CardFacts) -> DeviceProfile:
    """Returns a profile for a card that has no profile file, scaled from the profile of the most similar known card.

    The most similar card is chosen by compute capability first: the same, else the next lower one, else the next higher
    one. Among those, cards of the same family (GeForce or not) are preferred, and then the card with the nearest number
    of multiprocessors. Rates are scaled by the number of multiprocessors. The size of the CUDA context is estimated
    (`modelled_context_bytes`).
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
    """Converts a compute capability to a number, so that differences can be compared: (8, 6) gives 806."""
    return 100 * compute_capability[0] + compute_capability[1]
