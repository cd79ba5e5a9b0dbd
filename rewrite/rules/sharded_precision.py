"""Sharded precision: FSDP2 gathers parameters in bf16, and forward and loss run in bf16, under autocast or not.

The shards, which the optimizer updates, stay in fp32 (`torch.distributed.fsdp.MixedPrecisionPolicy`). Compared with
autocast alone, the gathered parameters take half of the memory and of the communication, and forward casts no copies of
them. Autocast keeps losses, softmax and norms in fp32. accelerate 1.15 does not use it with FSDP2: each op then runs in
the dtype of its inputs, which FSDP2 casts to bf16, and so are the outputs of units and of the model
(`AcceleratorState.__init__`, `FullyShardedDataParallelPlugin.set_mixed_precision`).
"""

from __future__ import annotations

import torch

from planner.plan_types.decisions import ShardedPrecision
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode
from planner.rewrite.rewriting import Rewriting

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def sharded_precision(rewriting: Rewriting, decision: ShardedPrecision) -> None:
    """Make the training step use autocast if it is planned, and `shard` a policy for mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype, reduce_dtype = DTYPES[decision.dtype], DTYPES[decision.reduce_dtype]
    if decision.without_autocast:
        rewriting.sharded_precision = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=reduce_dtype, output_dtype=dtype
        )
    else:
        rewriting.autocast_dtype = dtype
        rewriting.sharded_precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)


def sharded_precision_source(plan: Plan, decision: ShardedPrecision) -> EmittedCode:
    """Return the code that does the same as `sharded_precision` in an emitted file."""
    is_on_host = any(other.keeps_parameters_on_host for other in plan.decisions)
    device = '"cuda" if torch.cuda.is_available() else "cpu"' if is_on_host else "next(model.parameters()).device.type"
    arguments = f"param_dtype={DTYPES[decision.dtype]}, reduce_dtype={DTYPES[decision.reduce_dtype]}"
    if decision.without_autocast:
        arguments = f"\n    {arguments}, output_dtype={DTYPES[decision.dtype]}\n"
    return EmittedCode(
        imports=("from torch.distributed.fsdp import MixedPrecisionPolicy",),
        constants=(f"SHARDED_PRECISION = MixedPrecisionPolicy({arguments})",),
        autocast="" if decision.without_autocast else f"torch.autocast({device}, dtype={DTYPES[decision.dtype]})",
    )
