"""Models and recipes that users bring, made small, planned and trained."""

from __future__ import annotations

import pathlib
import runpy

import pytest
import torch

import planner
from planner import rewrite
from planner.plan_types.decisions import Accumulation, Optimizer, Precision
from planner.plan_types.recompute_decisions import Checkpoint, Replay
from planner.workload.workload import workload
from tests.support.training import roberta, seeded, tokens
from tests.support.workloads import CARD, what_if

pytestmark = pytest.mark.slow

MIB = 1 << 20
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.thorough
def test_one_long_function_trains_where_a_single_sample_would_not_fit():
    build = runpy.run_path(str(EXAMPLES / "flat.py"))["build"]
    torch.manual_seed(0)
    model, (damaged, whole), loss_fn = build(batch_size=4, image_size=24, depth=16, width=16)
    one = planner.plan(model, (damaged[:1], whole[:1]), vram=None, loss_fn=loss_fn, gpu="bare", optimizer="sgd")
    budget = int(0.9 * one.baseline.total_bytes)
    plan = planner.plan(
        model, (damaged, whole), vram=budget, loss_fn=loss_fn, gpu="bare", optimizer="sgd", fidelity="exact"
    )
    assert plan.fits and plan.peak.total_bytes <= budget
    assert plan.decision(Replay) is not None
    parity = rewrite.verify(plan, model, (damaged, whole), loss_fn=loss_fn)
    assert parity.passed, parity


@pytest.fixture(scope="module")
def recipe():
    model, batch = seeded(roberta), tokens(samples=16, length=12)
    plan = planner.plan(
        model, batch, vram="600MiB", gpu="t4", force=("checkpoint", "accumulation", "precision", "optimizer"),
        only=("checkpoint", "accumulation", "precision", "optimizer"),
    )  # fmt: skip
    return plan, model, batch


@pytest.mark.thorough
def test_checkpointing_accumulation_fp16_and_8_bits_together_keep_the_effective_batch(recipe):
    plan, _, _ = recipe
    assert {type(decision) for decision in plan.decisions} == {Checkpoint, Accumulation, Precision, Optimizer}
    assert plan.decision(Precision).dtype == "fp16"  # a T4 has no bf16 of its own
    split = plan.decision(Accumulation)
    assert split.micro_batches > 1 and split.micro_batch_size * split.micro_batches >= 16
    assert plan.fits and plan.certified


@pytest.mark.thorough
def test_checkpointing_accumulation_fp16_and_8_bits_together_train_as_the_plain_step(recipe):
    plan, model, batch = recipe
    parity = rewrite.verify(plan, model, batch)
    assert parity.passed, parity


@pytest.mark.thorough
def test_sizes_that_nothing_divides_keep_their_promise():
    model = seeded(roberta, hidden_size=1500, num_attention_heads=25, intermediate_size=4096, num_hidden_layers=2)
    batch = tokens(samples=9, length=40)
    card = planner.plan(model, batch, vram=None, gpu="rtx-3090")
    budget = int(0.75 * card.baseline.total_bytes)
    plan = planner.plan(model, batch, vram=budget, gpu="rtx-3090")
    assert plan.fits and plan.peak.total_bytes <= budget
    assert plan.solver.promised_bytes == plan.solver.certified_bytes


@pytest.mark.thorough
def test_what_is_frozen_gets_no_gradients_and_keeps_no_activations_under_checkpoints():
    model, batch = seeded(roberta), tokens()
    for part in (model.roberta.embeddings, model.roberta.encoder.layer[0]):
        part.requires_grad_(False)
    graph = what_if(workload(model, batch), card=CARD)
    saving = {graph.calls[save.call].module for save in graph.saves if save.storage is not None}
    assert any(name.startswith("roberta.encoder.layer.1") for name in saving)
    assert not any(name.startswith(("roberta.embeddings", "roberta.encoder.layer.0")) for name in saving)
    plan = planner.plan(model, batch, vram="1GiB", gpu="rtx-3090", force=("checkpoint",), only=("checkpoint",))
    assert rewrite.verify(plan, model, batch).passed
    rewritten = rewrite.apply(plan, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    rewritten.step(batch)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed and not any(name.startswith(("roberta.embeddings", "roberta.encoder.layer.0")) for name in changed)
