"""The identity of a model's architecture: what a plan remembers so that it is never applied to another model."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 (hex) over names, shapes and dtypes of parameters and buffers, in named order.

    Values, devices and `requires_grad` do not count. A tied tensor counts once, under its first name.
    """
    digest = hashlib.sha256()
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            digest.update(f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()
