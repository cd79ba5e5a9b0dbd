"""A damaged state of a training step is refused with one line, and nothing changes."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from planner.errors import PlanFileError
from planner.plan_types.decisions import Optimizer, Precision
from planner.rewrite import step_state
from tests.support.training import Perceptron, cross_entropy, rewritten, roberta, seeded, tokens, vectors

OF_FIRST = ("optimizer", "state", 0)


def put(*path_and_value):
    """Returns a function that puts a value at a path of a state."""
    *path, last, value = path_and_value

    def damage(state):
        for key in path:
            state = state[key]
        state[last] = value(state[last]) if callable(value) else value

    return damage


def drop(*path):
    def damage(state):
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return damage


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = math.nan
    return tensor


class Odd:
    pass


class Index(int):
    """A number that is equal to every other one."""

    __hash__ = int.__hash__

    def __eq__(self, other):
        return True


class Raising(dict):
    """A mapping whose entries cannot be read."""

    def __getitem__(self, key):
        raise RuntimeError("evil")

    get = __getitem__


DAMAGES = {
    "optimizer None": (put("optimizer", None), "the optimizer's state is not a dict"),
    "optimizer empty": (put("optimizer", {}), "the optimizer's state is not a dict"),
    "no state": (drop("optimizer", "state"), "the optimizer's state is not a dict"),
    "state a list": (put("optimizer", "state", []), "the optimizer's state is not a dict"),
    "no groups": (drop("optimizer", "param_groups"), "is not a list of groups"),
    "group None": (put("optimizer", "param_groups", 0, None), "is not a list of groups"),
    "group without params": (drop("optimizer", "param_groups", 0, "params"), "is not a list of groups"),
    "two groups": (put("optimizer", "param_groups", lambda groups: groups * 2), r"groups of \[10, 10\] parameters"),
    "params repeated": (put("optimizer", "param_groups", 0, "params", [0] * 10), "are not distinct integers"),
    "params of text": (put("optimizer", "param_groups", 0, "params", list("abcdefghij")), "not distinct integers"),
    "no rate": (drop("optimizer", "param_groups", 0, "lr"), "has no 'lr'"),
    "rate of text": (put("optimizer", "param_groups", 0, "lr", "1e-3"), "'lr' of group 0 .* is a value of type str"),
    "rate NaN": (put("optimizer", "param_groups", 0, "lr", math.nan), "'lr' of group 0 .* is nan"),
    "rate negative": (put("optimizer", "param_groups", 0, "lr", -1.0), "Invalid learning rate"),
    "betas out of range": (put("optimizer", "param_groups", 0, "betas", (0.9, 2.0)), "Invalid beta parameter"),
    "one beta": (put("optimizer", "param_groups", 0, "betas", (0.9,)), "'betas' of group 0"),
    "fused of text": (put("optimizer", "param_groups", 0, "fused", "yes"), "'fused' of group 0"),
    "moment of another shape": (put(*OF_FIRST, "exp_avg", torch.zeros(3)), r"'exp_avg' in .*'.*weight' is a tensor"),
    "moment of another dtype": (put(*OF_FIRST, "exp_avg", lambda t: t.long()), "dtype torch.int64, not a tensor"),
    "moment in half": (put(*OF_FIRST, "exp_avg", lambda t: t.half()), "dtype torch.float16"),
    "moment NaN": (put(*OF_FIRST, "exp_avg", with_nan), "contains NaN"),
    "moment of text": (put(*OF_FIRST, "exp_avg", "zeros"), "is a value of type str"),
    "moment on meta": (put(*OF_FIRST, "exp_avg", lambda t: t.to("meta")), "is on the meta device"),
    "moment sparse": (put(*OF_FIRST, "exp_avg", lambda t: t.to_sparse()), "is not a plain tensor"),
    "moment missing": (drop(*OF_FIRST, "exp_avg"), "has the entries exp_avg_sq, step, not exp_avg"),
    "entry of another type": (put(*OF_FIRST, Odd()), "is a value of type Odd, not a dict"),
    "moment of another type": (put(*OF_FIRST, "exp_avg", Odd()), "is a value of type Odd"),
    "entry more": (lambda state: state["optimizer"]["state"][0].update(extra=1), "has the entries .*extra"),
    "step NaN": (put(*OF_FIRST, "step", torch.tensor(math.nan)), "contains NaN"),
    "step negative": (put(*OF_FIRST, "step", torch.tensor(-5.0)), "'step' in .* contains negative or infinite values"),
    "step a negative number": (put(*OF_FIRST, "step", -(10**30)), "'step' in .* is -1000.*, not a number of steps"),
    "step infinite": (put(*OF_FIRST, "step", torch.tensor(math.inf)), "'step' in .* contains negative or infinite"),
    "step huge": (put(*OF_FIRST, "step", torch.tensor(1e30)), "'step' in .* is not a number of steps"),
    "step a huge number": (put(*OF_FIRST, "step", 10**300), "'step' in .* not a number of steps"),
    "epoch huge": (put("scheduler", "last_epoch", 10**300), "'last_epoch' of StepLR has too many digits"),
    "index True": (lambda state: state["optimizer"]["state"].update({Index(0): {}, Index(77): {}}), "is unknown"),
    "squares negative": (put(*OF_FIRST, "exp_avg_sq", lambda t: -1 - t), "'exp_avg_sq' in .* contains negative"),
    "rate without end": (
        put("optimizer", "param_groups", 0, "lr", 10**400),
        "'lr' of group 0 of the optimizer's state is 1000",
    ),
    "mapping that raises": (
        put("optimizer", "param_groups", [Raising(params=[])]),
        "cannot be read .RuntimeError: evil",
    ),
    "step of text": (put(*OF_FIRST, "step", "1"), "'step' in"),
    "parameter missing": (drop("optimizer", "state", 3), "is missing"),
    "parameter unknown": (lambda state: state["optimizer"]["state"].update({99: {}}), "parameter 99, which is unknown"),
    "parameter of text": (lambda state: state["optimizer"]["state"].update({"a": {}}), "parameter a, which is unknown"),
    "plan a tensor": (put("plan", torch.zeros(2)), "saved under another plan"),
    "decisions a text": (lambda state: state.update(plan="", decisions="abc"), "decisions cannot be read"),
    "decisions nested": (lambda state: state.update(plan="", decisions=[{"kind": []}]), "cannot be read"),
    "class None": (put("optimizer_class", None), "saved from None"),
    "scheduler without": (put("scheduler", None), "a step with no scheduler"),
    "scheduler a list": (put("scheduler", []), "state of StepLR is a value of type list"),
    "scheduler lacks": (drop("scheduler", "gamma"), "has no 'gamma'"),
    "scheduler text": (put("scheduler", "last_epoch", "2"), "'last_epoch' of StepLR is a value of type str"),
    "scheduler rates": (put("scheduler", "base_lrs", []), "'base_lrs' of StepLR has 0 values, not 1"),
    "scheduler method": (lambda state: state["scheduler"].update(step=1), "its attribute 'step'"),
    "scheduler optimizer": (lambda state: state["scheduler"].update(optimizer=1), "its attribute 'optimizer'"),
    "scaler None": (put("scaler", None), "gradient scaler's state needs the entries"),
    "scale NaN": (put("scaler", "scale", math.nan), "'scale' of the gradient scaler is nan"),
    "scale zero": (put("scaler", "scale", 0.0), "'scale' of the gradient scaler is 0.0"),
    "scale a list": (put("scaler", "scale", [1]), "'scale' of the gradient scaler is a value of type list"),
    "tracker too large": (put("scaler", "_growth_tracker", 2**31), "is larger than its tensor can hold"),
    "interval too large": (put("scaler", "growth_interval", 10**30), "is larger than its tensor can hold"),
    "factor of too many digits": (put("scaler", "growth_factor", 10**400), "'growth_factor' of the gradient scaler is"),
    "tracker a fraction": (put("scaler", "_growth_tracker", 0.5), "not an integer"),
}


def trained(steps: int):
    """A step with a scheduler and a gradient scaler, after some steps."""
    torch.manual_seed(0)
    result = rewritten(
        seeded(Perceptron),
        Precision(dtype="fp16"),
        batch=vectors(6),
        loss_fn=cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    )
    for _ in range(steps):
        result.step(vectors(6))
    return result


@pytest.fixture(scope="module")
def whole() -> dict:
    return copy.deepcopy(trained(2).step.state_dict())


@pytest.fixture(scope="module")
def target():
    return trained(3)


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_state_is_refused_in_one_line_and_nothing_changes(case, whole, target):
    damage, message = DAMAGES[case]
    state = copy.deepcopy(whole)
    damage(state)
    before = copy.deepcopy(target.step.state_dict())
    with pytest.raises(PlanFileError, match=message) as raised:
        target.step.load_state_dict(state)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600
    assert_same(before, target.step.state_dict())


def test_the_state_that_is_damaged_here_can_be_loaded(whole, target):
    other = trained(0)
    other.step.load_state_dict(copy.deepcopy(whole))
    assert_same(whole, other.step.state_dict())


def test_a_factor_of_a_scaler_may_be_a_whole_number(whole, target):
    for factor in (2, 2.0):
        state = copy.deepcopy(whole)
        state["scaler"]["growth_factor"] = factor
        target.step.load_state_dict(state)
        assert target.step.scaler.get_growth_factor() == 2


def _aliased(entry: dict, parameter: torch.Tensor) -> None:
    entry["exp_avg_sq"] = entry["exp_avg"]


def _live(entry: dict, parameter: torch.Tensor) -> None:
    entry["exp_avg"] = parameter.detach()


def _expanded(entry: dict, parameter: torch.Tensor) -> None:
    entry["exp_avg"] = torch.zeros(()).expand_as(parameter)


def _overlapping(entry: dict, parameter: torch.Tensor) -> None:
    both = torch.zeros(parameter.numel() + 1)
    entry["exp_avg"], entry["exp_avg_sq"] = both[1:].view_as(parameter), both[:-1].view_as(parameter)


@pytest.mark.parametrize("share", [_aliased, _live, _expanded, _overlapping])
@pytest.mark.parametrize("is_host", [True, False])
def test_tensors_that_share_memory_are_separate_after_loading(share, is_host):
    """All tensors of a state in host memory are copied. `is_host` False stands for a state on the card."""
    parameters = [torch.nn.Parameter(torch.ones(3, 4)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    share(state["state"][0], parameters[0])
    optimizer.load_state_dict(state)
    step_state._copy_shared_tensors(state if is_host else {"state": {}}, optimizer)
    entries = [value for values in optimizer.state.values() for value in values.values()]
    addresses = [tensor.untyped_storage().data_ptr() for tensor in (*entries, *parameters)]
    assert len(set(addresses)) == len(addresses)
    assert all(tensor.is_contiguous() for tensor in entries)
    optimizer.step()


def assert_same(a, b) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


@pytest.mark.parametrize(
    "kind", ["SGD", "Adam", "Adagrad", "Adadelta", "NAdam", "RMSprop", "ASGD", "Adafactor", "Rprop"]
)
def test_each_optimizer_of_torch_goes_on_from_its_own_state(kind):
    def build():
        return rewritten(
            seeded(Perceptron),
            batch=vectors(6),
            loss_fn=cross_entropy,
            optimizer=lambda parameters: getattr(torch.optim, kind)(parameters, lr=1e-3),
        )

    first, second = build(), build()
    second.step.load_state_dict(copy.deepcopy(first.step.state_dict()))  # before the first step
    first.step(vectors(6))
    state = copy.deepcopy(first.step.state_dict())
    second.step.load_state_dict(state)
    assert_same(state, second.step.state_dict())
    second.step(vectors(6))


@pytest.mark.parametrize("damage", [{"qmap1": torch.zeros(3)}, {"state1": torch.zeros(80, 64)}, {"absmax2": "x"}])
def test_a_damaged_state_in_8_bits_is_refused(damage):
    pytest.importorskip("bitsandbytes")
    model = seeded(lambda: roberta(hidden_size=64, vocab_size=80))
    result = rewritten(model, Optimizer(), batch=tokens(), optimizer="adamw")
    result.step(tokens())
    state = copy.deepcopy(result.step.state_dict())
    nested = "__bnb_optimizer_quant_state__"
    entry = next(e for e in state["optimizer"]["state"].values() if "qmap1" in e[nested])
    entry[nested].update(damage)
    before = copy.deepcopy(result.step.state_dict())
    with pytest.raises(PlanFileError, match=f"'{next(iter(damage))}' in the optimizer's state of '"):
        result.step.load_state_dict(state)
    assert_same(before, result.step.state_dict())


@pytest.mark.parametrize(
    ("error", "seen"), [(KeyError("x"), PlanFileError), (torch.OutOfMemoryError("full"), torch.OutOfMemoryError)]
)
def test_an_error_in_the_middle_of_loading_restores_everything(error, seen, whole, target, monkeypatch):
    before = copy.deepcopy(target.step.state_dict())

    def fail(optimizer_state, optimizer):
        raise error

    monkeypatch.setattr(step_state, "_copy_shared_tensors", fail)  # after the optimizer has loaded its state
    with pytest.raises(seen):
        target.step.load_state_dict(copy.deepcopy(whole))
    assert_same(before, target.step.state_dict())
    target.step(vectors(6))


def test_a_state_of_several_optimizers_is_loaded_all_or_nothing():
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9) for _ in range(2))
    first.state[first.param_groups[0]["params"][0]] = {"momentum_buffer": torch.ones(2)}
    with (
        pytest.raises(PlanFileError, match="the saved state cannot be loaded: SGD"),
        step_state.restored_on_error(first, None, None),
        step_state.restored_on_error(second, None, None),
    ):
        first.load_state_dict({**first.state_dict(), "state": {}})
        second.load_state_dict({})
    assert torch.equal(next(iter(first.state.values()))["momentum_buffer"], torch.ones(2))
