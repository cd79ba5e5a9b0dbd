"""Random numbers that are all alike: what is computed from them is the same however a batch is taken apart.

Each op that draws gives one number that it could have drawn, everywhere in its result. No generator moves on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_QUANTILE = 0.4
"""Of uniform numbers the one with this share below it, of which the others are made."""

_NORMAL = -0.25
"""What a normal distribution has about that share of its numbers below."""

_MOST_DRAWS = 100_000


def _uniform(given: dict[str, Any]) -> float:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return low + _QUANTILE * (high - low)


def _whole(given: dict[str, Any]) -> int:
    low, high = given.get("low", given.get("from")) or 0, given.get("high", given.get("to"))
    return low if high is None else low + int(_QUANTILE * (high - low))


def _normal(given: dict[str, Any]) -> Any:
    return given.get("mean", 0.0) + _NORMAL * given.get("std", 1.0)


def _coin(given: dict[str, Any]) -> Any:
    chance = given.get("p", given["self"])
    return (chance > _QUANTILE).to(given["self"].dtype) if isinstance(chance, torch.Tensor) else chance > _QUANTILE


_DRAWN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rand": _uniform, "rand_like": _uniform, "uniform_": _uniform, "uniform": _uniform,
    "randn": _normal, "randn_like": _normal, "normal_": _normal, "normal": _normal, "normal_functional": _normal,
    "randint": _whole, "randint_like": _whole, "random_": _whole, "random": _whole,
    "bernoulli_": _coin, "bernoulli": _coin,
    "exponential_": lambda given: -math.log(1.0 - _QUANTILE) / given["lambd"],
    "exponential": lambda given: -math.log(1.0 - _QUANTILE) / given["lambd"],
}  # fmt: skip
"""By name of the op: what it draws, from its arguments."""


@final
class SteadyRandom(TorchDispatchMode):
    """Below it, ops draw what is in the table above, and `native_dropout` drops nothing.

    Args:
        devices: cards, beside the CPU, whose default generators are watched.

    Raises:
        NotImplementedError: in an op that draws something else, or where numbers are drawn without end: what waits for
            another number than the last one waits for ever.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        super().__init__()
        self._generators = [torch.default_generator, *(torch.cuda.default_generators[_index(d)] for d in devices)]
        self._draws = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return op(*args, **kwargs)
        name = op.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        before = [generator.get_state() for generator in self._generators]
        if (own := kwargs.get("generator")) is not None:
            kwargs["generator"] = own.clone_state()
        result = op(*args, **kwargs)
        if name in _DRAWN:
            value = _DRAWN[name](_given(op, args, kwargs))
            result.copy_(value) if isinstance(value, torch.Tensor) else result.fill_(value)
        elif own is not None or not all(map(torch.equal, before, (g.get_state() for g in self._generators))):
            raise NotImplementedError(f"{name} draws random numbers of its own kind")
        for generator, state in zip(self._generators, before, strict=True):
            generator.set_state(state)
        self._draws += name in _DRAWN
        if self._draws > _MOST_DRAWS:
            raise NotImplementedError(f"{self._draws} draws of random numbers")
        return result


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _given(op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, or what they are by default."""
    arguments = op._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
