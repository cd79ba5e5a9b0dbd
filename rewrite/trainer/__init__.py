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
    """A `transformers.TrainerCallback` that holds the Trainer to the plan.

    When training begins it refuses arguments, a model or an optimizer that were not planned, and in the first steps
    batches that are larger than planned or whose labels the Trainer counts otherwise than the model's loss. After them
    it says in one line of the log (`trainer.callback`; `.promise` is the same as an object) whether the card
    took more than promised; without CUDA, that it could not be measured. Let the Trainer evaluate later than that: what
    it takes then was not promised.

    Args:
        steps: how many optimizer steps are looked at; at least 2, since the optimizer's state is made in the first.
        on_broken: what to do when a promise is broken, or a later batch is larger than planned: "warn", or "raise" a
            `PromiseError`.
    """
    from planner.rewrite.trainer.callback import PlanCallback

    if steps < 2:
        raise DecisionError(f"steps={steps}: the optimizer's state is made in the first step, look at 2 or more")
    if on_broken not in ("warn", "raise"):
        raise DecisionError(f"on_broken={on_broken!r} is unknown: choose warn or raise")
    return PlanCallback(rewritten, steps=steps, on_broken=on_broken)
