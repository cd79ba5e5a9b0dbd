"""Mixed precision: run forward and loss under autocast to bf16 or fp16, while the weights stay in fp32.

With fp16 a gradient scaler is used, too.
"""

from __future__ import annotations

import torch

from planner.errors import DecisionError
from planner.plan_types.decisions import Precision
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode
from planner.rewrite.rewriting import Rewriting

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(rewriting: Rewriting, decision: Precision) -> None:
    """Make the training step use autocast, and for fp16 also a gradient scaler.

    Raises:
        DecisionError: if a trainable parameter is not fp32.
    """
    for name, parameter in rewriting.model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise DecisionError(
                f"precision {decision.dtype} needs fp32 weights, but parameter '{name}' is {dtype}: load the model in "
                "fp32, for example with model.float(), or forbid mixed-precision"
            )
    rewriting.autocast_dtype = _DTYPES[decision.dtype]
    if decision.dtype == "fp16":
        rewriting.scaler = torch.amp.GradScaler(rewriting.device_type)


def mixed_precision_source(plan: Plan, decision: Precision) -> EmittedCode:
    """Return the code that does the same as `mixed_precision` in an emitted file."""
    return EmittedCode(
        autocast=f"torch.autocast(next(model.parameters()).device.type, dtype={_DTYPES[decision.dtype]})",
        scaled=decision.dtype == "fp16",
        rewriting=(_MASTER_WEIGHTS,),
    )


_MASTER_WEIGHTS = """\
for name, parameter in model.named_parameters():
    if parameter.requires_grad and parameter.dtype != torch.float32:
        raise TypeError(f"{name} is {parameter.dtype}, but autocast needs fp32 weights: call model.float() first")
"""
