"""Weights of micro-batch losses, and gradient clipping that also takes sparse gradients."""

from __future__ import annotations

import torch

# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def weighted(loss: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
    """The part's share of the batch's loss. A part without any counted term has loss 0/0 and weight 0: share 0."""
    if not isinstance(weight, torch.Tensor):
        return loss * weight
    return torch.where(weight == 0, 0.0, loss * weight.to(loss.dtype))


def clip_gradients(module: torch.nn.Module, max_norm: float) -> None:
    """`torch.nn.utils.clip_grad_norm_`, which refuses sparse gradients; those are clipped by their values."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    values = [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters]
    norm = torch.nn.utils.get_total_norm(values)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for value in values:
        value.mul_(factor.to(value.device))
