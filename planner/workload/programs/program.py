"""The base class of programs that train by their own loop: it prepares a model as the program does."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import warnings
from typing import Any, ClassVar

import torch

from planner.errors import WorkloadError
from planner.plan_types.adapter import Adapter
from planner.plan_types.plan import TrainingProgram
from planner.workload.optimizer_choice import OPTIMIZERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """The training that the user asks for, and the card."""

    adapter: Adapter | None
    optimizer: str
    dtype: str | None
    """Name of the dtype of the weights that the user asks for; None to let the program choose."""
    stored: str
    """Name of the dtype of the saved weights."""
    autocast: str | None
    """Name of the dtype that the card computes fastest under autocast; None if it computes none faster than float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """The conditions under which a plan can be followed by a program's config."""

    dtype: str
    """Name of the dtype in which the program loads the weights, or to which it converts them."""
    forced: tuple[str, ...] = ()
    """Techniques that the program always uses."""
    forbidden: tuple[str, ...] = ()
    """Techniques that the program cannot use."""


class Program(abc.ABC):
    """A program that trains a transformers model by its own loop."""

    title: ClassVar[str]
    """The name that the program gives itself."""
    upcasts_before_adapters: ClassVar[bool] = True
    """True if weights that are not quantized become float32 under QLoRA (peft's `prepare_model_for_kbit_training`)."""

    def terms(self, wish: Wish) -> Terms:
        """Returns the conditions for the plan.

        Raises:
            WorkloadError: the program cannot train this; the message says what to change.
        """
        optim = OPTIMIZERS[wish.optimizer].optim if wish.optimizer in OPTIMIZERS else None
        if optim is None:
            raise WorkloadError(
                f"the config of {self.title} cannot name the optimizer '{wish.optimizer}', because transformers' "
                "Trainer does not have the same one: choose another with --optimizer, such as adamw"
            )
        if wish.adapter is not None and wish.adapter.folder:
            raise WorkloadError(
                f"a plan for {self.title} cannot train the saved adapters in '{wish.adapter.folder}' further: plan "
                "new adapters with --lora or --qlora, or another loop with --for"
            )
        terms = self._terms(wish)
        # The optimizers' names set a kernel only for AdamW: adamw_torch_fused.
        kernels = () if optim == "adamw_torch" else ("optimizer-kernel",)
        return dataclasses.replace(terms, forbidden=(*terms.forbidden, *kernels))

    @abc.abstractmethod
    def _terms(self, wish: Wish) -> Terms:
        """Returns the conditions on dtype and precision. Raises `WorkloadError` as `terms` does."""

    def prepare(self, model: Any, adapter: Adapter | None, dtype: str, settings: TrainingProgram) -> TrainingProgram:
        """Changes the model as the program does before training, and returns the settings with the model's facts.

        Args:
            model: the model with its adapters. It may be on the meta device.
            dtype: name of the dtype of its weights.
            settings: which program it is, and whether it checkpoints.

        Raises:
            WorkloadError: the program trains no such model.
        """
        base = model if adapter is None else model.get_base_model()
        refuse_other_models(base, self.title)
        self._convert(model, adapter, dtype)
        if settings.gradient_checkpointing:
            _enable_gradient_checkpointing(base)
        if adapter is not None and self._inputs_need_gradients(settings):
            base.enable_input_require_grads()
        return dataclasses.replace(
            settings, attention=base.config._attn_implementation, targets=_targets(model, self.title)
        )

    @abc.abstractmethod
    def _convert(self, model: Any, adapter: Adapter | None, dtype: str) -> None:
        """Converts the weights whose dtype the program changes after loading."""

    def _inputs_need_gradients(self, settings: TrainingProgram) -> bool:
        """True if the program lets the outputs of the embeddings require gradients although these are frozen."""
        return settings.gradient_checkpointing


def refuse_other_models(model: torch.nn.Module, title: str) -> None:
    """Raises `WorkloadError` unless the program loads this class for the model's config: that of a language model."""
    transformers: Any = importlib.import_module("transformers")
    config = type(model.config)
    others = (transformers.AutoModelForImageTextToText, transformers.AutoModelForSeq2SeqLM)
    language = transformers.AutoModelForCausalLM._model_mapping
    is_other = any(config in other._model_mapping for other in others)
    if is_other or config not in language or language[config] is not type(model):
        raise WorkloadError(
            f"a plan for {title} must be for a causal language model of text (AutoModelForCausalLM), and this is a "
            f"{type(model).__name__}: choose another loop with --for"
        )


def _enable_gradient_checkpointing(model: Any) -> None:
    """Enables transformers' own gradient checkpointing for all layers, without reentrant autograd."""
    if not model.supports_gradient_checkpointing:
        raise WorkloadError(f"{type(model).__name__} does not support gradient checkpointing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of transformers have another name for it
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _targets(model: torch.nn.Module, title: str) -> tuple[str, ...]:
    """Returns the names of the layers that have adapters, such as 'q_proj'; empty if there are none.

    Raises:
        WorkloadError: the names would also select other layers.
    """
    named = {name: module for name, module in model.named_modules() if "lora_" not in name}
    adapted = {name for name, module in named.items() if hasattr(module, "lora_A")}
    targets = {name.rpartition(".")[2] for name in adapted}
    if others := sorted(name for name in named if name.rpartition(".")[2] in targets and name not in adapted):
        raise WorkloadError(
            f"the config of {title} names layers by the last part of their names, which '{others[0]}' shares with "
            "layers that get adapters: name other layers, as in --lora 16:q_proj,v_proj"
        )
    return tuple(sorted(targets))
