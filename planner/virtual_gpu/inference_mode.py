"""Runs ops under `torch.inference_mode()` as they run outside of it.

A composite op, such as `linear`, consists of other ops. Outside of inference mode, autograd's dispatch key takes it
apart before a dispatch mode sees it, and kernels that a rehearsal registers for that key take its place. Inference mode
skips that key, so that the whole op reaches the mode: the tensors that it makes and frees would not be recorded,
attention and recurrent layers would run other kernels, and `FakeTensorMode` would compute a `to(device)` of a tensor in
host memory with real tensors. Modes therefore ask `composite_kernel` for the function that takes the op apart.

Source: aten/src/ATen/core/dispatch/OperatorEntry.cpp (`computeDispatchTableEntryWithDebug`: which kernel is chosen).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_BACKENDS = {"cpu": "CPU", "cuda": "CUDA"}
"""Dispatch keys of the kernels of real devices. That of the virtual GPU is PrivateUse1."""

_routes: dict[str, Callable[..., Any]] = {}
"""The functions that a rehearsal runs instead of an op, by the op's name, such as 'aten::lstm.input'."""
_running: set[str] = set()
"""Names of the ops whose route is running. If the function calls the op itself, the op's own kernel runs."""


def note_route(name: str, function: Callable[..., Any]) -> None:
    """Notes the function that is registered for autograd's key of an op, so that inference mode runs it, too."""
    _routes[name] = function


def composite_kernel(op: torch._ops.OpOverload, device: str) -> Callable[..., Any] | None:
    """Returns the function that runs a composite op by calling other ops; None if the op has a kernel of its own.

    Args:
        device: type of the device that is recorded.
    """
    name = op.name()
    if name in _routes and name not in _running:
        return functools.partial(_run_route, name)
    return functools.partial(op._op_dk, _COMPOSITE) if _is_composite(op, _BACKENDS.get(device, "PrivateUse1")) else None


def _run_route(name: str, *args: Any, **kwargs: Any) -> Any:
    with _is_running(name):
        return _routes[name](*args, **kwargs)


@contextlib.contextmanager
def _is_running(name: str) -> Iterator[None]:
    _running.add(name)
    try:
        yield
    finally:
        _running.discard(name)


@functools.cache
def _is_composite(op: torch._ops.OpOverload, backend_key: str) -> bool:
    """True if the dispatcher takes the op's composite kernel on a device, because no other kernel comes before it."""
    name = op.name()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not any(
        has(name, key) for key in (backend_key, "CompositeExplicitAutograd")
    )
