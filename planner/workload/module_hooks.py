"""Finds hooks that users registered on their modules."""

from __future__ import annotations

import torch


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """True if the module has a backward hook or a backward pre-hook.

    Such a hook reads the gradient of the module's input or output. A technique that never computes this gradient as one
    tensor cannot be used on the module.
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)


def carry_gradient_hooks(parameter: torch.Tensor, replacement: torch.Tensor) -> None:
    """Registers the hooks that a parameter has for its gradient with the parameter that replaces it."""
    for hook in (parameter._backward_hooks or {}).values():
        replacement.register_hook(hook)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        replacement.register_post_accumulate_grad_hook(hook)
