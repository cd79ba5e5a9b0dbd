"""Sharded precision: FSDP2 gathers parameters in bf16, and forward and loss run under autocast to bf16.

The shards, which the optimizer updates, stay in fp32 (`torch.distributed.fsdp.MixedPrecisionPolicy`). Compared with
autocast alone, the gathered parameters take half of the memory and of the communication, and forward casts no copies of
them. Autocast keeps losses, softmax and norms in fp32, as accelerate does for FSDP.
"""

from __future__ import annotations

import torch

from planner.plan_types.decisions import Shard, ShardedPrecision
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode
from planner.rewrite.rewriting import Rewriting

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def sharded_precision(rewriting: Rewriting, decision: ShardedPrecision) -> None:
    """Make the training step use autocast, and `shard` a policy for mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    rewriting.autocast_dtype = DTYPES[decision.dtype]
    rewriting.sharded_precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[decision.dtype], reduce_dtype=DTYPES[decision.reduce_dtype]
    )


def sharded_precision_source(plan: Plan, decision: ShardedPrecision) -> EmittedCode:
    """Return the code that does the same as `sharded_precision` in an emitted file."""
    is_on_host = any(other.kind == Shard.kind and other.to_json().get("offload") for other in plan.decisions)
    device = '"cuda" if torch.cuda.is_available() else "cpu"' if is_on_host else "next(model.parameters()).device.type"
    arguments = f"param_dtype={DTYPES[decision.dtype]}, reduce_dtype={DTYPES[decision.reduce_dtype]}"
    return EmittedCode(
        imports=("from torch.distributed.fsdp import MixedPrecisionPolicy",),
        constants=(f"SHARDED_PRECISION = MixedPrecisionPolicy({arguments})",),
        autocast=f"torch.autocast({device}, dtype={DTYPES[decision.dtype]})",
    )
