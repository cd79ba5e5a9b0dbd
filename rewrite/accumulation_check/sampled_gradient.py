"""Sample elements of the gradients of all parameters, without holding more than one gradient in memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch

_ELEMENTS = 1 << 18
"""Approximate number of gradient elements that are compared, over all parameters together."""

_MIN_ELEMENTS = 256
"""Minimum number of gradient elements that are compared per parameter. Smaller parameters are compared in full."""


def sampled_gradient(loss: torch.Tensor, trained: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Returns some elements of the gradients of all parameters, as one vector in double on the host.

    The elements are scaled so that their norm estimates the norm of all gradients. A hook on each parameter copies its
    elements as soon as autograd has computed the gradient, and replaces the gradient by a broadcast zero, so that at
    most one gradient is in memory at a time. Nothing is added to `.grad`, and hooks registered by
    `register_post_accumulate_grad_hook` are not called.
    """
    # Every `stride`-th element is taken; an odd stride does not hit the same columns in all rows of a matrix.
    elements = sum(parameter.numel() for parameter in trained)
    stride = -(-elements // _ELEMENTS) | 1
    strides = [max(1, min(stride, parameter.numel() // _MIN_ELEMENTS)) | 1 for parameter in trained]
    sampled: dict[int, torch.Tensor] = {}

    def sample(number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # a custom autograd function may return None
            return None
        sampled[number] = _spread(gradient, strides[number]).cpu().double() * strides[number] ** 0.5
        return gradient.new_zeros(()).expand_as(gradient) if gradient.layout is torch.strided else None

    with contextlib.ExitStack() as stack:
        for number, parameter in enumerate(trained):
            if parameter._backward_hooks is None:  # leave no empty dict behind
                stack.callback(setattr, parameter, "_backward_hooks", None)
            stack.callback(parameter.register_hook(functools.partial(sample, number)).remove)
        torch.autograd.grad(loss, trained, allow_unused=True)
    for number, (parameter, stride) in enumerate(zip(trained, strides, strict=True)):
        sampled.setdefault(number, torch.zeros(-(-parameter.numel() // stride), dtype=torch.float64))
    return torch.cat([sampled[number] for number in range(len(trained))])


def _spread(gradient: torch.Tensor, stride: int) -> torch.Tensor:
    """Return every `stride`-th element in row-major order. Of complex elements, real and imaginary part alternate."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows, elements = gradient.indices(), gradient.values()
        if len(rows) > 1:
            return _spread(gradient.cpu().to_dense(), stride)
        width = gradient[0].numel()
        positions = (rows[0][:, None] * width + torch.arange(width, device=rows.device)).reshape(-1)
        chosen = positions % stride == 0
        spread = elements.new_zeros(-(-gradient.numel() // stride))
        spread[positions[chosen] // stride] = elements.reshape(-1)[chosen]
        return spread
    if gradient.layout is not torch.strided:
        gradient = gradient.cpu().to_dense()
    if gradient.is_contiguous():
        spread = gradient.view(-1)[::stride]
    else:  # without making a contiguous copy
        positions = torch.arange(0, gradient.numel(), stride, device=gradient.device)
        spread = gradient[torch.unravel_index(positions, gradient.shape)]
    if not spread.is_complex():
        return spread
    spread = spread.resolve_conj()
    return torch.where(torch.arange(len(spread), device=spread.device) % 2 == 0, spread.real, spread.imag)
