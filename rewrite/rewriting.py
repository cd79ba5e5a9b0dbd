"""The object that rules work on: a model, the settings of its training step, and a way to undo every change."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from planner.errors import DecisionError
from planner.rewrite.optimizers import make_optimizers
from planner.rewrite.portable.module_forward import forward_function
from planner.rewrite.portable.recompute_check import RecomputeCheck
from planner.workload.call_convention import Calling, LossFn, Parallelize
from planner.workload.optimizer_choice import Optimizers, by_name

LossWeight = Callable[[Any], torch.Tensor | float]
"""`loss_weight(batch)` returns the number of terms over which the loss of a batch or micro-batch is a mean."""


class Uncopied:
    """Base class of objects that hold the changes to one model: copying or pickling them raises `TypeError`.

    A copy would undo and check the changes to the original model, although it trains a copy of it.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} objects cannot be copied or pickled, because they hold the changes to one model: "
            "copy the module instead, or save step.state_dict() and load it where the plan is applied again"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One change that a rule made to the model, and how to undo it."""

    place: str
    """Description of what was changed, for messages: 'forward of encoder.layer.0'."""
    intact: Callable[[], bool]
    """Returns True unless something else has replaced what the rule set."""
    restore: Callable[[], None]
    """Undoes the change."""
    set_again: Callable[[], None] | None = None
    """For a forward: makes the change again after `restore`; None for other changes."""


@final
class Rewriting:
    """A model that is being rewritten. Rules set the attributes below, and record what they change on the model.

    Attributes:
        not_by_sample: paths of the tensors of a batch that are the same for all samples.
        parallelize: the user's own function that divides the model among cards; None if there is none.
        device_type: type of the device on which the step computes.
        autocast_dtype: lower precision of forward and loss; None without autocast.
        sharded_precision: FSDP2's policy for mixed precision; None if parameters are gathered in their own dtype.
        scaler: the gradient scaler; None unless the step runs in fp16.
        split: splits a batch into micro-batches; None if the step takes the batch whole.
        loss_terms: function that takes a batch or micro-batch and its number of samples, and returns the number of
            terms over which its loss is a mean.
        backward: context of a backward that updates the parameters itself; None if the optimizer steps after it.
        chunked_head: module that computes its logits in chunks; None if the loss is not computed in chunks.
        rank_share: function that takes the batch of a rank, and returns the factor of its loss; None for one process.
        wrapper: module through which the model is called, such as DistributedDataParallel; None if it is called itself.
        no_sync: returns the context of a micro-batch whose gradients are not reduced over the cards; None if those of
            each micro-batch are.
        recompute_check: compares the tensors that backward gets in watched modules with those of their forward; None if
        no module is watched.
        changes: changes to the model, in the order in which they were made.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optimizer: Optimizers,
        calling: Calling,
        batch_size: int,
        loss_fn: LossFn | None,
        loss_weight: LossWeight | None,
        not_by_sample: tuple[str, ...] = (),
        parallelize: Parallelize | None = None,
    ) -> None:
        self.model = model
        self.calling = calling
        self.batch_size = batch_size
        self.loss_fn = loss_fn
        self.loss_weight = loss_weight
        self.not_by_sample = not_by_sample
        self.parallelize = parallelize
        self.autocast_dtype: torch.dtype | None = None
        self.sharded_precision: Any = None
        self.scaler: torch.amp.GradScaler | None = None
        self.split: Callable[[Any], Any] | None = None
        self.loss_terms: Callable[[Any, int], torch.Tensor | float] | None = None
        self.backward: Callable[[], contextlib.AbstractContextManager] | None = None
        self.chunked_head: torch.nn.Module | None = None
        self.rank_share: Callable[[Any], torch.Tensor] | None = None
        self.wrapper: torch.nn.Module | None = None
        self.no_sync: Callable[[], contextlib.AbstractContextManager] | None = None
        self.recompute_check: RecomputeCheck | None = None
        self.changes: list[Change] = []
        self._latest: dict[tuple[int, str], object] = {}
        """(id of an object, name of an attribute) -> the last value to which a rule set the attribute."""
        self.device_type = next(model.parameters()).device.type
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._choice = optimizer

    @functools.cached_property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name; '' names the only one. They are made on first use, after rules that freeze."""
        return make_optimizers(self._choice, self.model)

    def replace_in_optimizers(self, replaced: Mapping[int, torch.nn.Parameter]) -> None:
        """Put new parameters into the groups of the optimizers that the user gave, by the `id` of the old ones.

        Raises:
            DecisionError: if an optimizer has taken a step already, so that it has state for the old parameters.
        """
        for given in by_name(self._choice).values():
            if not isinstance(given, torch.optim.Optimizer):
                continue
            if given.state:
                raise DecisionError(
                    f"{type(given).__name__} has state for parameters that are sharded now: apply the plan before the "
                    "first step, and load a state that was saved before with torch.distributed.checkpoint"
                )
            for group in given.param_groups:
                group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The only optimizer of the planner's own step."""
        return self.optimizers[""]

    def chosen_optimizers(self, names: Sequence[str], kind: str) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers that a decision names; without names, the only one.

        Args:
            kind: kind of the decision, for the error message.

        Raises:
            DecisionError: if there is no optimizer of such a name.
        """
        for name in names or ("",):
            if name not in self.optimizers:
                present = ", ".join(map(repr, self.optimizers)) if any(self.optimizers) else "only one, without a name"
                raise DecisionError(
                    f"{kind} is planned for {f'optimizer {name!r}' if name else 'the only optimizer'}, and the step "
                    f"has {present}: give the optimizers that the plan was made with"
                )
        return {name: self.optimizers[name] for name in names or ("",)}

    def module(self, name: str, kind: str) -> torch.nn.Module:
        """Return the submodule `name`. Raises `DecisionError` if there is none.

        Args:
            kind: kind of the decision that names the module, for the error message.
        """
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

    def watched_forward(self, module: torch.nn.Module, name: str) -> Callable[..., Any]:
        """The forward of a module, as a function that takes the module first. `recompute_check` watches its calls."""
        if self.recompute_check is None:
            self.recompute_check = RecomputeCheck()
        return self.recompute_check.watched(forward_function(module), name)

    def replace(self, owner: object, name: str, value: object, *, place: str) -> None:
        """Set an attribute of an object. Undo restores its former value.

        If the object itself had no such attribute, but only its class, undo removes it from the object.

        Args:
            place: description of what is changed, for messages.
        """
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
            Change(
                place=place,
                intact=lambda: own.get(name) is self._latest[id(owner), name],
                restore=restore,
                set_again=functools.partial(setattr, owner, name, value) if name == "forward" else None,
            )
        )

    @contextlib.contextmanager
    def original_forwards(self) -> Iterator[None]:
        """Context in which modules have the forwards that they had before the rewriting.

        Raises:
            DecisionError: if something replaced a forward after the rewriting, as accelerate does.
        """
        forwards = [change for change in self.changes if change.set_again is not None]
        for change in forwards:
            if not change.intact():
                raise DecisionError(f"{change.place} was replaced after the plan was applied")
        for change in reversed(forwards):
            change.restore()
        try:
            yield
        finally:
            for change in forwards:
                assert change.set_again is not None
                change.set_again()

    def add_hooks(self, handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
        """Let `undo` remove these hooks of the model. Hooks may also be removed before."""

        def remove_hooks() -> None:
            for handle in handles:
                handle.remove()

        self.changes.append(
            Change(
                place="hooks of the model",
                intact=lambda: True,
                restore=remove_hooks,
            )
        )

    def is_latest(self, owner: object, name: str, value: object) -> bool:
        """True if `value` is the last value that a rule gave this attribute."""
        return self._latest.get((id(owner), name)) is value

    def turn_cache_off(self) -> None:
        """Set `config.use_cache` (transformers) to False: training would fill a key-value cache that nothing reads."""
        for name, module in self.model.named_modules():
            config = getattr(module, "config", None)
            if getattr(config, "use_cache", None) is True:
                self.replace(config, "use_cache", False, place=f"config.use_cache of '{name}'")

    def undo(self) -> None:
        """Undo every change. Raises `DecisionError`, and undoes nothing, if something else replaced what a rule set."""
        for change in self.changes:
            if not change.intact():
                raise DecisionError(
                    f"{change.place} was replaced after the plan was applied: undo that first, then call undo() again"
                )
        self.restore()

    def restore(self) -> None:
        """Undo every change, the latest first, also if something else replaced what a rule set."""
        while self.changes:
            self.changes.pop().restore()
