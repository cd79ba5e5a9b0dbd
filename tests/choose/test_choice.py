"""Plans that count as equally fast: which one is chosen, and what the plan says about the one that was passed over."""

from __future__ import annotations

import types

import pytest
import torch
import transformers

import planner
from planner.assemble import _tie_notes
from planner.choose import choice as choice_module
from planner.choose.choice import BestPlans, Certified, Choice, Prediction, simplest_in_tie
from planner.plan_types.decisions import OptimizerKernel, Precision
from planner.plan_types.recompute_decisions import Checkpoint
from tests.support.workloads import CARD

KERNEL, CHECKPOINT, BF16 = OptimizerKernel(kernel="fused"), Checkpoint(modules=("0",)), Precision(dtype="bf16")


def choice(step_ns: int, *decisions) -> Choice:
    return Choice(decisions=decisions, peak_bytes=1, step_ns=step_ns, status="optimal", gap=0.0)


def test_the_simplest_of_plans_within_five_percent_is_chosen():
    chosen = simplest_in_tie([choice(100, KERNEL, CHECKPOINT), choice(104, KERNEL), choice(106)])
    assert chosen.decisions == (KERNEL,) and chosen.passed_over == choice(100, KERNEL, CHECKPOINT)


def test_a_more_exact_plan_is_chosen_before_a_simpler_one():
    assert simplest_in_tie([choice(100, BF16), choice(105, KERNEL, CHECKPOINT)]).decisions == (KERNEL, CHECKPOINT)


def test_the_fastest_plan_passes_nothing_over():
    assert simplest_in_tie([choice(100, KERNEL), choice(101, KERNEL, CHECKPOINT)]) == choice(100, KERNEL)


def test_the_fastest_plan_that_fits_and_the_smallest_plan_are_kept():
    def plan(name: str, *, seconds: int, peak_bytes: int, fits: bool = True, rank: int = 0) -> Certified:
        footprint = types.SimpleNamespace(step_ns=seconds)
        measured = types.SimpleNamespace(fits=fits, curve_bytes=peak_bytes, footprint=footprint)
        return Certified(choice=choice(1, *[BF16] * rank), graph=name, measured=measured)

    best = BestPlans()
    assert (best.fastest, best.smallest) == (None, None)
    kept = []
    for each in (
        plan("does not fit", seconds=1, peak_bytes=80, fits=False),
        plan("slow", seconds=9, peak_bytes=50),
        plan("small", seconds=8, peak_bytes=20, rank=2),
        plan("simpler", seconds=8, peak_bytes=30, rank=1),
        plan("as good", seconds=8, peak_bytes=20, rank=1),
        plan("fast", seconds=2, peak_bytes=60),
    ):
        best.add(each)
        kept.append((best.fastest and best.fastest.graph, best.smallest.graph))
    assert kept == [
        (None, "does not fit"),
        ("slow", "slow"),
        ("small", "small"),
        ("simpler", "small"),
        ("simpler", "small"),
        ("fast", "small"),
    ]


def test_a_prediction_is_computed_once_for_each_budget_and_allocator(monkeypatch):
    asked = []

    def missing_bytes(graph, card, vram_bytes, alternatives, fastest, watch):
        asked.append((graph, vram_bytes, alternatives, fastest))
        return 100 - vram_bytes + len(alternatives)

    monkeypatch.setattr(choice_module, "predicted_missing_bytes", missing_bytes)
    prediction = Prediction(lambda: "two steps")
    for _ in range(2):
        assert prediction.missing_bytes(CARD, 90, ((),), True) == 11
        assert prediction.missing_bytes(CARD, 80, ((),), True) == 21
        assert prediction.missing_bytes(CARD, 90, ((), (KERNEL,)), False) == 12
    assert asked == [
        ("two steps", 90, ((),), True),
        ("two steps", 80, ((),), True),
        ("two steps", 90, ((), (KERNEL,)), False),
    ]


def test_a_note_names_a_plan_that_is_faster_by_more_than_a_percent():
    (note,) = _tie_notes(simplest_in_tie([choice(1000, KERNEL, BF16), choice(1020, KERNEL)]))
    assert "its predicted step is 2.0% shorter, with mixed precision" in note
    assert note.endswith("--force mixed-precision asks for the other plan")
    assert _tie_notes(simplest_in_tie([choice(1000, BF16), choice(1010)])) == ()
    assert _tie_notes(choice(1000)) == ()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_plan_says_what_it_passed_over_and_the_named_option_gives_it():
    config = transformers.BertConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2, vocab_size=1000
    )
    model = transformers.BertForMaskedLM(config)
    batch = {name: torch.zeros(16, 256, dtype=torch.long) for name in ("input_ids", "labels")}
    vram = planner.plan(model, batch, vram=None, gpu="rtx-3060").total_bytes * 9 // 10
    plan = planner.plan(model, batch, vram=vram, gpu="rtx-3060", fidelity="rounded")
    (note,) = (note for note in plan.notes if "faster plan" in note)
    forced = note.partition("--force ")[2].split()[0]
    other = planner.plan(model, batch, vram=vram, gpu="rtx-3060", fidelity="rounded", force=forced)
    assert 0.95 <= other.peak.step_ns / plan.peak.step_ns < 0.99
