"""Fingerprints of models and plans, which show whether a plan or a saved state belongs to a given model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from planner.plan_types.quantized import shape_and_dtype

if TYPE_CHECKING:
    import torch

    from planner.plan_types.decision_base import Decision


def fingerprint(model: torch.nn.Module) -> str:
    """Returns the SHA-256 (hex) of the names, shapes and dtypes of a model's parameters and buffers.

    Their order is that of `named_parameters` and `named_buffers`. Values, devices and `requires_grad` do not count. A
    tied tensor counts once, under its first name. A weight that bitsandbytes quantizes on a card counts as quantized.
    """
    digest = hashlib.sha256()
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            shape, dtype = shape_and_dtype(tensor)
            digest.update(f"{kind} {name} {shape} {dtype}\n".encode())
    return digest.hexdigest()


def plan_fingerprint(decisions: Iterable[Decision], model: torch.nn.Module) -> str:
    """Returns the SHA-256 (hex) of the decisions, whose order does not count, and of the model's fingerprint.

    A technique with a `former_kind` enters under that name, so that the saved state of a training step from an older
    version can still be loaded.
    """
    with_kinds = [decision.to_json() | {"kind": decision.former_kind or decision.kind} for decision in decisions]
    listed = sorted(with_kinds, key=lambda decision: str(decision["kind"]))
    text = json.dumps({"decisions": listed, "model": fingerprint(model)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
