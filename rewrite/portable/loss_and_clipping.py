"""Weights of micro-batch losses, and gradient clipping that also handles sparse gradients."""

from __future__ import annotations

import torch

# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def weighted(loss, weight):
    """Multiply a micro-batch's loss by its weight: the share of the batch's loss terms that are in the micro-batch.

    If no term of the micro-batch counts (all labels are ignored), its loss is 0/0 and its weight 0. Return 0 then, not
    NaN.
    """
    if not isinstance(weight, torch.Tensor):
        return loss * weight
    return torch.where(weight == 0, 0.0, loss * weight.to(loss.dtype))


def clip_divided_gradients(module, max_norm):
    """Clip the norm of all gradients, of which some may be DTensors, on different meshes.

    `torch.nn.utils.clip_grad_norm_` computes with the gradients of all parameters in one op, which takes only plain
    tensors or DTensors on one mesh.
    """
    groups = {}
    for parameter in module.parameters():
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [torch.nn.utils.get_total_norm([parameter.grad for parameter in group]) for group in groups.values()]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)


def clip_gradients(module, max_norm):
    """Clip the norm of all gradients, like `torch.nn.utils.clip_grad_norm_`, but also if some gradients are sparse."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # sums duplicate rows, so that the norm of the values is right
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    values = [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters]
    norm = torch.nn.utils.get_total_norm(values)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for value in values:
        value.mul_(factor.to(value.device))
