"""Parity of the planned step with the baseline: correct plans pass, and every planted fault is caught."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random

import pytest
import torch
from torch import nn

import planner
from planner import rewrite
from planner.errors import DecisionError, PlanFileError, WorkloadError
from planner.plan_types.decisions import (
    Accumulation,
    ChunkedLoss,
    Freeze,
    Optimizer,
    OptimizerKernel,
    Precision,
    StepInBackward,
)
from planner.plan_types.recompute_decisions import Checkpoint, Replay
from planner.rewrite import Parity, loss_terms
from planner.rewrite.parity.reference_step import Comparable
from planner.rewrite.parity.result import Row
from planner.rewrite.portable import loss_and_clipping, replay_ops
from planner.rewrite.portable.recompute_check import RecomputeCheck
from planner.rewrite.rules import RULES, accumulation, checkpoint, chunked_loss, eight_bit_optimizer, step_in_backward
from planner.rewrite.step import TrainingStep
from planner.workload import model_loss
from tests.support.training import (
    Convolutional,
    Perceptron,
    cross_entropy,
    gpt2,
    images,
    plan_for,
    roberta,
    seeded,
    sgd,
    tokens,
    vectors,
    verified,
)

pytestmark = pytest.mark.slow

UNEVEN = Accumulation(micro_batch_size=4, micro_batches=2)
"""A batch of 6 samples becomes micro-batches of 4 and 2."""
BLOCKS = Checkpoint(modules=("first", "twice"))
BF16, FP16 = Precision(dtype="bf16"), Precision(dtype="fp16")
FUSED = OptimizerKernel(kernel="fused")
FLAT = Replay(modules=("layers",), stretches=((0, 8),), kept=((),))


class Bag(nn.Module):
    """A model with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids).mean(1))


class Recurrent(nn.Module):
    """A model with dropout that is not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.rnn(x.unflatten(1, (4, 4)))[0][:, -1], 0.3, self.training))


class Normed(nn.Module):
    """Running statistics per sample, which torch computes over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
        self.head = nn.Linear(4, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(image).relu().mean((2, 3)))


class Averaging(Perceptron):
    """Updates a buffer from the batch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x)


class Empty(Perceptron):
    """Has a parameter without elements, which gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.empty.sum()


def bags() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(12).view(6, 2) % 5, torch.arange(6) % 3


IMAGES = (Convolutional, images(6))
VECTORS = (Perceptron, vectors(6))
BAGS = (Bag, bags())
MASKED = (roberta, tokens())
CAUSAL = (gpt2, tokens())

CLEAN = {
    "without decisions": (IMAGES, ()),
    "checkpoints": (IMAGES, (BLOCKS,)),
    "checkpoints that keep products": (IMAGES, (Checkpoint(modules=("first", "twice"), kept=((0,), (0,))),)),
    "replay": (VECTORS, (FLAT,)),
    "replay of micro-batches": (VECTORS, (FLAT, UNEVEN)),
    "step in backward": (IMAGES, (BLOCKS, StepInBackward())),
    "loop": (IMAGES, (OptimizerKernel(kernel="for-loop"),)),
    "fused": (IMAGES, (FUSED,)),
    "frozen prefix": (IMAGES, (Freeze(modules=("first",)), BLOCKS)),
    "uneven micro-batches and batch norm": (IMAGES, (BLOCKS, UNEVEN)),
    "uneven micro-batches of a recurrent net": ((Recurrent, vectors(6)), (UNEVEN,)),
    "a frozen recurrent net": ((Recurrent, vectors(6)), (Freeze(modules=("rnn",)), UNEVEN)),
    "instance norm": ((Normed, images(6)), (UNEVEN, Checkpoint(modules=("first",)))),
    "a parameter without elements": ((Empty, vectors(6)), (UNEVEN,)),
    "sparse": (BAGS, (UNEVEN,)),
    "sparse, step in backward": (BAGS, (StepInBackward(),)),
    "tied weights, counted labels": (MASKED, (UNEVEN, Checkpoint(modules=("roberta.encoder.layer.0", "lm_head")))),
    "chunks": (MASKED, (ChunkedLoss(module="lm_head.decoder", chunks=3),)),
    "causal": (CAUSAL, (UNEVEN, ChunkedLoss(module="lm_head", chunks=3), Checkpoint(modules=("transformer.h.0",)))),
    "bf16": (CAUSAL, (BF16, UNEVEN, Checkpoint(modules=("transformer.h.1",)), FUSED)),
    "fp16": (CAUSAL, (FP16, UNEVEN, ChunkedLoss(module="lm_head", chunks=3))),
    "fp16 and batch norm": (IMAGES, (FP16, BLOCKS)),
    "bf16 and batch norm": (IMAGES, (BF16, Checkpoint(modules=("twice",)))),
    "everything": (IMAGES, (Freeze(modules=("first",)), BF16, UNEVEN, BLOCKS, FUSED)),
}


