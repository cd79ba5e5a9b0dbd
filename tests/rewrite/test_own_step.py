"""A step of the user's own with rewritten modules: the same weights, its state, its checks, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import logging

import pytest
import torch
from torch import nn

from planner import rewrite
from planner.errors import DecisionError, PlanFileError, WorkloadError
from planner.plan_types.decisions import Freeze, Optimizer, OptimizerKernel
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.rewrite.optimizers import make_optimizers
from planner.workload.call_convention import Calling
from planner.workload.optimizer_choice import arranged
from tests.support.loops import LOOPS, WIDTH, Loop, gan, network, two
from tests.support.training import plan_for

STEPS = 3


def plan_of(loop: Loop, model: nn.Module, *decisions):
    batch = loop.batch(8)
    plan = plan_for(model, batch if isinstance(batch, dict) else (batch,), *decisions)
    return dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, calling=Calling.STEP.name))


def weights(loop: Loop, *decisions, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Returns the state after some steps: of the user's plain loop without decisions, else of the rewritten step."""
    torch.manual_seed(0)
    model = loop.model().to(dtype)
    optimizer = loop.optimizer_of(model)
    if decisions:
        step = rewrite.apply(plan_of(loop, model, *decisions), model, optimizer, step=loop.step).step
    else:
        optimizer = arranged(optimizer, make_optimizers(optimizer, model))

        def step(batch):
            loop.step(model, optimizer, batch)

    torch.manual_seed(1)
    for _ in range(STEPS):
        step(torch.utils._pytree.tree_map(lambda tensor: tensor.to(dtype), loop.batch(8)))
    return model.state_dict()


def modules_of(loop: Loop) -> tuple[str, ...]:
    """Returns the blocks of all networks that train."""
    blocks = ((name, module) for name, module in loop.model().named_modules() if isinstance(module, nn.Sequential))
    trained = (name for name, module in blocks if any(p.requires_grad for p in module.parameters()))
    return tuple(name for name in trained if name[-1:].isdigit())


@pytest.mark.parametrize("name", LOOPS)
def test_recomputing_modules_gives_the_bits_of_the_plain_loop(name):
    loop = LOOPS[name]
    blocks = modules_of(loop)
    assert len(blocks) >= 3
    decisions = (
        Checkpoint(modules=blocks[::2], kept=tuple((0,) if n % 2 else () for n in range(len(blocks[::2])))),
        Offload(modules=blocks[1::2], inputs_of=(), from_bytes=1),
    )
    plain, rewritten = weights(loop), weights(loop, *decisions)
    assert [key for key in plain if not torch.equal(plain[key], rewritten[key])] == []


@pytest.mark.parametrize("name", ["GAN", "actor-critic", "distillation"])
def test_replaying_segments_gives_the_bits_of_the_plain_loop(name):
    loop = LOOPS[name]
    block = modules_of(loop)[0]
    plain, rewritten = weights(loop), weights(loop, Replay(modules=(block,), stretches=((0, 3),), kept=((),)))
    assert [key for key in plain if not torch.equal(plain[key], rewritten[key])] == []


def test_the_kernel_of_one_of_several_optimizers_is_set():
    loop = LOOPS["GAN"]
    model = loop.model()
    decision = OptimizerKernel(kernel="fused", optimizers=("D",))
    result = rewrite.apply(plan_of(loop, model, decision), model, loop.optimizer, step=loop.step)
    assert result.optimizer["D"].param_groups[0]["fused"] and not result.optimizer["G"].param_groups[0]["fused"]
    result.undo()
    assert not result.optimizer["D"].param_groups[0]["fused"]


def test_one_of_several_optimizers_gets_8_bit_state():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    loop = LOOPS["GAN"]
    model = loop.model()
    result = rewrite.apply(plan_of(loop, model, Optimizer(optimizers=("D",))), model, loop.optimizer, step=loop.step)
    assert isinstance(result.optimizer["D"], bitsandbytes.optim.AdamW8bit)
    assert type(result.optimizer["G"]) is torch.optim.Adam


def test_a_decision_for_an_optimizer_that_is_not_there_is_refused():
    loop = LOOPS["GAN"]
    model = loop.model()
    plan = plan_of(loop, model, OptimizerKernel(kernel="fused", optimizers=("critic",)))
    with pytest.raises(DecisionError, match="planned for optimizer 'critic', and the step has 'G', 'D'"):
        rewrite.apply(plan, model, loop.optimizer, step=loop.step)


def test_names_and_functions_in_a_dict_get_the_parameters_of_their_module():
    model = two("G", "D")()
    made = make_optimizers({"G": "adam", "D": torch.optim.SGD, "all": "sgd"}, model)
    for name, parameters in (("G", model["G"]), ("D", model["D"]), ("all", model)):
        held = [id(p) for group in made[name].param_groups for p in group["params"]]
        assert held == [id(p) for p in parameters.parameters()]


def test_the_step_gets_the_optimizers_in_the_form_in_which_they_were_given():
    seen = []

    def step(model, optimizer, batch):
        seen.append(optimizer)

    for given, kind in (({"a": "adamw"}, dict), (("adamw", "sgd"), tuple), ("adamw", torch.optim.AdamW)):
        model = network()
        loop = Loop(model=lambda: model, step=step)  # noqa: B023 - used at once
        rewrite.apply(plan_of(loop, model), model, given, step=step).step(loop.batch(2))
        assert isinstance(seen[-1], kind)


