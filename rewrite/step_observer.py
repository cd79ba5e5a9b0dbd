"""The hooks of a training step, for checks between forward, loss, backward and update."""

from __future__ import annotations

from typing import Any

import torch


class StepObserver:
    """Base class of observers of a `TrainingStep`. The hooks do nothing; subclasses override the hooks that they need.

    An exception raised by a hook aborts the step before any parameter changes, and is raised by the step.
    `before_step` comes first. For each micro-batch the order is `before_forward`, `after_forward`, `after_loss`, then
    backward, which is not watched. `before_update` follows once, after the backward of the last micro-batch.
    """

    def before_step(self, batch: Any) -> None:
        """Called with the whole batch before the first forward of a step."""

    def before_forward(self, weight: torch.Tensor | float | None) -> None:
        """Called before the forward of a micro-batch, inside autocast.

        Args:
            weight: the factor on the loss of this micro-batch; None if the batch is not split.
        """

    def after_forward(self) -> None:
        """Called between the forward and the loss function (the loss may have been computed in the forward)."""

    def after_loss(self, loss: torch.Tensor) -> None:
        """Called with the loss of a micro-batch, before it is weighted and scaled."""

    def before_update(self, batch: Any) -> None:
        """Called with the whole batch when all gradients are accumulated, before they are unscaled and clipped."""

    def after_error(self) -> None:
        """Called when the forward, the backward or a hook raised, including `KeyboardInterrupt`."""
