"""In the first step, gradients of the rewritten model are compared with those of the original one."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner import rewrite
from planner.errors import DecisionError
from planner.plan_types.decisions import ChunkedLoss, StepInBackward
from planner.plan_types.recompute_decisions import Checkpoint
from tests.support.training import plan_for

ROOMY = 1 << 30
"""Bytes that a plan promises, where memory is not the point."""


class Tagger(nn.Module):
    """A language model whose loss takes another branch if the logits are an ordinary tensor."""

    def __init__(self, branches: bool = True) -> None:
        super().__init__()
        self.embed, self.body, self.lm_head = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 64)
        self.branches, self.calls = branches, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        self.seen += 1
        logits = self.lm_head(self.body(self.embed(input_ids)).tanh())
        if self.branches and isinstance(logits, torch.Tensor):
            logits = logits * 3.0
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def rows(samples: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(64, (samples, 5), generator=generator) for name in ("input_ids", "labels")}


def plan_of(model: nn.Module, *decisions, peak_bytes: int = ROOMY):
    plan = plan_for(model, rows(), *decisions, optimizer="sgd")
    return dataclasses.replace(plan, peak=dataclasses.replace(plan.peak, allocated_bytes=peak_bytes))


CHUNKS = ChunkedLoss(module="lm_head", chunks=3)


def test_a_model_that_takes_another_branch_when_it_is_rewritten_is_refused_before_the_update():
    model = Tagger()
    before = copy.deepcopy(model.state_dict())
    step = rewrite.apply(plan_of(model, CHUNKS), model).step
    with pytest.raises(DecisionError, match="between the rewritten model and the original one: chunked-loss changes"):
        step(rows())
    parameters = dict(model.named_parameters())
    assert all(
        torch.equal(parameter, before[name]) and parameter.grad is None for name, parameter in parameters.items()
    )
    with pytest.raises(DecisionError, match="chunked-loss changes"):  # the next step is still the first that trains
        step(rows())


def test_the_check_can_be_turned_off():
    model = Tagger()
    before = copy.deepcopy(model.state_dict())
    rewrite.apply(plan_of(model, CHUNKS), model, check="off").step(rows())
    assert not torch.equal(model.body.weight, before["body.weight"])
    with pytest.raises(DecisionError, match='give "first-step" or "off"'):
        rewrite.apply(plan_of(Tagger(), CHUNKS), Tagger(), check="always")


@pytest.mark.parametrize("decision", [CHUNKS, Checkpoint(modules=("body",))])
def test_a_right_rewriting_trains_and_the_check_leaves_no_trace(decision, caplog):
    model = Tagger(branches=False)
    rewritten = rewrite.apply(plan_of(model, decision), model)
    random_state = torch.get_rng_state()
    for _ in range(2):
        rewritten.step(rows())
    assert (model.calls, float(model.seen)) == (2, 2.0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not caplog.text
    rewritten.undo()
    assert "forward" not in vars(model.lm_head) and "forward" not in vars(model.body)


@pytest.mark.parametrize("others", [(), (StepInBackward(),)])
def test_a_wrong_forward_of_any_rule_is_refused_before_anything_is_trained(others):
    model = Tagger(branches=False)
    before = copy.deepcopy(model.state_dict())
    rewritten = rewrite.apply(plan_of(model, Checkpoint(modules=("body",)), *others), model)
    right = model.body.forward
    wrong = types.MethodType(lambda self, x: right(x) * 1.05, model.body)
    rewritten._rewriting.replace(model.body, "forward", wrong, place="forward of 'body'")
    with pytest.raises(DecisionError, match="checkpoint changes what the model computes"):
        rewritten.step(rows())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_where_no_sample_fits_the_planned_memory_it_says_so_in_one_line(caplog):
    model = Tagger()
    plan = plan_of(model, CHUNKS, peak_bytes=0)
    plan = dataclasses.replace(plan, baseline=dataclasses.replace(plan.baseline, allocated_bytes=6 << 20))
    rewrite.apply(plan, model).step(rows())
    (record,) = caplog.records
    assert "without the plan's decisions one sample takes up to 1022.4 KiB, and the plan leaves 0 B" in record.message


GLOBAL = {"calls": 0}
NUMBER = 0


class Counts(Tagger):
    """Counts its calls in places that are no attributes of the model, and uses one of them."""

    shared = 0

    def __init__(self, place: str) -> None:
        super().__init__(branches=False)
        self.place, self.counter = place, itertools.count(1) if place == "iterator" else None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        global NUMBER
        NUMBER, GLOBAL["calls"], Counts.shared = NUMBER + 1, GLOBAL["calls"] + 1, Counts.shared + 1
        calls = {"number": NUMBER, "dict": GLOBAL["calls"], "class": Counts.shared}.get(self.place)
        calls = next(self.counter) if self.counter is not None else calls
        return {"loss": super().forward(input_ids, labels)["loss"] * calls}


@pytest.mark.parametrize("place", ["number", "dict", "class", "iterator"])
def test_what_counts_outside_of_the_model_counts_steps_only(place, caplog):
    global NUMBER
    NUMBER, GLOBAL["calls"], Counts.shared = 0, 0, 0
    model = Counts(place)
    step = rewrite.apply(plan_of(model, CHUNKS), model).step
    losses = [float(step(rows())) for _ in range(2)]
    assert losses[1] / losses[0] == pytest.approx(2.0, rel=1e-2)
    assert ("holds an iterator (count), whose position cannot be restored" in caplog.text) is (place == "iterator")


def test_a_plan_that_replaces_no_forward_is_not_compared():
    model = Tagger()
    rewritten = rewrite.apply(plan_of(model), model)
    rewritten.step(rows())
    assert model.calls == 1
