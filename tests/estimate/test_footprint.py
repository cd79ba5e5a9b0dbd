"""From a recording to reserved memory, where the card's driver has a say."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch

from planner import pipeline, profiles
from planner.estimate import footprint
from planner.estimate.allocation_stream import allocation_stream, last_round
from planner.estimate.footprint import AllocatingStep, measure, runs_within
from planner.estimate.largest_tensors import MOST_LISTED, largest_tensors
from planner.estimate.smallest_total import approximate_smallest_of, missing_bytes, smallest_of, smallest_total_bytes
from planner.plan_types.decisions import Allocator
from planner.plan_types.sizes import MIB
from planner.recording.rehearsal import rehearse_program
from planner.recording.step_graph import Category, Phase, StepGraph, Storage
from planner.rewrite import rehearse
from planner.virtual_gpu.backend import Target
from planner.workload.workload import Workload, workload
from planner.workspaces.gemm import GEMM_OPS
from tests.support.workloads import certifying_graph, layers_of_similar_widths

CARD = profiles.load("rtx-3090")


def holes_in_two_segments(device: torch.device, *, freed: int) -> None:
    """A hole in either of two segments is filled by one block; what then needs one of them may find it whole.

    `freed` is the number of the segment whose other blocks are freed before.
    """

    def take(size_mib: int) -> torch.Tensor:
        return torch.empty(size_mib * MIB, dtype=torch.uint8, device=device)

    blocks = [take(5) for _ in range(8)]
    blocks[0] = blocks[4] = None
    filling = take(5)
    blocks[4 * freed + 1] = blocks[4 * freed + 2] = blocks[4 * freed + 3] = None
    large = take(18)
    del filling, large


@pytest.mark.parametrize(("freed", "better"), [(0, "descending"), (1, "ascending")])
@pytest.mark.parametrize("order", ["ascending", "descending", "unknown"])
def test_where_it_is_not_known_how_the_driver_places_segments_the_worse_order_counts(order, freed, better):
    program = functools.partial(holes_in_two_segments, freed=freed)
    graph = rehearse_program(program, Target(compute_capability=CARD.compute_capability))
    card = dataclasses.replace(CARD, segment_addresses=order)
    measured = measure(graph, card, vram_bytes=None)
    assert measured.footprint.reserved_bytes == (40 if order == better else 58) * MIB
    assert measured.footprint.total_bytes == measured.footprint.reserved_bytes + card.context_bytes
    budget_bytes = card.context_bytes + 50 * MIB
    assert measure(graph, card, vram_bytes=budget_bytes).fits == (order == better)
    assert (smallest_total_bytes(graph, card) <= budget_bytes) == (order == better)


def medium_after_small(device: torch.device) -> None:
    """The segment of the first block, 2 MiB, can be given back before the second block takes one of 20 MiB."""
    torch.empty(MIB, dtype=torch.uint8, device=device)
    torch.empty(3 * MIB, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("program", [functools.partial(holes_in_two_segments, freed=0), medium_after_small])
def test_a_step_fits_from_the_smallest_budget_on_and_not_below(program):
    """The slack counts: segments are larger than what is alive in them."""
    graph = rehearse_program(program, Target(compute_capability=CARD.compute_capability))
    smallest = smallest_total_bytes(graph, CARD, within_bytes=1)
    assert measure(graph, CARD, vram_bytes=smallest).fits
    assert not measure(graph, CARD, vram_bytes=smallest - 1).fits


@pytest.mark.parametrize("order", ["ascending", "descending", "unknown"])
@pytest.mark.parametrize("program", [functools.partial(holes_in_two_segments, freed=0), medium_after_small])
def test_the_smallest_total_of_several_alternatives_is_that_of_the_best_one(program, order):
    graph = rehearse_program(program, Target(compute_capability=CARD.compute_capability))
    card = dataclasses.replace(CARD, segment_addresses=order)
    alternatives = [(), (Allocator(max_split_size_mb=21),), (Allocator(expandable_segments=True),)]
    totals = [smallest_total_bytes(graph, card, decisions) for decisions in alternatives]
    for ordered in itertools.permutations(alternatives):
        assert 0 <= smallest_of(graph, card, ordered) - min(totals) <= MIB
    for decisions, total in zip(alternatives, totals, strict=True):
        for vram_bytes in (total, total - MIB - 1, None):
            fits = measure(graph, card, vram_bytes=vram_bytes, decisions=decisions).fits
            assert runs_within(graph, card, vram_bytes, decisions) == fits


@pytest.mark.parametrize("order", ["ascending", "descending", "unknown"])
@pytest.mark.parametrize("program", [functools.partial(holes_in_two_segments, freed=0), medium_after_small])
def test_an_approximate_total_is_within_a_budget_if_the_step_runs_in_it(program, order):
    """Most budgets differ from the smallest total by less than the error that the approximate total may have."""
    graph = rehearse_program(program, Target(compute_capability=CARD.compute_capability))
    card = dataclasses.replace(CARD, segment_addresses=order)
    alternatives = [(), (Allocator(max_split_size_mb=21),), (Allocator(expandable_segments=True),)]
    smallest_bytes = smallest_of(graph, card, alternatives, within_bytes=1)
    for more_bytes in (-MIB, -1, 0, 1, MIB // 2, 10 * MIB):
        vram_bytes = smallest_bytes + more_bytes
        total_bytes = approximate_smallest_of(graph, card, alternatives, vram_bytes=vram_bytes)
        assert (total_bytes <= vram_bytes) == (more_bytes >= 0)
        assert 0 <= total_bytes - smallest_bytes <= MIB
        if more_bytes < 0:
            assert 0 < missing_bytes(AllocatingStep(graph, card), vram_bytes, alternatives) <= MIB - more_bytes


def large_after_small(device: torch.device) -> None:
    """The segment of the first block, 2 MiB, can be given back before the second block takes one of 4102 MiB."""
    torch.empty(MIB, dtype=torch.uint8, device=device)
    torch.empty(4102 * MIB, dtype=torch.uint8, device=device)


def test_an_approximate_total_is_within_a_budget_that_is_a_little_larger_than_the_smallest_total():
    """Without a limit, 4104 MiB are reserved, which exceeds the smallest total by less than 0.1 %."""
    graph = rehearse_program(large_after_small, Target(compute_capability=CARD.compute_capability))
    vram_bytes = CARD.outside_bytes + 4103 * MIB
    assert approximate_smallest_of(graph, CARD, [()], vram_bytes=vram_bytes) == vram_bytes - MIB
    assert smallest_total_bytes(graph, CARD, within_bytes=4 * MIB) == vram_bytes + MIB


def linear_layers() -> Workload:
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    batch = (torch.zeros(8192, 256), torch.zeros(8192, 256))
    return workload(layers, batch, loss_fn=lambda output, batch: torch.nn.functional.mse_loss(output, batch[-1]))


def test_each_thread_that_multiplies_has_a_workspace_from_its_first_product_on():
    graph = certifying_graph(linear_layers(), (), CARD)
    size_bytes = CARD.cublas_workspace_bytes(torch.__version__)
    found = [s.lives for s in graph.storages if s.category is Category.WORKSPACE and s.size_bytes == size_bytes]
    products = [op for op in graph.ops if op.name in GEMM_OPS]
    firsts = [next(op for op in products if op.phase is phase) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    births = [graph.storages[op.outputs[0]].lives[0][0] for op in firsts]
    assert found == [[(birth, graph.ticks)] for birth in births]


def test_scratch_memory_is_alive_together_with_the_outputs_of_its_kernel():
    graph = certifying_graph(linear_layers(), (), CARD)
    scratch = [s for s in graph.storages if s.category is Category.WORKSPACE and s.lives[0][1] < graph.ticks]
    assert len(scratch) == 8  # two buffers for each gradient of two biases, in two steps
    for storage in scratch:
        ((start, stop),) = storage.lives
        assert stop == start + 1
        for output in graph.ops[storage.op].outputs:
            assert any(birth <= start < death for birth, death in graph.storages[output].lives)


def test_each_category_has_its_own_maximum_which_may_be_at_another_moment_than_the_peak():
    graph = certifying_graph(linear_layers(), (), CARD)
    footprint = measure(graph, CARD, vram_bytes=None).footprint
    most = dict.fromkeys(Category, 0)
    for tick in range(graph.ticks):
        alive = dict.fromkeys(Category, 0)
        for storage in graph.storages:
            if any(start <= tick < stop for start, stop in storage.lives):
                alive[storage.category] += -(-storage.size_bytes // 512) * 512
        most = {category: max(most[category], alive[category]) for category in Category}
    assert footprint.most == {str(category): size for category, size in most.items() if size}
    assert footprint.breakdown[Category.GRADIENT] < footprint.most[Category.GRADIENT]


def test_the_largest_tensors_at_the_peak_have_their_module_and_line_and_repeated_layers_are_one_item():
    class Layer(torch.nn.Linear):
        def forward(self, x):
            return torch.tanh(super().forward(x))

    work = linear_layers()
    model = torch.nn.Sequential(*(Layer(256, 256) for _ in range(4)))
    graph = certifying_graph(workload(model, work.batch, loss_fn=work.loss_fn), (), CARD)
    tick = measure(graph, CARD, vram_bytes=None).peak_tick
    tensors = largest_tensors(graph, tick, granularity_bytes=512)
    sizes = sorted(
        (
            -(-storage.size_bytes // 512) * 512
            for storage, spans in zip(graph.storages, graph.spans(), strict=True)
            if any(start <= tick < stop for start, stop in spans)
        ),
        reverse=True,
    )
    assert len(tensors) == MOST_LISTED
    assert [tensor.size_bytes for tensor in tensors for _ in range(tensor.count)][:MOST_LISTED] == sizes[:MOST_LISTED]
    repeated = next(tensor for tensor in tensors if tensor.count == 3 and tensor.category == Category.ACTIVATION)
    assert (repeated.module, repeated.shape, repeated.dtype) == ("*", (8192, 256), "float32")
    assert repeated.source.startswith("tests/estimate/test_footprint.py:")
    assert "*.weight" in {tensor.name for tensor in tensors if tensor.category == Category.PARAMETER}


def test_what_dies_at_a_tick_is_free_for_what_is_born_at_it_and_blocks_are_freed_in_reverse():
    graph = rehearse_program(lambda device: None, Target(compute_capability=CARD.compute_capability))
    lives = [(0, 5), (1, 5), (5, 9)]
    storages = [Storage(size_bytes=4, lives=[life], category=Category.TEMPORARY, op=None) for life in lives]
    ids, sizes, ticks = allocation_stream(dataclasses.replace(graph, storages=storages, ticks=9))
    assert list(zip(ids.tolist(), sizes.tolist(), ticks.tolist(), strict=True)) == [
        (0, 4, 0), (1, 4, 1), (1, 0, 5), (0, 0, 5), (2, 4, 5),
    ]  # fmt: skip


def steps_of(work: Workload, steps: int) -> StepGraph:
    """Returns a recording of the unchanged step, run a number of times."""
    whole = {"sizes": (work.batch_size,), "steps": steps, "primed": False, "what_if": False}
    return rehearse.finish_certificate(rehearse.start_rehearsal(work, (), CARD, **whole).result(), work, CARD)


@pytest.mark.slow
def test_two_recorded_steps_count_what_later_steps_reserve(monkeypatch):
    """In the third step, free memory is fragmented differently, and the allocator reserves 24 MiB more."""
    card, work = CARD, layers_of_similar_widths()
    totals, graphs = [], {steps: steps_of(work, steps) for steps in (2, 5)}
    for is_repeated, steps in itertools.product((True, False), graphs):
        if not is_repeated:
            monkeypatch.setattr(footprint, "last_round", lambda graph, stream: None)
        measured = measure(graphs[steps], card, vram_bytes=None)
        totals.append(measured.footprint.total_bytes)
        assert measured.footprint.total_bytes == smallest_total_bytes(graphs[steps], card, within_bytes=1)
    assert totals[0] == totals[1] == totals[3] == totals[2] + 24 * MIB
    monkeypatch.undo()
    assert runs_within(graphs[2], card, totals[0]) and not runs_within(graphs[2], card, totals[2])


@pytest.mark.slow
def test_limits_for_repeated_steps_are_tried_from_below(monkeypatch):
    """Replays that fit repeat the steps many times, and take longer than replays that run out of memory early."""
    graph, limits = steps_of(layers_of_similar_widths(), 2), []

    def replay(step, capacity_bytes, settings, *, repeats=True, **options):
        if repeats and capacity_bytes is not None:
            limits.append(capacity_bytes)
        return whole(step, capacity_bytes, settings, repeats=repeats, **options)

    whole = footprint.AllocatingStep.replay
    monkeypatch.setattr(footprint.AllocatingStep, "replay", replay)
    total_bytes = smallest_total_bytes(graph, CARD)
    assert limits[0] < limits[1] <= limits[0] + 4 * MIB < total_bytes - CARD.outside_bytes


def test_a_step_that_leaves_more_than_the_one_before_it_does_not_repeat():
    graph = steps_of(linear_layers(), 2)
    assert last_round(graph, allocation_stream(graph)) is not None
    growing = Storage(size_bytes=512, lives=[(graph.ticks - 1, graph.ticks)], category=Category.TEMPORARY, op=None)
    graph = dataclasses.replace(graph, storages=[*graph.storages, growing])
    assert last_round(graph, allocation_stream(graph)) is None
    one = steps_of(linear_layers(), 1)
    assert last_round(one, allocation_stream(one)) is None


class KeepingOutputs:
    """A training step that keeps hidden outputs of its last two calls."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, model, optimizer, batch) -> None:
        x, outputs = batch, []
        for module in model:
            x = module(x)
            outputs.append(x.detach())
        self.kept = [*self.kept, (outputs[1], outputs[-1])][-2:]
        x.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_what_several_steps_keep_is_freed_in_turn(monkeypatch):
    widths = itertools.pairwise((827, 827, 827, 1097))
    model = torch.nn.Sequential(*[part for i, o in widths for part in (torch.nn.Linear(i, o), torch.nn.ReLU())])
    work = workload(model, torch.randn(3000, 827), step=KeepingOutputs(), optimizer="adamw")
    recorded, many = pipeline.record_step(work, CARD), steps_of(work, 30)
    planned = measure(recorded, CARD, vram_bytes=None).footprint.total_bytes
    monkeypatch.setattr(footprint, "last_round", lambda graph, stream: None)
    assert planned == measure(many, CARD, vram_bytes=None).footprint.total_bytes
    assert planned > measure(recorded, CARD, vram_bytes=None).footprint.total_bytes
