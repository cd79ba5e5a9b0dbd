"""An optimizer that steps with another of torch's kernels trains the same, and undo restores it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from planner.errors import DecisionError
from planner.plan_types.decisions import (
    Accumulation,
    Decision,
    Freeze,
    Optimizer,
    OptimizerKernel,
    Precision,
    StepInBackward,
)
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite import apply, source
from planner.workload.optimizer_choice import OPTIMIZERS as NAMED
from planner.workload.torch_optimizers import kernel_instead_of_foreach
from tests.support.training import Perceptron, cross_entropy, plan_for, rewritten, seeded, vectors

OPTIMIZERS = tuple(name for name, named in NAMED.items() if named.library == "torch")
FUSED, LOOP = OptimizerKernel(kernel="fused"), OptimizerKernel(kernel="for-loop")

WITH_FUSED = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}),
    "adam, weight decay": (torch.optim.Adam, {"lr": 3e-3, "weight_decay": 0.1}),
    "adam, amsgrad, maximize": (torch.optim.Adam, {"lr": 3e-3, "amsgrad": True, "maximize": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
}
WITHOUT_FUSED = {
    name: (getattr(torch.optim, name), {"lr": 0.01})
    for name in ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor")
} | {
    "sgd, nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
# fused kernels divide and take roots in another order: a few units in the last place, each step
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def made_by(kind, options, **more):
    return lambda parameters: kind(parameters, **options, **more)


def trained(model, batches, *decisions: Decision, **options):
    """Return losses, weights and a copy of the optimizer state by parameter, after one step on each batch."""
    result = rewritten(model, *decisions, batch=batches[0], loss_fn=cross_entropy, **options)
    torch.manual_seed(1)
    losses = [result.step(batch) for batch in batches]
    return losses, model.state_dict(), result.optimizer.state_dict()["state"]


def assert_close(one, other, **tolerance) -> None:
    torch.testing.assert_close(one, other, check_device=True, **tolerance)


THREE = [vectors(seed=seed) for seed in range(3)]


@pytest.mark.parametrize("name", [*WITH_FUSED, *WITHOUT_FUSED])
def test_a_loop_trains_as_foreach_does_most_of_them_to_the_same_bits(name):
    kind, settings = {**WITH_FUSED, **WITHOUT_FUSED}[name]
    tolerance = CLOSE if name in ("ASGD", "NAdam", "RAdam", "Adafactor") else {"rtol": 0, "atol": 0}
    model = seeded(Perceptron)
    foreach = trained(copy.deepcopy(model), THREE, optimizer=made_by(kind, settings, foreach=True))
    looped = trained(copy.deepcopy(model), THREE, LOOP, optimizer=made_by(kind, settings))
    assert_close(looped, foreach, **tolerance)


class LateBranch(nn.Module):
    """A network whose second branch is used from the third call on: its parameters get their first gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(16, 3), nn.Linear(16, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.first(x) + self.second(x) if self.calls > 2 else self.first(x)


@pytest.mark.parametrize("name", [*WITH_FUSED, *WITHOUT_FUSED])
def test_a_parameter_whose_first_gradient_comes_late_is_trained_by_the_kernel_that_is_offered(name):
    kind, settings = {**WITH_FUSED, **WITHOUT_FUSED}[name]
    decision = OptimizerKernel(kernel=kernel_instead_of_foreach(kind(seeded(Perceptron).parameters(), **settings)))
    foreach, found = (
        trained(seeded(LateBranch), THREE, *decisions, optimizer=made_by(kind, settings))
        for decisions in ((), (decision,))
    )
    assert_close(found, foreach, **CLOSE)


@pytest.mark.parametrize("name", WITH_FUSED)
def test_fused_trains_as_foreach_does(name):
    kind, settings = WITH_FUSED[name]
    model = seeded(Perceptron)
    foreach = trained(copy.deepcopy(model), THREE, optimizer=made_by(kind, settings, foreach=True))
    fused = trained(copy.deepcopy(model), THREE, FUSED, optimizer=made_by(*WITH_FUSED[name]))
    assert_close(fused, foreach, **CLOSE)


SPLIT = Accumulation(micro_batch_size=4, micro_batches=2)
BESIDE = {
    "fp16 and its scaler": (Precision(dtype="fp16"),),
    "accumulation": (SPLIT,),
    "fp16, accumulation, checkpoint": (Precision(dtype="fp16"), SPLIT, Checkpoint(modules=("layers.1",))),
    "freeze": (Freeze(modules=("layers.0",)),),
}


@pytest.mark.parametrize("clipped", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("kernel", [FUSED, LOOP], ids=["fused", "loop"])
def test_together_with_other_decisions(kernel, beside, clipped):
    model, options = seeded(Perceptron), {"optimizer": "adamw", **({"max_grad_norm": 0.1} if clipped else {})}
    before = trained(copy.deepcopy(model), THREE, *beside, **options)
    assert_close(trained(copy.deepcopy(model), THREE, *beside, kernel, **options), before, **CLOSE)


def test_fused_inside_of_the_backward_trains_to_the_same_bits():
    model = seeded(Perceptron)
    after = trained(copy.deepcopy(model), THREE, FUSED, optimizer="adamw")
    inside = trained(copy.deepcopy(model), THREE, FUSED, StepInBackward(), optimizer="adamw")
    assert_close(inside, after, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", [FUSED, LOOP], ids=["fused", "loop"])
def test_the_scaler_skips_a_step_with_gradients_that_are_not_finite(kernel):
    model = seeded(Perceptron)
    result = rewritten(
        model, Precision(dtype="fp16"), kernel, batch=vectors(), loss_fn=cross_entropy, optimizer="adamw"
    )
    result.step(vectors())
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(result.optimizer.state_dict()["state"])
    scale = result.step.scaler.get_scale()
    broken = model.head.weight.register_hook(lambda gradient: gradient * torch.inf)
    result.step(vectors())
    broken.remove()
    assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert_close(result.optimizer.state_dict()["state"], state, rtol=0, atol=0)
    assert result.step.scaler.get_scale() == scale / 2
    result.step(vectors())
    assert not torch.equal(model.head.weight, weights["head.weight"])


def options_of(optimizer) -> tuple:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return groups, dict(optimizer.defaults), len(optimizer._optimizer_load_state_dict_post_hooks)


def test_undo_gives_back_every_group_as_it_was():
    model = seeded(Perceptron)
    groups = [{"params": [*model.layers.parameters()], "lr": 1e-2}, {"params": [*model.head.parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    before = options_of(optimizer)
    result = rewritten(model, FUSED, batch=vectors(), loss_fn=cross_entropy, optimizer=optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    result.step(vectors())
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert optimizer.param_groups.pop()["fused"] is True, "a group that is added later steps so as well"
    result.undo()
    assert options_of(optimizer) == before


def test_what_was_set_otherwise_since_is_not_silently_undone():
    result = rewritten(seeded(Perceptron), LOOP, batch=vectors(), loss_fn=cross_entropy, optimizer="adamw")
    result.optimizer.param_groups[0]["foreach"] = True
    with pytest.raises(DecisionError, match="foreach of AdamW was replaced"):
        result.undo()


def test_step_counters_have_the_dtype_that_each_kernel_reads():
    """The fused kernel reads float32 counters, other kernels the default dtype, which differs here."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        model = seeded(Perceptron)
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"batch": vectors(dtype=torch.float64), "loss_fn": cross_entropy, "optimizer": optimizer}
        rewritten(model, **options).step(options["batch"])
        dtypes = lambda: {state["step"].dtype for state in optimizer.state.values()}  # noqa: E731
        assert dtypes() == {torch.float64}
        fused = rewritten(model, FUSED, **options)
        assert dtypes() == {torch.float32}
        fused.step(options["batch"])
        fused.undo()
        assert dtypes() == {torch.float64}
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["adamw", "adagrad"])
def test_state_goes_from_one_kernel_to_the_other_and_back(name):
    """The kernel stays chosen after `load_state_dict`, whose groups do not contain the option."""
    make = made_by(*WITH_FUSED[name])
    batches = [vectors(seed=seed) for seed in range(6)]
    expected = trained(seeded(Perceptron), batches, optimizer=make)
    model = seeded(Perceptron)
    optimizer = make(model.parameters())
    torch.manual_seed(1)
    plain_one = rewritten(model, batch=batches[0], loss_fn=cross_entropy, optimizer=optimizer)
    losses = [plain_one.step(batch) for batch in batches[:2]]
    saved = copy.deepcopy(optimizer.state_dict())
    fused = rewritten(model, FUSED, batch=batches[0], loss_fn=cross_entropy, optimizer=optimizer)
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert all(step.dtype is torch.float32 for step in steps)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["fused"] is True
    losses += [fused.step(batch) for batch in batches[2:4]]
    fused.undo()
    assert optimizer.param_groups[0]["fused"] is None
    losses += [plain_one.step(batch) for batch in batches[4:]]
    assert_close((losses, model.state_dict(), optimizer.state_dict()["state"]), expected, **CLOSE)


class Custom(torch.optim.SGD):
    """An optimizer of unknown kind: its step may look at all gradients."""


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).abs()[:, :3]


REFUSED = {
    "no fused kernel": (FUSED, Perceptron, torch.optim.RMSprop, "RMSprop has no fused kernel"),
    "momentum": (
        FUSED,
        Perceptron,
        made_by(torch.optim.SGD, {}, momentum=0.9),
        "SGD with momentum fails if a parameter",
    ),
    "no such class": (LOOP, Perceptron, torch.optim.LBFGS, "LBFGS is not known"),
    "of one's own": (FUSED, Perceptron, Custom, "Custom is not known"),
    "fused already": (LOOP, Perceptron, made_by(torch.optim.AdamW, {}, fused=True), "fused=True, which is kept"),
    "foreach already": (FUSED, Perceptron, made_by(torch.optim.AdamW, {}, foreach=True), "foreach=True, which is"),
    "a loop already": (FUSED, Perceptron, made_by(torch.optim.AdamW, {}, foreach=False), "foreach=False, which is"),
    "differentiable": (FUSED, Perceptron, made_by(torch.optim.Adam, {}, differentiable=True), "differentiable=True"),
    "sparse gradients": (FUSED, lambda: nn.EmbeddingBag(9, 3, sparse=True), torch.optim.SGD, "sparse gradients"),
    "not floating point": (FUSED, Complex, torch.optim.AdamW, "complex64, not floating point"),
}


@pytest.mark.parametrize(("kernel", "build", "optimizer", "reported"), REFUSED.values(), ids=REFUSED)
def test_an_optimizer_without_this_kernel_is_refused_and_not_changed(kernel, build, optimizer, reported):
    model = seeded(build)
    given = optimizer(model.parameters())
    before = options_of(given)
    with pytest.raises(DecisionError, match=reported):
        rewritten(model, kernel, batch=vectors(), loss_fn=cross_entropy, optimizer=given)
    assert options_of(given) == before


def test_two_optimizers_are_not_put_into_one_place():
    for other, reported in ((Optimizer(), "8-bit state"), (StepInBackward(), "loop changes nothing")):
        with pytest.raises(DecisionError, match=reported):
            rewritten(seeded(Perceptron), LOOP, other, batch=vectors(), loss_fn=cross_entropy, optimizer="adamw")
    with pytest.raises(DecisionError, match="unknown: choose fused or for-loop"):
        OptimizerKernel(kernel="foreach")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_file_makes_the_optimizer_with_the_option_of_the_live_one(name):
    kernel = kernel_instead_of_foreach(name)
    plan = plan_for(
        seeded(Perceptron), vectors(), OptimizerKernel(kernel=kernel), loss_fn=cross_entropy, optimizer=name
    )
    scope: dict = {}
    exec(compile(source(plan), "train_step.py", "exec"), scope)
    made = scope["make_optimizer"](seeded(Perceptron))
    live = apply(plan, seeded(Perceptron), loss_fn=cross_entropy).optimizer
    assert type(made) is type(live)
    assert options_of(made)[:2] == options_of(live)[:2]


def test_a_file_for_an_optimizer_of_the_users_own_names_the_option():
    plan = plan_for(seeded(Perceptron), vectors(), LOOP, loss_fn=cross_entropy, optimizer="torch.optim.rmsprop.RMSprop")
    assert "return torch.optim.RMSprop(parameters, foreach=False)" in source(plan)
