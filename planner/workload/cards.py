"""Resolves the card that a plan is for: the card that the user named, this machine's CUDA card, or a generic one."""

from __future__ import annotations

import dataclasses
import os

import torch

from planner import profiles
from planner.allocator.options import given_options
from planner.errors import DeviceProfileError
from planner.profiles.device import DeviceProfile, ProfileError
from planner.profiles.finding import UNLISTED, CardFacts
from planner.virtual_gpu.forked_process import run_in_child


def resolve_card(gpu: str | None, vram_bytes: int | None) -> DeviceProfile:
    """Returns the profile of the card that a plan is for.

    Args:
        gpu: a profile's name, 'bare', the path of a TOML file, or 'generic'. If None, the result is the profile of this
            machine's CUDA card, or the generic profile if there is none. 'unlisted' is the name in plans for a card
            without a profile of its own: it also stands for this machine's card.
        vram_bytes: memory of the generic card in bytes; None means 8 GiB.

    Raises:
        DeviceProfileError: the name is unknown, the file is not well formed, or `gpu` is 'unlisted' and this machine
            has no CUDA card.
    """
    try:
        if gpu not in (None, GENERIC, UNLISTED):
            return profiles.load(gpu)
        if gpu != GENERIC and (present := _present_card()) is not None:
            return present
    except ProfileError as error:
        raise DeviceProfileError(str(error)) from error
    if gpu == UNLISTED:
        raise DeviceProfileError(
            "card 'unlisted' stands for this machine's CUDA card, and this machine has none: name another card with "
            "--gpu"
        )
    return profiles.generic(vram_bytes or 8 << 30)


def with_allocator_options(card: DeviceProfile, explicit: str | None) -> tuple[DeviceProfile, tuple[str, ...]]:
    """Returns the card with the options of the allocator that the user has set, and notes about them.

    Args:
        explicit: options in the notation of PYTORCH_ALLOC_CONF, '' for PyTorch's defaults; None for the environment of
            this process.

    Raises:
        WorkloadError: PyTorch refuses an option or its value, or cannot be simulated with it.
    """
    if not card.allocator:
        return card, ()
    conf, notes = given_options(explicit, os.environ, torch.__version__)
    return dataclasses.replace(card, alloc_conf=conf), notes


GENERIC = "generic"
"""Name of the generic profile."""


def has_cuda_card() -> bool:
    """True if this machine has a CUDA card that torch can use."""
    return _present_card_facts() is not None


def _present_card() -> DeviceProfile | None:
    """Returns the profile of this machine's first CUDA card; None if it has none.

    If the card's name is in a profile (`profiles.matching`), the result is this profile with the memory that the driver
    reports. Otherwise it is the profile of the most similar card, scaled to this card.
    """
    facts = _present_card_facts()
    if facts is None:
        return None
    profile = profiles.matching(facts.cuda_name)
    return profiles.like(facts) if profile is None else dataclasses.replace(profile, vram_bytes=facts.vram_bytes)


def _present_card_facts() -> CardFacts | None:
    """Returns what the driver reports of the first CUDA card; None if there is none.

    The driver is asked in a child process, because a process that has initialized CUDA cannot be forked for rehearsals.
    """
    if torch.version.cuda is None:
        return None
    return _driver_facts() if torch.cuda.is_initialized() else run_in_child(_driver_facts)


def _driver_facts() -> CardFacts | None:
    """Returns what the driver reports of the first CUDA card; None if there is none. Initializes CUDA."""
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
