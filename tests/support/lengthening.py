"""Recordings of models with many identical layers: with all layers, with a few, and lengthened."""

from __future__ import annotations

import torch

from planner.choose.recordings import Recordings
from planner.derive.lengthen import lengthened
from planner.derive.shortening import Shortening, runs_to_shorten
from planner.recording.repeats.layer_runs import KEPT
from planner.recording.step_graph import Op, Phase, StepGraph
from planner.rewrite.rehearse import certifying_graph, start_certificate, start_rehearsal, start_update
from planner.space.micro_batches import MicroBatching
from planner.workload.workload import Workload, workload
from tests.support.workloads import BARE

LAYERS = 2 * KEPT + 2


def shortened(work: Workload, decisions=(), *, sizes: tuple[int, ...] | None = None) -> StepGraph:
    """Returns the what-if recording with a few layers of each run."""
    return start_rehearsal(
        work,
        decisions,
        BARE,
        sizes=sizes or (work.batch_size,),
        steps=1,
        primed=True,
        what_if=True,
        runs=runs_to_shorten(work),
    ).result()


def shortening(work: Workload) -> Shortening:
    """Returns what the search uses to find out whether recordings may have a few layers of each run."""
    return Shortening(
        runs_to_shorten(work),
        lambda runs: start_certificate(work, (), BARE, runs=runs),
        lambda: certifying_graph(work, (), BARE),
    )


def with_all_layers(graph: StepGraph | None, work: Workload) -> StepGraph | None:
    for run in runs_to_shorten(work):
        graph = graph and lengthened(graph, run)
    return graph


def recordings_of(work: Workload, known: Shortening | None = None) -> Recordings:
    """Returns the recordings that the search uses."""
    return Recordings(
        lambda decisions, sizes, runs: start_rehearsal(
            work, decisions, BARE, sizes=sizes, steps=1, primed=True, what_if=True, runs=runs
        ),
        lambda decisions: start_update(work, decisions, BARE, [n for n, _ in work.model.named_parameters()]),
        lambda graph: graph,
        shortening=known,
    )


def recorded(work: Workload, known: Shortening | None = None, config=()) -> StepGraph:
    """Returns the recording that the search gets."""
    return recordings_of(work, known).of(config, MicroBatching(micro_batches=1, size=work.batch_size))()


class Layers(torch.nn.Module):
    """Identical layers, used in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(LAYERS))

    def forward(self, x):
        outputs = []
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if self.way == "every third is doubled" and number % 3 == 2:
                x = x * 2
            if self.way == "every other is wider inside":
                x = x.expand(2 + number % 2, *x.shape).clone()[0]
            outputs.append(x)
        if self.way == "all outputs are summed":
            return torch.stack(outputs).sum(0).square().mean()
        if self.way == "one more output is part of the loss":  # the last one of a model with `KEPT` layers
            return x.square().mean() + outputs[KEPT - 1].abs().mean()
        if self.way == "a tensor has a row for each layer":
            return x.square().mean() * x.new_ones(len(self.layers), 8).mean()
        return x.square().mean()


def layers(way: str) -> Workload:
    with torch.device("meta"):
        return workload(Layers(way), torch.zeros(8, 16))


def assert_equal(graph: StepGraph, full: StepGraph) -> None:
    """Both have the same events from the first op of the forward on, at the same ticks.

    It does not use `is_same_step`, which the planner trusts: an event that one of the two forgets is seen by the other.
    """
    (ops, start), (all_ops, all_start) = of_step(graph), of_step(full)
    assert (graph.live_bytes()[start:] == full.live_bytes()[all_start:]).all()
    assert [op_at(op, start) for op in ops] == [op_at(op, all_start) for op in all_ops]
    for op, same in zip(ops, all_ops, strict=True):
        for indices, others in ((op.inputs, same.inputs), (op.outputs, same.outputs), (op.written, same.written)):
            assert [storage_at(graph, i, start) for i in indices] == [storage_at(full, i, all_start) for i in others]
        assert op.call == same.call
        if op.forward_op is not None:
            assert same.forward_op is not None
            assert graph.ops[op.forward_op].tick - start == full.ops[same.forward_op].tick - all_start
    assert saves_at(graph, start) == saves_at(full, all_start)
    assert calls_at(graph, start) == calls_at(full, all_start)


def of_step(graph: StepGraph) -> tuple[list[Op], int]:
    ops = [op for op in graph.ops if op.phase is not Phase.SETUP]
    return ops, ops[0].tick


def op_at(op: Op, start: int) -> tuple:
    numbers = op.flops, op.moved_bytes, op.host_bytes, op.micro_batch, op.shapes, op.kernel
    return op.name, op.phase, op.tick - start, op.module, op.dtype, op.source, op.draws_random_numbers, *numbers


def storage_at(graph: StepGraph, index: int, start: int) -> tuple:
    storage = graph.storages[index]
    lives = [(max(birth - start, 0), death - start) for birth, death in storage.lives]
    return storage.size_bytes, storage.category, storage.name, storage.shape, storage.dtype, lives


def saves_at(graph: StepGraph, start: int) -> list[tuple]:
    ticks = [(save.pack, save.unpack, save.release, save.again) for save in graph.saves]
    return [tuple(tick and tick - start for tick in each) for each in ticks]


def calls_at(graph: StepGraph, start: int) -> list[tuple]:
    return [(call.module, call.parent, call.start - start, call.end - start, call.obstacle) for call in graph.calls]
