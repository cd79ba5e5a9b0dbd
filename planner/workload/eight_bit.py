"""8-bit Adam of bitsandbytes: whether it can replace the workload's optimizer, and how many bytes its state takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import torch

from planner.workload.optimizer_choice import OptimizerSpec, optimizer_name
from planner.workload.torch_optimizers import has_scheduler, has_step_hooks, sparse_lookups

_ADAM_NAMES = ("adam", "adamw")
_SMALLEST_IN_8_BITS = 4096
"""bitsandbytes keeps the state of parameters with fewer elements in 32 bits (`min_8bit_size`)."""


def why_not_eight_bit(optimizer: OptimizerSpec, model: torch.nn.Module, *, of_own_step: bool = False) -> str | None:
    """Returns the reason why bitsandbytes' AdamW cannot replace an optimizer of `model`; None if it can.

    Args:
        of_own_step: True if a step of the user's own calls the optimizer, and its scheduler.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed (pip install bitsandbytes)"
    if any(p.dtype == torch.float64 for p in model.parameters() if p.requires_grad):
        return "trained parameters are float64"
    if sparse_lookups(model):
        return "an embedding produces sparse gradients"
    if isinstance(optimizer, str):
        return None if optimizer in _ADAM_NAMES else f"{optimizer} has no 8-bit counterpart here"
    if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return f"{optimizer_name(optimizer)} has no 8-bit counterpart here"
    if optimizer.state:
        return "the optimizer already holds state"
    if has_step_hooks(optimizer):
        return "the optimizer has step hooks, which would be lost"
    if of_own_step and has_scheduler(optimizer):
        return "your step function has a learning-rate scheduler for the optimizer that would be replaced"
    for group in optimizer.param_groups:
        if group["amsgrad"] or group["maximize"]:
            return "the 8-bit optimizer supports neither amsgrad nor maximize"
        if type(optimizer) is torch.optim.Adam and group["weight_decay"]:
            return "Adam's weight decay differs from AdamW's"
    return None


def least_state_bytes(model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]) -> int:
    """Returns a lower bound on the bytes of 8-bit Adam state for `parameters`.

    Each of the two moments takes one byte for each element; for embeddings and small tensors it takes four bytes,
    because their state stays in 32 bits (see `planner.rewrite.rules.eight_bit_optimizer`). Quantization constants are
    not counted.
    """
    wide = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return sum(p.numel() * (8 if id(p) in wide or p.numel() < _SMALLEST_IN_8_BITS else 2) for p in parameters)
