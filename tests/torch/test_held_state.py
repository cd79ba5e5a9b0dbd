"""What a model and its loss function hold is as it was after a look, in whatever they keep it."""

from __future__ import annotations

import array
import collections
import functools
import queue
import random
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

from rewrite import held_state
from rewrite.held_state import HeldState
from rewrite.untouched import Untouched


class Slotted:
    __slots__ = ("__hidden", "late", "value")

    def __init__(self) -> None:
        self.__hidden, self.value = 1, [1]

    def change(self) -> None:
        self.__hidden, self.late = 2, 2
        self.value.append(2)

    def told(self) -> object:
        return self.__hidden, self.value, hasattr(self, "late")


class Attributes(dict):
    """Keys are attributes too, as many people have it."""

    def __getattr__(self, name: str) -> object:
        return self[name]


class Anything:
    """Has every attribute that is asked for, and keeps it."""

    def __getattr__(self, name: str) -> object:
        setattr(self, name, [])
        return getattr(self, name)


class Node:
    def __init__(self, depth: int) -> None:
        self.next = Node(depth - 1) if depth else [0]


class Grown(dict):
    def __init__(self) -> None:
        super().__init__(a=1)
        self.times = [1]


def last_of(node: Node) -> list:
    while isinstance(node.next, Node):
        node = node.next
    return node.next


def ordered() -> collections.OrderedDict:
    made = collections.OrderedDict(a=1, b=2, c=3)
    made.move_to_end("a")
    return made


def projections() -> object:
    return functools.lru_cache(lambda size: [random.random()])


def twice(cache: object) -> None:
    cache(3)


def in_place(function):
    def change(tensor: torch.Tensor) -> None:
        with torch.no_grad():
            function(tensor)

    return change


def replace_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.ones(5)


def keep_a_graph(tensor: torch.Tensor) -> None:
    tensor.add_(torch.ones(2, 3, requires_grad=True))


def numbers(generator: object) -> object:
    return generator.random_raw() if isinstance(generator, np.random.BitGenerator) else generator.random()


def state_of(generator: object) -> object:
    state = generator.get_state() if isinstance(generator, np.random.RandomState) else None
    state = state or getattr(generator, "state", None)
    return str(state or generator.getstate())


def plain(tensor: torch.Tensor) -> object:
    return tensor.tolist(), tensor.requires_grad, tensor.is_leaf, tensor.stride()


CASES = {
    "ordered, moved": (ordered, lambda d: d.move_to_end("b"), lambda d: list(d.items())),
    "ordered, grown": (ordered, lambda d: d.update(e=1), lambda d: list(d.items())),
    "counter": (lambda: collections.Counter("abb"), lambda d: d.update("a"), dict),
    "default": (lambda: collections.defaultdict(list, a=[1]), lambda d: d["b"].append(1), dict),
    "deque": (lambda: collections.deque([1, 2], maxlen=2), lambda d: d.append(3), list),
    "set": (lambda: {1, 2}, lambda d: d.add(3), set),
    "of a set": (lambda: {(1, Node_of_set)}, lambda d: Node_of_set.next.append(1), lambda d: list(Node_of_set.next)),
    "long list": (lambda: list(range(5000)), lambda d: d.pop(), len),
    "empty list": (list, lambda d: d.append(1), list),
    "subclass of dict": (Grown, lambda d: d.times.append(2), lambda d: list(d.times)),
    "slots": (Slotted, Slotted.change, Slotted.told),
    "deep": (lambda: Node(40), lambda node: last_of(node).append(1), lambda node: list(last_of(node))),
    "bytes": (lambda: bytearray(b"ab"), lambda b: b.extend(b"c"), bytes),
    "array": (lambda: array.array("i", [1, 2]), lambda a: a.append(3), list),
    "numpy array": (lambda: np.zeros(3), lambda a: np.add(a, 1, out=a), list),
    "a cache": (projections, twice, lambda cache: cache.cache_info().currsize),
    "legacy generator": (lambda: np.random.RandomState(0), numbers, state_of),
    "bits": (lambda: np.random.PCG64(0), numbers, state_of),
    "generator": (lambda: np.random.default_rng(0), numbers, lambda g: state_of(g.bit_generator)),
    "python's": (lambda: random.Random(0), numbers, state_of),
    "written": (lambda: torch.zeros(2, 3), in_place(lambda t: t.add_(1)), plain),
    "data": (lambda: torch.zeros(2, 3), replace_data, plain),
    "turned": (lambda: torch.arange(4.0).view(2, 2), in_place(lambda t: t.t_()), plain),
    "resized": (lambda: torch.ones(2, 3), in_place(lambda t: t.resize_(9).zero_()), plain),
    "frozen": (lambda: torch.ones(2, requires_grad=True), lambda t: t.requires_grad_(False), plain),
    "of a graph": (lambda: torch.ones(2, 3), keep_a_graph, plain),
    "attribute of a tensor": (lambda: torch.ones(1), lambda t: setattr(t, "seen", 1), lambda t: hasattr(t, "seen")),
}
Node_of_set = Node(0)


