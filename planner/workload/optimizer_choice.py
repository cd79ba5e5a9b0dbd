"""The ways to give the optimizers of a model: one or several, each as a name, an object or a function."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from planner.errors import WorkloadError
from planner.plan_types.words import OptimizerName
from planner.workload.unsupported import library

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
OptimizerSpec = str | torch.optim.Optimizer | MakeOptimizer
"""A name such as 'adamw', an optimizer over the model's parameters, or a function from parameters to an optimizer."""

Optimizers = OptimizerSpec | Mapping[str, OptimizerSpec] | Sequence[OptimizerSpec]
"""One optimizer or, for a step of the user's own, a dict or tuple of optimizers."""

_OneChoice = OptimizerName | torch.optim.Optimizer | MakeOptimizer
OptimizerChoice = _OneChoice | Mapping[str, _OneChoice] | Sequence[_OneChoice]
"""The same as `Optimizers` for an argument, whose names are checked and completed by editors."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerByName:
    """An optimizer class that the user can name, with the hyperparameters of the live step and of emitted files."""

    path: str
    """Module and name of the class, such as 'torch.optim.AdamW'."""
    hyperparameters: dict[str, Any]
    """Arguments of the class, numbers and tuples of numbers. For others it has its own defaults."""
    optim: str | None = None
    """Its name in the Trainer (`TrainingArguments.optim`); None if it has none."""

    @property
    def library(self) -> str:
        """Name of the package of the class, such as 'bitsandbytes'."""
        return self.path.partition(".")[0]

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        """The class. Raises `WorkloadError` if its package is not installed, or cannot be used."""
        module, _, name = self.path.rpartition(".")
        library(self.library, self.path)
        return getattr(importlib.import_module(module), name)

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Creates the optimizer over these parameters."""
        return self.kind(parameters, **self.hyperparameters)


_ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
_ADAMW: dict[str, Any] = {**_ADAM, "weight_decay": 1e-2}
_LION: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}


def _of_library(module: str, hyperparameters: dict[str, Any], **names: str) -> dict[str, OptimizerByName]:
    """Returns optimizers that have the same name here as in the Trainer, given their names and class names."""
    return {
        name: OptimizerByName(path=f"{module}.{kind}", hyperparameters=hyperparameters, optim=name)
        for name, kind in names.items()
    }


OPTIMIZERS: dict[str, OptimizerByName] = {
    "adamw": OptimizerByName(path="torch.optim.AdamW", hyperparameters=_ADAMW, optim="adamw_torch"),
    "adam": OptimizerByName(
        path="torch.optim.Adam", hyperparameters={**_ADAM, "weight_decay": 0.0}, optim="adamw_torch"
    ),
    "sgd": OptimizerByName(path="torch.optim.SGD", hyperparameters={"lr": 1e-3}, optim="sgd"),
    "sgd-momentum": OptimizerByName(path="torch.optim.SGD", hyperparameters={"lr": 1e-3, "momentum": 0.9}, optim="sgd"),
    "adagrad": OptimizerByName(path="torch.optim.Adagrad", hyperparameters={"lr": 1e-2}, optim="adagrad"),
    "rmsprop": OptimizerByName(path="torch.optim.RMSprop", hyperparameters={"lr": 1e-2}, optim="rmsprop"),
    "adafactor": OptimizerByName(path="torch.optim.Adafactor", hyperparameters={"lr": 1e-2}),
    **_of_library("bitsandbytes.optim", _ADAMW, paged_adamw_32bit="PagedAdamW32bit", paged_adamw_8bit="PagedAdamW8bit"),
    **_of_library(
        "bitsandbytes.optim",
        _LION,
        lion_32bit="Lion32bit",
        lion_8bit="Lion8bit",
        paged_lion_32bit="PagedLion32bit",
        paged_lion_8bit="PagedLion8bit",
    ),
}
"""Optimizers by the names that users can give instead of an optimizer object."""


def by_name(optimizers: Optimizers) -> dict[str, OptimizerSpec]:
    """Returns the optimizers by name: keys of a dict, '[0]', '[1]' ... for a tuple, '' for a single optimizer.

    Raises:
        WorkloadError: the dict or tuple is empty, or has an entry that gives no optimizer.
    """
    if isinstance(optimizers, (str, torch.optim.Optimizer)) or not isinstance(optimizers, (Mapping, Sequence)):
        return {"": optimizers}
    if isinstance(optimizers, Mapping):
        named = {str(name): spec for name, spec in optimizers.items()}
    else:
        named = {f"[{number}]": spec for number, spec in enumerate(optimizers)}
    if not named:
        raise WorkloadError("no optimizer was given: give at least one")
    for name, spec in named.items():
        if not (isinstance(spec, (str, torch.optim.Optimizer)) or callable(spec)):
            raise WorkloadError(
                f"optimizer '{name}' is of type {type(spec).__name__}: give a torch optimizer, a name, or a function "
                "that takes parameters and returns an optimizer"
            )
    return named


