"""Keeps errors of a user's backward hooks until the step is over, and raises the first of them then.

An exception in a hook would abort the process (signal 6): it unwinds through the C++ code of the autograd engine, where
the device guard of a Python backend calls into Python from a destructor while the exception is still set. Hooks are
therefore wrapped: the exception is stored, backward continues, and the exception is raised after the step.
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
        """Raises the error of the hook that failed first; does nothing if no hook failed."""
        if self._raised:
            raise self._raised[0]

    def install(self, model: torch.nn.Module) -> None:
        """Wraps the hooks that the model has, and all hooks that are registered later."""
        for module in model.modules():
            for hooks in (module._backward_hooks, module._backward_pre_hooks):
                for number, hook in hooks.items():
                    hooks[number] = self._storing_errors(hook)
        for kind, name in (
            (torch.Tensor, "register_hook"),
            (torch.Tensor, "register_post_accumulate_grad_hook"),
            (torch.nn.Module, "register_full_backward_hook"),
            (torch.nn.Module, "register_full_backward_pre_hook"),
        ):
            setattr(kind, name, self._wrapping_hooks(getattr(kind, name)))

    def _storing_errors(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls the hook, and stores an exception instead of raising it."""

        @functools.wraps(hook)
        def guarded(*args: Any) -> Any:
            try:
                return hook(*args)
            except Exception as error:  # raised again outside of autograd, whatever it is
                self._raised.append(error)
                return None

        return guarded

    def _wrapping_hooks(self, register: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method that wraps a hook and then registers it with `register`, a method of torch."""

        @functools.wraps(register)
        def wrapping(owner: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return register(owner, self._storing_errors(hook), *args, **kwargs)

        return wrapping
