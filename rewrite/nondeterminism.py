"""Finds out whether a nondeterministic kernel explains that recomputed values differ from those of the forward.

Two runs of a forward may differ although nothing that it reads has changed, because some kernels add with atomic
operations, in a different order each time. A recompute then differs from its forward as well, which is no error. Three
findings are needed for this conclusion:

1. The forward, run twice from the same state, saves different values in the watched modules.
2. Ops, run twice in a row on the same inputs and with the same random numbers, return different bits.
3. If these ops return in a further forward what they returned before, both forwards save the same values.

The first finding alone could come from state that was not restored, such as the position of an iterator. The second
one does not depend on Python state, but such an op need not be the cause: the third finding excludes another one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.recording.op_schema import op_traits
from planner.rewrite.accumulation_check.side_effects import SideEffectGuard
from planner.rewrite.portable.recompute_check import RecomputeCheck, RecomputeDifference, SavedSample, may_be_private


def nondeterministic_op(
    check: RecomputeCheck, guard: SideEffectGuard, forward: Callable[[], torch.Tensor]
) -> str | None:
    """Return the name of an op that makes the forward differ between two runs; None if it does not differ.

    Args:
        check: samples what autograd saves in watched modules. No step may be running.
        guard: restores what the forward changes.
        forward: runs the forward of the model that has these modules, and returns the loss.
    """

    def sampled(mode: contextlib.AbstractContextManager[object]) -> list[SavedSample]:
        samples: list[SavedSample] = []  # a list of its own, as the guard also restores the attributes of the check
        check.is_on, check.samples, check.places = True, samples, random.Random(0)  # the same places in each run
        try:
            with guard.restoring(), mode:
                forward()
            return samples
        finally:
            check.end_step()

    def differ(samples: list[SavedSample], others: list[SavedSample]) -> bool:
        for sample, other in zip(samples, others, strict=False):
            sample.after = other.before if other.shape == sample.shape else None
        try:
            check.compare(samples)
        except RecomputeDifference:
            return True
        return False

    if not differ(sampled(contextlib.nullcontext()), sampled(contextlib.nullcontext())):
        return None
    for _ in range(_ATTEMPTS):
        repeated = _RepeatedOps()
        samples = sampled(repeated)
        replayed = _ReplayedOps(repeated.results)
        if repeated.results and not differ(samples, sampled(replayed)) and not replayed.missed:
            return next(name for name, _ in repeated.results.values())
    return None


_ATTEMPTS = 3
"""A kernel may by chance return the same bits twice. The search is repeated, so that it is found nevertheless."""


class _NumberedOps(TorchDispatchMode):
    """Calls `run` for each op that computes something, with its number in the order of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op_traits(op).is_view or op.__name__.startswith(("empty", "new_empty")):
            return op(*args, **kwargs)
        self._number += 1
        return self.run(self._number, op, args, kwargs)

    def run(self, number: int, op, args, kwargs):
        raise NotImplementedError


@final
class _RepeatedOps(_NumberedOps):
    """Runs each op twice. `results` has the name and the results, on the host, of each op whose results differ."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[int, tuple[str, list[torch.Tensor]]] = {}

    def run(self, number, op, args, kwargs):
        written = {id(tensor) for tensor in tree_leaves(op_traits(op).written_arguments(args, kwargs))}
        args_again, kwargs_again = tree_map_only(
            torch.Tensor, lambda tensor: tensor.clone() if id(tensor) in written else tensor, (args, kwargs)
        )
        with _generators_restored(tree_leaves((args, kwargs))):
            again = op(*args_again, **kwargs_again)
        result = op(*args, **kwargs)
        pairs = zip(tree_leaves((result, args, kwargs)), tree_leaves((again, args_again, kwargs_again)), strict=True)
        if not all(map(_are_equal, *zip(*pairs, strict=True))):
            self.results[number] = str(op), [tensor.cpu().clone() for tensor in _results(op, args, kwargs, result)]
        return result


@final
class _ReplayedOps(_NumberedOps):
    """Gives these ops the results that they had before. `missed` is True if one of their numbers has another op."""

    def __init__(self, results: dict[int, tuple[str, list[torch.Tensor]]]) -> None:
        super().__init__()
        self._results = results
        self.missed = False

    def run(self, number, op, args, kwargs):
        result = op(*args, **kwargs)
        name, before = self._results.get(number, (str(op), []))
        now = _results(op, args, kwargs, result) if before else []
        if name != str(op) or [tensor.shape for tensor in now] != [tensor.shape for tensor in before]:
            self.missed = True
            return result
        for tensor, earlier in zip(now, before, strict=True):
            tensor.copy_(earlier)
        return result


def _results(op, args, kwargs, result) -> list[torch.Tensor]:
    """Returns the tensors that an op has made or written to."""
    leaves = tree_leaves((result, op_traits(op).written_arguments(args, kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


@contextlib.contextmanager
def _generators_restored(arguments: list[object]):
    """Context that restores the states of random generators at its end."""
    own = [value for value in arguments if isinstance(value, torch.Generator)]
    states = [generator.get_state() for generator in own]
    cards = {value.device for value in arguments if isinstance(value, torch.Tensor) and value.is_cuda}
    with torch.random.fork_rng(list(cards)):
        yield
    for generator, state in zip(own, states, strict=True):
        generator.set_state(state)


def _are_equal(first: object, second: object) -> bool:
    """True for tensors with the same values, where NaN equals NaN, and for other objects."""
    if first is second or not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return True
    if may_be_private(first) or first.layout is not torch.strided:
        return True
    return bool(((first == second) | ((first != first) & (second != second))).all())