def arranged(like: Optimizers, named: Mapping[str, T]) -> T | dict[Any, T] | tuple[T, ...]:
    """Returns values by name, as `by_name` names them, in the form of `like`: one value, a dict or a tuple."""
    if isinstance(like, Mapping):
        return {key: named[str(key)] for key in like}
    return named[""] if "" in named else tuple(named.values())


def optimizer_name(optimizers: Optimizers) -> str:
    """Returns the name of an optimizer: the name that the user gave, or the qualified name of its class or function.

    Several optimizers are listed with their names, as in 'generator: adamw, discriminator: adamw'.
    """
    named = by_name(optimizers)
    return ", ".join(f"{name}: {_name_of(spec)}" if name else _name_of(spec) for name, spec in named.items())


def _name_of(optimizer: OptimizerSpec) -> str:
    if isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return getattr(optimizer, "__qualname__", type(optimizer).__qualname__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerBlueprint:
    """Class, defaults and parameter groups of an optimizer object, without the parameters.

    With a blueprint the same optimizer can be created for another copy of the model, such as the fake copy that is
    rehearsed.
    """

    kind: type[torch.optim.Optimizer]
    defaults: dict[str, Any]
    groups: tuple[dict[str, Any], ...]
    """The parameter groups; 'params' lists positions in `model.parameters()` instead of parameters."""

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        lacks: Callable[[str], bool] = lambda name: False,
    ) -> OptimizerBlueprint:
        """Returns the blueprint of an optimizer over parameters of `model`.

        Args:
            lacks: says whether the copies of the model will lack the parameter with this name.

        Raises:
            WorkloadError: the optimizer has a parameter that does not belong to the model.
        """
        members = {id(parameter) for parameter in model.parameters()}
        kept = [parameter for name, parameter in model.named_parameters() if not lacks(name)]
        position = {id(parameter): number for number, parameter in enumerate(kept)}
        groups = []
        for group in optimizer.param_groups:
            if any(id(parameter) not in members for parameter in group["params"]):
                raise WorkloadError(
                    "the optimizer has a parameter that does not belong to the model: create it from model.parameters()"
                )
            numbers = [position[id(each)] for each in group["params"] if id(each) in position]
            groups.append({**group, "params": numbers})
        return cls(kind=type(optimizer), defaults=dict(optimizer.defaults), groups=tuple(groups))

    def over(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Creates the same optimizer for the parameters of `model`, which is another copy of the model.

        Raises:
            WorkloadError: the class needs arguments that are not in the optimizer's `defaults`.
        """
        parameters = list(model.parameters())
        groups = [{**group, "params": [parameters[number] for number in group["params"]]} for group in self.groups]
        accepted = inspect.signature(self.kind).parameters
        try:
            return self.kind(groups, **{name: value for name, value in self.defaults.items() if name in accepted})
        except TypeError as error:
            raise WorkloadError(
                f"another {self.kind.__name__} like yours cannot be made ({error}): give a function that takes "
                "parameters and returns the optimizer"
            ) from error


def for_copies(
    optimizers: Optimizers, model: torch.nn.Module, lacks: Callable[[str], bool] = lambda name: False
) -> Callable[[torch.nn.Module], Optimizers]:
    """Returns a function that gives the same optimizers for a copy of `model`. Objects are created anew, without state.

    Args:
        lacks: says whether the copy lacks the parameter with this name.

    Raises:
        WorkloadError: an optimizer has a parameter that does not belong to the model.
    """
    blueprints = {
        name: OptimizerBlueprint.of(spec, model, lacks) if isinstance(spec, torch.optim.Optimizer) else spec
        for name, spec in by_name(optimizers).items()
    }

    def over(copy: torch.nn.Module) -> Optimizers:
        made = {
            name: spec.over(copy) if isinstance(spec, OptimizerBlueprint) else spec for name, spec in blueprints.items()
        }
        return arranged(optimizers, made)

    return over
