"""State of a model and its loss function is restored after a probe, whatever kind of object holds it."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import queue
import random
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from planner.rewrite.accumulation_check import object_snapshot
from planner.rewrite.accumulation_check.object_snapshot import ObjectSnapshot
from planner.rewrite.accumulation_check.side_effects import SideEffectGuard


class Slotted:
    __slots__ = ("__hidden", "late", "value")

    def __init__(self) -> None:
        self.__hidden, self.value = 1, [1]

    def change(self) -> None:
        self.__hidden, self.late = 2, 2
        self.value.append(2)

    def content(self) -> object:
        return self.__hidden, self.value, hasattr(self, "late")


class Attributes(dict):
    """A dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> object:
        return self[name]


class Anything:
    """Creates every attribute that is read, and keeps it."""

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


@dataclasses.dataclass(unsafe_hash=True)
class Entry:
    """Has a hash that depends on state which a forward changes."""

    number: int = 0


def seen() -> tuple[Entry, set, dict]:
    entry = Entry()
    return entry, {entry}, {entry: 0}


def see(held: tuple[Entry, set, dict]) -> None:
    entry, elements, counts = held
    elements.discard(entry)
    counts.pop(entry, 0)
    entry.number += 1
    elements.add(entry)
    counts[entry] = 1


class Reset:
    def change(self) -> None:
        self.__dict__ = {"number": vars(self).get("number", 0) + 1}


class SlotsAlone:
    __slots__ = ()


class OtherSlots:
    __slots__ = ()


def by_tensors() -> dict:
    return {torch.ones(2): 1, torch.zeros(2): 2}


class Early:
    def change(self) -> None:
        self.__class__, self.more = Late, 1


class Late(Early):
    pass


def hooked() -> torch.Tensor:
    tensor = torch.ones(1, requires_grad=True)
    add_hooks(tensor)
    return tensor


def add_hooks(tensor: torch.Tensor) -> None:
    tensor.register_hook(lambda gradient: 2 * gradient)
    tensor.register_post_accumulate_grad_hook(lambda tensor: None)


def count_of_hooks(tensor: torch.Tensor) -> int:
    tensor.grad = None
    tensor.sum().backward()
    return int(tensor.grad), len(tensor._post_accumulate_grad_hooks or ())


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
    "slots": (Slotted, Slotted.change, Slotted.content),
    "deep": (lambda: Node(40), lambda node: last_of(node).append(1), lambda node: list(last_of(node))),
    "bytes": (lambda: bytearray(b"ab"), lambda b: b.extend(b"c"), bytes),
    "array": (lambda: array.array("i", [1, 2]), lambda a: a.append(3), list),
    "numpy array": (lambda: np.zeros(3), lambda a: np.add(a, 1, out=a), list),
    "hashes": (seen, see, lambda held: (held[0].number, held[0] in held[1], list(held[2].items()))),
    "a new dict": (Reset, Reset.change, lambda held: vars(held).copy()),
    "a class of slots": (SlotsAlone, lambda held: setattr(held, "__class__", OtherSlots), type),
    "order by tensors": (by_tensors, lambda d: d.update({(k := next(iter(d))): d.pop(k)}), lambda d: list(d.values())),
    "without hooks": (hooked, lambda t: setattr(t, "_backward_hooks", None), count_of_hooks),
    "a class": (lambda: Early(), Early.change, lambda held: (type(held), vars(held).copy())),
    "hooks of a tensor": (lambda: torch.ones(1, requires_grad=True), add_hooks, count_of_hooks),
    "more hooks of a tensor": (hooked, add_hooks, count_of_hooks),
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
def test_held_objects_are_restored_after_each_probe(name, of_model):
    make, change, content = CASES[name]
    held, model = make(), nn.Linear(2, 2)

    def loss(output, batch):
        change(held)

    if of_model:
        model.held = held
    untouched, before = SideEffectGuard(model, None if of_model else loss), content(held)
    for _ in range(2):
        with untouched.restoring():
            change(held)
            assert content(held) != before
        assert content(held) == before


def test_a_gradient_that_a_forward_makes_itself_is_restored():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1](torch.ones(1, 2)).sum().backward()
    before, copied = model[1].weight.grad, model[1].weight.grad.clone()
    with SideEffectGuard(model).restoring():
        for module in model:
            module(torch.ones(1, 2)).sum().backward()
        model[1].zero_grad()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is before
    assert torch.equal(before, copied)


