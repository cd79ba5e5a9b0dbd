"""Replace random numbers by values that do not depend on how a batch is split.

The same samples get different random numbers in batches of different sizes, so that their results differ although
nothing is wrong. In this mode each op that draws random numbers returns the same value in all elements: the 0.4
quantile of its distribution. With `samples`, a result with one row per sample gets random numbers that depend only on
the sample instead. The state of the random number generators does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_QUANTILE = 0.4
"""The quantile of its distribution that an op returns if samples have no random numbers of their own."""

_MAX_DRAWS = 10_000
"""Maximum number of ops that draw random numbers in one evaluation.

Rejection sampling, which draws until a number is accepted, would never end: it always gets the same number.
"""


# Each function returns what an op draws, from uniform numbers `u` (a float or a tensor) and the arguments of the op.


def _uniform(u: Any, arguments: dict[str, Any]) -> Any:
    low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
    return low + u * (high - low)


def _integer(u: Any, arguments: dict[str, Any]) -> Any:
    low, high = arguments.get("low", arguments.get("from")) or 0, arguments.get("high", arguments.get("to"))
    if high is None:
        return low
    number = low + u * (high - low)
    return number.floor() if isinstance(number, torch.Tensor) else math.floor(number)


def _normal(u: Any, arguments: dict[str, Any]) -> Any:
    normal = torch.special.ndtri(torch.as_tensor(u))
    standard = normal if isinstance(u, torch.Tensor) else float(normal)
    return arguments.get("mean", 0.0) + standard * arguments.get("std", 1.0)


def _bernoulli(u: Any, arguments: dict[str, Any]) -> Any:
    heads = u < arguments.get("p", arguments["self"])
    return heads.to(arguments["self"].dtype) if isinstance(heads, torch.Tensor) else heads


def _exponential(u: Any, arguments: dict[str, Any]) -> Any:
    survives = torch.log1p(-u) if isinstance(u, torch.Tensor) else math.log1p(-u)
    return -survives / arguments["lambd"]


_DISTRIBUTIONS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "rand": _uniform, "rand_like": _uniform, "uniform_": _uniform, "uniform": _uniform,
    "randn": _normal, "randn_like": _normal, "normal_": _normal, "normal": _normal, "normal_functional": _normal,
    "randint": _integer, "randint_like": _integer, "random_": _integer, "random": _integer,
    "bernoulli_": _bernoulli, "bernoulli": _bernoulli,
    "exponential_": _exponential, "exponential": _exponential,
}  # fmt: skip
"""Name of an op that draws random numbers -> the distribution that it draws from."""


@final
class BatchIndependentRandom(TorchDispatchMode):
    """Replaces the random numbers that ops draw by values that do not depend on the batch.

    `native_dropout` drops nothing.

    Args:
        devices: CUDA devices whose default generators are rewound after each op, in addition to the CPU's.
        samples: indices of the samples that are evaluated, to give each sample its own random numbers; None to give
            all samples the same.

    Raises:
        NotImplementedError: if an op draws from a distribution that is not in `_DISTRIBUTIONS`, or if more than
            10,000 ops draw random numbers.
    """

    def __init__(self, devices: Sequence[torch.device] = (), samples: Sequence[int] | None = None) -> None:
        super().__init__()
        self._generators = [torch.default_generator, *(torch.cuda.default_generators[_index(d)] for d in devices)]
        self._samples = samples
        self.draws = 0
        """Number of ops that drew random numbers so far."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return op(*args, **kwargs)
        name = op.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        # Run the op for the shape and dtype of its result, replace the values, and rewind all generators.
        before = [generator.get_state() for generator in self._generators]
        if (own := kwargs.get("generator")) is not None:
            kwargs["generator"] = own.clone_state()
        result = op(*args, **kwargs)
        if name in _DISTRIBUTIONS:
            value = _DISTRIBUTIONS[name](self._numbers(result), _arguments_of(op, args, kwargs))
            result.copy_(value) if isinstance(value, torch.Tensor) else result.fill_(value)
        elif own is not None or not all(map(torch.equal, before, (g.get_state() for g in self._generators))):
            raise NotImplementedError(f"{name} draws from a distribution that is not supported by the check")
        for generator, state in zip(self._generators, before, strict=True):
            generator.set_state(state)
        self.draws += name in _DISTRIBUTIONS
        if self.draws > _MAX_DRAWS:
            raise NotImplementedError(
                f"forward and loss draw random numbers more than {_MAX_DRAWS:,} times: the check would take too long"
            )
        return result

    def _numbers(self, result: torch.Tensor) -> Any:
        """Return the uniform numbers from which `result` is computed.

        They are a tensor with one row per sample, seeded by the sample's index. If samples do not have numbers of their
        own, or `result` does not have one row per sample, the number 0.4 stands for all of them.
        """
        if self._samples is None or not result.dim() or len(result) != len(self._samples):
            return _QUANTILE
        rows = []
        for sample in self._samples:
            generator = torch.Generator().manual_seed(100_003 * sample + self.draws)
            rows.append(torch.rand(result.shape[1:], generator=generator))
        return torch.stack(rows).clamp(1e-6, 1 - 1e-6).to(result.device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _arguments_of(op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, including defaults."""
    schema = op._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
