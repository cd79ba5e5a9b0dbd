"""Tests of blocks that keep the outputs of their products and are recomputed in parts, from product to product."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.estimate.footprint import measure
from planner.estimate.roofline import op_times_ns
from planner.plan_types.recompute_decisions import Checkpoint, Replay
from planner.recompute.kept_products import PRODUCT_NAMES
from planner.recompute.units import Units, units_of
from planner.recording.module_calls import ops_in
from planner.recording.step_graph import StepGraph
from planner.search import milp
from planner.workload.workload import workload
from tests.support.workloads import BARE, plain, units, what_if

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """Widens, convolves each channel, weighs the channels and narrows again. A replay copies batch norm statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Sequential(nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.SiLU())
        self.depthwise = nn.Sequential(nn.Conv2d(24, 24, 3, 1, 1, groups=24, bias=False), nn.BatchNorm2d(24), nn.SiLU())
        self.weigh = nn.Conv2d(24, 24, 1)
        self.narrow = nn.Sequential(nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(self.widen(x))
        return x + self.narrow(y * torch.sigmoid(self.weigh(y.mean((2, 3), keepdim=True))))


class Net(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), *(Block() for _ in range(blocks)))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class InPlace(nn.Module):
    """A residual block whose addition and activation work in place, as in most ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.last = nn.Conv2d(8, 8, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(self.last(self.body(x)).mul(0.5).add_(x))


class ChangesInput(nn.Module):
    """Writes to its input before it uses it, and returns a tensor that autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(F.silu(x.add_(1.0))) * 2.0


