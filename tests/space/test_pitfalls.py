"""What would train another thing than asked is not offered, and a note says why."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

import planner
from planner.errors import DecisionError, WorkloadError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import Accumulation, Fidelity, Optimizer
from planner.rewrite.rehearse import start_rehearsal
from planner.space.search_space import SearchSpace, search_space
from planner.workload.workload import workload
from tests.support.workloads import BARE, plain

pytestmark = pytest.mark.slow

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def mean_square(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])


def constraints(*forced: str) -> Constraints:
    return Constraints(fidelity=Fidelity.ROUNDED, forced=forced, forbidden=("optimizer-kernel",))


# ---- statistics over the batch -----------------------------------------------------------------------------------


class FunctionalNorm(torch.nn.Module):
    def __init__(self, width: int, *, training: bool) -> None:
        super().__init__()
        self.batch_norm_training = training
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x):
        return torch.nn.functional.batch_norm(x, self.mean, self.variance, training=self.batch_norm_training)


def model_with(*norms: torch.nn.Module) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), *norms, torch.nn.Linear(8, 1))


def task(model: torch.nn.Module, samples: int = 64, dtype: torch.dtype = torch.float32, **options):
    batch = (torch.zeros(samples, 8, dtype=dtype), torch.zeros(samples, 1, dtype=dtype))
    return workload(model, batch, loss_fn=mean_square, **options)


def test_norms_over_the_batch_are_recorded_however_they_are_written_and_others_are_not():
    norms = {
        "functional": FunctionalNorm(8, training=True),
        "functional with fixed statistics": FunctionalNorm(8, training=False),
        "module": torch.nn.BatchNorm1d(8),
        "module in evaluation": torch.nn.BatchNorm1d(8).eval(),
        "without running statistics": torch.nn.BatchNorm1d(8, track_running_stats=False).eval(),
        "layer": torch.nn.LayerNorm(8),
        "group": torch.nn.GroupNorm(2, 8),
    }
    graph = plain(task(model_with(*norms.values())))
    over_the_batch = ("functional", "module", "without running statistics")
    assert graph.batch_statistics == tuple(str(1 + list(norms).index(name)) for name in over_the_batch)


def test_a_norm_over_each_sample_of_images_may_be_accumulated():
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.InstanceNorm2d(4, affine=True), torch.nn.Flatten())
    graph = plain(workload(model, (torch.zeros(8, 2, 6, 6), torch.zeros(8, 64)), loss_fn=mean_square))
    assert any("norm" in op.name for op in graph.ops)
    assert graph.batch_statistics == ()


def test_accumulation_is_not_offered_over_recorded_batch_statistics_but_may_be_forced():
    work = task(model_with())
    assert len(search_space(work, BARE, constraints(), batch_statistics=(), chunks=None).splits) > 1
    offered = search_space(work, BARE, constraints(), batch_statistics=("norm",), chunks=None)
    assert [split.micro_batches for split in offered.splits] == [1]
    assert "no accumulation: 'norm' normalizes over the micro-batch" in " ".join(offered.notes)
    forced = search_space(work, BARE, constraints("accumulation"), batch_statistics=("norm",), chunks=None)
    assert min(split.micro_batches for split in forced.splits) == 2
    assert "accumulation is forced although 'norm' normalizes over the micro-batch" in " ".join(forced.notes)


def test_accumulation_of_a_single_sample_cannot_be_forced():
    with pytest.raises(DecisionError, match="accumulation is forced, but the batch is a single sample"):
        search_space(task(model_with(), samples=1), BARE, constraints("accumulation"), batch_statistics=(), chunks=None)


@pytest.mark.thorough
def test_a_plan_over_a_functional_batch_norm_splits_the_batch_only_on_request_and_says_so():
    model, batch = model_with(FunctionalNorm(8, training=True)), (torch.zeros(4, 8), torch.zeros(4, 1))
    settings = {"vram": "1GiB", "loss_fn": mean_square, "gpu": "bare", "fidelity": "exact"}
    plan = planner.plan(model, batch, **settings)
    assert plan.decision(Accumulation) is None
    assert any(note.startswith("no accumulation: '1' normalizes over the micro-batch") for note in plan.notes)
    forced = planner.plan(model, batch, force="accumulation", **settings)
    assert forced.decision(Accumulation) == Accumulation(micro_batch_size=2, micro_batches=2)
    assert any(note.startswith("accumulation is forced although '1' normalizes") for note in forced.notes)


# ---- 8-bit optimizer state ---------------------------------------------------------------------------------------


class OwnAdamW(torch.optim.AdamW):
    """May do anything in its step."""


def stepped(parameters):
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def in_groups(parameters):
    first, *others = parameters
    return torch.optim.Adam([{"params": [first]}, {"params": others, "weight_decay": 0.1}])


KEPT = {
    "sgd by name": ("sgd", "sgd has no 8-bit counterpart"),
    "sgd": (lambda p: torch.optim.SGD(p), "SGD has no 8-bit counterpart"),
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), "neither amsgrad nor maximize"),
    "maximize": (lambda p: torch.optim.AdamW(p, maximize=True), "neither amsgrad nor maximize"),
    "adam with weight decay": (
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        "Adam's weight decay differs",
    ),
    "weight decay in one group": (in_groups, "Adam's weight decay differs"),
    "a subclass of AdamW": (OwnAdamW, "OwnAdamW has no 8-bit counterpart"),
    "an optimizer that has stepped": (stepped, "already holds state"),
}
REPLACED = {
    "adamw by name": "adamw",
    "adam by name": "adam",
    "AdamW": torch.optim.AdamW,
    "Adam without weight decay": torch.optim.Adam,
}


def offered_for(optimizer, *forced: str, dtype: torch.dtype = torch.float32) -> SearchSpace:
    model = model_with().to(dtype)
    live = optimizer if isinstance(optimizer, str) else optimizer(model.parameters())
    return search_space(
        task(model, dtype=dtype, optimizer=live), BARE, constraints(*forced), batch_statistics=(), chunks=None
    )


@needs_bitsandbytes
@pytest.mark.parametrize("case", REPLACED)
def test_adam_and_adamw_may_have_8_bit_state(case):
    offered = offered_for(REPLACED[case])
    assert offered.optimizers == ((), (Optimizer(),))
    assert not any("8-bit" in note for note in offered.notes)


@needs_bitsandbytes
@pytest.mark.parametrize("case", KEPT)
def test_an_optimizer_that_would_become_another_one_keeps_its_state_and_a_note_tells_why(case):
    optimizer, why = KEPT[case]
    offered = offered_for(optimizer)
    assert offered.optimizers == ((),)
    assert [note for note in offered.notes if note.startswith("no 8-bit optimizer state: ") and why in note]
    with pytest.raises(DecisionError, match="optimizer is forced, but "):
        offered_for(optimizer, "optimizer")


@needs_bitsandbytes
def test_parameters_in_double_precision_keep_their_state():
    offered = offered_for("adamw", dtype=torch.float64)
    assert offered.optimizers == ((),)
    assert "no 8-bit optimizer state: trained parameters are float64" in offered.notes


@needs_bitsandbytes
def test_frozen_parameters_in_double_precision_do_not_matter():
    model = model_with(torch.nn.Linear(8, 8).double().requires_grad_(False))
    assert search_space(task(model), BARE, constraints(), batch_statistics=(), chunks=None).optimizers == (
        (),
        (Optimizer(),),
    )


@needs_bitsandbytes
@pytest.mark.parametrize("case", REPLACED)
def test_what_is_offered_is_what_the_rewriter_takes_over(case):
    optimizer, model = REPLACED[case], model_with()
    live = optimizer if isinstance(optimizer, str) else optimizer(model.parameters())
    work = task(model, optimizer=live)
    graph = start_rehearsal(
        work, (Optimizer(),), BARE, sizes=(work.batch_size,), steps=1, primed=True, what_if=False
    ).result()
    assert any("bitsandbytes" in op.name or "optimizer_update" in op.name for op in graph.ops)


def test_without_bitsandbytes_the_note_tells_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    offered = offered_for("adamw")
    assert offered.optimizers == ((),)
    assert any("pip install bitsandbytes" in note for note in offered.notes)


@needs_bitsandbytes
def test_a_plan_for_amsgrad_keeps_the_optimizer_and_says_so():
    model = model_with()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    batch = (torch.zeros(64, 8), torch.zeros(64, 1))
    plan = planner.plan(model, batch, vram="1GiB", loss_fn=mean_square, gpu="bare", optimizer=optimizer)
    assert plan.decision(Optimizer) is None
    assert any("amsgrad" in note for note in plan.notes)


# ---- what cannot be planned at all -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_sparse_gradients_are_planned_where_the_optimizer_takes_them(kind):
    model = torch.nn.Sequential(kind(10, 4, sparse=True), torch.nn.Linear(4, 1))
    batch = (torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 1))

    def loss_fn(output, batch):
        return output.square().mean()

    for optimizer, copies in ("sgd", 1), ("adagrad", 2):  # weights, and a dense sum of squares
        plan = planner.plan(model, batch, vram=None, loss_fn=loss_fn, optimizer=optimizer, gpu="bare")
        assert any("sparse gradients" in note for note in plan.notes)
        held_bytes = plan.peak.breakdown["parameters"] + plan.peak.breakdown.get("optimizer state", 0)
        assert held_bytes == copies * 4 * sum(p.numel() for p in model.parameters())
    with pytest.raises(WorkloadError, match="does not support sparse gradients"):
        planner.plan(model, batch, vram=None, loss_fn=loss_fn, optimizer="adamw", gpu="bare")


def test_a_batch_is_not_split_where_the_model_changes_its_own_gradients():
    scaling = torch.nn.Sequential(torch.nn.Embedding(8, 8, scale_grad_by_freq=True), torch.nn.Linear(8, 8))
    hooked = model_with()
    name, parameter = next(iter(hooked.named_parameters()))
    parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
    for model, reason in ((scaling, "(scale_grad_by_freq)"), (hooked, f"the gradient of '{name}'")):
        offered = search_space(task(model), BARE, constraints(), batch_statistics=(), chunks=None)
        assert [split.micro_batches for split in offered.splits] == [1]
        assert reason in " ".join(offered.notes)
