"""State that one forward leaves for the next is found in the recording, and accumulation is then not offered."""

from __future__ import annotations

import collections
import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planner
from planner.plan_types.decisions import Accumulation
from planner.rewrite.rehearse import certifying_graph
from planner.space.carried_state import carried_state
from planner.workload.workload import workload
from tests.support.workloads import BARE

pytestmark = pytest.mark.slow

SIZE = 16


class Layer(nn.Module):
    """A linear layer. Subclasses change what comes before it or after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("state", torch.ones(SIZE))
        self.calls, self.cache = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.before(x)).square()

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Replaced(Layer):
    def before(self, x):
        held, self.state = self.state, torch.cat([self.state[1:], x.detach().mean().reshape(1)])
        return x * held


class MovingAverage(Layer):
    def before(self, x):
        with torch.no_grad():
            self.state.lerp_(x.mean(0), 0.1)
        return x + self.state


class MovingAverageOfAll(Layer):
    """Updates its moving average with an op that takes lists of tensors and returns nothing."""

    def before(self, x):
        with torch.no_grad():
            torch._foreach_lerp_([self.state], [x.mean(0)], 0.1)
        return x + self.state


class MovedWeight(Layer):
    def before(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        return x


class Counting(Layer):
    def before(self, x):
        self.state += 1
        return x * self.state


class Bank(Layer):
    """Keeps the means of the last four inputs. A recording of two steps does not fill the queue."""

    def __init__(self):
        super().__init__()
        self.bank = collections.deque(maxlen=4)

    def before(self, x):
        mean = sum(self.bank, x.new_ones(SIZE))
        self.bank.append(x.detach().mean(0))
        return x * mean


class InitialisedByData(Layer):
    def before(self, x):
        if self.cache is None:
            self.cache = x.detach().std(0)
        return x * self.cache


class WarmingUp(Layer):
    def before(self, x):
        self.calls += 1
        return x * min(1.0, self.calls / 10)


class Alternating(Layer):
    def before(self, x):
        self.calls += 1
        return torch.tanh(x) if self.calls % 2 else x


_CALLS = [0]


def warmed_up(x):
    _CALLS[0] += 1
    return x * min(1.0, _CALLS[0] / 1000)


class WarmingUpElsewhere(Layer):
    """Counts its calls in a global of a function that it calls."""

    def before(self, x):
        return warmed_up(x)


class Cycling(Layer):
    """Keeps its state in an iterator, whose position cannot be read."""

    def __init__(self):
        super().__init__()
        self.scales = itertools.cycle([1.0, 2.0, 3.0])

    def before(self, x):
        return x * next(self.scales)


class RunningStatistics(Layer):
    """Keeps a running mean, as a norm does, which only evaluation uses."""

    def before(self, x):
        with torch.no_grad():
            self.state.lerp_(x.mean(0), 0.1)
        return x if self.training else x - self.state


class ReplacedStatistics(Layer):
    def before(self, x):
        self.state = 0.9 * self.state + 0.1 * x.detach().mean(0)
        return x


class AveragedWeights(Layer):
    """Keeps an average of its weights, which only evaluation uses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(SIZE, SIZE))

    def before(self, x):
        with torch.no_grad():
            self.average.mul_(0.99).add_(self.linear.weight, alpha=0.01)
        return x


class InstanceStatistics(Layer):
    """Keeps running statistics of each sample, which training does not use."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(SIZE, track_running_stats=True, affine=True)

    def before(self, x):
        return self.norm(x.unsqueeze(2).expand(-1, -1, 4)).mean(2)


@pytest.mark.parametrize(
    "kind",
    [
        Replaced,
        MovingAverage,
        MovingAverageOfAll,
        MovedWeight,
        Counting,
        Bank,
        InitialisedByData,
        WarmingUp,
        Alternating,
        WarmingUpElsewhere,
        Cycling,
        RunningStatistics,
        ReplacedStatistics,
        AveragedWeights,
        InstanceStatistics,
    ],
)
def test_state_that_the_next_forward_uses_is_found(kind):
    assert found_in(kind()) is not None


class Logging(Layer):
    """Counts calls and keeps an activation, but reads neither."""

    def before(self, x):
        self.calls += 1
        self.cache = torch.tanh(x)
        self.state += 1
        return x


class Caching(Layer):
    """Makes a mask in its first call."""

    def before(self, x):
        if self.cache is None:
            self.cache = torch.ones(SIZE, SIZE, device=x.device).tril()
        return x @ self.cache


class Clamped(Layer):
    def before(self, x):
        with torch.no_grad():
            self.linear.weight.clamp_(-1, 1)
        return x


class Scratch(Layer):
    """Uses a buffer as memory for a result of its own."""

    def before(self, x):
        with torch.no_grad():
            self.state.zero_().add_(x.mean(0))
        return x * self.state.clone()


class Skipped(Layer):
    """Counts its calls, and draws a random number that decides whether it applies tanh."""

    def before(self, x):
        self.calls += 1
        return torch.tanh(x) if random.random() < 0.5 else x


class Stored(Layer):
    """Keeps its last input and a copy of its weights, but no average of them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("copy", torch.zeros(SIZE, SIZE))

    def before(self, x):
        with torch.no_grad():
            self.state.copy_(x.mean(0))
            self.copy.copy_(self.linear.weight)
        self.cache = x + self.state
        return x


_TABLES = {}


def table(device):
    if not _TABLES:
        _TABLES[0] = torch.linspace(0, 1, SIZE, device=device)
    return _TABLES[0]


class CachingElsewhere(Layer):
    """Calls a function that keeps its result in a global, so that the first forward runs other ops."""

    def before(self, x):
        return x + table(x.device)


@pytest.mark.parametrize("kind", [Layer, Logging, Caching, CachingElsewhere, Clamped, Scratch, Skipped, Stored])
def test_state_that_the_next_forward_does_not_use_is_not_reported(kind):
    assert found_in(kind()) is None


class LossWithCounter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output, batch):
        self.calls += 1
        return output.mean() * min(1.0, self.calls / 10)


def loss_with_iterator():
    calls = itertools.count(1)
    return lambda output, batch: output.mean() * min(1.0, next(calls) / 10)


def loss_with_default(output, batch, calls=[0]):  # noqa: B006 - a state is the point
    calls[0] += 1
    return output.mean() * min(1.0, calls[0] / 10)


@pytest.mark.parametrize("loss_fn", [LossWithCounter(), loss_with_iterator(), loss_with_default])
def test_a_loss_function_that_counts_is_found(loss_fn):
    assert "loss function" in found_in(Layer(), loss_fn)


@pytest.mark.thorough
def test_accumulation_is_then_offered_only_if_it_is_forced():
    options = {"loss_fn": mean, "optimizer": "sgd", "gpu": "bare", "vram": "1MiB"}
    batch = torch.randn(512, SIZE)
    plan = planner.plan(MovingAverage(), batch, **options, only=["accumulation"])
    assert not plan.decisions
    assert any("no accumulation: the forward changes a tensor" in note for note in plan.notes)
    forced = planner.plan(MovingAverage(), batch, **options, force=["accumulation"])
    assert any(isinstance(decision, Accumulation) for decision in forced.decisions)
    assert any("forced although the forward changes" in note for note in forced.notes)


def mean(output: torch.Tensor, batch: object) -> torch.Tensor:
    return F.mse_loss(output, torch.zeros_like(output))


def found_in(model: nn.Module, loss_fn=mean) -> str | None:
    work = workload(model, torch.randn(8, SIZE), loss_fn=loss_fn, optimizer="sgd")
    return carried_state(certifying_graph(work, (), BARE))
