"""The rules: one file per technique, with the change to a live model and the source text that does the same.

`RULES` and `SOURCES` map a decision's type to its two functions. To add a technique, add a `Decision`, a file here and
one entry in each table.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.plan_types.decisions import (
    Accumulation,
    Checkpoint,
    ChunkedLoss,
    Decision,
    Freeze,
    Offload,
    Optimizer,
    OptimizerKernel,
    Precision,
    Replay,
    StepInBackward,
)
from planner.rewrite.rules import (
    accumulation,
    checkpoint,
    chunked_loss,
    freeze,
    offload,
    optimizer,
    optimizer_kernel,
    precision,
    replay,
    step_in_backward,
)

RULES: dict[type[Decision], Callable] = {
    Freeze: freeze.freeze,
    Precision: precision.precision,
    Optimizer: optimizer.optimizer,
    OptimizerKernel: optimizer_kernel.optimizer_kernel,
    ChunkedLoss: chunked_loss.chunked_loss,
    Accumulation: accumulation.accumulation,
    StepInBackward: step_in_backward.step_in_backward,
    Checkpoint: checkpoint.checkpoint,
    Replay: replay.replay,
    Offload: offload.offload,
}
"""`rule(rewriting, decision)` by type of decision, in the order in which the rules are applied."""

SOURCES: dict[type[Decision], Callable] = {
    Freeze: freeze.freeze_source,
    Precision: precision.precision_source,
    Optimizer: optimizer.optimizer_source,
    OptimizerKernel: optimizer_kernel.optimizer_kernel_source,
    ChunkedLoss: chunked_loss.chunked_loss_source,
    Accumulation: accumulation.accumulation_source,
    StepInBackward: step_in_backward.step_in_backward_source,
    Checkpoint: checkpoint.checkpoint_source,
    Replay: replay.replay_source,
    Offload: offload.offload_source,
}
"""The emitted counterpart of each rule, `source(plan, decision)` -> `EmittedCode`."""
