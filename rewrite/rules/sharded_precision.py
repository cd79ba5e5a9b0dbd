"""Sharded precision: FSDP2 gathers parameters in bf16, and forward and backward compute in bf16.

The shards, which the optimizer updates, stay in fp32 (`torch.distributed.fsdp.MixedPrecisionPolicy`). Compared with
autocast, the gathered parameters take half of the memory and of the communication, and no copies are cast in forward.
"""

from __future__ import annotations

import torch

from planner.plan_types.decisions import ShardedPrecision
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode
from planner.rewrite.rewriting import Rewriting

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def sharded_precision(rewriting: Rewriting, decision: ShardedPrecision) -> None:
    """Make `shard` use a policy for mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtypes = {"param_dtype": DTYPES[decision.dtype], "reduce_dtype": DTYPES[decision.reduce_dtype]}
    rewriting.sharded_precision = MixedPrecisionPolicy(**dtypes)


def sharded_precision_source(plan: Plan, decision: ShardedPrecision) -> EmittedCode:
    """Return the code that does the same as `sharded_precision` in an emitted file."""
    arguments = f"param_dtype={DTYPES[decision.dtype]}, reduce_dtype={DTYPES[decision.reduce_dtype]}"
    return EmittedCode(
        imports=("from torch.distributed.fsdp import MixedPrecisionPolicy",),
        constants=(f"SHARDED_PRECISION = MixedPrecisionPolicy({arguments})",),
    )
