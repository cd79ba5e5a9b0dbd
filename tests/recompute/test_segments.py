"""Where long forwards are cut, what is offered of them, and how far below checkpoints their parts reach."""

from __future__ import annotations

import networkx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.plan_types.recompute_decisions import Checkpoint, Replay
from planner.recompute.replay_cost import Replays
from planner.recompute.segments import with_segments
from planner.recompute.units import units_of
from planner.search import milp
from planner.workload.workload import workload
from tests.support.flat_models import Flat
from tests.support.training import cross_entropy, vectors
from tests.support.workloads import BARE, plain, units, what_if

pytestmark = pytest.mark.slow


class Deep(Flat):
    """Layers of four ops - two products, an activation, a sum - of which only the residual stream crosses."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth, up=(64, 16), down=(16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            up, down = self.of(number, "up", "down")
            x = x + F.linear(torch.tanh(F.linear(x, up)), down)
        return F.linear(x, self.head)


class Skips(Flat):
    """Down and up again; between layers ops of which nothing is saved, and a condition that every layer takes."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=2 * depth, up=(64, 16), down=(16, 64), shift=(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition, kept = torch.sigmoid(x), []
        for number in range(self.depth):
            up, down, shift = self.of(number, "up", "down", "shift")
            hidden = torch.tanh(F.linear(x, up))
            x = x + F.linear(hidden, down) + F.linear(condition, shift)
            if number < self.depth // 2:
                kept.append(x)
                x = x * 2 + 1
            else:
                x = (x + kept.pop()) / 2 - 1
        return F.linear(x, self.head)


class Wide(Flat):
    """Wide tensors that nothing saves, one result that is dropped at the end and one that never meets the loss."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth, mix=(16, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for number in range(self.depth):
            (mix,) = self.of(number, "mix")
            x = torch.tanh(F.linear(x, mix)) * 2
            x = x + torch.cat([x] * 32, 1).unflatten(1, (32, 16)).mean(1)
            if number == self.depth // 2:
                dropped = torch.sigmoid(x)
                x = torch.cat([x] * 32, 1).unflatten(1, (32, 16)).mean(1)
                returned = torch.sigmoid(x)
                x = torch.cat([x] * 32, 1).unflatten(1, (32, 16)).mean(1)
        logits = F.linear(x, self.head)
        del dropped
        return logits, returned


class Routed(Flat):
    """Layers that take the largest entries: autograd releases their indices, and saves them again for the gather."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth, mix=(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            (mix,) = self.of(number, "mix")
            scores = torch.sigmoid(F.linear(x, mix))
            chosen = scores.topk(2, dim=-1).indices
            x = torch.tanh(x + scores.gather(1, chosen).sum(1, keepdim=True))
        return F.linear(x, self.head)


class DetachedScale(Flat):
    """Layers that divide by a detached scale: autograd saves their tensors and releases some of them at once."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth, up=(64, 16), down=(16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            up, down = self.of(number, "up", "down")
            hidden = torch.exp(torch.tanh(F.linear(x, up)))
            scale = (hidden * hidden).mean().detach()
            x = x + torch.tanh(F.linear(hidden / scale, down))
        return F.linear(x, self.head)


class NearestCode(DetachedScale):
    """Replaces each vector by the nearest vector of a codebook, with a straight-through gradient, as in a VQ-VAE."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            up, down = self.of(number, "up", "down")
            hidden = torch.tanh(F.linear(x, up))
            distances = (
                hidden.square().sum(1, keepdim=True) - 2 * F.linear(hidden, down) + down.square().sum(1)
            ).softmax(1)
            codes = F.embedding(distances.argmin(1), down)
            x = x + torch.tanh(F.linear(hidden + (codes - hidden).detach(), down))
        return F.linear(x, self.head)


