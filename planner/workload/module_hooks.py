"""Hooks that users register on their modules."""

from __future__ import annotations

import torch


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """True if a hook reads the gradient of the module's output or input, which must then exist as one tensor."""
    return bool(module._backward_hooks or module._backward_pre_hooks)
