"""Fingerprints of a model's architecture and of a plan, to detect that a plan or state belongs to a different model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from planner.plan_types.decision_base import Decision


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 (hex) over names, shapes and dtypes of parameters and buffers, in named order.

    Values, devices and `requires_grad` do not count. A tied tensor counts once, under its first name.
    """
    digest = hashlib.sha256()
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            digest.update(f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()


def plan_fingerprint(decisions: Iterable[Decision], model: torch.nn.Module) -> str:
    """SHA-256 (hex) over the decisions, in any order, and the fingerprint of their model.

    Former kinds are used where a technique has one, so that saved steps of older versions can still be resumed.
    """
    with_kinds = [decision.to_json() | {"kind": decision.former_kind or decision.kind} for decision in decisions]
    listed = sorted(with_kinds, key=lambda decision: str(decision["kind"]))
    text = json.dumps({"decisions": listed, "model": fingerprint(model)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
