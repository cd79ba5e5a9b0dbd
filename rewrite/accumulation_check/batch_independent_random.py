"""Random numbers that do not depend on how a batch is taken apart.

Each op that draws gives one number that it could have drawn, everywhere in its result; or, for results with a row for
each sample, numbers that belong to the sample. No generator moves on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_QUANTILE = 0.4
"""Of uniform numbers the one with this share below it, of which the others are made."""

_MOST_DRAWS = 10_000


def _uniform(u: Any, given: dict[str, Any]) -> Any:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return low + u * (high - low)


def _whole(u: Any, given: dict[str, Any]) -> Any:
    low, high = given.get("low", given.get("from")) or 0, given.get("high", given.get("to"))
    if high is None:
        return low
    number = low + u * (high - low)
    return number.floor() if isinstance(number, torch.Tensor) else math.floor(number)


def _normal(u: Any, given: dict[str, Any]) -> Any:
    normal = torch.special.ndtri(torch.as_tensor(u))
    return given.get("mean", 0.0) + (normal if isinstance(u, torch.Tensor) else float(normal)) * given.get("std", 1.0)


def _coin(u: Any, given: dict[str, Any]) -> Any:
    heads = u < given.get("p", given["self"])
    return heads.to(given["self"].dtype) if isinstance(heads, torch.Tensor) else heads


def _exponential(u: Any, given: dict[str, Any]) -> Any:
    survives = torch.log1p(-u) if isinstance(u, torch.Tensor) else math.log1p(-u)
    return -survives / given["lambd"]


_DRAWN: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "rand": _uniform, "rand_like": _uniform, "uniform_": _uniform, "uniform": _uniform,
    "randn": _normal, "randn_like": _normal, "normal_": _normal, "normal": _normal, "normal_functional": _normal,
    "randint": _whole, "randint_like": _whole, "random_": _whole, "random": _whole,
    "bernoulli_": _coin, "bernoulli": _coin,
    "exponential_": _exponential, "exponential": _exponential,
}  # fmt: skip
"""By name of the op: what it draws, from uniform numbers and its arguments."""


@final
class SteadyRandom(TorchDispatchMode):
    """Below it, ops draw what is in the table above, and `native_dropout` drops nothing.

    Args:
        devices: cards, beside the CPU, whose default generators are watched.
        samples: numbers of the samples that are computed, where what is drawn for each is to be its own.

    Raises:
        NotImplementedError: in an op that draws something else, or where numbers are drawn without end: what waits for
            another number than the last one waits for ever.
    """

    def __init__(self, devices: Sequence[torch.device] = (), samples: Sequence[int] | None = None) -> None:
        super().__init__()
        self._generators = [torch.default_generator, *(torch.cuda.default_generators[_index(d)] for d in devices)]
        self._samples = samples
        self.draws = 0

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
            value = _DRAWN[name](self._numbers(result), _given(op, args, kwargs))
            result.copy_(value) if isinstance(value, torch.Tensor) else result.fill_(value)
        elif own is not None or not all(map(torch.equal, before, (g.get_state() for g in self._generators))):
            raise NotImplementedError(f"{name} draws random numbers of its own kind")
        for generator, state in zip(self._generators, before, strict=True):
            generator.set_state(state)
        self.draws += name in _DRAWN
        if self.draws > _MOST_DRAWS:
            raise NotImplementedError(f"{self.draws} draws of random numbers")
        return result

    def _numbers(self, result: torch.Tensor) -> Any:
        """Uniform numbers: one, or a row for each sample."""
        if self._samples is None or not result.dim() or len(result) != len(self._samples):
            return _QUANTILE
        rows = []
        for sample in self._samples:
            generator = torch.Generator().manual_seed(100_003 * sample + self.draws)
            rows.append(torch.rand(result.shape[1:], generator=generator))
        return torch.stack(rows).clamp(1e-6, 1 - 1e-6).to(result.device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _given(op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, or what they are by default."""
    arguments = op._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
