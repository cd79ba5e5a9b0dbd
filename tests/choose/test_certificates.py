"""A certificate is rehearsed once, also where it was begun before it was asked for."""

from __future__ import annotations

import types

import pytest

from planner import pipeline
from planner.choose.certificates import Certificates
from planner.errors import RehearsalError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Fidelity
from planner.plan_types.decisions import Decision, Precision
from planner.plan_types.recompute_decisions import Checkpoint
from tests.support.workloads import CARD, example

BF16, FP16 = (Precision(dtype="bf16"),), (Precision(dtype="fp16"),)


class Rehearsing:
    """Stands for a child process."""

    def __init__(self, decisions: tuple[Decision, ...], ops: int) -> None:
        self.decisions, self.ops = decisions, ops
        self.ended = self.is_ready = False

    def result(self):
        assert not self.ended
        if any(isinstance(decision, Checkpoint) for decision in self.decisions):
            raise RehearsalError("cannot be rehearsed")
        return types.SimpleNamespace(decisions=self.decisions, ops=range(self.ops))

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def begun() -> list[Rehearsing]:
    return []


def certificates(begun: list[Rehearsing], *, ops: int = 10) -> Certificates:
    def start(decisions):
        begun.append(Rehearsing(decisions, ops))
        return begun[-1]

    return Certificates(start, lambda graph: graph)


def test_what_was_ahead_is_not_begun_again(begun):
    made = certificates(begun)
    made.foresee(BF16)
    made.foresee(BF16)
    assert made.of(BF16).decisions == BF16
    assert made.of(BF16) is made.of(BF16)
    made.foresee(BF16)
    assert [(child.decisions, child.ended) for child in begun] == [(BF16, False)]


def test_only_one_is_ahead(begun):
    made = certificates(begun)
    made.foresee(BF16)
    made.foresee(FP16)
    assert [child.ended for child in begun] == [True, False]
    assert made.of(BF16).decisions == BF16
    assert [child.ended for child in begun] == [True, True, False]
    made.forget()
    assert not begun[2].ended


def test_an_error_matters_only_to_those_who_ask(begun):
    made, refused = certificates(begun), (Checkpoint(modules=("a",)),)
    made.foresee(refused)
    made.foresee(BF16)
    made.of(BF16)
    with pytest.raises(RehearsalError):
        made.of(refused)


def test_what_was_begun_runs_on_until_it_is_asked_for(begun):
    made = certificates(begun)
    made.begin(())
    made.begin(BF16)
    made.begin(BF16)
    made.foresee(FP16)  # is not started while others are running
    assert len(begun) == 2
    for child in begun:
        child.is_ready = True
    made.foresee(BF16)  # was begun
    assert len(begun) == 2
    made.foresee(FP16)
    assert begun.pop().decisions == FP16
    made.forget()
    assert made.of(()).decisions == () and made.of(BF16).decisions == BF16
    made.begin(BF16)
    assert [(child.decisions, child.ended) for child in begun] == [((), False), (BF16, False)]


def test_what_was_foreseen_is_not_begun_again(begun):
    made = certificates(begun)
    made.foresee(BF16)
    made.begin(BF16)
    assert made.of(BF16).decisions == BF16
    assert len(begun) == 1


def test_what_was_begun_ends_if_another_certificate_is_asked_for(begun):
    made = certificates(begun)
    made.begin(BF16)
    assert made.of(FP16).decisions == FP16
    made.begin(BF16)
    made.close()
    assert [(child.decisions, child.ended) for child in begun] == [(BF16, True), (FP16, False), (BF16, True)]


def test_few_ops_are_kept_at_hand(begun):
    made = certificates(begun, ops=150_000)
    made.of(BF16)
    made.of(FP16)
    made.of(FP16)
    made.of(BF16)
    assert [child.decisions for child in begun] == [BF16, FP16, BF16]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_search_foresees_what_it_chooses(monkeypatch):
    """Without a head start, the certificate of the choice is begun while its what-if recording is made."""
    monkeypatch.setattr(pipeline, "start_early", lambda session, constraints: session.expect(constraints))
    begun: list[tuple[tuple[Decision, ...], bool]] = []
    rehearsed = Certificates._child

    def child(self, decisions):
        foreseen = self._ahead is not None and self._ahead[0] == decisions
        begun.append((decisions, foreseen))
        return rehearsed(self, decisions)

    monkeypatch.setattr(Certificates, "_child", child)
    work = example("sequential.py:build", 256)
    constraints = Constraints(
        fidelity=BF16[0].fidelity, forced=("mixed-precision",), forbidden=("8bit-optimizer", "optimizer-kernel")
    )
    plan = pipeline.plan_workload(work, CARD, vram_bytes=8 << 30, constraints=constraints)
    assert plan.decisions == BF16
    assert begun == [((), False), (BF16, True)]


@pytest.mark.slow
def test_a_step_that_cannot_fit_without_recompute_is_not_rehearsed(monkeypatch):
    begun: list[tuple[Decision, ...]] = []
    foresee = Certificates.foresee

    def noted(self, decisions):
        begun.append(decisions)
        foresee(self, decisions)

    monkeypatch.setattr(Certificates, "foresee", noted)
    work = example("sequential.py:build", 16384)
    constraints = Constraints(fidelity=Fidelity.EXACT, forced=(), forbidden=("accumulation",))
    baseline = pipeline.plan_workload(work, CARD, vram_bytes=None, constraints=constraints).baseline
    budget = baseline.total_bytes - baseline.most["activations"] * 2 // 3
    plan = pipeline.plan_workload(work, CARD, vram_bytes=budget, constraints=constraints)
    assert plan.fits
    assert begun == []
