"""Cases: side effects of a forward on later forwards. A recompute must not repeat them."""

from __future__ import annotations

import collections
import functools
import itertools
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.parity.case import SAMPLES, Registry
from benchmarks.parity.models.plain import CLASSES, WIDTH, Block, Perceptron, cross_entropy, vectors

CASES = Registry()
GLOBAL: dict[str, Any] = {}


class Holder:
    """A plain object that counts."""

    def __init__(self) -> None:
        self.count, self.inner = 0, {"count": 0}


class Noted(nn.Module):
    """Counts its calls in one of many places; its output does not depend on the count."""

    shared = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.inner = where, Block()
        self.count, self.counts, self.listed, self.array = 0, {"count": 0}, [0], np.zeros(1)
        self.holder, self.queue, self.ticks = Holder(), collections.deque([0]), itertools.count(1)
        self.last, self.counter, self.tensors = 0, collections.Counter(), [torch.zeros(())]
        self.tensor = torch.zeros(())
        self.register_buffer("buffer", torch.zeros(()))
        self.register_buffer("statistic", torch.zeros(WIDTH))
        self.count_in_closure, self.read_closure = _closure()
        self.settings = {"a": [{"count": 0}]}
        self.strings, self.seen = "", set()
        GLOBAL["count"], type(self).shared = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(x)
        return self.inner(x)

    def note(self, x: torch.Tensor) -> None:
        match self.where:
            case "attribute":
                self.count += 1
            case "dict":
                self.counts["count"] += 1
            case "list":
                self.listed[0] += 1
            case "array":
                self.array[0] += 1
            case "object":
                self.holder.count += 1
            case "dict in an object":
                self.holder.inner["count"] += 1
            case "deque":
                self.queue.append(len(self.queue))
            case "itertools.count":
                self.last = next(self.ticks)
            case "global dict":
                GLOBAL["count"] += 1
            case "class attribute":
                type(self).shared += 1
            case "closure":
                self.count_in_closure()
            case "Counter":
                self.counter["calls"] += 1
            case "tensor attribute, in place":
                self.tensor += 1
            case "tensor attribute, replaced":
                self.tensor = self.tensor + 1
            case "tensor in a list":
                self.tensors[0] = self.tensors[0] + 1
            case "buffer":
                self.buffer += 1
            case "nested settings":
                self.settings["a"][0]["count"] += 1
            case "string":
                self.strings += "."
            case "set":
                self.seen.add(len(self.seen))
            case "running mean in a buffer":
                with torch.no_grad():
                    self.statistic.lerp_(x.mean(0), 0.1)
            case "function attribute":
                _function.count = getattr(_function, "count", 0) + 1

    def read(self) -> Any:
        return {
            "attribute": lambda: self.count, "dict": lambda: self.counts["count"], "list": lambda: self.listed[0],
            "array": lambda: float(self.array[0]), "object": lambda: self.holder.count,
            "dict in an object": lambda: self.holder.inner["count"], "deque": lambda: len(self.queue),
            "itertools.count": lambda: self.last, "global dict": lambda: GLOBAL["count"],
            "class attribute": lambda: type(self).shared, "closure": lambda: self.read_closure(),
            "Counter": lambda: self.counter["calls"], "tensor attribute, in place": lambda: self.tensor.clone(),
            "tensor attribute, replaced": lambda: self.tensor, "tensor in a list": lambda: self.tensors[0],
            "buffer": lambda: self.buffer.clone(), "nested settings": lambda: self.settings["a"][0]["count"],
            "string": lambda: len(self.strings), "set": lambda: len(self.seen),
            "running mean in a buffer": lambda: self.statistic.square().sum(),
            "function attribute": lambda: getattr(_function, "count", 0),
        }[self.where]()  # fmt: skip


WHERE = (
    "attribute", "dict", "list", "array", "object", "dict in an object", "deque", "itertools.count", "global dict",
    "class attribute", "closure", "Counter", "tensor attribute, in place", "tensor attribute, replaced",
    "tensor in a list", "buffer", "nested settings", "string", "set", "running mean in a buffer",
    "function attribute",
)  # fmt: skip


def _function() -> None:
    """Carries a count as an attribute."""


def _closure() -> tuple[Any, Any]:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    return add, lambda: count


