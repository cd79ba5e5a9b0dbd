"""What the rules work on: a model, the settings of its training step, and a way back for every change."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from planner.errors import DecisionError
from planner.rewrite.optimizers import OptimizerChoice, make_optimizer
from planner.workload.call_convention import Calling, LossFn

LossWeight = Callable[[Any], torch.Tensor | float]
"""`loss_weight(batch)` -> how many terms the mean loss of this batch, or of a part of it, is taken over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One thing a rule did to the model, and how to take it back."""

    place: str
    """What was changed, for people: 'forward of encoder.layer.0'."""
    intact: Callable[[], bool]
    """Whether the change is still as the rule left it."""
    restore: Callable[[], None]


@final
class Rewriting:
    """A model being rewritten. Constraints set the fields below and record what they change on the model itself."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optimizer: OptimizerChoice,
        calling: Calling,
        batch_size: int,
        loss_fn: LossFn | None,
        loss_weight: LossWeight | None,
    ) -> None:
        self.model = model
        self.calling = calling
        self.batch_size = batch_size
        self.loss_fn = loss_fn
        self.loss_weight = loss_weight
        self.autocast_dtype: torch.dtype | None = None
        self.scaler: torch.amp.GradScaler | None = None
        self.split: Callable[[Any], Any] | None = None
        self.loss_terms: Callable[[Any, int], torch.Tensor | float] | None = None
        """From a part of a batch and its samples, over how many terms its loss is taken to be a mean."""
        self.backward: Callable[[], contextlib.AbstractContextManager] | None = None
        """Context of a backward that updates the parameters itself."""
        self.changes: list[Change] = []
        self._latest: dict[tuple[int, str], object] = {}
        """Attributes as the last of those rules left them that set them."""
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._choice = optimizer
        self._optimizer: torch.optim.Optimizer | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Made on first use: rules that freeze parameters come before those that look at the optimizer."""
        if self._optimizer is None:
            self._optimizer = make_optimizer(self._choice, self.model)
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def module(self, name: str, kind: str) -> torch.nn.Module:
        """The submodule that a decision of this kind names. Raises `DecisionError` when there is none."""
        if name in self._modules:
            return self._modules[name]
        known = name
        while known not in self._modules:
            known = known.rpartition(".")[0]
        children = [child for child, _ in self._modules[known].named_children()]
        raise DecisionError(
            f"{kind} names module '{name}', which {type(self.model).__name__} does not have: "
            f"'{known}' holds {', '.join(children[:8]) or 'no modules'}; make the plan again for this model"
        )

    def device_type(self) -> str:
        """Where the parameters are now, as `torch.autocast` wants it."""
        return next(self.model.parameters()).device.type

    def replace(self, owner: object, name: str, value: object, *, place: str) -> None:
        """Set an attribute on this one object; undo restores what the object itself held, or its class's."""
        own = vars(owner)
        missing = object()
        before = own.get(name, missing)

        def restore() -> None:
            if before is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self._latest[id(owner), name] = value
        self.changes.append(
            Change(place=place, intact=lambda: own.get(name) is self._latest[id(owner), name], restore=restore)
        )

    def add_hooks(self, handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
        """Have hooks of the model removed when all is taken back; twice is once."""
        self.changes.append(
            Change(
                place="hooks of the model",
                intact=lambda: True,
                restore=lambda: [handle.remove() for handle in handles],
            )
        )

    def is_latest(self, owner: object, name: str, value: object) -> bool:
        """Whether it was `value` that the last rule to replace this attribute set it to."""
        return self._latest.get((id(owner), name)) is value

    def turn_cache_off(self) -> None:
        """No `config.use_cache` (transformers): training fills a cache of keys and values for nothing."""
        for name, module in self.model.named_modules():
            config = getattr(module, "config", None)
            if getattr(config, "use_cache", None) is True:
                self.replace(config, "use_cache", False, place=f"config.use_cache of '{name}'")

    def undo(self) -> None:
        """Take back every change, unless one was changed again. Raises `DecisionError` then, and nothing is changed."""
        for change in self.changes:
            if not change.intact():
                raise DecisionError(f"{change.place} was replaced after the plan was applied: undo that first")
        self.restore()

    def restore(self) -> None:
        """Take back every change, the latest first."""
        while self.changes:
            self.changes.pop().restore()
