"""The state that a step can reach differs after each kind of change, and equals itself if nothing has changed."""

from __future__ import annotations

import array
import dataclasses
import functools
import io
import itertools
import random
import types
import weakref
from collections import deque

import numpy
import pytest
import torch
from transformers import PretrainedConfig

from planner.recording.repeats.python_state import python_state


def state_of(*roots: object) -> list[object]:
    return python_state(roots, lambda name, module, buffer: None)


class Counter:
    pass


class Base:
    calls = 0


class Derived(Base):
    pass


@dataclasses.dataclass(slots=True)
class Slots:
    calls: int = 0


class Double(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Double.calls += 1
        return gradient * 2


COUNTS = [0]
HELPERS = types.ModuleType("helpers_of_a_test")
HELPERS.calls = 0


def count() -> int:
    COUNTS[0] += 1
    return COUNTS[0]


@functools.wraps(count)
def decorated(*arguments):
    return count(*arguments)


@functools.lru_cache
def cached(number: int) -> int:
    return number


class Model(torch.nn.Module):
    """Reaches all kinds of state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.first, self.second = torch.nn.Tanh(), torch.nn.Sigmoid()
        self.config = PretrainedConfig()
        self.slots, self.derived = Slots(), Derived()
        self.nested = {"a": {"b": {"c": {"d": [0]}}}}
        self.long, self.ring = [0] * 5000, deque([0], maxlen=2)
        self.generator, self.own_random = numpy.random.default_rng(0), random.Random(0)
        self.number, self.array = numpy.int64(0), numpy.zeros(3)
        self.bytes, self.plain_array = bytearray(1), array.array("i", [0])
        self.tensor, self.count = torch.zeros(()), itertools.count()
        self.kept = Counter()
        self.weak = weakref.ref(self.kept)
        self.layer.weight.calls = 0

    def forward(self, x):
        return self.helper(Double.apply(self.layer(x)))

    def helper(self, x):
        def inner():
            return decorated(), HELPERS.calls, cached(0)

        return x * len(inner())


def swap(model: Model) -> None:
    model.first, model.second = model.second, model.first


CHANGES = {
    "an attribute of a module": lambda model: setattr(model, "more", 1),
    "an object of transformers": lambda model: setattr(model.config, "calls", 1),
    "a slot": lambda model: setattr(model.slots, "calls", 1),
    "a class": lambda model: setattr(Derived, "calls", Derived.calls + 1),
    "the base of a class": lambda model: setattr(Base, "calls", Base.calls + 1),
    "a function of autograd": lambda model: setattr(Double, "calls", Double.calls + 1),
    "a variable of a function that a method calls": lambda model: count(),
    "a variable of a module": lambda model: setattr(HELPERS, "calls", HELPERS.calls + 1),
    "a cache": lambda model: cached(cached.cache_info().currsize),
    "a list deep in dicts": lambda model: model.nested["a"]["b"]["c"]["d"].append(1),
    "a long list": lambda model: model.long.__setitem__(4000, 1),
    "a ring": lambda model: model.ring.append(1),
    "numpy's generator": lambda model: model.generator.random(),
    "Python's generator": lambda model: model.own_random.random(),
    "numpy's global generator": lambda model: numpy.random.rand(),
    "Python's global generator": lambda model: random.random(),
    "a number of numpy": lambda model: setattr(model, "number", model.number + 1),
    "an array": lambda model: model.array.__setitem__(0, 1),
    "bytes": lambda model: model.bytes.__setitem__(0, 1),
    "an array of Python": lambda model: model.plain_array.__setitem__(0, 1),
    "a tensor": lambda model: model.tensor.add_(1),
    "another tensor": lambda model: setattr(model, "tensor", torch.zeros(())),
    "a count": lambda model: next(model.count),
    "an object behind a weak reference": lambda model: setattr(model.weak(), "calls", 1),
    "an attribute of a parameter": lambda model: setattr(model.layer.weight, "calls", 1),
    "a parameter that is frozen": lambda model: model.layer.weight.requires_grad_(False),
    "a parameter with a gradient": lambda model: setattr(model.layer.weight, "grad", torch.zeros(4, 4)),
    "another parameter": lambda model: setattr(model.layer, "bias", torch.nn.Parameter(torch.zeros(4))),
    "another buffer": lambda model: setattr(model.norm, "running_mean", torch.zeros(4)),
    "swapped modules": swap,
    "a mode": lambda model: model.norm.eval(),
    "a hook": lambda model: model.layer.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name, monkeypatch):
    monkeypatch.setattr(Derived, "calls", 0, raising=False)
    model = Model()
    before = state_of(model)
    assert before == state_of(model)
    CHANGES[name](model)
    assert before != state_of(model)


def test_another_precision_is_seen():
    before = state_of()
    torch.set_default_dtype(torch.float64)
    try:
        assert before != state_of()
    finally:
        torch.set_default_dtype(torch.float32)


def test_updates_of_parameters_and_buffers_are_no_change():
    model = Model()
    before = state_of(model)
    with torch.no_grad():
        model.layer.weight.add_(1)
        model.norm.running_mean.add_(1)
    assert before == state_of(model)


@pytest.mark.parametrize("hidden", [iter([1]), itertools.cycle([1]), (x for x in [1]), io.StringIO()])
def test_an_object_that_hides_its_state_never_equals_itself(hidden):
    assert state_of(hidden) != state_of(hidden)


def test_too_many_objects_never_equal_themselves(monkeypatch):
    monkeypatch.setattr("planner.recording.repeats.python_state._MOST_OBJECTS", 10)
    roots = [[object()] for _ in range(20)]
    assert state_of(*roots) != state_of(*roots)


def test_the_state_keeps_no_tensor_alive():
    tensor = torch.zeros(3)
    reference, state = weakref.ref(tensor), state_of([tensor])
    del tensor
    assert reference() is None, state


def test_a_model_of_an_installed_package_is_searched_without_the_whole_package():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(target_modules=["0"], r=2))
    state = state_of(model)
    assert state == state_of(model)
    assert len(state) < 10_000
