"""Words: those that arguments accept, as types, and lists of names and numbers in descriptions.

Editors complete the types, and type checkers refuse other words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

FidelityName = Literal["exact", "rounded", "adapted", "partial"]
"""How closely training must match the original."""

Technique = Literal[
    "freeze",
    "mixed-precision",
    "sharded-precision",
    "shard",
    "8bit-optimizer",
    "optimizer-kernel",
    "chunked-loss",
    "accumulation",
    "step-in-backward",
    "allocator",
    "checkpoint",
    "segment-checkpoint",
    "offload",
]
"""The name of a technique. Former names and aliases are accepted too, but are not of this type."""

Techniques = Technique | Sequence[Technique]
"""One technique or several."""

Sharding = Literal["ddp", "zero1", "zero2", "fsdp"]
"""A way in which several cards train one model. The ways are ordered by how much they divide among the cards."""

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)

Fewest = Literal["fewest"]
FEWEST: Fewest = "fewest"
"""Stands for the smallest number of cards with which a plan fits."""
MOST_CARDS = 65_536
"""Maximum number of cards."""

OptimizerName = Literal[
    "adamw",
    "adam",
    "sgd",
    "sgd-momentum",
    "adagrad",
    "rmsprop",
    "adafactor",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "lion_32bit",
    "lion_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
]
"""An optimizer that can be given by name."""

CallingName = Literal["KEYWORDS", "POSITIONAL", "ALL_BUT_LAST", "SINGLE", "STEP"]
"""The name of a way to call a model with a batch (`planner.workload.call_convention.Calling`)."""

ProgramName = Literal["axolotl", "llama-factory"]
"""A program that trains by its own loop, and reads a config."""

Loop = Literal["loop", "trainer", "lightning", "accelerate", ProgramName]
"""A kind of training loop."""

DEFAULT_SECONDS = 30.0
"""Default time limit in seconds for computing a trade-off, which is kept approximately."""

_MOST_NAMES, _MOST_RANGES = 6, 4
"""Maximum number of name patterns, and of ranges of op numbers, in a description."""


def counted(number: int, noun: str, *, with_commas: bool = False) -> str:
    """Formats a number with its noun: '1 module', '3 modules'; '3,000 modules' with commas."""
    return f"{format(number, ',' if with_commas else '')} {noun}{'' if number == 1 else 's'}"


def unknown_sharding(value: str) -> str:
    """Returns the message for a text that is not a `Sharding`."""
    return (
        f"sharding '{value[:40]}' is unknown: choose from {', '.join(SHARDINGS)}, or leave it out; tensor parallelism "
        "needs a function of your own (parallelize in Python, --parallelize on the command line)"
    )


def not_a_number_of_cards(value: object) -> str:
    """Returns the message for a value that is not a number of cards."""
    return f"{value!r:.40} is not a number of cards: give a whole number from 1 to {MOST_CARDS:,}, or '{FEWEST}'"


def module_listing(names: Iterable[str]) -> str:
    """Lists module names. Names that differ only in the first number are joined: 'encoder.layer.{0-3,7}.attention'."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        parts = name.split(".")
        position = next((position for position, part in enumerate(parts) if part.isdigit()), None)
        if position is None:
            numbers.setdefault((name, ""), [])
        else:
            before, after = ".".join([*parts[:position], ""]), ".".join(["", *parts[position + 1 :]])
            numbers.setdefault((before, after), []).append(int(parts[position]))
    patterns = [before + (_ranges(members) + after if members else "") for (before, after), members in numbers.items()]
    return _shortened(patterns, _MOST_NAMES)


def op_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """Formats half-open ranges of op numbers with the last op included: [(0, 10), (12, 21)] gives '0-9, 12-20'."""
    return _shortened([f"{start}-{stop - 1}" for start, stop in ranges], _MOST_RANGES)


def _shortened(items: list[str], most: int) -> str:
    return ", ".join(items) if len(items) <= most else f"{', '.join(items[:most])} and {len(items) - most} more"


def _ranges(numbers: list[int]) -> str:
    """Formats numbers as ranges in braces: '{0-3,7}'. A single number has no braces."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return text if len(numbers) == 1 else f"{{{text}}}"
