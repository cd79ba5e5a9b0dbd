"""A module that would compute something else in a second run is not recomputed, or is named in the error."""

from __future__ import annotations

import collections
import functools
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import planner
from planner import rewrite
from planner.plan_types.recompute_decisions import Checkpoint

pytestmark = pytest.mark.slow

SIZE = 16


class Scaled(nn.Module):
    """A layer whose caller sets what it multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(SIZE, SIZE), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) * self.scale)


class SetsATensor(nn.Module):
    """Sets a tensor as attribute of each block for its call, and removes it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.scale = x.mean()
            x = block(x)
            block.scale = None
        return x


class SharedBlock(nn.Module):
    """Calls one block several times, each time with another time step as its attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in range(3):
            self.block.scale = step + 1.0
            x = self.block(x)
        return x


class TrainsAndEvaluates(nn.Module):
    """Calls one block in training and in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.block(x)
        self.block.eval()
        second = self.block(x)
        self.block.train()
        return first + second


class ReadsADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(self.layer(state["x"])) * 1.5


class EmptiesADict(nn.Module):
    """Passes its blocks a dict that is empty when backward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReadsADict() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = {"x": x}
        for block in self.blocks:
            state["x"] = block(state)
        return state.pop("x")


def squares(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.pow(2).mean()


def plan_of(model: nn.Module) -> planner.Plan:
    return planner.plan(
        model, torch.randn(256, SIZE), loss_fn=squares, vram="60KiB", gpu="bare", optimizer="sgd", only=["checkpoint"]
    )


@pytest.mark.parametrize(
    ("model", "name"), [(SetsATensor, "blocks"), (SharedBlock, "block"), (TrainsAndEvaluates, "block")]
)
@pytest.mark.thorough
def test_a_module_whose_attributes_change_after_its_call_is_not_recomputed(model, name):
    recomputed = [name for d in plan_of(model()).decisions if isinstance(d, Checkpoint) for name in d.modules]
    assert not [module for module in recomputed if module.split(".")[0] == name and not module.endswith("layer")]


def test_an_error_of_a_recomputed_module_is_reported_with_its_name():
    found = plan_of(EmptiesADict())
    assert found.shortfall is not None and not found.decisions
    [note] = [note for note in found.notes if note.startswith("left out (checkpoint of blocks.")]
    assert "KeyError: 'x' (in 'blocks." in note


class Transformed(nn.Module):
    """Runs its layers inside of a transform of torch.func."""

    def __init__(self, transform: str) -> None:
        super().__init__()
        self.transform = transform
        self.layers = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.transform == "vmap":
            return torch.func.vmap(self.layers)(x)
        if self.transform == "grad":
            return torch.func.grad(lambda x: self.layers(x).sum())(x)
        if self.transform == "jvp":
            return torch.func.jvp(self.layers, (x,), (torch.ones_like(x),))[1]
        weights = dict(self.layers.named_parameters())  # one step of an inner loop, as MAML takes

        def inner(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(self.layers, weights, (x,)).square().mean()

        slopes = torch.func.grad(inner)(weights)
        updated = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
        return torch.func.functional_call(self.layers, updated, (x,))


@pytest.mark.parametrize("transform", ["maml", "jvp", "vmap", "grad"])
@pytest.mark.parametrize("only", ["checkpoint", "offload", "segment-checkpoint"])
@pytest.mark.thorough_after(1)
def test_a_model_that_uses_torch_func_can_be_planned_and_trains_the_same(transform, only):
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), Transformed(transform)), torch.randn(256, SIZE)
    plan = planner.plan(model, batch, loss_fn=squares, vram="60KiB", gpu="bare", optimizer="sgd", only=[only])
    parity = rewrite.verify(plan, model, batch, loss_fn=squares)
    assert parity.passed, parity.failures
    named = [name for decision in plan.decisions for name in getattr(decision, "modules", ())]
    assert not [name for name in named if name.startswith("2.layers")]


class Counter:
    def __init__(self) -> None:
        self.calls = 0


COUNTS = {"calls": 0}


def counter():
    """Returns a function that counts its calls in a variable that it closes over."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    return count


class Counting(nn.Module):
    """A block whose forward counts its calls in a place that is no attribute of plain type."""

    counts: ClassVar[dict[str, int]] = {"calls": 0}

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.layer = place, nn.Linear(SIZE, SIZE)
        self.numbers, self.nested = [0], {"a": {"b": [0]}}
        self.array, self.object, self.queue = np.zeros(1), Counter(), collections.deque([0])
        self.tensor, self.count = torch.zeros(1), counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.place == "list":
            self.numbers[0] += 1
        elif self.place == "nested":
            self.nested["a"]["b"][0] += 1
        elif self.place == "array":
            self.array += 1
        elif self.place == "object":
            self.object.calls += 1
        elif self.place == "deque":
            self.queue[0] += 1
        elif self.place == "class":
            type(self).counts["calls"] += 1
        elif self.place == "global":
            COUNTS["calls"] += 1
        elif self.place == "tensor":
            self.tensor += 1
        elif self.place == "closure":
            self.count()
        return torch.tanh(self.layer(torch.tanh(x)))


@pytest.mark.parametrize(
    "place", ["list", "nested", "array", "object", "deque", "class", "global", "tensor", "closure", ""]
)
@pytest.mark.thorough_after(1)
def test_a_module_that_counts_its_calls_is_not_recomputed_wherever_it_counts(place):
    plan = plan_of(nn.Sequential(*(Counting(place) for _ in range(4))))
    modules = [name for decision in plan.decisions for name in decision.modules]
    assert bool([name for name in modules if "layer" not in name]) is (place == "")


class Hook:
    """A forward hook that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        self.count()

    def count(self, *_: object) -> None:
        self.calls += 1


class Observed(nn.Sequential):
    """A model whose method is the forward hook of the modules in its blocks."""

    calls = 0

    def count(self, *_: object) -> None:
        self.calls += 1


def count_into(seen: list[int], *_: object) -> None:
    seen[0] += 1


@pytest.mark.parametrize("kind", ["method", "closure", "object", "partial", "method of the model"])
@pytest.mark.thorough_after(2)
def test_a_module_with_a_hook_that_counts_is_not_recomputed(kind):
    model, seen = Observed(*(Counting("") for _ in range(4))), [0]

    def counting(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        seen[0] += 1

    hooks = {
        "method": lambda: Hook().count,
        "closure": lambda: counting,
        "object": Hook,
        "partial": lambda: functools.partial(count_into, seen),
        "method of the model": lambda: model.count,
    }
    for block in model:
        block.layer.register_forward_hook(hooks[kind]())
    modules = [name for decision in plan_of(model).decisions for name in decision.modules]
    assert not modules
