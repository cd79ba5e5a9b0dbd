"""Plans for small budgets: the allocator holds segments of 20 MiB, so the smallest promise is not the best plan."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import planner
from planner import pipeline, profiles
from planner.choose.candidates import Candidate, Candidates
from planner.choose.choice import Choice, given_choice
from planner.errors import DecisionError
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decisions import (
    Accumulation,
    Checkpoint,
    ChunkedLoss,
    Freeze,
    Optimizer,
    OptimizerKernel,
    Precision,
    StepInBackward,
    micro_batches_of,
)
from planner.questions.known_plans import plan_that_fits
from planner.space.lm_head import ChunkedLossOption
from planner.space.lower_bounds import TrainedParameters, lower_bound_bytes
from planner.space.micro_batches import MicroBatching
from planner.space.search_space import SearchSpace
from planner.workload.workload import workload

pytestmark = pytest.mark.slow

MIB = 1 << 20


def dense() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1))]
    batch = torch.zeros(4096, 256), torch.zeros(4096, dtype=torch.int64)
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 10)), batch


def loss_fn(out: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(out, batch[1])


@pytest.fixture(scope="module")
def plans() -> dict[int, planner.Plan]:
    """By budget in MiB; the baseline takes 160 MiB, of which the context is 68 MiB."""
    with torch.device("meta"):
        model, batch = dense()
    options = {"loss_fn": loss_fn, "only": ("accumulation", "checkpoint", "optimizer")}
    return {budget: planner.plan(model, batch, vram=budget * MIB, **options) for budget in (90, 100, 114)}


@pytest.mark.thorough
def test_what_fits_a_budget_fits_every_larger_one(plans):
    fits = [plan.fits for _, plan in sorted(plans.items())]
    assert fits == sorted(fits) and not fits[0] and fits[-1]


@pytest.mark.thorough
def test_a_fitting_plan_is_inside_its_budget(plans):
    assert all(plan.peak.total_bytes <= budget * MIB for budget, plan in plans.items() if plan.fits)


@pytest.mark.thorough
def test_what_is_called_the_smallest_is_near_what_fits(plans):
    reached = min(plan.peak.total_bytes for plan in plans.values() if plan.fits)
    said = [plan.peak.total_bytes for plan in plans.values() if not plan.fits]
    assert said and all(total <= reached + 2 * MIB for total in said)


@pytest.mark.thorough
def test_a_larger_budget_buys_no_slower_plan(plans):
    """But for what small segments make of it."""
    times = [plan.peak.step_ns for _, plan in sorted(plans.items()) if plan.fits]
    assert all(later <= 1.5 * earlier for earlier, later in itertools.pairwise(times))


@pytest.mark.thorough
def test_the_batch_is_not_cut_into_single_samples(plans):
    """The smallest promise has one sample in each of 4096 micro-batches, and needs no fewer segments than a few."""
    assert all(micro_batches_of(plan.decisions) <= 64 for plan in plans.values())


def test_precision_is_not_lowered_for_a_gain_within_a_tie():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(768, 768), torch.nn.ReLU(), torch.nn.Linear(768, 768))
        batch = torch.zeros(1152, 768), torch.zeros(1152, 768)
    options = {
        "vram": "20GiB", "gpu": "rtx-3090", "optimizer": "sgd", "only": ("mixed-precision",),
        "loss_fn": lambda output, batch: torch.nn.functional.mse_loss(output, batch[-1]),
    }  # fmt: skip
    assert 0.955 < planner.plan(model, batch, force=("mixed-precision",), **options).slowdown < 0.99
    assert planner.plan(model, batch, **options).decisions == ()


@pytest.mark.thorough
def test_the_smallest_plan_fits_its_own_total_and_is_then_reported_as_a_way_out():
    """Its slack is below the first guess of it, and the total is no whole number of MiB."""
    with torch.device("meta"):
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.Sigmoid())]
        model, batch = torch.nn.Sequential(*layers, torch.nn.Linear(512, 10)), (torch.zeros(40960, 512),)
    batch = (*batch, torch.zeros(40960, dtype=torch.int64))
    options = {"loss_fn": loss_fn, "gpu": "rtx-3090"}
    smallest = planner.plan(model, batch, vram=10 * MIB, only="precision", force="precision", **options)
    assert smallest.solver.promised_bytes > 0.99 * smallest.peak.reserved_bytes
    vram = smallest.peak.total_bytes
    again = planner.plan(model, batch, vram=vram, only="precision", force="precision", **options)
    assert not smallest.fits and again.fits and again.peak.total_bytes <= vram
    without = planner.plan(model, batch, vram=vram, only=(), **options)
    opens = {one.relax: one.opens for one in without.shortfall.relaxations}
    assert not without.fits and opens["allow mixed-precision"]


def test_the_smallest_plan_has_no_micro_batches_that_save_nothing_of_the_total():
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)), torch.nn.Linear(256, 4))
        batch = (torch.zeros(512, 256), torch.zeros(512, 4))
    plan = planner.plan(
        model, batch, vram=10 * MIB, gpu="rtx-3090", only="accumulation", optimizer="sgd",
        loss_fn=lambda output, batch: torch.nn.functional.mse_loss(output, batch[-1]),
    )  # fmt: skip
    assert not plan.fits
    assert plan.peak.total_bytes == plan.baseline.total_bytes and plan.slowdown == 1


class PooledNorm(torch.nn.Module):
    """Blocks that keep much, and a norm over one value for each sample, which refuses single samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Conv2d(4, 16, 1), torch.nn.Sigmoid(), torch.nn.Conv2d(16, 4, 1))
            for _ in range(4)
        )
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x.mean((2, 3))).square().mean()


