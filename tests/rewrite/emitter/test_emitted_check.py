"""The flag `--check` of emitted files: it accepts right steps, and finds faults that are planted in the text."""

from __future__ import annotations

import copy
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

from planner.plan_types.decisions import Accumulation, Precision
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite import emit, source
from planner.rewrite.rules import offload
from tests.rewrite.emitter.test_emitted_fixtures import CASES, FOLDER, ROOT, each_case
from tests.support.training import cross_entropy, imported, plan_for, seeded, vectors

FAULTS = {
    "gradients are divided by the number of micro-batches twice": (
        "accumulation", "loss = weighted(loss, weight)", "loss = weighted(loss, weight) / 2",
    ),
    "micro-batches are weighted by samples instead of labels": (
        "accumulation", "loss_terms(part, stop - start) / terms", "(stop - start) / samples",
    ),
    "the first labels are not counted": ("accumulation", "LABELS_SHIFTED = False", "LABELS_SHIFTED = True"),
    "the last micro-batch is left out": (
        "accumulation_of_a_function", "range(0, samples, micro_batch_size)", "range(0, samples - 3, micro_batch_size)",
    ),
    "running statistics are updated twice": (
        "live_model", 'hidden = {"momentum": 0.0, "num_batches_tracked": None}', "hidden = {}",
    ),
    "the gradient of a chunked loss is a sum": ("chunked_loss", "share / ctx.terms if ctx.mean else share", "share"),
    "biases are not trained": (
        "as_it_is", "if parameter.requires_grad]\n    return", "if parameter.dim() > 1]\n    return",
    ),
    "gradients are cleared before the update": (
        "as_it_is", "    optimizer.step()\n    if scheduler", "    optimizer.zero_grad()\n    if scheduler",
    ),
    "the loss is scaled twice": ("mixed_precision", "scaler.scale(loss)", "scaler.scale(scaler.scale(loss))"),
    "8-bit state of another optimizer": ("eight_bit_state", "optim.AdamW8bit", "optim.LAMB8bit"),
}  # fmt: skip
"""Description -> name of the emitted file, a text that it has once, and the text that replaces it."""


def checked(name: str, emitted) -> None:
    """Run the `check` of an emitted file on the model of its fixture and a batch with ignored labels."""
    case = CASES[name]
    options = {} if case.loss_fn is None else {"loss_fn": case.loss_fn}
    if name == "accumulation_of_a_function":
        options["loss_terms"] = emitted.samples_only
    model, batch = seeded(case.build), case.batch_of(1)
    before, batch_before = copy.deepcopy(model.state_dict()), copy.deepcopy(batch)
    emitted.check(model, batch, **options)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(batch, batch_before, rtol=0, atol=0)


