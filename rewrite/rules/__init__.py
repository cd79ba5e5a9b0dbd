"""One technique, one file, one rule: what is done to a live model, and beside it the source that does the same."""

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
from planner.rewrite.rules.accumulation import accumulation, accumulation_source
from planner.rewrite.rules.checkpoint import checkpoint, checkpoint_source
from planner.rewrite.rules.chunked_loss import chunked_loss, chunked_loss_source
from planner.rewrite.rules.freeze import freeze, freeze_source
from planner.rewrite.rules.offload import offload, offload_source
from planner.rewrite.rules.optimizer import optimizer, optimizer_source
from planner.rewrite.rules.optimizer_kernel import optimizer_kernel, optimizer_kernel_source
from planner.rewrite.rules.precision import precision, precision_source
from planner.rewrite.rules.replay import replay, replay_source
from planner.rewrite.rules.step_in_backward import step_in_backward, step_in_backward_source

RULES: dict[type[Decision], Callable] = {
    Freeze: freeze,
    Precision: precision,
    Optimizer: optimizer,
    OptimizerKernel: optimizer_kernel,
    ChunkedLoss: chunked_loss,
    Accumulation: accumulation,
    StepInBackward: step_in_backward,
    Checkpoint: checkpoint,
    Replay: replay,
    Offload: offload,
}
"""Rule by decision, in the order in which they are applied: `rule(rewriting, decision)`."""

SOURCES: dict[type[Decision], Callable] = {
    Freeze: freeze_source,
    Precision: precision_source,
    Optimizer: optimizer_source,
    OptimizerKernel: optimizer_kernel_source,
    ChunkedLoss: chunked_loss_source,
    Accumulation: accumulation_source,
    StepInBackward: step_in_backward_source,
    Checkpoint: checkpoint_source,
    Replay: replay_source,
    Offload: offload_source,
}
"""The emitted counterpart of each rule: `source(plan, decision)` -> `Fragment`."""
