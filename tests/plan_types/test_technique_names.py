"""Every name that a technique ever had is accepted: on the command line, in Python and in plan files."""

from __future__ import annotations

import pathlib

import pytest
import torch

from planner.errors import DecisionError
from planner.plan_types.constraints import Constraints, parse_constraints
from planner.plan_types.decision_base import Role, conflict
from planner.plan_types.decisions import (
    Accumulation,
    Allocator,
    ChunkedLoss,
    Decision,
    Fidelity,
    Freeze,
    Optimizer,
    OptimizerKernel,
    Precision,
    Shard,
    ShardedPrecision,
    StepInBackward,
)
from planner.plan_types.fingerprint import plan_fingerprint
from planner.plan_types.plan import Plan
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.plan_types.techniques import KINDS, canonical_kind

FORMER = pathlib.Path(__file__).parents[1] / "fixtures/plans/former_kinds.json"
"""A plan with every technique, written when three of them had other kinds."""
FORMER_FINGERPRINT = "1975693ec6e8ba309b3a3b3a1688dabd8240a7089439530cc6b11109ba5d29e1"
"""Fingerprint of that plan for `torch.nn.Linear(2, 3)`, computed at that time."""
LATER = ("allocator", "shard", "sharded-precision")
"""Techniques that are younger than that plan."""
DECISIONS = (
    Freeze(modules=("a",)),
    Precision(dtype="fp16"),
    ShardedPrecision(),
    Shard(way="fsdp", mesh=(2, 4), units=("b.0", "b.1"), kept=("b.1",)),
    Optimizer(),
    OptimizerKernel(kernel="fused"),
    ChunkedLoss(module="head", chunks=8),
    Accumulation(micro_batch_size=16, micro_batches=4),
    StepInBackward(),
    Allocator(expandable_segments=True),
    Checkpoint(modules=("b.0", "b.1"), kept=((1, 2), (1, 2))),
    Replay(modules=("",), stretches=((0, 10),), kept=((3,),), stops=((5,),)),
    Offload(modules=("c", "d"), inputs_of=("d",), from_bytes=1024),
)
DESCRIPTIONS = (
    "freeze 1 module: a",
    "mixed precision: fp16 autocast with a gradient scaler, trained weights in fp32",
    "mixed precision: bf16 autocast, parameters are gathered in bf16, gradients added up in fp32",
    "2 copies, each sharded over 4 cards (FSDP2), in units b.{0-1}; gathered once in a step: b.1",
    "8-bit optimizer state (bitsandbytes AdamW); embeddings and small tensors keep 32-bit state",
    "fused optimizer kernel: updates parameters in place, without temporaries",
    "loss in 8 chunks (head): the full logits are never materialized",
    "gradient accumulation: 4 micro-batches of 16",
    "optimizer step in backward: each gradient is applied and freed at once (no clipping by global norm)",
    "allocator options, to be set before CUDA starts: PYTORCH_ALLOC_CONF=expandable_segments:True",
    "activation checkpointing: b.{0-1}, keeping 2 op outputs each",
    "segment checkpointing: ops 0-9 of the model's forward, keeping 1 op output, recomputed in 2 parts",
    "offload to pinned host memory: tensors saved in c; inputs of d",
)


def constraints(**names) -> Constraints:
    return parse_constraints(**{"fidelity": "rounded", "force": (), "forbid": (), **names})


def test_a_plan_with_former_kinds_is_read_and_written_with_todays(tmp_path):
    plan = Plan.load(FORMER)
    assert plan.decisions == tuple(decision for decision in DECISIONS if decision.kind not in LATER)
    assert plan.forced == ("mixed-precision", "8bit-optimizer")
    assert plan.forbidden == ("segment-checkpoint", "step-in-backward")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert '"kind": "precision"' not in (tmp_path / "plan.json").read_text()


def test_a_step_saved_under_former_kinds_can_be_resumed():
    assert plan_fingerprint(Plan.load(FORMER).decisions, torch.nn.Linear(2, 3)) == FORMER_FINGERPRINT


@pytest.mark.parametrize("decision", KINDS.values(), ids=KINDS)
def test_every_name_of_a_technique_means_the_same(decision: type[Decision]):
    for name in filter(None, (decision.kind, decision.former_kind, *decision.aliases)):
        assert canonical_kind(name) == decision.kind
        assert constraints(fidelity="partial", force=name).force(decision)
        only = constraints(fidelity="partial", only=(name,))
        assert {kind for kind in KINDS.values() if only.allow(kind)} == {decision, Shard}
        if decision is not Shard:
            assert not constraints(fidelity="partial", forbid=[name]).allow(decision)


def test_how_several_cards_divide_a_model_cannot_be_forbidden():
    with pytest.raises(DecisionError, match="'shard' cannot be forbidden: several cards always use it"):
        constraints(forbid=("accumulation", "shard"))


def test_two_names_of_one_technique_contradict_each_other_like_one():
    with pytest.raises(DecisionError, match="'mixed-precision' is both forced and forbidden"):
        constraints(force=("precision",), forbid=("mixed-precision",))
    with pytest.raises(DecisionError, match="'8bit-optimizer' is forbidden, but 'only' allows it"):
        constraints(only=("8bit-optimizer",), forbid=("optimizer",))


def test_names_are_unique():
    names = [name for kind in KINDS.values() for name in (kind.kind, kind.former_kind, *kind.aliases) if name]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("decision", "text"), list(zip(DECISIONS, DESCRIPTIONS, strict=True)), ids=KINDS)
def test_a_decision_says_what_it_does(decision, text):
    assert decision.describe() == text


def test_constraints_are_asked_by_role():
    rules = constraints(force=("step-in-backward",), forbid=("precision", "sharded-precision", "checkpoint"))
    assert rules.force(Role.UPDATE_TIME) and not rules.force(Role.RECOMPUTE)
    assert not rules.allow(Role.PRECISION) and rules.allow(Role.RECOMPUTE)
    assert not rules.allow(Role.FREEZING)
    assert rules.fidelity is Fidelity.ROUNDED


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        ((Accumulation(micro_batch_size=1, micro_batches=2), StepInBackward()), "sums gradients over micro-batches"),
        ((StepInBackward(), Precision(dtype="fp16")), "gradient scaler"),
        ((Optimizer(), OptimizerKernel(kernel="fused")), "8-bit state"),
        ((OptimizerKernel(kernel="for-loop"), StepInBackward()), "loop changes nothing"),
    ],
    ids=str,
)
def test_decisions_exclude_each_other_in_either_order(pair, why):
    assert why in (conflict(pair) or "") and why in (conflict(reversed(pair)) or "")
    assert conflict((StepInBackward(), Precision(dtype="bf16"), OptimizerKernel(kernel="fused"))) is None


def test_only_accumulation_depends_on_the_number_of_micro_batches():
    changed = [decision.with_micro_batches(7) for decision in DECISIONS]
    assert [decision for decision in changed if decision not in DECISIONS] == [
        Accumulation(micro_batch_size=16, micro_batches=7)
    ]
