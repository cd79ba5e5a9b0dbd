"""Adam's moments in 8 bits (bitsandbytes): where they can take the place of an optimizer's state, and their size."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import torch

from planner.workload.torch_optimizers import has_step_hooks, sparse_lookups
from planner.workload.workload import Workload, optimizer_name

_ADAM_NAMES = ("adam", "adamw")
_SMALLEST_IN_8_BITS = 4096
"""Elements from which on bitsandbytes keeps state in 8 bits (`min_8bit_size`)."""


def why_not_eight_bit(work: Workload) -> str | None:
    """What keeps bitsandbytes' AdamW from taking the optimizer's place; None if nothing does."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed (pip install bitsandbytes)"
    if any(p.dtype == torch.float64 for p in work.model.parameters() if p.requires_grad):
        return "trained parameters are float64"
    if sparse_lookups(work.model):
        return "an embedding makes sparse gradients"
    optimizer = work.optimizer
    if isinstance(optimizer, str):
        return None if optimizer in _ADAM_NAMES else f"{optimizer} has no 8-bit twin here"
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return f"{optimizer_name(optimizer)} has no 8-bit twin here"
    if optimizer.state:
        return "the optimizer holds state already"
    if has_step_hooks(optimizer):
        return "the optimizer has step hooks, which would be lost"
    for group in optimizer.param_groups:
        if group["amsgrad"] or group["maximize"]:
            return "it has neither amsgrad nor maximize"
        if type(optimizer) is torch.optim.Adam and group["weight_decay"]:
            return "Adam's weight decay is not AdamW's"
    return None


def least_state_bytes(model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]) -> int:
    """At least: a byte for each of the two moments; four for embeddings and small tensors (`rewrite/rules/`)."""
    wide = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return sum(p.numel() * (8 if id(p) in wide or p.numel() < _SMALLEST_IN_8_BITS else 2) for p in parameters)
