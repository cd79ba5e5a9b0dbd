"""Reads the options of PyTorch's caching allocator as PyTorch does: from the environment, and from their text.

Sources: pytorch's c10/core/AllocatorConfig.cpp and .h, c10/cuda/CUDAAllocatorConfig.cpp and .h. In the releases 2.11 to
2.14 the first variable that is set counts (`allocator_variable_in`). PyTorch reads a number up to the first character
that does not belong to it ('64MB' is 64), and so does this module.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from planner.allocator.settings import PYTORCH_DEFAULTS, ROUNDUP_INTERVALS, AllocatorSettings
from planner.errors import WorkloadError
from planner.plan_types.decision_base import ALLOCATOR_VARIABLE, allocator_conf, allocator_variable_in, options_in
from planner.plan_types.sizes import MIB

FRACTION = "per_process_memory_fraction"
"""Option that limits the memory of the allocator to a fraction of the card's memory."""

_NATIVE, _FLAGS, _OTHERS = "native", ("True", "False"), "cudaMallocAsync"
_OF_SETTINGS = (
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "large_segment_size_mb",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "expandable_segments",
    FRACTION,
)
"""Options that change which memory the allocator takes from the card."""
_WITHOUT_EFFECT = {
    "backend": None,
    "release_lock_on_cudamalloc": bool,
    "release_lock_on_hipmalloc": bool,
    "pinned_use_cuda_host_register": bool,
    "pinned_use_hip_host_register": bool,
    "pinned_use_background_threads": bool,
    "graph_capture_record_stream_reuse": bool,
    "pinned_reserve_segment_size_mb": int,
    "pinned_num_register_threads": int,
    "pinned_free_catch_all": bool,
    "throw_on_cudamalloc_oom": bool,
    "pinned_max_round_threshold_mb": int,
    "pinned_max_cached_size_mb": int,
}
"""Options that do not change the memory of a training step on the card, and the type of their values."""
_MOST_MB = ((1 << 64) - 1) // MIB
_SINCE = {
    "pinned_free_catch_all": (2, 12),
    "throw_on_cudamalloc_oom": (2, 12),
    "pinned_max_round_threshold_mb": (2, 13),
    "pinned_max_cached_size_mb": (2, 13),
}
"""The first release with an option, for those that release 2.11 does not have."""


def given_options(
    explicit: str | None, environment: Mapping[str, str], torch_version: str
) -> tuple[str, tuple[str, ...]]:
    """Returns the options of the allocator that the user has set, in PyTorch's notation, and notes.

    Args:
        explicit: options that count instead of the environment; '' for PyTorch's defaults, None for the environment.
        torch_version: a version as in `torch.__version__`.

    Raises:
        WorkloadError: PyTorch refuses an option or its value, or cannot be simulated with it.
    """
    name, conf = ("--alloc-conf", explicit) if explicit is not None else allocator_variable_in(environment)
    options = options_in(conf)
    _refuse_unknown(options, name, torch_version)
    settings_of(conf, name=name)
    if options.get("backend") == _OTHERS:
        raise WorkloadError(
            f"{name} has backend:{_OTHERS}, whose memory is not simulated: train and plan with backend:native, or plan "
            "with --gpu bare, which counts tensors only"
        )
    notes = []
    if options:
        source = "as you state them" if explicit is not None else f"of this process ({name})"
        notes.append(f"allocator options {source}: {allocator_conf((), conf)}")
    ignored = environment.get(ALLOCATOR_VARIABLE, "")
    if explicit is None and name != ALLOCATOR_VARIABLE and ignored:
        notes.append(f"PyTorch ignores {ALLOCATOR_VARIABLE}={ignored}, because {name} is set, too: unset {name}")
    if "garbage_collection_threshold" in options and float(_number(options.get(FRACTION, "1"), FRACTION, name)) >= 1:
        notes.append(
            "garbage_collection_threshold has no effect without a limit on the memory of the process "
            f"({FRACTION}, or torch.cuda.set_per_process_memory_fraction, which is not part of the plan)"
        )
    return allocator_conf((), conf), tuple(notes)


