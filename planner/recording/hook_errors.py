"""Errors that a user's backward hook raises, carried past autograd.

An error that leaves a hook unwinds through the engine while Python still has it set; the device guard of a Python
backend then calls into Python from a destructor, and the process is ended by signal 6. So hooks are wrapped: what one
raises is kept, the backward goes on, and the error is raised when the step is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class HookErrors:
    """Of one rehearsal. `install` is for a child process."""

    def __init__(self) -> None:
        self._raised: list[Exception] = []

    def raise_first(self) -> None:
        """Raise what the first failing hook raised, if one did."""
        if self._raised:
            raise self._raised[0]

    def install(self, model: torch.nn.Module) -> None:
        """Wrap the hooks that are there, and those that will be registered."""
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
        """The hook, with its error kept instead of raised."""

        @functools.wraps(hook)
        def guarded(*args: Any) -> Any:
            try:
                return hook(*args)
            except Exception as error:
                self._raised.append(error)
                return None

        return guarded

    def _registering(self, register: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(register)
        def registering(owner: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return register(owner, self.kept(hook), *args, **kwargs)

        return registering
