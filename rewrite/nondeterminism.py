"""Finds out whether a nondeterministic kernel explains that recomputed values differ from those of the forward.

Two runs of a forward may differ although nothing that it reads has changed, because some kernels add with atomic
operations, in a different order each time. A recompute then differs from its forward as well, which is no error. Two
findings are needed for this conclusion:

1. The forward, run twice from the same state, saves different values in the watched modules.
2. An op, run twice in a row on the same inputs and with the same random numbers, returns different bits.

The first finding alone could come from state that was not restored, such as the position of an iterator. The second
one does not depend on Python state.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

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

    def sampled() -> list[SavedSample]:
        samples: list[SavedSample] = []  # a list of its own, as the guard also restores the attributes of the check
        check.is_on, check.samples, check.places = True, samples, random.Random(0)  # the same places in each run
        try:
            with guard.restoring():
                forward()
            return samples
        finally:
            check.end_step()

    samples = sampled()
    for sample, again in zip(samples, sampled(), strict=False):
        sample.after = again.before if again.shape == sample.shape else None
    try:
        check.compare(samples)
    except RecomputeDifference:
        with guard.restoring(), _RepeatedOps() as ops:
            forward()
        return ops.different
    return None


class _RepeatedOps(TorchDispatchMode):
    """Runs each op twice. `different` is the name of the first op with two different results; None if there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.different: str | None = None

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        traits = op_traits(op)
        if self.different is not None or traits.is_view or op.__name__.startswith(("empty", "new_empty")):
            return op(*args, **kwargs)
        written = {id(tensor) for tensor in tree_leaves(traits.written_arguments(args, kwargs))}
        args_again, kwargs_again = tree_map_only(
            torch.Tensor, lambda tensor: tensor.clone() if id(tensor) in written else tensor, (args, kwargs)
        )
        with _generators_restored(tree_leaves((args, kwargs))):
            again = op(*args_again, **kwargs_again)
        result = op(*args, **kwargs)
        pairs = zip(tree_leaves((result, args, kwargs)), tree_leaves((again, args_again, kwargs_again)), strict=True)
        if not all(map(_are_equal, *zip(*pairs, strict=True))):
            self.different = str(op)
        return result


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
