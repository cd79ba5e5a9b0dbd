"""Cases: state that changes in forward, or that the parent sets before it calls a module."""

from __future__ import annotations

import collections
import itertools
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.parity.case import SAMPLES, Registry
from benchmarks.parity.models.plain import CLASSES, WIDTH, Block, Perceptron, cross_entropy, vectors

CASES = Registry()
CALLS = {"count": 0}
"""A global that a forward changes."""


class TimeSetByParent(nn.Module):
    """The parent sets a time on a shared block before each call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.head, self.kind = TimedBlock(kind), nn.Linear(WIDTH, CLASSES), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for time in range(3):
            match self.kind:
                case "number":
                    self.block.time = float(time)
                case "tensor":
                    self.block.time = torch.tensor(float(time))
                case "dict":
                    self.block.options["time"] = float(time)
                case "list":
                    self.block.times.append(float(time))
                case "object":
                    self.block.state.time = float(time)
                case "array":
                    self.block.array[0] = time
            x = self.block(x)
        return self.head(x)


class State:
    def __init__(self) -> None:
        self.time = 0.0


class TimedBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.time = kind, 0.0
        self.options, self.state, self.array = {"time": 0.0}, State(), np.zeros(1)
        self.times: Any = collections.deque(maxlen=1) if kind == "list" else []
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = {
            "number": lambda: self.time, "tensor": lambda: self.time, "dict": lambda: self.options["time"],
            "list": lambda: self.times[-1], "object": lambda: self.state.time, "array": lambda: float(self.array[0]),
        }[self.kind]()  # fmt: skip
        return x + self.out(torch.tanh(self.linear(x) * (1.0 + time) + time))


for kind in ("number", "tensor", "dict", "list", "object", "array"):
    CASES.add(f"time set by the parent: {kind}", lambda kind=kind: TimeSetByParent(kind), vectors, loss=cross_entropy)


class SavedByKind(nn.Module):
    """The parent sets a tensor on a shared block, of which backward needs only this tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.head, self.kind = KindBlock(kind), nn.Linear(WIDTH, CLASSES), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(WIDTH, device=x.device) % 3
        for number in range(3):
            match self.kind:
                case "index":
                    self.block.value = torch.full((), number, dtype=torch.long, device=x.device)
                case "bytes":
                    self.block.value = (at == number).to(torch.uint8)
                case "mask":
                    self.block.value = at == number
                case "numbers":
                    self.block.value = (at == number).to(x.dtype)
            x = self.block(x)
        return self.head(x)


class KindBlock(nn.Module):
    value: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner, self.table = kind, nn.Linear(WIDTH, WIDTH), nn.Embedding(3, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "index":
            return torch.tanh(self.inner(x)) + self.table(self.value)
        if self.kind == "mask":
            return x + self.inner(x).masked_fill(self.value, 0.0)
        return x + self.inner(x) * self.value


for kind in ("index", "bytes", "mask", "numbers"):
    CASES.add(f"tensor set by the parent: {kind}", lambda kind=kind: SavedByKind(kind), vectors, loss=cross_entropy)


class DrawsForNothing(nn.Module):
    """A block draws numbers that do not change its output; its parent draws from the same generator."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.block, self.head = source, DrawingBlock(source), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = draw(self.source)
        return self.head(self.block(x)) * (1 + scale)


class DrawingBlock(Block):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw(self.source)
        return super().forward(x)


def draw(source: str) -> float:
    """Returns a number from Python's or NumPy's global generator."""
    return random.random() if source == "python" else float(np.random.rand())


for source in ("python", "numpy"):
    CASES.add(f"numbers drawn for nothing: {source}", lambda source=source: DrawsForNothing(source), vectors,
              loss=cross_entropy, draws=True)  # fmt: skip


class Counting(nn.Module):
    """Scales by a counter that each forward advances."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.head = CountingBlock(where), nn.Linear(WIDTH, CLASSES)
        self.first = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.first(x)))


class CountingBlock(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.count, self.counts = where, 0, {"count": 0}
        self.listed, self.array, self.ticks = [0], np.zeros(1), itertools.count()
        self.queue: collections.deque = collections.deque([0], maxlen=4)
        self.state, self.first_call = State(), True
        self.register_buffer("steps", torch.zeros(()))
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        CALLS["count"] = 0
        self.random = random.Random(0)
        self.generator = np.random.default_rng(0)
        self.torch_generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.linear(x) * (1.0 + 0.1 * self.advance())))

    def advance(self) -> Any:
        match self.where:
            case "attribute":
                self.count += 1
                return self.count
            case "dict":
                self.counts["count"] += 1
                return self.counts["count"]
            case "list":
                self.listed[0] += 1
                return self.listed[0]
            case "growing list":
                self.listed.append(len(self.listed))
                return self.listed[-1]
            case "array":
                self.array += 1
                return float(self.array[0])
            case "object":
                self.state.time += 1
                return self.state.time
            case "itertools.count":
                return next(self.ticks)
            case "global":
                CALLS["count"] += 1
                return CALLS["count"]
            case "deque":
                self.queue.append(self.queue[-1] + 1)
                return self.queue[-1]
            case "buffer":
                self.steps += 1
                return self.steps.clone()
            case "replaced buffer":
                self.steps = self.steps + 1
                return self.steps
            case "first call":
                self.first_call, first = False, self.first_call
                return 5.0 if first else 1.0
            case "random.Random":
                return self.random.random()
            case "numpy generator":
                return float(self.generator.random())
            case "torch generator":
                return torch.rand((), generator=self.torch_generator)
            case "global random":
                return random.random()
            case "global numpy":
                return float(np.random.rand())
        raise ValueError(self.where)