def test_an_optimizer_within_a_model_is_restored():
    model = nn.Linear(2, 2)
    model.inner = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    with SideEffectGuard(model).restoring():
        model.inner.param_groups[0]["lr"] *= 0.9
        model.inner.step()
    assert model.inner.param_groups[0]["lr"] == 0.5
    assert not model.inner.state
    assert torch.equal(model.weight, before)


@dataclasses.dataclass(slots=True)
class Buffer:
    lock: object = dataclasses.field(default_factory=threading.Lock)
    later: int = 0


@pytest.mark.parametrize(
    "shared",
    [
        queue.Queue, threading.Event, Buffer, lambda: types.SimpleNamespace(lock=threading.RLock()),
        lambda: types.SimpleNamespace(tasks=queue.Queue()),
    ],
)  # fmt: skip
def test_what_threads_share_is_left_alone(shared):
    model = nn.Linear(2, 2)
    model.shared, model.buffer = shared(), [1]
    with SideEffectGuard(model).restoring():
        model.shared.later = 1
        model.buffer.append(2)
        if isinstance(model.shared, queue.Queue):
            model.shared.put(3)
    assert model.shared.later == 1
    assert model.buffer == [1]
    if isinstance(model.shared, queue.Queue):
        assert model.shared.get_nowait() == 3


class NotYet(list):
    def __len__(self) -> int:
        raise RuntimeError("not loaded yet")

    def __iter__(self) -> object:
        raise RuntimeError("not loaded yet")


class Proxy:
    @property
    def __dict__(self) -> dict:
        raise RuntimeError("outside of a context")


class WithoutHash(type):
    __hash__ = None

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("no")


ODD = {
    "system's": random.SystemRandom,
    "attributes": Attributes,
    "attributes that mislead": lambda: Attributes(__closure__=(1,)),
    "anything": Anything,
    "not yet": NotYet,
    "a proxy": Proxy,
    "of a class without hash": WithoutHash("Odd", (), {}),
    "weak": lambda: weakref.WeakSet([Early()]),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.parametrize("name", ODD)
def test_objects_of_odd_classes_are_no_trouble(name, caplog):
    model = nn.Linear(2, 2)
    odd = vars(model)["odd"] = ODD[name]()
    before = None if name == "a proxy" else copy.copy(getattr(odd, "__dict__", None))
    with SideEffectGuard(model).restoring():
        model.extra = 1
    assert not hasattr(model, "extra")
    assert name == "a proxy" or getattr(odd, "__dict__", None) == before
    assert not caplog.records


def test_an_interruption_comes_when_all_is_restored(monkeypatch):
    model, refill, calls = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), object_snapshot.restore_entries, []

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt
        refill(*arguments)

    monkeypatch.setattr(object_snapshot, "restore_entries", interrupted)
    with pytest.raises(KeyboardInterrupt), SideEffectGuard(model).restoring():
        for module in model.modules():
            module.training = False
    assert all(module.training for module in model.modules())


def test_attributes_are_never_away():
    """Other threads may read attributes at any time."""
    model = nn.Linear(2, 2)
    for number in range(100):
        setattr(model, f"number{number}", number)
    away, over = [], threading.Event()

    def read() -> None:
        while not over.is_set():
            away.extend(not hasattr(model, "number99") for _ in range(100))

    before, reader = sys.getswitchinterval(), threading.Thread(target=read)
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        untouched = SideEffectGuard(model)
        for turn in range(30):
            with untouched.restoring():
                model.number0, model.extra = turn + 1, 1
        over.set()
        reader.join()
    finally:
        sys.setswitchinterval(before)
    assert away
    assert not any(away)
    assert model.number0 == 0


def test_numbers_that_are_not_of_torch_are_noticed():
    model = nn.Linear(2, 2)
    model.own = np.random.default_rng(0)
    untouched = SideEffectGuard(model)
    for draw in (random.random, np.random.rand, model.own.random):
        with untouched.restoring():
            draw()
        assert untouched.drew_on_host
        with untouched.restoring():
            torch.rand(3)
        assert not untouched.drew_on_host


def test_very_many_objects_are_logged(monkeypatch):
    model = nn.Linear(2, 2)
    assert ObjectSnapshot([model]).is_complete
    monkeypatch.setattr(object_snapshot, "_MAX_OBJECTS", 1)
    assert not ObjectSnapshot([model]).is_complete
