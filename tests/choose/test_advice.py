"""Where nothing fits, changes of the job are offered, but only those with which a plan was found."""

from __future__ import annotations

import dataclasses
import types

import pytest

from planner import advice, profiles
from planner.errors import WorkloadError
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decisions import Accumulation
from planner.plan_types.plan import Shortfall
from planner.plan_types.sizes import GIB
from planner.progress import Watch
from tests.plan_types.test_plan import example

CARD = profiles.load("rtx-2060")
CONSTRAINTS = parse_constraints(fidelity="rounded", force=(), forbid=())
JOB = types.SimpleNamespace(batch_size=8, seq_len=512)


def plan_without_room(*decisions, **changes):
    shortfall = Shortfall(missing_bytes=GIB, binding="activations", binding_bytes=GIB, next_step=None)
    plan = example(*decisions, vram_bytes=2 * GIB, card_bytes=CARD.vram_bytes, fits=False, shortfall=shortfall)
    return dataclasses.replace(plan, peak=dataclasses.replace(plan.peak, total_bytes=7 * GIB), **changes)


@pytest.fixture
def labels(monkeypatch):
    """A function that returns the changes that are offered for a plan, if `fits(workload, card)` says what fits."""

    def found(plan, fits):
        def plan_that_fits(workload, card, *, vram_bytes, constraints, watch):
            assert vram_bytes == (plan.vram_bytes if card is CARD else card.vram_bytes)
            return example() if fits(workload, card) else None

        monkeypatch.setattr(advice, "plan_that_fits", plan_that_fits)
        load = types.SimpleNamespace
        after = advice.advised(plan, JOB, CARD, constraints=CONSTRAINTS, load=load, watch=Watch()).shortfall
        assert after.next_step == (after.relaxations[0].next_step if after.relaxations else None)
        return [row.relax for row in after.relaxations]

    return found


def test_the_first_size_that_fits_is_offered(labels):
    tried = []

    def fits(job, card):
        tried.append((job.batch_size, job.seq_len, card.name))
        return job.seq_len <= 128 or job.batch_size <= 2 or card is not CARD

    assert labels(plan_without_room(), fits)[:2] == ["--seq-len 128", "--batch-size 2"]
    sizes = [(8, 256), (8, 128), (4, 512), (2, 512)]
    assert tried[:4] == [(*size, "rtx-2060") for size in sizes]
    assert profiles.load(tried[4][2]).vram_bytes > 7 * GIB


def test_what_does_not_fit_or_is_refused_is_not_offered(labels):
    assert labels(plan_without_room(), lambda job, card: False) == []

    def refuse(job, card):
        raise WorkloadError("not this size")

    assert labels(plan_without_room(), refuse) == []


def test_a_smaller_batch_is_not_tried_where_the_plan_splits_the_batch(labels):
    plan = plan_without_room(Accumulation(micro_batch_size=1, micro_batches=8))
    assert not [label for label in labels(plan, lambda job, card: True) if "batch" in label]


def test_after_the_time_limit_nothing_is_tried(labels, monkeypatch):
    monkeypatch.setattr(advice, "_SECONDS", -1)
    assert labels(plan_without_room(), lambda job, card: True) == []


def test_a_plan_that_fits_needs_no_advice():
    assert advice.advised(example(), JOB, CARD, constraints=CONSTRAINTS, load=None, watch=Watch()) == example()