for where in ("attribute", "dict", "list", "growing list", "array", "object", "itertools.count", "global", "deque",
              "buffer", "replaced buffer", "first call", "random.Random", "numpy generator", "torch generator",
              "global random", "global numpy"):  # fmt: skip
    CASES.add(
        f"counter in forward: {where}", lambda where=where: Counting(where), vectors, loss=cross_entropy, draws=True
    )


class Switching(nn.Module):
    """A schedule in forward that first changes anything in the third step."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.block, self.head = after, TimedBlock("number"), nn.Linear(WIDTH, CLASSES)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for time in range(2):
            self.block.time = float(time) if self.calls > self.after else 0.0
            x = self.block(x)
        return self.head(x)


CASES.add("the parent sets a time from step 3 on", lambda: Switching(2), vectors, loss=cross_entropy, draws=True,
          known=(("checkpoint", "values are compared in steps 1, 2, 4, 8 and 16"),))  # fmt: skip


class MovingAverage(nn.Module):
    """A target network that follows the student in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Perceptron(), Perceptron()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for target, source in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                target.lerp_(source, 0.1)
            wanted = self.teacher(x)
        return F.mse_loss(self.student(x + 0.1), wanted)


CASES.add("teacher as a moving average", MovingAverage, lambda step: torch.randn(SAMPLES, WIDTH))


class Queue(nn.Module):
    """MoCo: negatives from a queue of earlier batches, a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.momentum = (
            nn.Sequential(Block(), nn.Linear(WIDTH, 8)),
            nn.Sequential(Block(), nn.Linear(WIDTH, 8)),
        )
        self.momentum.load_state_dict(self.encoder.state_dict())
        self.momentum.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(2 * SAMPLES, 8), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for target, source in zip(self.momentum.parameters(), self.encoder.parameters(), strict=True):
                target.mul_(0.9).add_(source, alpha=0.1)
            keys = F.normalize(self.momentum(x + 0.01), dim=1)
        queries = F.normalize(self.encoder(x), dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().T], 1)
        loss = F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long, device=x.device))
        with torch.no_grad():
            self.queue = torch.cat([keys, self.queue])[: 2 * SAMPLES]
        return loss


CASES.add("queue of negatives (MoCo)", Queue, lambda step: torch.randn(SAMPLES, WIDTH), splits=False)


class StochasticDepth(nn.Module):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.source == "per sample":
                kept = (torch.rand(len(x), 1, device=x.device) < 0.7).to(x.dtype)
                x = x + (block(x) - x) * kept / 0.7
            elif (random.random() if self.source == "python" else np.random.rand()) < 0.7:
                x = block(x)
        return self.head(x)


for source in ("per sample", "python", "numpy"):
    CASES.add(f"stochastic depth: {source}", lambda source=source: StochasticDepth(source), vectors,
              loss=cross_entropy, draws=True)  # fmt: skip


class WarmUp(nn.Module):
    """Its own loss is scaled by a counter of the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = Perceptron(), 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(self.body(x), y) * min(1.0, self.calls / 4)


CASES.add("loss warm-up by a counter in forward", WarmUp, vectors)


def counting_loss() -> tuple[nn.Module, Any]:
    calls = itertools.count(1)
    return Perceptron(), lambda output, batch: F.cross_entropy(output, batch[-1]) * min(1.0, next(calls) / 4)


class LossWithCounter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, batch: tuple) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(output, batch[-1]) * min(1.0, self.calls / 4)


CASES.add("loss warm-up by itertools.count in the loss", counting_loss, vectors)
CASES.add("loss warm-up by a counter in the loss object", lambda: (Perceptron(), LossWithCounter()), vectors)


class AdaptiveLoss:
    """Weights classes by a running mean of earlier losses."""

    def __init__(self) -> None:
        self.mean = torch.ones(CLASSES)

    def __call__(self, output: torch.Tensor, batch: tuple) -> torch.Tensor:
        costs = F.cross_entropy(output, batch[-1], reduction="none")
        loss = (costs * self.mean.to(costs)[batch[-1]]).mean()
        with torch.no_grad():
            self.mean = 0.9 * self.mean.to(costs) + 0.1 * costs.mean()
        return loss


CASES.add("loss with a running mean of losses", lambda: (Perceptron(), AdaptiveLoss()), vectors)
