"""The transformers models of the tests' zoo, with random weights and batches of random samples."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.guard.losses import Case
from planner.workload.workload import map_batch, resized

SAMPLES = 8
AS_IT_IS = " as in the tests"


def cases() -> Iterator[Case]:
    from tests.zoo.table import TRANSFORMERS, VOCABULARY

    for entry in TRANSFORMERS:
        model, batch, *_ = entry.build()
        build = functools.partial(type(model), model.config)
        for name, fill in (("", functools.partial(_filled, VOCABULARY)), (AS_IT_IS, _as_it_is)):
            yield Case(entry.name + name, build, functools.partial(fill, resized(batch, SAMPLES, device="cpu")))


def _as_it_is(batch: Any) -> Any:
    """For models that take no random tokens."""
    return map_batch(lambda t: torch.rand_like(t) if t.is_floating_point() else t, batch)


def _filled(words: int, batch: Any) -> Any:
    """Random numbers; labels of which some tokens do not count, sentences of uneven lengths."""
    filled = _as_it_is(batch)
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
