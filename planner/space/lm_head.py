"""Which linear layer makes the logits that the loss is taken of, found in the recording of the step as it is."""

from __future__ import annotations

import dataclasses

import torch

from planner.plan_types.decisions import ChunkedLoss
from planner.recording.step_graph import Op, Phase, StepGraph
from planner.workload.module_hooks import has_backward_hooks
from planner.workspaces.gemm import GEMM_OPS

_LOG_SOFTMAX = "aten._log_softmax.default"
_NLL = "aten.nll_loss_forward.default"
_COPIES = ("aten._to_copy.default", "aten.clone.default", "aten.copy_.default")
_UNSAFE_VIEW = "aten._unsafe_view.default"
"""A view of something that nobody else holds."""
_FP32_BYTES = 4
_CHUNK_SHARE = 1 / 16
"""A chunk of logits in fp32 takes at most this part of the budget. More chunks cost more sums of gradients."""
_MOST_CHUNKS = 64
_SMALLEST_LOGITS_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedLossOption:
    """How the loss can be taken in chunks."""

    module: str
    """The linear layer that makes the logits."""
    chunks: int
    """Of the whole batch."""
    always: bool = False
    """Whether micro-batches that are small enough by themselves are taken in chunks, too."""

    def for_micro_batches(self, micro_batches: int) -> ChunkedLoss | None:
        """The decision for one of so many micro-batches; None where it is no larger than a chunk of the whole batch.

        Between the two all have half as many chunks: their recordings are good for all numbers of micro-batches.
        """
        if micro_batches >= self.chunks and not self.always:
            return None
        chunks = self.chunks if micro_batches == 1 or self.always else max(self.chunks // 2, 2)
        return ChunkedLoss(module=self.module, chunks=chunks)

    def most_chunks(self) -> ChunkedLossOption:
        """In as many as there may be, in every micro-batch."""
        return dataclasses.replace(self, chunks=_MOST_CHUNKS, always=True)


def loss_in_chunks(graph: StepGraph, model: torch.nn.Module, *, vram_bytes: int) -> ChunkedLossOption | None:
    """How the loss is taken in chunks; None where no linear layer's output goes straight to cross entropy.

    Args:
        graph: of the step as it is.
    """
    for op in graph.ops:
        if op.name == _LOG_SOFTMAX and op.phase is Phase.FORWARD and op.step == 0 and op.inputs and op.shapes:
            rows, words = op.shapes[0][0], op.shapes[0][-1]
            logits_bytes = rows * words * _FP32_BYTES
            if len(op.shapes[0]) != 2 or logits_bytes < _SMALLEST_LOGITS_BYTES or not _is_plain(graph, op):
                continue
            made = _made_by(graph, op)
            head = made[-1]
            if not _is_linear(model, head) or not _read_only_by(graph, made, op):
                continue
            if has_backward_hooks(model.get_submodule(head.module)):
                continue
            if sum(call.module == head.module for call in graph.calls) != graph.steps:
                continue  # used elsewhere too
            chunks = 2
            while chunks < min(_MOST_CHUNKS, rows) and logits_bytes > chunks * _CHUNK_SHARE * vram_bytes:
                chunks *= 2
            return ChunkedLossOption(module=head.module, chunks=chunks)
    return None


def _is_plain(graph: StepGraph, log_softmax: Op) -> bool:
    """Whether only the loss of one label a row is taken of it: no weights, no smoothing, one number in the end."""
    result = log_softmax.outputs[0]
    readers = [op for op in graph.ops if result in op.inputs and op.phase is Phase.FORWARD and not op.is_view]
    return [op.name for op in readers] == [_NLL] and len(readers[0].inputs) == 2 and readers[0].shapes[0] == ()


def _made_by(graph: StepGraph, op: Op) -> list[Op | None]:
    """The copies and casts through which the op got what it reads, from the last to what made the first."""
    made: list[Op | None] = []
    while True:
        maker = graph.storages[op.inputs[0]].op if op.inputs else None
        if maker is None or graph.ops[maker] is op:
            return [*made, None]
        op = graph.ops[maker]
        made.append(op)
        if op.name not in _COPIES:
            return made


def _read_only_by(graph: StepGraph, made: list[Op], loss: Op) -> bool:
    """Whether what these ops made is read by the next of them alone, at last by the loss, and never written to."""
    logits = {output for op in made for output in op.outputs}
    expected = [id(op) for op in (*made, loss)]
    return not any(
        logits.intersection((*op.inputs, *op.outputs)) and not op.is_view and id(op) not in expected
        for op in graph.ops
        if op.phase is Phase.FORWARD and op.step == 0 and op.name != _UNSAFE_VIEW
    )


def _is_linear(model: torch.nn.Module, head: Op | None) -> bool:
    return head is not None and head.name in GEMM_OPS and type(model.get_submodule(head.module)) is torch.nn.Linear