@pytest.mark.thorough
def test_a_split_that_cannot_be_rehearsed_leaves_the_others():
    with torch.device("meta"):
        model, batch = PooledNorm(), (torch.zeros(4, 4, 64, 64),)
    options = {"force": "accumulation", "fidelity": "exact", "gpu": "bare"}
    whole = planner.plan(model, batch, vram=None, gpu="bare").baseline
    plans = [planner.plan(model, batch, vram=int(share * whole.total_bytes), **options) for share in (0.35, 0.6)]
    assert [plan.fits for plan in plans] == [True, True]
    assert plans[1].peak.step_ns < plans[0].peak.step_ns
    assert all(micro_batches_of(plan.decisions) == 2 for plan in plans)


@pytest.mark.thorough
def test_the_smallest_split_without_recompute_need_not_be_an_extreme():
    with torch.device("meta"):
        layers = [torch.nn.Linear(256, 256) for _ in range(8)]
        model, batch = torch.nn.Sequential(*layers), (torch.zeros(64, 256), torch.zeros(64, 256))

    def loss(out, batch):
        return torch.nn.functional.mse_loss(out, batch[1])

    options = {"forbid": "checkpoint", "fidelity": "exact", "gpu": "bare", "loss_fn": loss}
    smallest = planner.plan(model, batch, vram=1, **options)
    again = planner.plan(model, batch, vram=smallest.peak.total_bytes, **options)
    less = planner.plan(model, batch, vram=int(0.99 * smallest.peak.total_bytes), **options)
    assert not smallest.fits and again.fits and not less.fits


