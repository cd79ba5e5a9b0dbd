"""Hooks that users put on their modules."""

from __future__ import annotations

import torch


def has_backward_hooks(head: torch.nn.Module) -> bool:
    """Whether the gradient of the module's output or input is wanted as such."""
    return bool(head._backward_hooks or head._backward_pre_hooks)
