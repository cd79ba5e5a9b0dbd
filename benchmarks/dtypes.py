"""Finds ops that fakes take with a dtype that PyTorch's kernels refuse.

A rehearsal runs a step on fake tensors. If a fake takes what a kernel refuses, a step that cannot run gets a plan.
This runs the ops of PyTorch's own test database on a CPU, with the dtype of one tensor at a time changed, and the
same calls on fakes with the rehearsal's own check (`refuse_arguments`).

    pip install expecttest                 # PyTorch's test database imports it
    python -m benchmarks.dtypes            # about a minute; prints one line for each op that differs, and a count

A line that begins with `taken` is a gap: only the fake takes the call, and CUDA is not known to have a kernel for it. A
line that begins with `on CUDA` is not a gap: PyTorch's database says that CUDA has a kernel for this dtype, and a CPU
has none. This is known only for ops with one tensor. A line that begins with `refused` is a call that only the
rehearsal refuses; products of whole numbers are such calls, because CUDA refuses them and a CPU does not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from planner.virtual_gpu.values.kernel_arguments import refuse_arguments

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.bool)
SKIPPED = ("linalg", "fft", "sparse", "nested", "geqrf", "lu", "svd", "cholesky", "eig", "ormqr", "lobpcg")
"""Beginnings and parts of names of ops that training steps do not use, or that take long."""


class _Checked(TorchDispatchMode):
    """Checks the arguments of each op, as the recorder does."""

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        refuse_arguments(op, args)
        return op(*args, **(kwargs or {}))


def calls() -> Iterator[tuple[str, Callable, Any, set[torch.dtype]]]:
    """Yields (name, function, arguments, dtypes on CUDA) for PyTorch's test database, also of ops in place."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if any(part in info.name for part in SKIPPED) or torch.float32 not in info.dtypes:
            continue
        sample = next(iter(info.sample_inputs("cpu", torch.float32)), None)
        if sample is None:
            continue
        arguments = ((sample.input, *sample.args), sample.kwargs)
        on_cuda = set(info.supported_dtypes("cuda"))
        yield info.name, info.op, arguments, on_cuda
        if info.inplace_variant is not None:
            yield f"{info.name}_", info.inplace_variant, arguments, on_cuda


def variants(arguments: Any) -> Iterator[tuple[str, Any, torch.dtype | None]]:
    """Yields (description, arguments, dtype), where one tensor of the arguments has another dtype than in the database.

    The dtype is None if there are other tensors.
    """
    leaves, spec = tree_flatten(arguments)
    is_alone = sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 1
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            for dtype in DTYPES:
                if dtype != leaf.dtype:
                    changed = [*leaves[:at], leaf.detach().to(dtype), *leaves[at + 1 :]]
                    what = f"argument {at} {str(dtype).removeprefix('torch.')}"
                    yield what, tree_unflatten(changed, spec), dtype if is_alone else None


def is_taken(function: Callable, arguments: Any, *, fake: bool) -> bool:
    """Returns True if the function takes the arguments, as real tensors or as fakes."""
    args, kwargs = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, arguments)
    try:
        with contextlib.ExitStack() as stack:
            if fake:
                mode = stack.enter_context(FakeTensorMode())
                stack.enter_context(_Checked())
                args, kwargs = tree_map(
                    lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs)
                )
            function(*args, **kwargs)
    except Exception:  # whatever the kernel raises is a refusal
        return False
    return True


def compare() -> tuple[dict[str, list[str]], int]:
    """Returns the calls that differ, by 'taken NAME', 'on CUDA NAME' or 'refused NAME', and the number of all calls."""
    found: dict[str, list[str]] = {}
    number = 0
    for name, function, arguments, on_cuda in calls():
        if not is_taken(function, arguments, fake=False) or not is_taken(function, arguments, fake=True):
            continue
        for what, changed, dtype in variants(arguments):
            number += 1
            real, fake = is_taken(function, changed, fake=False), is_taken(function, changed, fake=True)
            if real != fake:
                kind = "refused" if real else "on CUDA" if dtype in on_cuda else "taken"
                lines = found.setdefault(f"{kind} {name}", [])
                lines += [what] * (what not in lines)
    return found, number


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    with contextlib.redirect_stderr(io.StringIO()):
        found, number = compare()
    for name in sorted(found):
        print(f"{name}: {', '.join(found[name])}")
    gaps = [name for name in found if name.startswith("taken")]
    print(f"{number} calls; only the fake takes {sum(len(found[name]) for name in gaps)} of {len(gaps)} ops")


if __name__ == "__main__":
    main()
