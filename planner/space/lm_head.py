"""Finds the linear layer that makes the logits (lm_head) in the recording of the baseline, for a loss in chunks."""

from __future__ import annotations

import dataclasses

import torch

from planner.plan_types.decision_base import Decision
from planner.plan_types.decisions import ChunkedLoss
from planner.plan_types.sizes import format_size
from planner.recording.step_graph import Op, Phase, StepGraph
from planner.workload.module_hooks import has_backward_hooks
from planner.workspaces.gemm import GEMM_OPS

_LOG_SOFTMAX = "aten._log_softmax.default"
_NLL = "aten.nll_loss_forward.default"
_COPIES = ("aten._to_copy.default", "aten.clone.default", "aten.copy_.default")
_UNSAFE_VIEW = "aten._unsafe_view.default"
"""Op that returns a view of a tensor that nothing else refers to."""
_FP32_BYTES = 4
_CHUNK_SHARE = 1 / 16
"""Maximum size of a chunk of fp32 logits, as a fraction of the budget."""
_MOST_CHUNKS = 64
"""Maximum number of chunks."""
_SMALLEST_LOGITS_BYTES = 1 << 20
"""Minimum size of fp32 logits for which chunks are considered."""
WHY_NO_CHUNKS = (
    f"no linear layer has an output of at least {format_size(_SMALLEST_LOGITS_BYTES)} in fp32 that goes straight into "
    "a cross entropy"
)
"""Reason why the loss cannot be computed in chunks if `loss_in_chunks` returns None."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedLossOption:
    """A way to compute the loss in chunks, for the whole batch and for micro-batches."""

    module: str
    """Name of the linear layer that makes the logits."""
    chunks: int
    """Number of chunks for the whole batch."""
    always: bool = False
    """True if small micro-batches are chunked too, although their logits are no larger than one chunk."""

    def for_micro_batches(self, micro_batches: int) -> ChunkedLoss | None:
        """Returns the decision for a step with this number of micro-batches; None for a loss without chunks.

        No chunks are needed if a micro-batch is no larger than one chunk of the whole batch, unless `always` is True.
        With 2 or more micro-batches, the number of chunks does not depend on how many there are, so that all splits can
        share recordings. It is half the number for the whole batch, and at least 2. If `always` is True (the user
        forces a chunked loss), it is the number for the whole batch.
        """
        if micro_batches >= self.chunks and not self.always:
            return None
        chunks = self.chunks if micro_batches == 1 or self.always else max(self.chunks // 2, 2)
        return ChunkedLoss(module=self.module, chunks=chunks)

    def for_whole_batch(self) -> tuple[Decision, ...]:
        """Returns the decision for a batch that is not split, as a tuple."""
        decision = self.for_micro_batches(1)
        return () if decision is None else (decision,)

    def most_chunks(self) -> ChunkedLossOption:
        """Returns the option to use the maximum number of chunks in every micro-batch."""
        return dataclasses.replace(self, chunks=_MOST_CHUNKS, always=True)


def loss_in_chunks(graph: StepGraph, model: torch.nn.Module, *, vram_bytes: int) -> ChunkedLossOption | None:
    """Returns how the loss can be computed in chunks; None if it cannot.

    It can if the loss is a cross entropy of the output of a linear layer, which nothing else reads or changes.

    Args:
        graph: the recording of the baseline.
        vram_bytes: the budget; the smaller it is, the more chunks there are.
    """
    for index, op in enumerate(graph.ops):
        if op.name == _LOG_SOFTMAX and op.phase is Phase.FORWARD and op.step == 0 and op.inputs and op.shapes:
            rows, vocabulary = op.shapes[0][0], op.shapes[0][-1]
            logits_bytes = rows * vocabulary * _FP32_BYTES
            if len(op.shapes[0]) != 2 or logits_bytes < _SMALLEST_LOGITS_BYTES or not _is_plain(graph, op):
                continue
            producers = _producers(graph, index)
            if producers is None or not _read_only_by(graph, producers, index):
                continue
            producer = graph.ops[producers[-1]]
            if not _is_linear(model, producer):
                continue
            head = producer.module
            if has_backward_hooks(model.get_submodule(head)):
                continue
            if sum(call.module == head for call in graph.calls) != graph.steps:
                continue  # the layer is also called elsewhere
            chunks = 2
            while chunks < min(_MOST_CHUNKS, rows) and logits_bytes > chunks * _CHUNK_SHARE * vram_bytes:
                chunks *= 2
            return ChunkedLossOption(module=head, chunks=chunks)
    return None


def _is_plain(graph: StepGraph, log_softmax: Op) -> bool:
    """True if the loss has one label per row, no weights, no label smoothing, and is reduced to one number."""
    result = log_softmax.outputs[0]
    readers = [op for op in graph.ops if result in op.inputs and op.phase is Phase.FORWARD and not op.is_view]
    return [op.name for op in readers] == [_NLL] and len(readers[0].inputs) == 2 and readers[0].shapes[0] == ()


def _producers(graph: StepGraph, index: int) -> list[int] | None:
    """Returns the ops from which an op gets its input: copies and casts, the latest first, then the op before them.

    Ops are indices into `graph.ops`. The last one computed the values. None if the values are an input of the step.
    """
    producers: list[int] = []
    while True:
        op = graph.ops[index]
        maker = graph.storages[op.inputs[0]].op if op.inputs else None
        if maker is None or maker == index:
            return None
        index = maker
        producers.append(index)
        if graph.ops[index].name not in _COPIES:
            return producers


def _read_only_by(graph: StepGraph, producers: list[int], loss: int) -> bool:
    """True if only `producers` and `loss` read or write the outputs of `producers` in the forward."""
    logits = {output for index in producers for output in graph.ops[index].outputs}
    return not any(
        logits.intersection((*op.inputs, *op.outputs)) and not op.is_view and index not in (*producers, loss)
        for index, op in enumerate(graph.ops)
        if op.phase is Phase.FORWARD and op.step == 0 and op.name != _UNSAFE_VIEW
    )


def _is_linear(model: torch.nn.Module, producer: Op) -> bool:
    return producer.name in GEMM_OPS and type(model.get_submodule(producer.module)) is torch.nn.Linear
