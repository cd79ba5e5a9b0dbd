"""Handles errors of Python code that autograd calls in backward, where an exception would abort the process (signal 6).

The exception would unwind through the C++ code of the autograd engine, where the device guard of a Python backend calls
into Python from a destructor while the exception is still set. An error of a backward hook is stored, backward
continues, and the first error is raised after the step. Backward cannot continue after an error of a recomputed module
(in a hook for saved tensors) or of the backward of a `torch.autograd.Function`: these are reported at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class HookErrors:
    """Collects the errors that backward hooks raise during one rehearsal.

    `install` replaces methods of torch's classes, so it must be called in a child process only.

    Args:
        report: function that is called with an error after which backward cannot continue, and that ends the process.
    """

    def __init__(self, report: Callable[[Exception], None]) -> None:
        self._report = report
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
        set_hooks = torch.autograd.graph.saved_tensors_hooks.__init__

        @functools.wraps(set_hooks)
        def set_guarded(hooks: Any, pack_hook: Callable, unpack_hook: Callable) -> None:
            set_hooks(hooks, pack_hook, self._reporting_errors(unpack_hook))

        torch.autograd.graph.saved_tensors_hooks.__init__ = set_guarded  # type: ignore[method-assign, assignment]  # a patch
        function = torch.autograd.function.BackwardCFunction
        function.apply = self._reporting_errors(function.apply)  # type: ignore[method-assign]  # a patch

    def _reporting_errors(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that reports an exception in backward before it raises it."""

        @functools.wraps(function)
        def guarded(*args: Any) -> Any:
            try:
                return function(*args)
            except Exception as error:  # whatever the user's code raises
                if torch._C._current_autograd_node() is not None:
                    self._report(error)
                raise

        return guarded

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
