"""A certificate is rehearsed once, also where it was begun before it was asked for."""

from __future__ import annotations

import types

import pytest

from planner import pipeline
from planner.choose.certificates import Certificates
from planner.errors import RehearsalError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Fidelity, Role, without_roles
from planner.plan_types.decisions import Decision, Precision
from planner.plan_types.recompute_decisions import Checkpoint
from tests.support.workloads import CARD, example, transformer

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


def test_a_foreseen_rehearsal_is_kept_by_begin_in_background(begun):
    made = certificates(begun)
    made.foresee(BF16)
    made.begin_in_background(BF16)
    made.foresee(FP16)
    made.begin_in_background(BF16)
    assert [(child.decisions, child.ended) for child in begun] == [(BF16, False), (FP16, False)]
    assert made.of(BF16).decisions == BF16


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


def test_what_was_begun_ends_what_was_foreseen(begun):
    made = certificates(begun)
    made.foresee(BF16)
    made.begin(FP16)
    assert [(child.decisions, child.ended) for child in begun] == [(BF16, True), (FP16, False)]


def test_only_the_named_rehearsal_is_forgotten(begun):
    made = certificates(begun)
    made.foresee(BF16)
    made.forget(FP16)
    assert not begun[0].ended
    made.forget(BF16)
    assert begun[0].ended


@pytest.fixture
def foreseen(monkeypatch) -> list[tuple[Decision, ...]]:
    """Returns the decisions whose certificates a search starts ahead."""
    noted: list[tuple[Decision, ...]] = []
    foresee = Certificates.foresee

    def noting(self, decisions):
        noted.append(decisions)
        foresee(self, decisions)

    monkeypatch.setattr(Certificates, "foresee", noting)
    return noted


@pytest.mark.slow
@pytest.mark.thorough
def test_the_best_plan_so_far_is_certified_while_another_configuration_is_recorded(foreseen):
    work = example("sequential.py:build", 256)
    constraints = Constraints(fidelity=BF16[0].fidelity, forced=("mixed-precision",), forbidden=("8bit-optimizer",))
    plan = pipeline.plan_workload(work, CARD, vram_bytes=8 << 30, constraints=constraints)
    assert {"mixed-precision", "optimizer-kernel"} == {decision.kind for decision in plan.decisions}
    assert foreseen == [BF16]


@pytest.mark.slow
def test_the_certificate_of_a_chunked_loss_is_started_while_its_step_is_recorded(foreseen):
    """The recording of the step with the whole loss shows that it fits if the logits are not counted."""
    settings = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 20_000, "tie_word_embeddings": False}
    work = transformer("llama", "LlamaForCausalLM", batch_size=2, seq_len=512, **settings)
    others = "optimizer-kernel", "8bit-optimizer", "accumulation", "step-in-backward", "mixed-precision"
    constraints = Constraints(fidelity=Fidelity.ROUNDED, forced=(), forbidden=others)
    baseline = pipeline.plan_workload(work, CARD, vram_bytes=None, constraints=constraints).baseline
    vram_bytes = baseline.total_bytes - baseline.most["logits and loss"] // 2
    plan = pipeline.plan_workload(work, CARD, vram_bytes=vram_bytes, constraints=constraints)
    rehearsed = without_roles(plan.decisions, Role.ALLOCATOR)
    assert plan.fits and [decision.kind for decision in rehearsed] == ["chunked-loss"]
    assert foreseen == [rehearsed]
    foreseen.clear()
    tighter = pipeline.plan_workload(work, CARD, vram_bytes=plan.total_bytes * 9 // 10, constraints=constraints)
    assert tighter.fits and foreseen == []


@pytest.mark.slow
def test_a_step_that_cannot_fit_without_recompute_is_not_rehearsed(foreseen):
    work = example("sequential.py:build", 16384)
    constraints = Constraints(fidelity=Fidelity.EXACT, forced=(), forbidden=("accumulation",))
    baseline = pipeline.plan_workload(work, CARD, vram_bytes=None, constraints=constraints).baseline
    budget = baseline.total_bytes - baseline.most["activations"] * 2 // 3
    plan = pipeline.plan_workload(work, CARD, vram_bytes=budget, constraints=constraints)
    assert plan.fits
    assert foreseen == []


def test_only_close_ends_a_rehearsal_in_the_background(begun):
    made = certificates(begun)
    made.begin_in_background(BF16)
    made.foresee(BF16)
    made.begin(BF16)
    made.begin_in_background(BF16)
    made.foresee(FP16)
    assert made.of(()).decisions == ()
    assert not made.is_ready(BF16)
    begun[0].is_ready = True
    assert made.is_ready(BF16) and not made.is_ready(FP16)
    assert [(child.decisions, child.ended) for child in begun] == [(BF16, False), (FP16, True), ((), False)]
    assert made.of(BF16).decisions == BF16
    made.begin_in_background(BF16)  # starts nothing: the certificate is cached
    made.begin_in_background(FP16)
    made.close()
    assert [(child.decisions, child.ended) for child in begun[3:]] == [(FP16, True)]


def test_a_rehearsal_in_the_background_is_started_by_its_own_function(begun):
    made = Certificates(None, lambda graph: graph, start_in_background=lambda decisions: Rehearsing(decisions, 1))
    made.begin_in_background(BF16)
    assert made.of(BF16).decisions == BF16