class Reading(nn.Module):
    """Scales its output by what a block counted."""

    def __init__(self, where: str) -> None:
        super().__init__()
        _function.__dict__.clear()
        self.first, self.noted, self.head = Block(), Noted(where), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.noted(self.first(x))
        return self.head(x * (1 + 0.1 * self.noted.read()))


for where in WHERE:
    CASES.add(f"block counts its calls: {where}", functools.partial(Reading, where), vectors, loss=cross_entropy,
              draws=True)  # fmt: skip


class OnOutput:
    """A forward hook that keeps a running mean of outputs, which a later forward uses."""

    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * float(output.detach().mean().abs() > -1)


class Observed(Perceptron):
    """Scales by a number that a forward hook on an inner module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.observer = OnOutput()
        self.blocks[0].up.register_forward_hook(self.count)
        self.calls: list = []

    def count(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.calls.append(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0.1 * len(self.calls))


CASES.add("hook on an inner module counts calls", Observed, vectors, loss=cross_entropy, draws=True)


class Pruning(nn.Module):
    """A schedule of sparsity by the calls of a layer: masks grow with each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = PrunedLayer(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x))


class PrunedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.schedule = nn.Linear(WIDTH, WIDTH), {"kept": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.schedule["kept"]
        self.schedule["kept"] *= 0.9
        return torch.tanh(x + self.linear(x)) * scale


CASES.add("schedule in a dict, decays in forward", Pruning, vectors, loss=cross_entropy, draws=True)


class Balanced(nn.Module):
    """Experts balanced without a loss: forward moves a bias buffer of the router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x)
        return self.head(sum(expert(x) * weights[:, n, None] for n, expert in enumerate(self.experts)))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.register_buffer("bias", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(1)
        chosen = F.one_hot((shares + self.bias).argmax(1), 3).to(shares.dtype)
        with torch.no_grad():
            self.bias -= 0.1 * torch.sign(chosen.mean(0) - 1 / 3)
        return chosen * shares


CASES.add("router bias moved in forward", Balanced, vectors, loss=cross_entropy, splits=False)


class Memory(nn.Module):
    """A memory that forward writes to and the next forward reads."""

    def __init__(self, as_list: bool) -> None:
        super().__init__()
        self.encoder, self.head = Remembering(as_list), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


class Remembering(nn.Module):
    def __init__(self, as_list: bool) -> None:
        super().__init__()
        self.block, self.as_list, self.kept = Block(), as_list, []
        self.register_buffer("memory", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = (sum(self.kept[-2:]) if self.kept else 0.0) if self.as_list else self.memory.clone()
        y = self.block(x + before)
        if self.as_list:
            self.kept.append(0.1 * y.detach().mean(0))
        else:
            self.memory.copy_(0.1 * y.detach().mean(0))
        return y.tanh()


CASES.add("memory in a list", lambda: Memory(True), vectors, loss=cross_entropy, splits=False)
CASES.add("memory in a buffer", lambda: Memory(False), vectors, loss=cross_entropy, splits=False)


class Clipped(nn.Module):
    """Clamps its own weights in forward (WGAN)."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in self.block.parameters():
                parameter.clamp_(-0.2, 0.2)
        return self.head(self.block(x))


CASES.add("weights clamped in forward", Clipped, vectors, loss=cross_entropy)


class Renormalised(nn.Module):
    """Divides its own weights by their norm in forward, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.head = Block(), Normalising(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.first(x)))


class Normalising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.5 + 0.5 / self.linear.weight.norm(dim=1, keepdim=True))
        return self.linear(x).tanh()


CASES.add("weights moved in forward", Renormalised, vectors, loss=cross_entropy, splits=False)


class Teacher(nn.Module):
    """Data2vec: targets from an average of weights that a submodule keeps and updates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.average = Block(), Averaged()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.student(x + 0.1), self.average(self.student, x))


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.copy = Block().requires_grad_(False)

    def forward(self, student: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for target, source in zip(self.copy.parameters(), student.parameters(), strict=True):
                target.lerp_(source, 0.2)
            return self.copy(x)


CASES.add("average of weights in a submodule", Teacher, lambda step: torch.randn(SAMPLES, WIDTH), splits=False)