def layers(*, whole_only: bool = False) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A model of a few layers; one that takes no part of its batch, if asked to."""

    class Whole(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) < 8:
                raise RuntimeError("no part of a batch")
            return super().forward(x)

    batch = torch.zeros(8, 16), torch.zeros(8, dtype=torch.int64)
    return (Whole if whole_only else torch.nn.Sequential)(torch.nn.Linear(16, 16), torch.nn.Linear(16, 10)), batch


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"force": "step-in-backward", "forbid": "accumulation"}, "frees each gradient at once"),
        ({"force": "step-in-backward", "forbid": "precision", "gpu": "t4", "vram": "2MiB"}, "fp16's gradient scaler"),
        ({"whole_only": True, "forbid": "accumulation"}, "no part of a batch"),
    ],
    ids=("accumulation", "scaler", "refused"),
)
@pytest.mark.thorough
def test_a_way_out_that_cannot_be_taken_is_reported_with_the_reason(options, why):
    """Also where a frozen prefix would be looked for with it."""
    options = {"gpu": "bare", "vram": 64, "fidelity": "partial", "loss_fn": loss_fn, "whole_only": False, **options}
    model, batch = layers(whole_only=options.pop("whole_only"))
    plan = planner.plan(model, batch, **options)
    *_, reported = plan.shortfall.relaxations  # after the adapters, which cannot be added here
    assert not plan.fits and reported.opens is False and why in reported.why


@pytest.mark.parametrize("vram", [64, 1 << 30])
def test_what_is_forced_and_leaves_nothing_to_choose_from_is_refused(vram):
    """RMSprop has no fused kernel, and its loop is what a step in backward does anyway."""
    options = {"gpu": "bare", "optimizer": "rmsprop", "loss_fn": loss_fn}
    with pytest.raises(DecisionError, match="no plan is possible: step-in-backward updates one parameter"):
        planner.plan(*layers(), vram=vram, force=("optimizer-kernel", "step-in-backward"), **options)


@pytest.mark.thorough
def test_a_loss_in_more_chunks_than_the_budget_asks_for_is_tried_before_nothing_fits():
    """The smallest plan has 64 chunks, and the budget that it needs asks for 32."""
    with torch.device("meta"):
        model, tokens = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 8000)), (4, 128)
        batch = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)

    def loss(out, batch):
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), batch[1].flatten())

    options = {"loss_fn": loss, "gpu": "bare", "fidelity": "exact"}
    chunks = {"only": "chunked-loss", **options}
    smallest = planner.plan(model, batch, vram=1, **chunks)
    vram = smallest.peak.total_bytes
    assert planner.plan(model, batch, vram=vram, **chunks).fits
    less = planner.plan(model, batch, vram=vram - 1, **chunks)
    assert not less.fits and less.shortfall.missing_bytes == 1
    closed = planner.plan(model, batch, vram=vram, only=(), **options)
    assert {one.relax: one.opens for one in closed.shortfall.relaxations}["allow chunked-loss"]


@pytest.mark.parametrize("update", [(), (StepInBackward(),)], ids=["after the backward", "inside of it"])
def test_an_optimizer_that_keeps_more_for_some_elements_than_for_others_has_no_higher_floor_than_it_needs(update):
    """Adafactor keeps a number for each row and column: nearly all of it belongs to the small frozen layer."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 4000, bias=False), torch.nn.Linear(4000, 50, bias=False))
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    state_bytes = {p: sum(t.nbytes for t in state.values() if t is not None) for p, state in optimizer.state.items()}
    work = workload(model, (torch.ones(2, 1),), loss_fn=lambda output, batch: output.sum(), optimizer=optimizer)
    parameter_bytes, still = sum(p.nbytes for p in model.parameters()), model[1].weight
    whole_bytes = sum(state_bytes.values())
    floor = lower_bound_bytes(
        work,
        TrainedParameters.of(work, [name for name, _ in model.named_parameters()]),
        optimizer_peak_bytes=2 * parameter_bytes + whole_bytes,
        state_bytes=whole_bytes,
        config=(Freeze(modules=("0",)), *update),
    )
    assert floor <= parameter_bytes + (0 if update else still.nbytes) + state_bytes[still]


@pytest.mark.parametrize(
    ("config", "trained_bytes"),
    [
        ((Freeze(modules=("0",)),), 16),  # gradients, two moments and one temporary
        ((Freeze(modules=("0",)), OptimizerKernel(kernel="fused")), 12),
        ((Freeze(modules=("0",)), StepInBackward()), 8),
        ((Freeze(modules=("0",)), Optimizer()), 6),
    ],
    ids=["foreach", "fused", "in backward", "8 bits"],
)
def test_a_floor_has_neither_gradients_nor_state_of_frozen_parameters(config, trained_bytes):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 50, bias=False))
        work = workload(model, (torch.ones(2, 100),), loss_fn=lambda output, batch: output.sum(), optimizer="adamw")
    floor = lower_bound_bytes(
        work,
        TrainedParameters.of(work, ["0.weight", "1.weight"]),
        optimizer_peak_bytes=15000 * 20,
        state_bytes=15000 * 8,
        config=config,
    )
    assert 0.98 * 5000 * trained_bytes <= floor - 15000 * 4 <= 5000 * trained_bytes


def test_of_equally_fast_plans_the_more_faithful_one_wins_and_then_the_simpler_one():
    exact = Accumulation(micro_batch_size=4, micro_batches=2), ChunkedLoss(module="head", chunks=2)
    plans = [
        Choice(decisions=decisions, peak_bytes=1, step_ns=step_ns, status="optimal", gap=0.0)
        for decisions, step_ns in ((exact[:1], 9), (exact, 8), ((Precision(dtype="bf16"),), 7))
    ]
    assert sorted(reversed(plans), key=lambda plan: plan.rank) == plans


def test_a_hopeless_budget_takes_recordings_of_the_fewest_and_the_most_micro_batches_only(monkeypatch):
    """Recordings for the numbers between the two would not change the answer."""
    recorded, of = set(), Candidates.of

    def noting(candidates, config, split):
        recorded.add(split.micro_batches)
        return of(candidates, config, split)

    monkeypatch.setattr(Candidates, "of", noting)
    model, batch = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)]), torch.zeros(16, 1024, 256)
    work = workload(model, batch, loss_fn=lambda out, batch: out.square().mean())
    card, constraints = profiles.load("bare"), parse_constraints(fidelity="rounded", force=[], forbid=[])
    options = {"constraints": constraints, "vram_bytes": 14 * MIB}  # the batch takes 16 MiB
    assert plan_that_fits(work, card, **options) is None
    assert recorded == {1, 16}
    assert plan_that_fits(work, card, **(options | {"vram_bytes": 40 * MIB})) is not None


