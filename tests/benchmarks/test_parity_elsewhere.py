"""`benchmarks.parity.elsewhere` accepts right trainings in processes, under trainers and with 8-bit state."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from benchmarks.parity import judge
from benchmarks.parity.case import Case, adamw
from benchmarks.parity.elsewhere import eight_bit, processes, trainers
from benchmarks.parity.elsewhere.sample import NAMES, Job, case_of, jobs, outcome_of
from benchmarks.parity.plain import Trained, trained_plainly
from benchmarks.parity.techniques import SINGLE, Technique, offer
from planner.plan_types.decisions import Optimizer

pytestmark = pytest.mark.slow


def job(name: str, technique: str) -> Job:
    offered = offer(case_of(name))
    return Job(name, offered, next(found for found in offered.techniques if found.name == technique))


@pytest.mark.thorough
def test_the_sample_takes_every_technique():
    assert {each.technique.name for each in jobs(NAMES, 3)} == set(SINGLE)


def test_a_training_by_another_optimizer_is_found():
    right = job("perceptron", "checkpoint")
    case = right.case

    def trained(case: Case) -> Trained:
        return trained_plainly.__wrapped__(case, case.dtype)

    def outcome(other: Case) -> judge.Outcome:
        return outcome_of(right, "plain", lambda: trained(other), lambda: trained(case))

    assert outcome(case).result == judge.EQUAL
    other = dataclasses.replace(case, optimizer=adamw)
    assert outcome(other).result == judge.DIFFERENT


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers' Trainer needs accelerate")
@pytest.mark.parametrize("way", ["Trainer", "Trainer, resumed"])
@pytest.mark.parametrize("technique", ["checkpoint", "accumulation 7x1"])
@pytest.mark.thorough_after(1)
def test_the_trainer_with_a_plan_trains_like_the_trainer_without(technique, way):
    found = trainers._outcome(job("transformers: bert", technique), way)
    assert found.result in (judge.EQUAL, judge.ROUNDED), found


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("way", ["8-bit, live", "8-bit, emitted"])
def test_8_bit_state_trains_like_the_optimizer_of_bitsandbytes(way):
    case = eight_bit.CASES[0]
    alone = Technique("8-bit state", (Optimizer(),))
    assert eight_bit._outcome(eight_bit.EightBitJob(case.name, offer(case), alone), way).result == judge.EQUAL


@pytest.mark.thorough
def test_processes_train_like_loops_around_the_same_wrapper(monkeypatch):
    sample = [job("perceptron", "checkpoint"), job("perceptron", "accumulation 4+3")]
    monkeypatch.setattr(processes, "jobs", lambda *_: sample)
    found = {(outcome.way, outcome.technique): outcome.result for outcome in processes.outcomes()}
    for way in ("DDP", "FSDP2, then apply"):
        assert found[way, "checkpoint"] == judge.EQUAL and found[way, "accumulation 4+3"] == judge.ROUNDED
    assert found["apply, then FSDP2", "checkpoint"] == judge.REFUSED
