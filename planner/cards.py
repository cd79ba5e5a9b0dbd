"""Which card a plan is for: the one named, the CUDA card at hand, or a generic one of the budget's size."""

from __future__ import annotations

import dataclasses

import torch

import profiles
from planner.child import run_in_child
from planner.errors import DeviceProfileError, MeasurementError
from profiles.device import DeviceProfile, ProfileError


def resolve_card(gpu: str | None, vram_bytes: int | None) -> DeviceProfile:
    """The profile for a plan.

    Args:
        gpu: a profile's name, 'bare', the path of a TOML file, or None.
        vram_bytes: size of the generic card when there is neither a name nor a card; None: 8 GiB.

    Raises:
        DeviceProfileError: the name is unknown or the file is not well formed.
    """
    if gpu is not None and gpu != GENERIC:
        try:
            return profiles.load(gpu)
        except ProfileError as error:
            raise DeviceProfileError(str(error)) from error
    if gpu is None and (present := _present_card()) is not None:
        return present
    return profiles.generic(vram_bytes or 8 << 30)


GENERIC = "generic"


def refuse_without_cuda() -> None:
    """Raises `MeasurementError` where there is no CUDA card."""
    if _name_and_memory_here() is None:
        build = "has a build without CUDA" if torch.version.cuda is None else "sees none"
        raise MeasurementError(
            f"--verify trains on a CUDA card, and torch {torch.__version__} here {build}: leave it out, the plan is "
            "certified by rehearsal"
        )


def _present_card() -> DeviceProfile | None:
    """The first CUDA card of this machine, as a profile knows it."""
    found = _name_and_memory_here()
    if found is None:
        return None
    name, total_bytes = found
    known = profiles.matching(name)
    return None if known is None else dataclasses.replace(known, vram_bytes=total_bytes)


def _name_and_memory_here() -> tuple[str, int] | None:
    """A child asks, because a process that has used CUDA cannot be forked."""
    if torch.version.cuda is None:
        return None
    return _name_and_memory() if torch.cuda.is_initialized() else run_in_child(_name_and_memory)


def _name_and_memory() -> tuple[str, int] | None:
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
