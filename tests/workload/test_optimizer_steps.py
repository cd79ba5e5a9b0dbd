"""Optimizers whose steps ask for values, need a closure or cannot be rehearsed: planned, or refused by their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.errors import PlannerError
from planner.rewrite.emitter.emit import source

pytestmark = pytest.mark.slow


class AroundSGD(torch.optim.Optimizer):
    """Wraps another optimizer."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)


class Sharpness(AroundSGD):
    """Runs the model again in its step, as in sharpness-aware minimization."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "give a closure"
        closure = torch.enable_grad()(closure)
        closure()
        self.base.step()


class Asking(AroundSGD):
    """Takes a step whose size depends on a value of the parameters, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.norm().item() > 0.1:
                    parameter.sub_(parameter.grad)


class Failing(AroundSGD):
    """Calls something that takes no fake tensor."""

    def step(self, closure=None):
        raise RuntimeError("expected a float")


def planned(optimizer) -> planner.Plan:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    return planner.plan(
        model, (torch.randn(8, 64),), vram=None, gpu="bare", loss_fn=lambda o, _: o.pow(2).mean(), optimizer=optimizer
    )


def test_adafactor_of_transformers_is_planned_with_its_default_arguments():
    from transformers.optimization import Adafactor

    state = planned(Adafactor).peak.breakdown["optimizer state"]
    # Of each matrix the means of the rows and columns, of each bias the whole second moment, and the size of each.
    assert state == 4 * (512 + 64 + 512 + 64 + 512 + 64) + 4 * 4


@pytest.mark.parametrize(
    ("optimizer", "error"),
    [
        (
            Sharpness,
            "the step of the optimizer Sharpness failed .*cannot be planned: give the optimizer that it wraps",
        ),
        (Failing, "the step of the optimizer Failing failed .*expected a float.*check that Failing steps without a"),
        (Asking, "in the step of Asking at .*test_optimizer_steps.py:.*whose step does not depend on tensor values"),
        (torch.optim.LBFGS, "LBFGS runs the model again inside its own step"),
    ],
)
def test_an_optimizer_that_cannot_be_planned_is_refused_by_its_name(optimizer, error):
    with pytest.raises(PlannerError, match=error) as refused:
        planned(optimizer)
    assert "with this batch" not in str(refused.value)


ELEMENTS = 64 * 512
"""Elements of each of the two matrices of the planned model."""


@pytest.mark.parametrize(
    ("name", "least", "tables"),
    [
        ("lion_32bit", 4 * 2 * ELEMENTS, 0),
        ("lion_8bit", 2 * ELEMENTS, 1),
        ("paged_adamw_8bit", 4 * ELEMENTS, 2),
        ("paged_lion_8bit", 2 * ELEMENTS, 1),
    ],
)
def test_optimizers_of_bitsandbytes_are_planned_by_the_trainers_names(name, least, tables, monkeypatch):
    """State of matrices below 100,000 elements is never paged."""
    bitsandbytes = pytest.importorskip("bitsandbytes", exc_type=ImportError)
    # bitsandbytes keeps settings of single parameters for the whole process, and other tests may have left some.
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    monkeypatch.setattr(manager, "index2config", {})
    monkeypatch.setattr(manager, "module_weight_config_triple", [])
    plan = planned(name)
    state = plan.peak.breakdown["optimizer state"]
    assert least < state < 1.1 * least + tables * 1024 + 8192
    assert ("unified memory" in " ".join(plan.notes)) == name.startswith("paged_")
    scope: dict = {}
    exec(source(plan), scope)
    assert type(scope["make_optimizer"](nn.Linear(2, 2))).__name__.lower() == name.replace("_", "")


def test_paged_state_of_large_matrices_is_not_counted():
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    model = nn.Linear(400, 400, bias=False)
    plan = planner.plan(
        model,
        (torch.randn(2, 400),),
        vram=None,
        gpu="bare",
        loss_fn=lambda o, _: o.sum(),
        optimizer="paged_adamw_32bit",
    )
    assert plan.peak.breakdown.get("optimizer state", 0) == 0


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_optimizers_of_bitsandbytes_that_cannot_be_rehearsed_are_not_blamed_on_the_batch(name):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    options = {"lr": 0.1, "momentum": 0.9} if name == "LARS" else {}
    with pytest.raises(PlannerError, match=f"the step of the optimizer {name} failed"):
        planned(lambda parameters: getattr(bitsandbytes.optim, name)(parameters, **options))