@pytest.mark.parametrize("case", CLEAN)
@pytest.mark.thorough_after(3)
def test_a_plan_that_trains_alike_passes(case):
    (build, batch), decisions = CLEAN[case]
    options = {"loss_fn": None if isinstance(batch, dict) else cross_entropy}
    if build is Bag:
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    if StepInBackward() not in decisions:
        options["max_grad_norm"] = 0.1
    found = verified(build, batch, *decisions, **options)
    assert found.passed, str(found)
    for row in found.rows:
        assert row.passed
        assert row.bit_equal or row.comparison != "as planned"
    kinds = {row.kind for row in found.rows if row.comparison == "as planned"}
    assert {"loss", "gradient", "parameter", "updates"} <= kinds


def test_eight_bit_state_is_compared_with_adamw():
    pytest.importorskip("bitsandbytes")
    decisions = (Optimizer(), Checkpoint(modules=("roberta.encoder.layer.0",)))
    found = verified(lambda: roberta(hidden_size=64, vocab_size=80), tokens(), *decisions)
    assert found.passed, str(found)
    quantized = [row for row in found.rows if row.comparison == "8-bit state" and row.kind == "state"]
    assert any(row.measured > 1e-3 for row in quantized)
    found = verified(
        lambda: roberta(hidden_size=64, vocab_size=80), tokens(), *decisions, StepInBackward(),
        Freeze(modules=("roberta.embeddings",)),
    )  # fmt: skip
    assert found.passed, str(found)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum", "adagrad", "rmsprop", "adam"])
def test_micro_batches_pass_for_every_named_optimizer(optimizer):
    found = verified(roberta, tokens(), UNEVEN, optimizer=optimizer)
    assert found.passed, str(found)
    assert any(row.comparison == "in double" and row.kind == "parameter" for row in found.rows)


def test_every_gradient_of_micro_batches_is_that_of_the_full_batch_below_1e_12():
    found = verified(gpt2, tokens(), UNEVEN, ChunkedLoss(module="lm_head", chunks=3))
    gradients = [row for row in found.rows if row.comparison == "in double" and row.kind == "gradient"]
    assert len(gradients) == len(list(gpt2().parameters()))
    assert max(row.bound for row in gradients) < 1e-12
    assert max(row.measured for row in gradients) < 1e-13


@pytest.mark.thorough
def test_a_plan_of_the_planner_passes():
    model, batch = seeded(roberta), tokens()
    forced = ("checkpoint", "accumulation")
    plan = planner.plan(model, batch, vram="1GiB", gpu="bare", force=forced, fidelity="exact")
    assert {type(decision) for decision in plan.decisions} >= {Accumulation, Checkpoint}
    found = rewrite.verify(plan, model, batch, device="cpu", steps=2)
    assert found.passed, str(found)


# ---- planted faults: what is patched, the plan it is planted in, and what must be reported ----------------------


def sparse_dropped(step) -> None:
    for parameter in step.module.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = None
    PLAIN_UPDATE(step)


def clipped_before_unscaling(step) -> None:
    loss_and_clipping.clip_gradients(step.module, step.max_grad_norm)
    step.scaler.step(step.optimizer)
    step.scaler.update()
    step.optimizer.zero_grad()


def twice(step) -> None:
    step.optimizer.step()
    PLAIN_UPDATE(step)


def every_second(step) -> None:
    step.calls = getattr(step, "calls", 0) + 1
    if step.calls % 2:
        PLAIN_UPDATE(step)
    else:
        step.optimizer.zero_grad()


def gradients_kept(step) -> None:
    step.optimizer.step()


PLAIN_UPDATE = TrainingStep.update


