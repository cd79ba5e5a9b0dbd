"""The words that arguments accept, as types: editors complete them, and type checkers refuse others; and a default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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
"""A way in which several cards train one model."""

Fewest = Literal["fewest"]
FEWEST: Fewest = "fewest"
"""Stands for the smallest number of cards with which a plan fits."""

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

ProgramName = Literal["axolotl", "llama-factory"]
"""A program that trains by its own loop, and reads a config."""

Loop = Literal["loop", "trainer", "lightning", "accelerate", ProgramName]
"""A kind of training loop."""

DEFAULT_SECONDS = 30.0
"""Default time limit in seconds for computing a trade-off, which is kept approximately."""