def settings_of(conf: str, *, card_bytes: int | None = None, name: str = ALLOCATOR_VARIABLE) -> AllocatorSettings:
    """Returns the settings with the options in a text such as 'expandable_segments:True'; others have their defaults.

    Args:
        card_bytes: memory of the card, of which `per_process_memory_fraction` is a part; None leaves this limit out.
        name: where the text comes from, for messages.

    Raises:
        WorkloadError: an option has a value that PyTorch refuses.
    """
    options = options_in(conf)
    sizes = {
        option: _least(_whole(options[option], option, name), least_mb, option, name) * MIB
        for option, least_mb in (("large_segment_size_mb", 11), ("max_split_size_mb", 20))
        if option in options
    }
    rounding = "max_non_split_rounding_mb"
    large_bytes = sizes.get("large_segment_size_mb", PYTORCH_DEFAULTS.large_segment_bytes)
    if sizes.get("max_split_size_mb", large_bytes) < large_bytes:
        raise _refused("max_split_size_mb", options["max_split_size_mb"], name, f"at least {large_bytes // MIB}")
    threshold, fraction = (
        float(_number(options[option], option, name)) if option in options else default
        for option, default in (("garbage_collection_threshold", 0.0), (FRACTION, 1.0))
    )
    if "garbage_collection_threshold" in options and not 0 < threshold < 1:
        raise _refused("garbage_collection_threshold", options["garbage_collection_threshold"], name, "between 0 and 1")
    if not 0 <= fraction <= 1:
        raise _refused(FRACTION, options[FRACTION], name, "a fraction from 0 to 1")
    return AllocatorSettings(
        expandable_segments=_flag(options.get("expandable_segments", "False"), "expandable_segments", name),
        max_split_size_bytes=sizes.get("max_split_size_mb"),
        max_non_split_rounding_bytes=PYTORCH_DEFAULTS.max_non_split_rounding_bytes
        if rounding not in options
        else _least(_whole(options[rounding], rounding, name), 20, rounding, name) * MIB,
        large_segment_bytes=large_bytes,
        roundup_power2_divisions=_divisions(options.get("roundup_power2_divisions"), name),
        garbage_collection_threshold=threshold,
        allowed_bytes=int(fraction * card_bytes) if fraction < 1 and card_bytes is not None else None,
    )


def without_limit(settings: AllocatorSettings) -> AllocatorSettings:
    """Returns the settings without the limit on the memory of the process."""
    return dataclasses.replace(settings, allowed_bytes=None)


def _refuse_unknown(options: Mapping[str, str], name: str, torch_version: str) -> None:
    """Raises `WorkloadError` for an option that this version of PyTorch does not have, or that has a wrong value."""
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    for option, value in options.items():
        if option not in _OF_SETTINGS and option not in _WITHOUT_EFFECT:
            raise WorkloadError(
                f"{name} has the option '{option}', which PyTorch does not know: correct it or leave it out; known are "
                f"{', '.join((*_OF_SETTINGS, *_WITHOUT_EFFECT))}"
            )
        if release < (since := _SINCE.get(option, (0, 0))):
            raise WorkloadError(
                f"{name} has the option '{option}', which torch {torch_version} does not know: leave it out, or use "
                f"torch {since[0]}.{since[1]} or newer"
            )
        kind = _WITHOUT_EFFECT.get(option)
        if kind is bool:
            _flag(value, option, name)
        elif kind is int:
            _whole(value, option, name)
        elif option == "backend" and value not in (_NATIVE, _OTHERS):
            raise _refused(option, value, name, f"{_NATIVE} or {_OTHERS}")


def _divisions(value: str | None, name: str) -> tuple[int, ...]:
    """Returns `AllocatorSettings.roundup_power2_divisions` (`parseRoundUpPower2Divisions` in PyTorch)."""
    option = "roundup_power2_divisions"
    if value is None:
        return ()
    if not value.startswith("["):
        steps = _whole(value, option, name)
        if steps < 1 or steps & (steps - 1):
            raise _refused(option, value, name, "a power of two")
        return (steps,) * ROUNDUP_INTERVALS if steps > 1 else ()
    found, last, is_first = [0] * ROUNDUP_INTERVALS, 0, True
    if not value.endswith("]"):
        raise _refused(option, value, name, "a list such as [256:1,512:2,>:4]")
    for pair in filter(None, value[1:-1].split(",")):
        size, _, text = pair.partition(":")
        steps = _whole(text, option, name)
        if steps & (steps - 1):
            raise _refused(option, value, name, "powers of two, or 0")
        if size == ">":
            found[last:] = [steps] * (ROUNDUP_INTERVALS - last)
            continue
        size_mb = _whole(size, option, name)
        if size_mb < 1 or size_mb & (size_mb - 1):
            raise _refused(option, value, name, "sizes that are powers of two")
        last = min(size_mb.bit_length() - 1, ROUNDUP_INTERVALS - 1)
        if is_first:
            found[:last] = [steps] * last
        found[last], is_first = steps, False
    return tuple(found) if any(steps > 1 for steps in found) else ()


def _flag(value: str, option: str, name: str) -> bool:
    if value not in _FLAGS:
        raise _refused(option, value, name, "True or False")
    return value == "True"


def _whole(value: str, option: str, name: str) -> int:
    match = re.match(r"[+-]?0*([0-9]+)", value)
    if match is None:
        raise _refused(option, value, name, "a whole number")
    if len(match[1]) > 20 or int(match[1]) >= 1 << 64:
        raise _refused(option, value, name, "a whole number below 2**64")
    return min(int(match[0]) % (1 << 64), _MOST_MB)  # a negative number is a very large one, as in PyTorch


def _number(value: str, option: str, name: str) -> str:
    match = re.match(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value, re.IGNORECASE)
    if match is None:
        raise _refused(option, value, name, "a number")
    return match[0]


def _least(number: int, least: int, option: str, name: str) -> int:
    if number < least:
        raise _refused(option, str(number), name, f"at least {least}")
    return number


def _refused(option: str, value: str, name: str, allowed: str) -> WorkloadError:
    return WorkloadError(f"{name} has {option}:{value}, which PyTorch refuses: give {allowed}, or leave the option out")
