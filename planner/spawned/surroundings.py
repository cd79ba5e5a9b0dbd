"""Sets aside what the caller has entered around a call: default devices, modes, autocast and debugging.

None of it is part of the training step, whose plan is the same without it. Settings of the process that also hold while
it trains, such as the default dtype, deterministic algorithms and the kernels that are allowed, are left as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils import _device
from torch.utils._python_dispatch import _disable_current_modes

_HOOKS: Any = torch._C._autograd
_AUTOCAST_DEVICES = ("cpu", "cuda")
_is_autocast_enabled = torch.is_autocast_enabled
"""PyTorch's function, which a rehearsal replaces by one that takes CUDA for the virtual GPU."""


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Sets the caller's contexts aside within the context, and restores them at its end.

    These are modes for functions and for dispatch (such as `FakeTensorMode`), autocast, anomaly detection, hooks for
    saved tensors and their prohibition, `torch.utils.checkpoint`'s debugging, and a default device. A default device
    on CUDA is kept (`default_card`), because a model that is trained with it creates its tensors there.
    """
    with contextlib.ExitStack() as stack:
        for context in (_disable_current_modes, _without_function_modes, _without_autocast, _without_hooks):
            stack.enter_context(context())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(torch.utils.checkpoint.set_checkpoint_debug_enabled(None))
        yield


def default_card() -> str | None:
    """Returns the default device, such as 'cuda:0', if it is a CUDA device; None for other default devices."""
    devices = [mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, _device.DeviceContext)]
    return next((str(device) for device in devices if device.type == "cuda"), None)


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    modes = _get_current_function_mode_stack()
    kept = [mode for mode in modes if isinstance(mode, _device.DeviceContext) and mode.device.type == "cuda"]
    device = _device.CURRENT_DEVICE
    globally = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    _replace_function_modes(kept)
    if not kept:
        _device.CURRENT_DEVICE = None
        torch._GLOBAL_DEVICE_CONTEXT.device_context = None
    try:
        yield
    finally:
        _replace_function_modes(modes)
        _device.CURRENT_DEVICE = device
        torch._GLOBAL_DEVICE_CONTEXT.device_context = globally


def _replace_function_modes(modes: list[Any]) -> None:
    """Makes `modes` the stack of modes for functions, the innermost one last."""
    for _ in _get_current_function_mode_stack():
        _pop_function_mode()
    for mode in modes:
        _push_function_mode(mode)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Sets autocast aside. Its copies of weights are only freed where no autocast context is around another one."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    were_enabled = [_is_autocast_enabled(device) for device in _AUTOCAST_DEVICES]
    for device in _AUTOCAST_DEVICES:
        torch.set_autocast_enabled(device, False)
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth):
            torch.autocast_increment_nesting()
        for device, was_enabled in zip(_AUTOCAST_DEVICES, were_enabled, strict=True):
            torch.set_autocast_enabled(device, was_enabled)


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Sets hooks for saved tensors aside, and allows such hooks if they were forbidden."""
    prohibition = _HOOKS._saved_tensors_hooks_get_disabled_error_message()
    _HOOKS._saved_tensors_hooks_enable()
    pairs = []
    while (pair := _HOOKS._top_saved_tensors_default_hooks(False)) is not None:
        pairs.append(pair)
        _HOOKS._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(pairs):
            _HOOKS._push_saved_tensors_default_hooks(pack, unpack)
        if prohibition is not None:
            _HOOKS._saved_tensors_hooks_disable(prohibition)
