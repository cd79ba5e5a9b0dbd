"""Mixed precision: run forward and loss under autocast, with fp32 master weights and a gradient scaler for fp16."""

from __future__ import annotations

import torch

from planner.errors import DecisionError
from planner.plan_types.decisions import Precision
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode
from planner.rewrite.rewriting import Rewriting

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(rewriting: Rewriting, decision: Precision) -> None:
    """Set the step's autocast dtype and scaler.

    Raises:
        DecisionError: if a trainable parameter is not fp32.
    """
    for name, parameter in rewriting.model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise DecisionError(
                f"precision {decision.dtype} keeps fp32 master weights, but parameter '{name}' is {dtype}: "
                "load the model in fp32 (model.float()) or forbid mixed-precision"
            )
    rewriting.autocast_dtype = _DTYPES[decision.dtype]
    if decision.dtype == "fp16":
        rewriting.scaler = torch.amp.GradScaler(rewriting.device_type())


def mixed_precision_source(plan: Plan, decision: Precision) -> EmittedCode:
    """Return the emitted counterpart of `mixed_precision`."""
    return EmittedCode(
        autocast=f"torch.autocast(next(model.parameters()).device.type, dtype={_DTYPES[decision.dtype]})",
        scaled=decision.dtype == "fp16",
        rewriting=(_MASTER_WEIGHTS,),
    )


_MASTER_WEIGHTS = """\
for name, parameter in model.named_parameters():
    if parameter.requires_grad and parameter.dtype != torch.float32:
        raise TypeError(f"{name} is {parameter.dtype}: autocast needs fp32 weights to train, model.float()")
"""