def parts(change):
    plain = accumulation.micro_batches

    def changed(*arguments, **options):
        return change(list(plain(*arguments, **options)))

    return changed


def cut_off(forward, contexts):
    def wrapper(module, /, *args, **kwargs):
        return forward(module, *(a.detach() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)

    return wrapper


class Stale(checkpoint.TakingResults):
    """A planted fault: never replaces the first kept results."""

    kept_first: dict = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in checkpoint.PRODUCTS and self.count in self.results:
            self.results[self.count] = self.kept_first.setdefault(self.count, self.results[self.count])
        return super().__torch_dispatch__(op, types, args, kwargs)


@contextlib.contextmanager
def stepping_twice(optimizer, *, by_position=False):
    plain = optimizer.step

    def step():
        plain()
        plain()

    optimizer.step = step
    try:
        with PLAIN_STEPPING(optimizer, by_position=by_position):
            yield
    finally:
        del optimizer.step


PLAIN_STEPPING = step_in_backward.stepping_in_backward

plain_checkpoint = torch.utils.checkpoint.checkpoint


def without_random_state(*arguments, **options):
    return plain_checkpoint(*arguments, **{**options, "preserve_rng_state": False})


def nothing(*_):
    return contextlib.nullcontext()


FAULTS = {
    "micro-batches weighted by samples": (
        MASKED, (UNEVEN,), (loss_terms, "counted_labels", lambda batch, samples, **_: samples), "gradient",
    ),
    "the first label of a causal model counted": (
        CAUSAL, (UNEVEN,), (model_loss, "shifts_labels", lambda model: False), "gradient",
    ),
    "a loss weight off by one in a thousand": (
        VECTORS, (UNEVEN,),
        (accumulation, "micro_batches", parts(lambda p: [(part, weight * 1.001) for part, weight in p])), "gradient",
    ),
    "the last micro-batch skipped": (
        VECTORS, (UNEVEN,), (accumulation, "micro_batches", parts(lambda p: p[:-1])), "gradient",
    ),
    "statistics updated twice": (IMAGES, (BLOCKS,), (checkpoint, "statistics_kept", nothing), "buffer"),
    "clipping before unscaling": (VECTORS, (FP16,), (TrainingStep, "update", clipped_before_unscaling), "gradient"),
    "a sparse gradient dropped": (BAGS, (UNEVEN,), (TrainingStep, "update", sparse_dropped), "gradient"),
    "other masks in the recompute": (
        IMAGES, (BLOCKS,), (torch.utils.checkpoint, "checkpoint", without_random_state), "gradient",
    ),
    "other masks in the recompute of micro-batches": (
        IMAGES, (BLOCKS, UNEVEN), (torch.utils.checkpoint, "checkpoint", without_random_state), "gradient",
    ),
    "other masks in the replay": (VECTORS, (FLAT,), (replay_ops, "rng_state_restored", nothing), "gradient"),
    "parameters updated twice": (VECTORS, (), (TrainingStep, "update", twice), "updates"),
    "parameters updated twice in backward": (
        VECTORS, (StepInBackward(),),
        (step_in_backward, "stepping_in_backward", stepping_twice), "updates",
    ),
    "every second update skipped": (VECTORS, (), (TrainingStep, "update", every_second), "updates"),
    "a branch cut off": (IMAGES, (Checkpoint(modules=("twice",)),), (checkpoint, "recomputed", cut_off), "gradient"),
    "a kept product of another step": (
        IMAGES, (Checkpoint(modules=("twice",), kept=((0,),)),), (checkpoint, "TakingResults", Stale), "gradient",
    ),
    "a frozen prefix trained": (IMAGES, (Freeze(modules=("first",)),), (RULES, Freeze, lambda *_: None), "frozen"),
    "gradients not zeroed": (VECTORS, (), (TrainingStep, "update", gradients_kept), "parameter"),
    "a chunk's gradient off": (
        MASKED, (ChunkedLoss(module="lm_head.decoder", chunks=3),),
        (chunked_loss, "unscaled", lambda product, scale: product * (1 + 1e-9)), "gradient",
    ),
    "a chunk's gradient in half precision left scaled": (
        CAUSAL, (FP16, ChunkedLoss(module="lm_head", chunks=3)),
        (chunked_loss, "unscaled", lambda product, scale: product),
        "gradient",
    ),
    "no autocast": (VECTORS, (BF16,), (RULES, Precision, lambda *_: None), "loss"),
    "a fused step at another rate": (
        VECTORS, (FUSED,),
        (RULES, OptimizerKernel, lambda r, _: r.optimizer.param_groups[0].update(fused=True, lr=1.001e-3)), "parameter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.thorough_after(3)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    (build, batch), decisions, (place, name, patched), kind = FAULTS[fault]
    options = {"loss_fn": None if isinstance(batch, dict) else cross_entropy}
    if build is Bag:
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    if FP16 in decisions:
        options["max_grad_norm"] = 0.1
    assert verified(build, batch, *decisions, **options).passed
    monkeypatch.setattr(RecomputeCheck, "watched", lambda self, forward, name: forward)  # verify has to see it alone
    if isinstance(place, dict):
        monkeypatch.setitem(place, name, patched)
    else:
        monkeypatch.setattr(place, name, patched)
    Stale.kept_first.clear()
    found = verified(build, batch, *decisions, **options)
    assert not found.passed
    assert kind in {row.kind for row in found.failures}, str(found)


def test_another_rate_of_the_eight_bit_optimizer_is_caught(monkeypatch):
    pytest.importorskip("bitsandbytes")
    plain = eight_bit_optimizer._group
    monkeypatch.setattr(eight_bit_optimizer, "_group", lambda *given: {**plain(*given), "lr": 1.01e-3})
    found = verified(Perceptron, vectors(6), Optimizer(), loss_fn=cross_entropy)
    assert {row.comparison for row in found.failures} == {"8-bit state"}
    assert {row.kind for row in found.failures} == {"parameter"}


# ---- what cannot be compared, and what stays as it was ---------------------------------------------------------------


def test_a_loss_across_samples_fails_when_it_is_split():
    def contrastive(output, batch):
        return nn.functional.cross_entropy(output @ output.t(), torch.arange(len(output)))

    assert verified(Perceptron, vectors(6), loss_fn=contrastive).passed
    found = verified(Perceptron, vectors(6), UNEVEN, loss_fn=contrastive)
    assert {row.comparison for row in found.failures} == {"in double"}


def test_a_buffer_that_counts_batches_fails_when_they_are_split():
    assert verified(Averaging, vectors(6), FLAT, loss_fn=cross_entropy).passed
    found = verified(Averaging, vectors(6), UNEVEN, loss_fn=cross_entropy)
    assert [(row.comparison, row.kind, row.name) for row in found.failures] == [("in double", "buffer", "mean")]


def test_a_hook_that_counts_starts_from_zero_in_each_training():
    def counting():
        calls = [0]

        def scaled(module, inputs, output):
            calls[0] += 1
            return output * (1 + calls[0])

        model = Perceptron()
        model.layers[1].register_forward_hook(scaled)
        return model

    assert verified(counting, vectors(6), loss_fn=cross_entropy).passed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_on_both_sides_fails(value):
    found = verified(Perceptron, vectors(6), loss_fn=lambda o, b: cross_entropy(o, b) * value)
    assert not found.passed
    assert "is not finite" in str(found)


def test_a_step_that_raises_fails():
    def broken(output, batch):
        raise ZeroDivisionError("no\nmore")

    found = verified(Perceptron, vectors(6), loss_fn=broken)
    assert {row.why for row in found.failures} == {"could not run: ZeroDivisionError: no"}


def test_a_loss_that_trains_the_model_itself_fails_and_leaves_no_gradient():
    model = seeded(Perceptron)

    def penalized(output, batch):
        return cross_entropy(output, batch) + model.head.weight.square().sum()

    found = rewrite.verify(plan_for(model, vectors(), loss_fn=penalized), model, vectors(), loss_fn=penalized)
    assert ("run", "head.weight") in {(row.kind, row.name) for row in found.failures}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_step_numbers_stay_as_kernels_want_them_while_a_model_asks_for_float_and_gets_double():
    with Comparable(dropout=True, double=True):
        assert torch.zeros((), dtype=torch.float32).dtype is torch.float32
        assert torch.zeros(()).to(torch.float32).dtype is torch.float32
        assert torch.zeros((), dtype=torch.float64).float().dtype is torch.float64
        assert torch.arange(3).to(dtype=torch.float32).dtype is torch.float64
        assert torch.softmax(torch.zeros(3, dtype=torch.float64), 0, dtype=torch.float32).dtype is torch.float64


def test_nothing_compared_is_nothing_passed():
    assert not Parity(rows=()).passed


def test_one_quantity_that_differs_fails():
    row = Row(
        comparison="as planned", kind="loss", name="1", bound=1.0, measured=0.0, bit_equal=True, passed=True
    )  # fmt: skip
    assert Parity(rows=(row, row)).passed
    assert not Parity(rows=(row, dataclasses.replace(row, measured=2.0, passed=False))).passed


def test_what_overflows_at_every_scale_fails():
    found = verified(Perceptron, vectors(6), FP16, loss_fn=lambda o, b: cross_entropy(o, b) * 1e35)
    assert "0 updates instead of 3" in str(found)


def test_a_model_that_rounds_is_compared_within_its_own_rounding():
    class Rounds(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).bfloat16()

    found = verified(Rounds, vectors(6), UNEVEN, loss_fn=cross_entropy)
    assert "some ops round to a lower precision than double, with eps 0.0078" in str(found)


def test_a_model_that_cannot_run_in_double_is_compared_in_its_own_precision():
    class Single(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype is torch.float64:
                raise RuntimeError("this kernel takes float")
            return super().forward(x)

    found = verified(Single, vectors(6), UNEVEN, loss_fn=cross_entropy)
    assert found.passed, str(found)
    assert "cannot run in double (RuntimeError: this kernel takes float)" in str(found)
    bounds = {row.bound for row in found.rows if row.comparison == "in double" and row.kind == "gradient"}
    assert bounds == {4096 * torch.finfo(torch.float32).eps}


def test_the_model_its_optimizer_and_random_numbers_stay_as_they_were():
    model = seeded(Convolutional)
    model.head.eval()
    optimizer = sgd(model.parameters())
    cross_entropy(model(images(6)[0]), images(6)).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]
    numbers, others = torch.get_rng_state(), random.getstate()
    plan = plan_for(model, images(6), UNEVEN, BLOCKS, loss_fn=cross_entropy)
    found = rewrite.verify(plan, model, images(6), loss_fn=cross_entropy, optimizer=optimizer)
    assert found.passed, str(found)
    assert any(row.kind == "state" and row.name.endswith("momentum_buffer") for row in found.rows)
    after = (model.state_dict(), optimizer.state_dict())
    assert all(torch.equal(before[0][name], value) for name, value in after[0].items())
    momenta = [state["momentum_buffer"] for state in after[1]["state"].values()]
    assert all(torch.equal(a["momentum_buffer"], b) for a, b in zip(before[1]["state"].values(), momenta, strict=True))
    assert all(p.grad is g and torch.equal(g, v) for p, (g, v) in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(numbers, torch.get_rng_state())
    assert random.getstate() == others
    assert not model.head.training
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_report_tells_each_comparison_with_its_bound_and_what_was_left_out():
    text = str(verified(Perceptron, vectors(6), UNEVEN, BF16, loss_fn=cross_entropy))
    assert text.startswith("parity: passed\nas planned\n")
    assert "in double" in text and "bound 9.1e-13" in text
    assert "note: in double: dropout is off" in text


def test_other_models_batches_and_rewritten_models_are_refused():
    model, batch = seeded(Perceptron), vectors(6)
    plan = plan_for(model, batch, Checkpoint(modules=("layers.0",)), loss_fn=cross_entropy)
    given = {"loss_fn": cross_entropy}
    with pytest.raises(PlanFileError, match="made for another model"):
        rewrite.verify(plan, Perceptron(depth=5), batch, **given)
    with pytest.raises(PlanFileError, match="batches of 6 samples, this one has 5"):
        rewrite.verify(plan, model, vectors(5), **given)
    with pytest.raises(WorkloadError, match="pass it as loss_fn"):
        rewrite.verify(plan, model, batch)
    with pytest.raises(DecisionError, match="give at least 1"):
        rewrite.verify(plan, model, batch, steps=0, **given)
    with pytest.raises(WorkloadError, match="no weights"):
        rewrite.verify(plan, copy.deepcopy(model).to("meta"), batch, **given)
    rewrite.apply(plan, model, **given)
    with pytest.raises(DecisionError, match=r"'layers.0' is rewritten already: undo\(\) first"):
        rewrite.verify(plan, model, batch, **given)
