"""The transformers models of the tests' zoo, with random weights and batches of random samples."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.guard.losses import Case
from planner.workload.workload import map_batch, resized

SAMPLES = 8
UNFILLED = " as in the tests"
"""Suffix of a case whose batch has the tokens of the tests instead of random ones."""


def cases() -> Iterator[Case]:
    """Yields each model twice: with random tokens, and with those of the tests."""
    from tests.zoo.table import TRANSFORMERS, VOCABULARY

    for entry in TRANSFORMERS:
        model, batch, *_ = entry.build()
        build = functools.partial(type(model), model.config)
        for name, fill in (("", functools.partial(_filled, VOCABULARY)), (UNFILLED, _unfilled)):
            yield Case(entry.name + name, build, functools.partial(fill, resized(batch, SAMPLES, device="cpu")))


def _unfilled(batch: Any) -> Any:
    """Returns the batch with random floating-point values only, for models that do not accept random tokens."""
    return map_batch(lambda t: torch.rand_like(t) if t.is_floating_point() else t, batch)


def _filled(words: int, batch: Any) -> Any:
    """Returns the batch with random values and tokens, some labels ignored, and sentences of different lengths."""
    filled = _unfilled(batch)
    for key, tensor in filled.items() if isinstance(filled, dict) else ():
        if key in ("input_ids", "inputs"):
            filled[key] = torch.randint(3, words, tensor.shape)
        elif isinstance(tensor, torch.Tensor) and "labels" in key and not tensor.is_floating_point():
            filled[key] = torch.randint(0, 2, tensor.shape)
            if tensor.dim() == 2:
                filled[key][:, -1] = torch.where(torch.rand(len(tensor)) < 0.5, -100, filled[key][:, -1])
                filled[key][-2:, 3:] = -100
    if isinstance(filled, dict) and "attention_mask" in filled:
        mask = torch.ones_like(filled["attention_mask"])
        mask[-2:, mask.shape[1] // 2 :] = 0
        filled["attention_mask"] = mask
    return filled
