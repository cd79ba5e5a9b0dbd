"""Image models of timm: the smallest model of each of its files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.zoo.case import Candidate, Case

BATCH, CLASSES = 2, 10
MOST_PARAMETERS = 30_000_000
SIZES = (32, 64, 224)
"""Sizes of images that are tried, in this order."""
_SMALL = ("test_", "femto", "atto", "pico", "nano", "tiny", "xxs", "_xs", "xsmall", "_s_", "small", "18", "_t_")
"""Parts of names of small models, the smallest first."""


def cases() -> Iterator[Case]:
    """Yields one model for each file of timm."""
    import timm

    for module in timm.list_modules():
        name = _smallest(timm.list_models(module=module))
        yield Case(library="timm", name=name, candidates=_candidates(name))


def _smallest(names: list[str]) -> str:
    """Returns the name that sounds smallest."""
    ranks = [next((rank for rank, part in enumerate(_SMALL) if part in name), len(_SMALL)) for name in names]
    return min(zip(ranks, map(len, names), names, strict=True))[2]


def _candidates(name: str) -> Any:
    def candidates() -> Iterator[Candidate]:
        for size in SIZES:
            for fixed in (True, False):
                yield Candidate(
                    how=f"{size} x {size} pixels", build=lambda size=size, fixed=fixed: built(name, size, fixed)
                )

    return candidates


def built(name: str, size: int, fixed: bool) -> tuple[torch.nn.Module, Any, Any]:
    """Builds a model for images of this size.

    Args:
        fixed: True to give the size to the model, as models with position embeddings need it.

    Raises:
        ValueError: the model is larger than `MOST_PARAMETERS`.
    """
    import timm

    settings = {"img_size": size} if fixed else {}
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in timm.create_model(name, num_classes=CLASSES).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"it has {count:,} parameters")
    model = timm.create_model(name, num_classes=CLASSES, **settings)
    return model, (torch.randn(BATCH, 3, size, size), torch.randint(CLASSES, (BATCH,))), classified


def classified(output: Any, batch: Any) -> torch.Tensor:
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    return torch.stack([F.cross_entropy(one, batch[-1]) for one in outputs]).sum()