def test_training_goes_on_from_a_saved_state_to_the_same_bits():
    loop, decision = LOOPS["GAN"], Checkpoint(modules=("D.0",))
    torch.manual_seed(0)
    model = loop.model()
    first = rewrite.apply(plan_of(loop, model, decision), model, loop.optimizer, step=loop.step)
    batch = loop.batch(4)
    first.step(batch)
    other = copy.deepcopy(loop.model())
    second = rewrite.apply(plan_of(loop, other, decision), other, loop.optimizer, step=loop.step)
    other.load_state_dict(model.state_dict())
    second.step.load_state_dict(copy.deepcopy(first.step.state_dict()))
    for result in (first, second):
        torch.manual_seed(1)
        result.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(PlanFileError, match="not the state of a step with the optimizers 'G', 'D'"):
        second.step.load_state_dict({"G": {}})
    before = copy.deepcopy(second.step.state_dict())
    with pytest.raises(PlanFileError):
        second.step.load_state_dict({"G": before["G"], "D": {}})
    assert second.step.state_dict()["G"]["optimizer"]["state"].keys() == before["G"]["optimizer"]["state"].keys()


def test_a_module_that_computes_something_else_in_backward_is_refused_before_the_update():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.factor = nn.Linear(WIDTH, WIDTH), 1.0

        def forward(self, x):
            return (self.inner(x) * self.factor).tanh()

    model = nn.ModuleDict({"net": nn.Sequential(Changing(), nn.Linear(WIDTH, 1))})

    def step(model, optimizer, batch):
        loss = model["net"](batch).mean()
        model["net"][0].factor += 1.0
        loss.backward()
        optimizer.step()

    loop = Loop(model=lambda: model, step=step)
    before = copy.deepcopy(model.state_dict())
    result = rewrite.apply(plan_of(loop, model, Checkpoint(modules=("net.0",))), model, "sgd", step=step)
    with pytest.raises(DecisionError, match=r"backward computed with other values.*'factor' was 1.0"):
        result.step(loop.batch(4))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_what_is_not_checked_is_said_in_one_line(caplog):
    loop = LOOPS["GAN"]
    model = loop.model()
    with caplog.at_level(logging.WARNING):
        rewrite.apply(plan_of(loop, model, Checkpoint(modules=("D.0",))), model, loop.optimizer, step=loop.step)
    assert "the first step is not compared with the original modules" in caplog.text


def test_after_undo_the_step_refuses_and_the_modules_are_the_users_own():
    loop = LOOPS["GAN"]
    model = loop.model()
    result = rewrite.apply(plan_of(loop, model, Checkpoint(modules=("D.0",))), model, loop.optimizer, step=loop.step)
    assert "forward" in vars(model["D"][0])
    result.undo()
    assert "forward" not in vars(model["D"][0])
    with pytest.raises(DecisionError, match="was undone"):
        result.step(loop.batch(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "made with a step function of your own: pass it as step="),
        ({"step": gan, "max_grad_norm": 1.0}, "leave max_grad_norm, loss_weight and scheduler out"),
        ({"step": gan, "optimizer": None}, "cannot be created by name: give optimizer="),
    ],
)
def test_arguments_that_do_not_go_with_a_step_of_the_users_own_are_refused(options, message):
    loop = LOOPS["GAN"]
    model = loop.model()
    plan = plan_of(loop, model)
    plan = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, optimizer="G: adam, D: adamw"))
    with pytest.raises(WorkloadError, match=message):
        rewrite.apply(plan, model, **{"optimizer": loop.optimizer, **options})


def test_freezing_holds_for_the_optimizers_that_are_made():
    loop = LOOPS["GAN"]
    plain, frozen = weights(loop), weights(loop, Freeze(modules=("G.0",)))
    torch.manual_seed(0)
    before = loop.model().state_dict()
    assert torch.equal(frozen["G.0.0.weight"], before["G.0.0.weight"])
    assert not torch.equal(plain["G.0.0.weight"], before["G.0.0.weight"])


def test_verify_compares_copies_that_train_by_the_users_step():
    loop = LOOPS["WGAN-GP"]
    torch.manual_seed(0)
    model = loop.model()
    decisions = (Checkpoint(modules=("D.0", "G.1")), OptimizerKernel(kernel="fused", optimizers=("D",)))
    before = copy.deepcopy(model.state_dict())
    optimizer = {"G": torch.optim.RMSprop(model["G"].parameters()), "D": torch.optim.Adam(model["D"].parameters())}
    plan = plan_of(loop, model, *decisions)
    parity = rewrite.verify(plan, model, loop.batch(8), step=loop.step, optimizer=optimizer)
    assert parity.passed, str(parity)
    assert {row.kind for row in parity.rows} == {"parameter", "state"}
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_verify_trains_copies_with_copies_of_what_the_step_keeps():
    """Its schedulers, its counters and the model that it closes over: both trainings begin with the same state."""
    loop, calls = LOOPS["manual accumulation"], [0]
    model = network(dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    before = copy.deepcopy(model.state_dict())

    class Trainer:
        def __init__(self):
            self.model = model

        def step(self, _, optimizer, batch):
            calls[0] += 1
            if calls[0] % 2:
                loop.step(self.model, optimizer, batch)
            scheduler.step()

    plan, trainer = plan_of(loop, model, Checkpoint(modules=("0",))), Trainer()
    parity = rewrite.verify(plan, model, loop.batch(8), step=trainer.step, optimizer=optimizer)
    assert parity.passed, str(parity)
    assert calls == [0] and scheduler.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.1
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_8_bit_state_does_not_replace_an_optimizer_whose_scheduler_the_step_calls():
    pytest.importorskip("bitsandbytes")
    loop = LOOPS["manual accumulation"]
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(DecisionError, match="the learning-rate scheduler that was created for it would have no effect"):
        rewrite.apply(plan_of(loop, model, Optimizer()), model, optimizer, step=loop.step)
