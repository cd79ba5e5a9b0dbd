"""Keeps errors of a user's backward hooks until the step is over, and raises them then.

An exception that leaves a hook unwinds through the autograd engine while it is still set in Python. The device guard of
a Python backend then calls into Python from a destructor, and the process is aborted (signal 6). Hooks are therefore
wrapped: an exception is stored, backward continues, and the exception is raised after the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class HookErrors:
    """Collects the errors that backward hooks raise during one rehearsal.

    `install` replaces methods of torch's classes, so it must be called in a child process only.
    """

    def __init__(self) -> None:
        self._raised: list[Exception] = []

    def raise_first(self) -> None:
        """Raises the error of the first hook that failed, if one did."""
        if self._raised:
            raise self._raised[0]

    def install(self, model: torch.nn.Module) -> None:
        """Wraps the hooks that the model has, and all hooks that are registered later."""
        for module in model.modules():
            for hooks in (module._backward_hooks, module._backward_pre_hooks):
                for number, hook in hooks.items():
                    hooks[number] = self.kept(hook)
        for kind, name in (
            (torch.Tensor, "register_hook"),
            (torch.Tensor, "register_post_accumulate_grad_hook"),
            (torch.nn.Module, "register_full_backward_hook"),
            (torch.nn.Module, "register_full_backward_pre_hook"),
        ):
            setattr(kind, name, self._registering(getattr(kind, name)))

    def kept(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the hook, changed so that it stores its error instead of raising it."""

        @functools.wraps(hook)
        def guarded(*args: Any) -> Any:
            try:
                return hook(*args)
            except Exception as error:
                self._raised.append(error)
                return None

        return guarded

    def _registering(self, register: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the method that registers hooks, changed so that it wraps them."""

        @functools.wraps(register)
        def registering(owner: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return register(owner, self.kept(hook), *args, **kwargs)

        return registering