@each_case
def test_the_step_of_each_plan_agrees_with_a_plain_step(name, monkeypatch, capsys):
    emitted = imported(FOLDER / f"{name}.py")
    if name == "offload":  # on the CPU all tensors are in host memory already
        for module in (emitted, offload):
            monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    checked(name, emitted)
    assert capsys.readouterr().out.endswith("the step by the plan agrees with a plain step\n")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_found(fault, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, right, wrong = FAULTS[fault]
    text = source(CASES[name].plan())
    assert text.count(right) == 1
    path = tmp_path / f"{name}.py"
    path.write_text(text.replace(right, wrong))
    with pytest.raises(RuntimeError, match=r"the step by the plan differs|only the plain step has"):
        checked(name, imported(path))


class Layered(nn.Module):
    """A perceptron with dropout, and optionally with noise, or with an op in another precision."""

    def __init__(self, noise: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.noise, self.dtype = noise, dtype
        self.body, self.head = nn.Sequential(nn.Linear(16, 5), nn.ReLU(), nn.Dropout(0.5)), nn.Linear(5, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        hidden = hidden.to(self.dtype).to(hidden.dtype)
        return self.head(hidden + self.noise * torch.randn_like(hidden) if self.noise else hidden)


def emitted_check(tmp_path: pathlib.Path, model: nn.Module, *decisions, **options):
    """Return the emitted file of a plan for a live model, and a function that calls its `check` on a model."""
    batch = vectors(6)
    emit(plan_for(model, batch, *decisions, loss_fn=cross_entropy, optimizer="sgd"), tmp_path / "step.py")
    emitted = imported(tmp_path / "step.py")
    options |= {"loss_terms": emitted.samples_only} if decisions == SPLIT else {}
    return emitted, lambda model: emitted.check(model, batch, loss_fn=cross_entropy, **options)


SPLIT = (Accumulation(micro_batch_size=4, micro_batches=2),)
IN_BODY = (Precision(dtype="bf16"), Checkpoint(modules=("body",)))


@pytest.mark.parametrize("decisions", [SPLIT, IN_BODY], ids=["micro-batches", "bf16 and checkpoint"])
def test_steps_with_random_numbers_are_compared_unless_micro_batches_draw_them_separately(tmp_path, decisions):
    model = seeded(Layered)
    emitted_check(tmp_path, model, *decisions)[1](model)
    noisy = seeded(lambda: Layered(noise=0.1))
    if decisions != SPLIT:
        emitted_check(tmp_path, noisy, *decisions)[1](noisy)
        return
    with pytest.raises(RuntimeError, match="random numbers other than those of dropout also cause this"):
        emitted_check(tmp_path, noisy, *decisions)[1](noisy)


@pytest.mark.parametrize(
    "decisions", [(), SPLIT, IN_BODY], ids=["no decisions", "micro-batches", "bf16 and checkpoint"]
)
def test_gradients_are_clipped_in_both_steps(tmp_path, decisions):
    model = seeded(Layered)
    emitted_check(tmp_path, model, *decisions, max_grad_norm=0.01)[1](model)
    text = (tmp_path / "step.py").read_text()
    right = "    if max_grad_norm is not None:\n"  # first in the step by the plan
    (tmp_path / "faulty.py").write_text(text.replace(right, "    if False:\n", 1))
    emitted = imported(tmp_path / "faulty.py")
    options = {"loss_terms": emitted.samples_only} if decisions == SPLIT else {}
    with pytest.raises(RuntimeError, match="the step by the plan differs from a plain step in the gradient"):
        emitted.check(model, vectors(6), loss_fn=cross_entropy, max_grad_norm=0.01, **options)


def test_a_model_that_is_rewritten_already_is_not_compared_with_itself(tmp_path):
    model = seeded(Layered)
    emitted, check = emitted_check(tmp_path, model, *IN_BODY)
    with pytest.raises(RuntimeError, match="but this one is rewritten: call check before rewrite"):
        check(emitted.rewrite(model))


def test_the_bound_is_that_of_the_lowest_precision_of_the_model(tmp_path, capsys):
    model = seeded(lambda: Layered(dtype=torch.float32))
    emitted_check(tmp_path, model)[1](model)
    assert "allowed 0.00049" in capsys.readouterr().out
    model = seeded(lambda: Layered(dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="an op of the plain step rounds to a lower precision than float32"):
        emitted_check(tmp_path, model)[1](model)


def test_a_plain_step_that_does_not_fit_says_what_to_do(tmp_path, monkeypatch):
    model = seeded(Layered)
    emitted, check = emitted_check(tmp_path, model)

    def result_of(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(emitted, "result_of", result_of)
    with pytest.raises(RuntimeError, match=r"ran out of memory.*: pass fewer samples, or run on the CPU"):
        check(model)


def test_results_that_are_nan_or_missing_on_one_side_differ(tmp_path):
    emitted, _ = emitted_check(tmp_path, seeded(Layered))
    zeros, ones = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    emitted.compare({"gradient": {"a": zeros, "b": zeros[:0]}}, {"gradient": {"a": zeros, "b": zeros[:0]}}, 1e-16)
    for plain, planned in ((zeros, ones), (ones, ones + 1e-9), (ones, ones * float("nan")), (ones / 0, ones / 0)):
        with pytest.raises(RuntimeError, match="differs from a plain step in the gradient of a"):
            emitted.compare({"gradient": {"a": plain}}, {"gradient": {"a": planned}}, 1e-16)
    with pytest.raises(RuntimeError, match="only the planned step has the gradient of b"):
        emitted.compare({"gradient": {"a": ones}}, {"gradient": {"a": ones, "b": ones}}, 1e-16)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_flag_ends_with_an_error_if_steps_differ(tmp_path, monkeypatch):
    _, right, wrong = FAULTS["gradients are divided by the number of micro-batches twice"]
    monkeypatch.chdir(ROOT)
    text = source(CASES["accumulation"].plan())
    for content, code in ((text, 0), (text.replace(right, wrong), 1)):
        path = tmp_path / "step.py"
        path.write_text(content)
        command = [sys.executable, str(path), "--check", "--device", "cpu"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert run.returncode == code, run.stderr
        lines = run.stdout.splitlines()
        assert [line.split(":")[0] for line in lines[:2]] == ["loss", "gradient"][: 2 - code]
        assert not any(line.startswith("step ") for line in lines)
        last = (run.stderr if code else run.stdout).splitlines()[-1]
        assert last.endswith("the step by the plan agrees with a plain step") or "differs from a plain step in" in last
