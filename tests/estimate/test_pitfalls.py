"""Bytes that are easily forgotten: the batch's other samples, losses in full storage, batches of any kind."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import planner
from planner import rewrite
from planner.choose.candidates import Candidates
from planner.choose.recordings import Recordings
from planner.estimate.footprint import with_whole_batch
from planner.plan_types.decisions import Accumulation, Decision
from planner.recording.step_graph import Category, Phase, StepGraph
from planner.rewrite.rehearse import start_rehearsal, start_update
from planner.space.micro_batches import MicroBatching
from planner.virtual_gpu.forked_process import Child
from planner.workload.workload import Workload, resized, tensors_of, workload
from tests.support.workloads import BARE, certifying_graph, plain

pytestmark = pytest.mark.slow


def mean_square(output, batch):
    return F.mse_loss(output, batch[-1])


def input_bytes(graph: StepGraph) -> int:
    return sum(storage.size_bytes for storage in graph.storages if storage.category is Category.INPUT)


def bytes_of(batch) -> int:
    return sum(tensor.numel() * tensor.itemsize for _, tensor in tensors_of(batch))


# ---- the whole batch is on the card ------------------------------------------------------------------------------


def wide_inputs(samples: int = 64) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Inputs are most of what the step holds."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 2), torch.nn.Sigmoid(), torch.nn.Linear(2, 1))
    return model, (torch.zeros(samples, 256), torch.zeros(samples, 1))


@pytest.mark.parametrize("size", [32, 5])
def test_however_many_micro_batches_the_whole_batch_stays_on_the_card(size):
    model, batch = wide_inputs()
    work = workload(model, batch, loss_fn=mean_square)
    split = Accumulation(micro_batch_size=size, micro_batches=-(-64 // size))
    graph = certifying_graph(work, (split,), BARE)
    assert input_bytes(graph) == bytes_of(batch)
    live = graph.live_bytes()
    assert min(live[op.tick] for op in graph.ops if op.phase is not Phase.SETUP) >= bytes_of(batch)


def test_a_recording_of_the_whole_batch_is_left_as_it_is():
    model, batch = wide_inputs()
    graph = plain(workload(model, batch, loss_fn=mean_square))
    assert with_whole_batch(graph, bytes_of(batch)) is graph


def test_what_the_search_is_promised_of_a_split_holds_the_whole_batch_too():
    model, batch = wide_inputs()
    work = workload(model, batch, loss_fn=mean_square)
    recordings = Recordings(
        lambda decisions, sizes, _: start_what_if(work, decisions, sizes),
        lambda decisions: start_update(work, decisions, BARE, ()),
        lambda graph: graph,
    )
    case = Candidates(recordings, BARE, batch_bytes=work.batch_bytes).of((), MicroBatching(micro_batches=13, size=5))
    assert case.lower_bound_bytes >= bytes_of(batch)
    assert case.peak_bytes == certifying_graph(work, case.decisions(()), BARE).live_bytes().max()


def start_what_if(work: Workload, decisions: tuple[Decision, ...], sizes: tuple[int, ...]) -> Child:
    return start_rehearsal(work, decisions, BARE, sizes=sizes, steps=1, primed=True, what_if=True)


# ---- losses ------------------------------------------------------------------------------------------------------

LOSSES = {
    "mse_loss": F.mse_loss,
    "mse_loss, summed": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "mse_loss, broadcast": lambda x, y: F.mse_loss(x[:, :1].expand(-1, 16), y),
    "smooth_l1_loss": F.smooth_l1_loss,
    "smooth_l1_loss, summed": lambda x, y: F.smooth_l1_loss(x, y, reduction="sum"),
    "soft_margin_loss": F.soft_margin_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
    "huber_loss": F.huber_loss,
    "l1_loss": F.l1_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "kl_div": F.kl_div,
}


class Loss(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x, y):
        return self.function(x, y)


class WithLosses(torch.nn.Module):
    def __init__(self, losses) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.losses = torch.nn.ModuleDict({name: Loss(function) for name, function in losses.items()})

    def forward(self, x, y):
        z = self.linear(x).sigmoid()
        return sum(loss(z, y) for loss in self.losses.values())


@pytest.fixture(scope="module")
def graph_of_losses():
    return plain(workload(WithLosses(LOSSES), (torch.rand(32, 16), torch.rand(32, 16))))


@pytest.mark.filterwarnings("ignore:.*batchmean.*")
@pytest.mark.parametrize("name", LOSSES)
def test_a_reduced_loss_lies_in_a_storage_of_the_size_that_the_real_kernel_leaves(graph_of_losses, name):
    graph = graph_of_losses
    real = LOSSES[name](torch.rand(32, 16), torch.rand(32, 16)).untyped_storage()
    *_, reduced = [op for op in graph.ops if op.module == f"losses.{name}" and op.phase is Phase.FORWARD]
    assert reduced.shapes == ((),)
    assert [graph.storages[index].size_bytes for index in reduced.outputs] == [real.nbytes()]


def test_an_unreduced_loss_is_counted_once():
    model = WithLosses({"unreduced": lambda x, y: F.mse_loss(x, y, reduction="none").mean()})
    graph = plain(workload(model, (torch.rand(32, 16), torch.rand(32, 16))))
    sizes = {op.name: [graph.storages[index].size_bytes for index in op.outputs] for op in graph.ops}
    assert sizes["aten.mse_loss.default"] == [32 * 16 * 4]
    assert sizes["aten.mean.default"] == [4]


# ---- callers and batches -----------------------------------------------------------------------------------------


def test_planning_where_gradients_are_off_gives_the_same_footprint():
    model, batch = wide_inputs(samples=8)
    settings = {"vram": None, "loss_fn": mean_square, "gpu": "bare"}
    outside = planner.plan(model, batch, **settings)
    with torch.no_grad():
        assert planner.plan(model, batch, **settings).baseline == outside.baseline
    with torch.inference_mode():
        assert planner.plan(model, batch, **settings).baseline == outside.baseline


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    scale: float = 2.0
    width: int = dataclasses.field(init=False, default=16)


class TakesSample(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 1)

    def forward(self, sample: Sample):
        assert isinstance(sample, Sample)
        return F.mse_loss(self.linear(sample.x), sample.y) * sample.scale


SAMPLE = Sample(torch.ones(6, 16), torch.arange(6.0)[:, None])


@pytest.mark.parametrize("batch", [(SAMPLE,), {"sample": SAMPLE}], ids=["positional", "by keyword"])
def test_a_dataclass_in_a_batch_is_on_the_card_with_its_tensors(batch):
    work = workload(TakesSample(), batch)
    assert work.batch_size == 6
    assert [shape for _, shape, _ in work.facts().batch] == [(6, 16), (6, 1)]
    assert input_bytes(plain(work)) == bytes_of(batch) == 6 * 17 * 4


def test_a_dataclass_in_a_batch_is_planned_in_parts_and_trains_to_the_loss_of_the_whole():
    model = TakesSample()
    expected = model(SAMPLE).item()
    plan = planner.plan(model, (SAMPLE,), vram="1GiB", gpu="bare", fidelity="exact", force="accumulation")
    assert plan.decision(Accumulation) is not None
    assert rewrite.apply(plan, model).step((SAMPLE,)).item() == pytest.approx(expected, rel=1e-5)


def test_a_dataclass_is_resized_with_everything_else_as_it_was():
    (found,) = resized((SAMPLE,), 4)
    assert (found.x.shape, found.y.shape, found.x.device.type) == ((4, 16), (4, 1), "meta")
    assert (found.scale, found.width) == (2.0, 16)
    assert SAMPLE.x.shape == (6, 16)