def first_cross_entropy(outputs: tuple[torch.Tensor, torch.Tensor], batch) -> torch.Tensor:
    return cross_entropy(outputs[0], batch)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """The same layers as modules."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(depth)))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def work_of(model: nn.Module, samples: int = 256):
    loss_fn = first_cross_entropy if isinstance(model, Wide) else cross_entropy
    return workload(model, vectors(samples), loss_fn=loss_fn, optimizer="sgd")


def test_cuts_are_where_the_fewest_bytes_cross():
    graph = with_segments(what_if(work_of(Deep(8))))
    begins = {call.segment[0] for call in graph.calls if call.segment is not None}
    assert begins <= {0, *range(3, 33)} and {4 * n for n in range(2, 8)} <= begins


@pytest.mark.parametrize("build", [Skips, Wide, Deep])
def test_what_is_replayed_are_the_ancestors_of_what_was_saved(build):
    graph = with_segments(what_if(work_of(build(4), samples=32)))
    replays = Replays(graph, [1] * len(graph.ops), [storage.size_bytes for storage in graph.storages])
    for call in (number for number, call in enumerate(graph.calls) if call.segment is not None):
        ops = replays.ops_of(call)
        flow: networkx.DiGraph = networkx.DiGraph()
        writer: dict[int, int] = {}
        for op in ops:  # edges from the last op that wrote a storage
            flow.add_node(op)
            record = graph.ops[op]
            touched = {*record.inputs, *record.outputs} & writer.keys()
            flow.add_edges_from((writer[storage], op) for storage in touched)
            writer |= dict.fromkeys(record.outputs, op)
        wanted = {save.storage for save in graph.saves if save.storage in writer}
        flow.add_edges_from((writer[storage], "saved") for storage in wanted)
        leading, _ = replays._leading_to(wanted, ops)
        assert set(leading) == (networkx.ancestors(flow, "saved") if wanted else set())


def test_nothing_is_cut_where_modules_do_the_work():
    graph = what_if(work_of(Stack(4)))
    segments = [call for call in with_segments(graph).calls if call.segment is not None]
    assert not any(call.split_points for call in segments)  # blocks are divided only after products


def smallest(model: nn.Module, *kinds) -> int:
    graph = what_if(work_of(model))
    found = units_of(graph, [1] * len(graph.ops), granularity_bytes=1, kinds=kinds)
    return milp.Search(found.problem).smallest_peak(tolerance_ns=0).peak_bytes


def test_a_flat_net_is_planned_as_well_as_the_same_net_of_modules():
    as_modules, flat = smallest(Stack(16), Checkpoint), smallest(Deep(16), Replay)
    assert flat < as_modules < smallest(Deep(16), Checkpoint)


@pytest.mark.parametrize("build", [Deep, Stack])
def test_parts_that_start_from_each_other_go_below_one_level(build):
    """Memory held in addition to one layer grows with the logarithm of the depth; checkpoints grow linearly."""
    bytes_of_layer = 256 * 16 * 4  # of the residual stream
    depth = 32
    work = work_of(build(depth))
    found, curve = units(what_if(work))
    whole = [number for number, unit in enumerate(found.units) if unit.split_points and unit.segment[0] == 0]
    peaks = {curve.peak((number,)): number for number in whole}
    least = min(peaks)
    assert least == plain(work, found.decisions((peaks[least],)), card=BARE).live_bytes().max()
    parameters = sum(2 * parameter.nbytes for parameter in work.model.parameters())
    held = least - parameters - sum(tensor.nbytes for tensor in work.batch)
    assert held < (depth.bit_length() + 18) * bytes_of_layer


@pytest.mark.parametrize(("build", "depth"), [(Skips, 2), (Wide, 4), (Stack, 9), (Routed, 8)])
@pytest.mark.thorough
def test_the_promise_for_every_division_is_what_its_rehearsal_takes(build, depth):
    work = work_of(build(depth), samples=64)
    found, curve = units(what_if(work))
    divided = [number for number, unit in enumerate(found.units) if unit.split_points]
    assert divided
    for number in divided:
        rehearsed = plain(work, found.decisions((number,)), card=BARE).live_bytes().max()
        assert curve.peak((number,)) == rehearsed, found.units[number]


@pytest.mark.thorough
@pytest.mark.parametrize("build", [DetachedScale, NearestCode])
def test_saved_tensors_that_are_released_in_the_forward_are_promised_as_rehearsed(build):
    work = work_of(build(6), samples=64)
    graph = what_if(work)
    assert any(save.release is not None and save.unpack is None for save in graph.saves)
    found, curve = units(graph, kinds=(Replay,))
    assert found.units
    for number, unit in enumerate(found.units):
        rehearsed = plain(work, found.decisions((number,)), card=BARE).live_bytes().max()
        assert curve.peak((number,)) == rehearsed, unit


class Noisy(Flat):
    """`rrelu` saves its noise, which `empty_like` makes, before the noise is drawn."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth, weight=(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            (weight,) = self.of(number, "weight")
            x = F.rrelu(F.linear(x, weight), training=self.training)
        return F.linear(x, self.head)


@pytest.mark.thorough
def test_tensors_that_are_saved_before_an_op_fills_them_are_promised_as_kept():
    work = work_of(Noisy(8), samples=256)
    found, curve = units(what_if(work), kinds=(Replay,))
    assert any(unit.split_points for unit in found.units)
    for number, unit in enumerate(found.units):
        rehearsed = plain(work, found.decisions((number,)), card=BARE).live_bytes().max()
        assert curve.peak((number,)) == rehearsed, unit


@pytest.mark.thorough
def test_a_plan_says_so_and_keeps_its_promise():
    torch.manual_seed(0)
    model, batch = Deep(32), vectors(1024)
    options = {"gpu": "bare", "loss_fn": cross_entropy, "optimizer": "sgd", "only": ("replay",)}
    start = planner.plan(model, batch, vram=None, **options).baseline.total_bytes
    plan = planner.plan(model, batch, vram=start // 6, **options)
    assert plan.fits and plan.solver.promised_bytes == plan.solver.certified_bytes
    assert "recomputed in " in plan.decision(Replay).describe()
