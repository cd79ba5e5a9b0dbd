"""Run a plan under transformers' `Trainer`, where transformers is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from planner.errors import DecisionError
from planner.rewrite.trainer.apply import RewrittenForTrainer

if TYPE_CHECKING:
    from planner.rewrite.trainer.callback import PlanCallback


def trainer_callback(
    rewritten: RewrittenForTrainer, *, steps: int = 3, on_broken: Literal["warn", "raise"] = "warn"
) -> PlanCallback:
    """Returns a `transformers.TrainerCallback` that checks that the Trainer follows the plan.

    When training begins, it raises an error if arguments, model or optimizer do not match the plan. In the first steps
    it raises an error if a batch is larger than planned, or if the loss counts labels differently from the Trainer.
    After these steps it logs one line: the memory of the card stayed within the plan's promise or did not (`.promise`
    has the figures), or could not be measured without CUDA. Do not evaluate during these steps: the promise does not
    include evaluation.

    Args:
        rewritten: the result of `apply_for_trainer`.
        steps: number of optimizer steps that are checked; at least 2, because the optimizer state is allocated in the
            first step.
        on_broken: what to do if the promise is broken, or a later batch is larger than planned: "warn", or "raise" a
            `PromiseError`.

    Raises:
        DecisionError: if `steps` is less than 2, or `on_broken` is neither "warn" nor "raise".
    """
    from planner.rewrite.trainer.callback import PlanCallback

    if steps < 2:
        raise DecisionError(
            f"steps={steps} is too few to check memory, because the optimizer's state is created in the first step: "
            "give at least 2"
        )
    if on_broken not in ("warn", "raise"):
        raise DecisionError(f"on_broken={on_broken!r} is unknown: choose warn or raise")
    return PlanCallback(rewritten, steps=steps, on_broken=on_broken)
