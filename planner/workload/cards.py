"""Which card a plan is for: the one named, the CUDA card at hand, or a generic one of the budget's size."""

from __future__ import annotations

import dataclasses

import torch

from planner import profiles
from planner.errors import DeviceProfileError, MeasurementError
from planner.profiles.device import DeviceProfile, ProfileError
from planner.profiles.finding import UNLISTED, CardFacts
from planner.virtual_gpu.forked_process import run_in_child


def resolve_card(gpu: str | None, vram_bytes: int | None) -> DeviceProfile:
    """The profile for a plan.

    Args:
        gpu: a profile's name, 'bare', the path of a TOML file, 'unlisted' for a card at hand that has none, or None.
        vram_bytes: size of the generic card when there is neither a name nor a card; None: 8 GiB.

    Raises:
        DeviceProfileError: the name is unknown or the file is not well formed.
    """
    try:
        if gpu not in (None, GENERIC, UNLISTED):
            return profiles.load(gpu)
        if gpu != GENERIC and (present := _present_card()) is not None:
            return present
    except ProfileError as error:
        raise DeviceProfileError(str(error)) from error
    if gpu == UNLISTED:
        raise DeviceProfileError("the plan is for a card that no profile knows and that is not here: name one (--gpu)")
    return profiles.generic(vram_bytes or 8 << 30)


GENERIC = "generic"


def refuse_without_cuda() -> None:
    """Raises `MeasurementError` where there is no CUDA card."""
    if _card_here() is None:
        build = "has a build without CUDA" if torch.version.cuda is None else "sees none"
        raise MeasurementError(
            f"--verify trains on a CUDA card, and torch {torch.__version__} here {build}: leave it out, the plan is "
            "certified by rehearsal"
        )


def _present_card() -> DeviceProfile | None:
    """The first CUDA card of this machine: its own calibrated profile, the one that is known, or one like it."""
    found = _card_here()
    if found is None:
        return None
    known = profiles.matching(found.cuda_name)
    return profiles.like(found) if known is None else dataclasses.replace(known, vram_bytes=found.vram_bytes)


def _card_here() -> CardFacts | None:
    """A child asks, because a process that has used CUDA cannot be forked."""
    if torch.version.cuda is None:
        return None
    return _asked() if torch.cuda.is_initialized() else run_in_child(_asked)


def _asked() -> CardFacts | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return CardFacts(
        cuda_name=torch.cuda.get_device_name(0),
        compute_capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        max_threads_per_sm=properties.max_threads_per_multi_processor,
        vram_bytes=properties.total_memory,
    )