class Concatenates(nn.Module):
    """Calls blocks with the output of the last block and an earlier one, as the way up of a U-Net does."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 8, 3, 1, 1), nn.SiLU()) for _ in range(blocks))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        earlier = x = self.first(x)
        for block in self.blocks:
            x = block(torch.cat((x, earlier), dim=1))
        return self.head(x.mean((2, 3)))


class Watched(nn.Module):
    """Keeps tensors that autograd saves, too, as a program that logs activations does."""

    seen: list[torch.Tensor] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(F.silu(self.first(x)) * 2)
        self.seen[:] = *self.seen[-2:], y.detach()
        return torch.tanh(self.second(torch.sigmoid(y) * 1.5) + x)


def work_with(module: nn.Module):
    batch = torch.randn(2, 3, 18, 18), torch.zeros(2, dtype=torch.long)
    return workload(module, batch, loss_fn=lambda out, batch: F.cross_entropy(out, batch[1]), optimizer="sgd")


def work_of(blocks: int):
    return work_with(Net(blocks))


def chain_of(kind: type[nn.Module], blocks: int):
    """Returns the workload of a network of these blocks, with 8 channels."""
    body = nn.Sequential(nn.Conv2d(3, 8, 3), *(kind() for _ in range(blocks)))
    return work_with(nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)))


def in_parts(found: Units) -> list[int]:
    """Returns the units that keep products and are divided."""
    return [number for number, unit in enumerate(found.units) if unit.split_points and unit.kept]


def products_again(graph: StepGraph) -> int:
    return sum(op.name in PRODUCT_NAMES and op.phase == "recompute" for op in graph.ops)


def test_a_block_is_divided_behind_the_products_that_it_keeps():
    found, _ = units(what_if(work_of(3)))
    blocks = [found.units[number] for number in in_parts(found) if found.units[number].module == "body.2"]
    assert blocks
    for unit in blocks:
        assert {number - 1 for number in unit.split_points} == {*unit.kept}
    assert not any(unit.segment is not None and unit.module.endswith(".widen") for unit in found.units)


def test_the_promise_is_what_the_rehearsal_takes_and_no_product_that_is_kept_runs_again():
    work = work_of(3)
    found, curve = units(what_if(work))
    chosen = in_parts(found)
    assert len(chosen) >= 3
    for number in chosen:
        rehearsed = plain(work, found.decisions((number,)), card=BARE)
        assert curve.peak((number,)) == rehearsed.live_bytes().max(), found.units[number]
        if found.units[number].module.startswith("body.") and len(found.units[number].kept) == 4:
            assert products_again(rehearsed) == 0


def test_a_saved_tensor_that_the_program_keeps_exists_twice_when_it_is_made_again():
    work = chain_of(Watched, 3)
    found, curve = units(what_if(work))
    assert any(unit.segment is None for unit in found.units) and any(unit.segment for unit in found.units)
    for number, unit in enumerate(found.units):
        rehearsed = plain(work, found.decisions((number,)), card=BARE)
        assert curve.peak((number,)) == rehearsed.live_bytes().max(), unit


def test_tapes_of_inner_modules_do_not_shift_the_numbers_of_ops_of_outer_ones():
    """The tape of a block copies running statistics. An outer tape must not count these copies as ops of its module."""
    work = work_of(9)
    found, curve = units(what_if(work))
    chosen = in_parts(found)
    last = max(
        (number for number in chosen if found.units[number].module == "body"), key=lambda n: found.units[n].segment
    )
    first = next(number for number in chosen if found.units[number].module == "body.1")
    both = tuple(sorted((first, last)))
    assert not any({*both} <= {*path} for path in found.problem.paths)
    rehearsed = plain(work, found.decisions(both), card=BARE)
    assert curve.peak(both) == rehearsed.live_bytes().max()
    alone = [products_again(plain(work, found.decisions((number,)), card=BARE)) for number in both]
    assert products_again(rehearsed) == sum(alone)


def test_blocks_in_parts_fit_where_checkpoints_would_run_products_again():
    graph = what_if(work_of(4))
    _, curve = units(graph)
    op_ns = [int(op.name in PRODUCT_NAMES) for op in graph.ops]  # a plan costs 1 ns per product that runs again
    checkpoints, all_units = (
        milp.Search(units_of(graph, op_ns, granularity_bytes=1, kinds=kinds).problem)
        for kinds in ((Checkpoint,), (Checkpoint, Replay))
    )
    budget_bytes = int(0.48 * curve.peak(()))
    assert checkpoints.solve(budget_bytes).cost_ns > 0
    assert all_units.solve(budget_bytes).cost_ns == 0


def test_the_step_time_of_a_plan_includes_the_host_time_that_the_search_counted():
    """The report and the search must measure time alike. Otherwise limits on the step time refuse what was chosen."""
    work, card = work_with(Concatenates(10)), dataclasses.replace(BARE, launch_ns=3_000)
    graph, baseline = what_if(work, card=card), measure(plain(work, card=card), card, vram_bytes=None)
    found = units_of(graph, op_times_ns(graph, card, 1), granularity_bytes=1, launch_ns=card.launch_ns)
    for number in range(0, len(found.units), 7):
        decisions = found.decisions((number,))
        rehearsed = measure(plain(work, decisions, card=card), card, vram_bytes=None, decisions=decisions)
        longer_ns = rehearsed.footprint.step_ns - baseline.footprint.step_ns
        assert found.problem.cost_ns[number] == longer_ns, found.units[number]


def test_the_host_time_of_a_tape_counts_where_kernels_are_short():
    graph = what_if(work_with(Concatenates(8)))
    op_ns = [100] * len(graph.ops)
    quick, slow = (units_of(graph, op_ns, granularity_bytes=1, launch_ns=launch_ns) for launch_ns in (1, 100))
    assert [unit.kept for unit in quick.units] == [unit.kept for unit in slow.units]
    for unit, few_ns, many_ns in zip(quick.units, quick.problem.cost_ns, slow.problem.cost_ns, strict=True):
        if unit.segment is None:
            assert few_ns == many_ns
        else:
            recorded = unit.segment[1] - unit.segment[0]
            assert many_ns == 5 * few_ns + 9 * 100 * recorded


def spanning_blocks(found: Units, graph: StepGraph) -> list[int]:
    """Returns the units of module "0" that are divided into parts and span several calls of its submodules."""
    outer = next(number for number, call in enumerate(graph.calls) if call.module == "0")
    longest = max(len(ops_in(graph, number)) for number, call in enumerate(graph.calls) if call.parent == outer)
    return [
        number
        for number, unit in enumerate(found.units)
        if unit.module == "0" and unit.split_points and unit.segment[1] - unit.segment[0] > longest
    ]


@pytest.mark.parametrize("kept", [True, False])
def test_segments_span_blocks_whose_last_op_works_in_place(kept):
    work = chain_of(InPlace, 8)
    graph = what_if(work)
    found, curve = units(graph)
    spanning = [number for number in spanning_blocks(found, graph) if bool(found.units[number].kept) == kept]
    assert spanning
    for number in spanning[:4]:
        rehearsed = plain(work, found.decisions((number,)), card=BARE)
        assert curve.peak((number,)) == rehearsed.live_bytes().max(), found.units[number]


def test_no_segment_is_divided_where_the_next_part_writes_to_what_it_is_given():
    work = chain_of(ChangesInput, 8)
    graph = what_if(work)
    found, curve = units(graph)
    spanning = spanning_blocks(found, graph)
    assert spanning
    assert all(found.units[number].kept for number in spanning)
    for number in spanning[:4]:
        rehearsed = plain(work, found.decisions((number,)), card=BARE)
        assert curve.peak((number,)) == rehearsed.live_bytes().max(), found.units[number]


def test_parts_between_the_calls_of_submodules_are_segments_of_their_own():
    """A concatenation in front of a block belongs to no submodule. A segment of both does not keep its result."""
    work = work_with(Concatenates(24))
    found, curve = units(what_if(work))
    block = next(number for number, unit in enumerate(found.units) if unit.module == "blocks.3" and not unit.kept)
    nested = {number for path in found.problem.paths if block in path for number in path}
    (around,) = (
        number
        for number in nested
        if (unit := found.units[number]).segment is not None and not unit.kept and not unit.split_points
    )
    assert curve.peak((around,)) < curve.peak((block,)) < curve.peak(())
    rehearsed = plain(work, found.decisions((around,)), card=BARE)
    assert curve.peak((around,)) == rehearsed.live_bytes().max()


@pytest.mark.thorough
def test_the_input_of_a_checkpointed_module_is_not_recomputed_by_the_segment_before_it():
    """`torch.utils.checkpoint` saves its inputs just after the op that makes them, which is in the segment."""
    narrow = [[nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, 2, 1), Block()] for _ in range(3)]
    body = nn.Sequential(nn.Conv2d(3, 8, 3), *itertools.chain.from_iterable(narrow))
    work = work_with(nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)))
    found, curve = units(what_if(work))
    whole = [
        number
        for number, unit in enumerate(found.units)
        if unit.module == "0" and unit.segment is not None and not unit.kept and not unit.split_points
    ]
    blocks = [number for number, unit in enumerate(found.units) if unit.module in ("0.3", "0.6", "0.9")]
    pairs = [
        tuple(sorted((segment, block)))
        for segment, block in itertools.product(whole, blocks)
        if found.units[block].segment is None and not any({segment, block} <= {*path} for path in found.problem.paths)
    ]
    assert len(pairs) > 5
    for pair in pairs:
        rehearsed = plain(work, found.decisions(pair), card=BARE)
        assert curve.peak(pair) == rehearsed.live_bytes().max(), [found.units[number] for number in pair]
