"""Fingerprints of models and plans, which show whether a plan or a saved state belongs to a given model."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from planner.errors import PlanFileError
from planner.plan_types.quantized import shape_and_dtype

if TYPE_CHECKING:
    import torch

    from planner.plan_types.decision_base import Decision
    from planner.plan_types.plan import Plan


def fingerprint(model: torch.nn.Module) -> str:
    """Returns the SHA-256 (hex) of the names, shapes and dtypes of a model's parameters and buffers.

    Their order is that of `named_parameters` and `named_buffers`. Values, devices and `requires_grad` do not count. A
    tied tensor counts once, under its first name. A weight that bitsandbytes quantizes on a card counts as quantized.
    """
    digest = hashlib.sha256()
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            shape, dtype = shape_and_dtype(tensor)
            digest.update(f"{kind} {name} {shape} {dtype}\n".encode(errors="surrogatepass"))
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


def refuse_another_model(plan: Plan, model: torch.nn.Module) -> None:
    """Raise `PlanFileError` unless the plan was made for this model. The message says what differs.

    A warning is given if only the scale of the adapters (`lora_alpha`) differs, which takes no memory.
    """
    program = plan.model.program
    is_checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if program is not None and program.gradient_checkpointing and not is_checkpointed:
        raise PlanFileError(
            f"the plan was made for {program.name} with gradient checkpointing, which this model does not have: train "
            "by the config that --emit config.yaml writes"
        )
    if fingerprint(model) == plan.model.fingerprint:
        _warn_of_another_scale(plan, model)
        return
    name = type(model).__name__
    parameters = sum(p.numel() for p in model.parameters())
    if name != plan.model.name:
        difference = f"it is a {name}, the plan is for a {plan.model.name}"
    elif parameters != plan.model.parameters:
        difference = f"it has {parameters:,} parameters, the planned {name} has {plan.model.parameters:,}"
    else:
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
        difference = f"a name, shape or dtype of a parameter or buffer differs (its parameters are {', '.join(dtypes)})"
    raise PlanFileError(f"the plan was made for another model: {difference}; make the plan again for this model")


def _warn_of_another_scale(plan: Plan, model: torch.nn.Module) -> None:
    """Warn if the user's adapters have another `lora_alpha` than the planned ones."""
    adapter = plan.model.adapter
    if adapter is None or adapter.folder:
        return
    planned = adapter.lora_options(plan.model.name)["lora_alpha"]
    for config in getattr(model, "peft_config", {}).values():
        if (given := getattr(config, "lora_alpha", planned)) != planned:
            warnings.warn(
                f"the adapters of the model have lora_alpha={given}, and those of the plan lora_alpha={planned}: "
                "memory and step time are as planned, but the adapters are scaled differently",
                stacklevel=4,
            )
