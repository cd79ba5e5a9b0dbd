"""A training step of the user's own, run with the rewritten modules: `step(batch)` calls the user's function."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from planner.errors import DecisionError, PlanFileError
from planner.plan_types.decisions import Decision
from planner.rewrite import step_state
from planner.rewrite.portable.recompute_check import RecomputeDifference
from planner.rewrite.rewriting import Uncopied
from planner.rewrite.step_observer import StepObserver
from planner.workload.call_convention import StepFn


@final
class OwnStep(Uncopied):
    """Trains with one batch per call: `step(batch)` calls the user's function, and returns what it returns.

    The function decides on everything: forwards, losses, backwards, clipping, the steps of its optimizers. After an
    error, gradients and parameters are as the function left them.

    Args:
        function: called as `function(module, optimizer, batch)`.
        optimizer: what the function gets: one optimizer, a dict or a tuple.
        optimizers: the same optimizers by name.
        decisions: the plan's decisions, which are saved in `state_dict`.
        observers: called before the function (`before_step`, `before_forward`) and after it (`before_update`).
    """

    def __init__(
        self,
        function: StepFn,
        module: torch.nn.Module,
        optimizer: Any,
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        decisions: Sequence[Decision] = (),
        observers: tuple[StepObserver, ...] = (),
    ) -> None:
        self.function = function
        self.module = module
        self.optimizer = optimizer
        self.observers = observers
        self._optimizers = dict(optimizers)
        self._decisions = tuple(decisions)
        self._closed = False

    def __call__(self, batch: Any) -> Any:
        """Run the user's step with one batch, and return what it returns.

        Raises:
            DecisionError: after `undo`; if a backward computed with other values than its forward (`RecomputeCheck`).
        """
        self._refuse_if_closed()
        try:
            for observer in self.observers:
                observer.before_step(batch)
                observer.before_forward(None)
            result = self.function(self.module, self.optimizer, batch)
            for observer in self.observers:
                observer.before_update(batch)
        except BaseException as error:
            for observer in self.observers:
                observer.after_error()
            if isinstance(error, RecomputeDifference):
                why = str(error).removesuffix("Nothing was updated")
                raise DecisionError(f"{why}Updates that the step function made before this backward stay") from None
            raise
        return result

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all optimizers by name, and the plan's fingerprint. Tensors are not copied.

        Save the model's weights and the state of your schedulers, scalers and random generators, too.

        Raises:
            DecisionError: after `undo`.
        """
        self._refuse_if_closed()
        return {
            name: step_state.saved(self.module, optimizer, None, None, self._decisions)
            for name, optimizer in self._optimizers.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, under the same plan, for the same model, with optimizers of the same names.

        Raises:
            PlanFileError: if the state belongs to another plan, model or optimizer. Nothing is changed then.
            DecisionError: after `undo`.
        """
        self._refuse_if_closed()
        if not isinstance(state, Mapping) or state.keys() != self._optimizers.keys():
            raise PlanFileError(
                f"this is not the state of a step with the optimizers {', '.join(map(repr, self._optimizers))}: give "
                "what its state_dict() returned"
            )
        for name, optimizer in self._optimizers.items():
            step_state.refuse_mismatch(state[name], self.module, optimizer, None, None, self._decisions)
        with contextlib.ExitStack() as all_or_nothing:
            for optimizer in self._optimizers.values():
                all_or_nothing.enter_context(step_state.restored_on_error(optimizer, None, None))
            for name, optimizer in self._optimizers.items():
                step_state.load_checked(state[name], optimizer, None, None)

    def close(self) -> None:
        """Raise an error in all further calls, because the modules are no longer rewritten."""
        self._closed = True

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise DecisionError("this training step was undone: apply the plan again to get a new one")