@pytest.mark.parametrize("of_model", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_what_is_held_is_given_back_after_each_look(name, of_model):
    make, change, told = CASES[name]
    held, model = make(), nn.Linear(2, 2)

    def loss(output, batch):
        change(held)

    if of_model:
        model.held = held
    untouched, before = Untouched(model, None if of_model else loss), told(held)
    for _ in range(2):
        with untouched.look():
            change(held)
            if name != "a cache":
                assert told(held) != before
        assert told(held) == before


def test_a_gradient_that_a_forward_makes_itself_is_given_back():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1](torch.ones(1, 2)).sum().backward()
    before, copied = model[1].weight.grad, model[1].weight.grad.clone()
    with Untouched(model).look():
        for module in model:
            module(torch.ones(1, 2)).sum().backward()
        model[1].zero_grad()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is before
    assert torch.equal(before, copied)


def test_an_optimizer_within_a_model_is_given_back():
    model = nn.Linear(2, 2)
    model.inner = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    with Untouched(model).look():
        model.inner.param_groups[0]["lr"] *= 0.9
        model.inner.step()
    assert model.inner.param_groups[0]["lr"] == 0.5
    assert not model.inner.state
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("shared", [queue.Queue, threading.Event, lambda: types.SimpleNamespace(lock=threading.Lock())])
def test_what_threads_share_is_left_alone(shared):
    model = nn.Linear(2, 2)
    model.shared, model.buffer = shared(), [1]
    with Untouched(model).look():
        model.shared.later = 1
        model.buffer.append(2)
        if isinstance(model.shared, queue.Queue):
            model.shared.put(3)
    assert model.shared.later == 1
    assert model.buffer == [1]
    if isinstance(model.shared, queue.Queue):
        assert model.shared.get_nowait() == 3


@pytest.mark.parametrize("odd", [random.SystemRandom, Attributes, Anything, lambda: Attributes(__closure__=(1,))])
def test_objects_of_odd_classes_are_no_trouble(odd, caplog):
    model = nn.Linear(2, 2)
    vars(model)["odd"] = odd()
    before = dict(vars(model.odd))
    with Untouched(model).look():
        model.extra = 1
    assert not hasattr(model, "extra")
    assert vars(model.odd) == before
    assert not caplog.records


def test_numbers_that_are_not_of_torch_are_noticed():
    model = nn.Linear(2, 2)
    model.own = np.random.default_rng(0)
    untouched = Untouched(model)
    for draw in (random.random, np.random.rand, model.own.random):
        with untouched.look():
            draw()
        assert untouched.drew_on_host
        with untouched.look():
            torch.rand(3)
        assert not untouched.drew_on_host


def test_very_many_objects_are_told(monkeypatch):
    model = nn.Linear(2, 2)
    assert HeldState([model]).is_whole
    monkeypatch.setattr(held_state, "_MOST_OBJECTS", 1)
    assert not HeldState([model]).is_whole