def test_a_plan_with_known_decisions_is_returned_if_the_search_finds_none(monkeypatch):
    model, batch = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)]), torch.zeros(16, 1024, 256)
    work = workload(model, batch, loss_fn=lambda out, batch: out.square().mean())
    constraints = parse_constraints(fidelity="rounded", force=[], forbid=[])
    options = {"constraints": constraints, "vram_bytes": 300 * MIB}
    found = plan_that_fits(work, profiles.load("bare"), **options)
    given = given_choice((StepInBackward(), Checkpoint(modules=("0", "1", "2"))))
    known = dataclasses.replace(given, status="optimal")  # by a search for another plan
    monkeypatch.setattr(pipeline, "fastest_in_time", lambda *_: (None, ()))
    assert plan_that_fits(work, profiles.load("bare"), **options) is None
    plan = plan_that_fits(work, profiles.load("bare"), **options, known=known)
    assert plan is not None and plan.fits and set(plan.decisions) == set(known.decisions)
    assert "found no plan that fits the budget" in plan.notes[0]
    assert plan.solver.status == "not needed"
    assert plan.solver.promised_bytes == plan.solver.certified_bytes == plan.peak.allocated_bytes
    assert plan.solver.gap == pytest.approx(1 - found.peak.step_ns / plan.peak.step_ns, abs=1e-3)
    assert plan.solver.gap > 0
    small = options | {"vram_bytes": plan.peak.total_bytes - 1}
    assert plan_that_fits(work, profiles.load("bare"), **small, known=known) is None


def test_the_most_chunks_are_another_search_only_if_a_plan_could_have_them():
    def space(chunks: int, *splits: int, always: bool = False) -> SearchSpace:
        option = ChunkedLossOption(module="head", chunks=chunks, always=always)
        return SearchSpace(
            precisions=((),),
            optimizers=((),),
            losses=((), option.for_whole_batch()),
            updates=((),),
            splits=tuple(MicroBatching(micro_batches=number, size=64 // number) for number in splits),
            allocators=((),),
            recompute=(),
            chunks=option,
            notes=(),
        )

    assert space(64, 1).with_most_chunks() is None
    assert space(64, 1, 2, always=True).with_most_chunks() is None
    assert space(32, 1).with_most_chunks() is not None
    finer = space(64, 1, 2).with_most_chunks()
    assert finer is not None and finer.chunks.for_micro_batches(2).chunks == 64
    assert dataclasses.replace(space(32, 1), chunks=None).with_most_chunks() is None


def test_gradients_do_not_make_a_budget_hopeless_that_an_update_in_backward_meets():
    """Accumulation keeps gradients, so that the most micro-batches need more than the whole batch does."""
    model, batch = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]), torch.zeros(16, 64, 1024)
    work = workload(model, batch, loss_fn=lambda out, batch: out.square().mean(), optimizer="sgd")
    constraints = parse_constraints(fidelity="exact", force=[], forbid=[])
    found = plan_that_fits(work, profiles.load("bare"), constraints=constraints, vram_bytes=101 * MIB)
    assert found is not None and any(isinstance(decision, StepInBackward) for decision in found.decisions)


@pytest.mark.parametrize("forbidden", [["accumulation"], []], ids=["whole batch", "micro-batches"])
def test_the_smallest_plan_is_searched_without_recordings_that_cannot_change_it(monkeypatch, forbidden):
    """Lower bounds from a recorded configuration show that other optimizer updates have larger peaks."""
    model, batch = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]), torch.zeros(8192, 512)
    work = workload(model, batch, loss_fn=lambda out, batch: out.square().mean(), optimizer="adamw")
    card, constraints = profiles.load("bare"), parse_constraints(fidelity="rounded", force=[], forbid=forbidden)
    recorded, of = set(), Candidates.of

    def noting(candidates, config, split):
        recorded.add((config, split))
        return of(candidates, config, split)

    monkeypatch.setattr(Candidates, "of", noting)
    pruned = pipeline.plan_workload(work, card, vram_bytes=30 * MIB, constraints=constraints)
    few = len(recorded)
    recorded.clear()
    monkeypatch.setattr(Candidate, "may_fit_with", lambda *args, **options: True)
    whole = pipeline.plan_workload(work, card, vram_bytes=30 * MIB, constraints=constraints)
    assert not pruned.fits and pruned.decisions == whole.decisions
    assert pruned.peak.total_bytes == whole.peak.total_bytes
    assert few < len(recorded)
