"""The judge of training parity passes right trainings, and sees wrong ones that are planted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.parity import judge
from benchmarks.parity.__main__ import main
from benchmarks.parity.case import Case
from benchmarks.parity.models import cases
from benchmarks.parity.plain import trained_plainly
from benchmarks.parity.techniques import SINGLE, Offer, Technique, offer, pairs
from planner.errors import DecisionError

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in cases()}
JUDGED = (
    "transformer, by hand", "convolutions, batch norm", "loss: tokens, ignore_index", "perceptron, dropout",
    "perceptron, adamw, clipping",
)  # fmt: skip
"""Cases that together are offered every technique."""


@functools.cache
def offered(name: str) -> Offer:
    return offer(CASES[name])


def technique(name: str, kind: str) -> Technique:
    return next(found for found in offered(name).techniques if found.name == kind)


def live(name: str, kind: str, after: Callable[[Any], None] | None = None) -> judge.Outcome:
    return next(judge.judged(CASES[name], offered(name), technique(name, kind), after=after))


def test_there_are_many_cases():
    losses = [name for name in CASES if name.startswith("loss: ")]
    assert len(losses) >= 60
    assert len(CASES) - len(losses) >= 120


def test_every_technique_is_offered_somewhere():
    assert {found.name for name in JUDGED for found in offered(name).techniques} == set(SINGLE)


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.thorough_after(1)
def test_rewritten_steps_train_like_plain_loops(name):
    found = [outcome for each in offered(name).techniques for outcome in judge.judged(CASES[name], offered(name), each)]
    assert [outcome for outcome in found if outcome.failed] == []
    assert {outcome.way for outcome in found if outcome.result == judge.EQUAL} == {"live", "emitted"}


@pytest.mark.thorough
def test_pairs_train_like_plain_loops_too():
    name = "perceptron, dropout"
    for pair in pairs(offered(name).techniques, name, 6):
        assert not any(outcome.failed for outcome in judge.judged(CASES[name], offered(name), pair))


# ---- planted mistakes ------------------------------------------------------------------------------------------------


def scale_a_gradient(result: Any) -> None:
    next(result.module.parameters()).register_hook(lambda gradient: gradient * 1.001)


def draw_a_number(result: Any) -> None:
    result.module.register_forward_pre_hook(lambda *_: torch.rand(1) and None)


def change_the_loss(result: Any) -> None:
    step = result.step._accumulate_gradients
    result.step._accumulate_gradients = lambda batch: step(batch) * 1.0000001


def change_the_momentum(result: Any) -> None:
    result.optimizer.param_groups[0]["momentum"] = 0.89


def count_twice(result: Any) -> None:
    for module in result.module.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.register_forward_hook(lambda module, *_: module.num_batches_tracked.add_(1) and None)


def forget_to_clear(result: Any) -> None:
    result.optimizer.zero_grad = lambda set_to_none=True: None


PLANTED = {
    "a gradient is scaled": ("perceptron, dropout", "checkpoint", scale_a_gradient),
    "a gradient of a sum is scaled": ("loss: tokens, ignore_index", "accumulation, loss_weight", scale_a_gradient),
    "dropout draws other numbers": ("perceptron, dropout", "offload", draw_a_number),
    "the loss that is returned differs": ("perceptron, dropout", "for-loop kernel", change_the_loss),
    "the optimizer has another option": ("perceptron, dropout", "for-loop kernel", change_the_momentum),
    "statistics count twice": ("convolutions, batch norm", "checkpoint, inner", count_twice),
    "gradients are not cleared": ("perceptron, dropout", "bf16", forget_to_clear),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_wrong_training_is_seen(planted):
    name, kind, plant = PLANTED[planted]
    outcome = live(name, kind, plant)
    assert outcome.result == judge.DIFFERENT, outcome
    assert outcome.size > 1e-8


def test_an_error_of_the_step_is_seen():
    def plant(result: Any) -> None:
        def fail(batch: Any) -> None:
            raise RuntimeError("planted")

        result.step = fail

    assert live("perceptron, dropout", "checkpoint", plant).result == judge.ERROR


def test_a_refusal_after_a_wrong_update_is_no_refusal():
    def plant(result: Any, changes: bool) -> None:
        step = result.step

        def refuse_later(batch: Any) -> torch.Tensor:
            if len(seen) == 2:
                raise DecisionError("planted")
            seen.append(batch)
            loss = step(batch)
            with torch.no_grad():
                next(result.module.parameters()).mul_(1.01 if changes else 1.0)
            return loss

        seen: list[Any] = []
        result.step = refuse_later

    for changes, expected in ((True, judge.LATE), (False, judge.REFUSED)):
        outcome = live("perceptron, dropout", "checkpoint", functools.partial(plant, changes=changes))
        assert outcome.result == expected, outcome


def test_samples_that_are_compared_are_refused():
    assert live("loss: SimCLR", "accumulation 4+3").result == judge.REFUSED


# ---- the judge itself ------------------------------------------------------------------------------------------------


def test_a_case_that_cannot_be_repeated_is_named():
    draws = iter(range(10**6))
    case = dataclasses.replace(
        CASES["perceptron"], loss=lambda output, batch: output.square().mean() * (1 + next(draws))
    )
    outcome = judge.repeats(case)
    assert outcome is not None
    assert outcome.result == judge.BROKEN


@pytest.mark.parametrize("place", ["losses", "parameters", "others"])
def test_a_number_that_is_not_finite_is_a_difference(place):
    case: Case = CASES["perceptron"]
    truth = trained_plainly(case, torch.float64)
    other = trained_plainly.__wrapped__(case, torch.float64)
    assert judge.difference(truth, other)[0] == 0.0
    values = getattr(other, place)
    next(iter(values.values() if isinstance(values, dict) else values)).fill_(torch.nan)
    assert judge.difference(truth, other)[0] == float("inf")


@pytest.mark.thorough
def test_the_exit_code_says_that_a_training_differs(monkeypatch, capsys):
    command = ["parity", "--only", "perceptron, adamw, clipping", "--technique", "checkpoint", "--pairs", "0"]
    monkeypatch.setattr("sys.argv", command)
    assert main() == 0
    monkeypatch.setattr("benchmarks.parity.__main__.repeats", lambda case: None)
    monkeypatch.setattr(judge, "difference", lambda *_, **__: (1.0, "planted"))
    assert main() == 1
    assert "planted" in capsys.readouterr().out
