"""Adapters that the planner adds to a transformers model, as `--lora` and `--qlora` ask for."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from planner.errors import WorkloadError
from planner.files import reading

ALL_LINEAR = "all-linear"
"""The name that stands for all linear layers except the output layer (peft's `target_modules="all-linear"`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """Low-rank adapters (Hu et al., LoRA, 2021) that are trained instead of the weights of the model."""

    rank: int
    """Rank of the adapters; 0 for the adapters of a folder that have no rank, such as those of IA3."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get adapters, such as 'q_proj', or `ALL_LINEAR`; empty for peft's choice."""
    is_quantized: bool = False
    """True if the weights of the model are stored in 4 bits (NF4 with double quantization; Dettmers et al., QLoRA,
    2023)."""
    is_dora: bool = False
    """True if the adapters also train the magnitudes of the weights (Liu et al., DoRA, 2024)."""
    folder: str = ""
    """Path of the folder of saved adapters that are trained further; empty for new adapters."""
    method: str = "LoRA"
    """The method of the saved adapters, as their `adapter_config.json` names it (`peft_type`)."""

    @classmethod
    def parsed(cls, text: str, *, is_quantized: bool, is_dora: bool) -> Adapter:
        """Returns the adapter that an option describes: '16', '16:q_proj,v_proj', or a folder of saved adapters.

        Raises:
            WorkloadError: the text is not of that form.
        """
        if text and saved_config(text) is not None:
            if is_dora:
                raise WorkloadError(f"--dora cannot change the saved adapters in '{text}': leave --dora out")
            return cls.saved(text, is_quantized=is_quantized)
        rank, _, names = text.partition(":")
        targets = tuple(name.strip() for name in names.split(",") if name.strip())
        if not rank.strip().isdigit() or int(rank) < 1 or (":" in text and not targets):
            raise WorkloadError(
                f"'{text}' is not a value of {'--qlora' if is_quantized else '--lora'}: give a positive rank, and "
                f"optionally the layers, as in 16, 16:{ALL_LINEAR} or 16:q_proj,v_proj; or an existing folder of saved "
                "adapters"
            )
        return cls(rank=int(rank), targets=targets, is_quantized=is_quantized, is_dora=is_dora)

    @classmethod
    def saved(cls, folder: str, *, is_quantized: bool = False) -> Adapter:
        """Returns the adapters that peft saved in a folder, which has an `adapter_config.json`."""
        config = saved_config(folder) or {}
        method = config.get("peft_type", "LORA")
        return cls(
            rank=config.get("r") or 0,
            is_quantized=is_quantized,
            is_dora=bool(config.get("use_dora")),
            folder=folder,
            method={"LORA": "LoRA", "ADALORA": "AdaLoRA"}.get(method, method),
        )

    @property
    def option(self) -> tuple[str, ...]:
        """The options of the command that ask for this adapter, such as ('--qlora', '16:all-linear')."""
        size = self.folder or ":".join([str(self.rank), *([",".join(self.targets)] if self.targets else [])])
        is_new_dora = self.is_dora and not self.folder
        return ("--qlora" if self.is_quantized else "--lora", size, *(["--dora"] if is_new_dora else []))

    def __str__(self) -> str:
        """Describes the adapter, such as 'LoRA of rank 16 on 4-bit weights'."""
        kind = "DoRA" if self.is_dora else self.method
        rank = f" of rank {self.rank}" if self.rank else ""
        layers = f" for {', '.join(self.targets)}" if self.targets else ""
        origin = f" from '{self.folder}'" if self.folder else ""
        return f"{kind}{rank}{layers}{origin}" + (" on 4-bit weights" if self.is_quantized else "")

    def lora_options(self, model_name: str) -> dict[str, object]:
        """Returns the arguments of `peft.LoraConfig`. The scale `lora_alpha` is twice the rank, as usual.

        Args:
            model_name: name of the model's class, from which the task follows.
        """
        task = _task(model_name)
        options: dict[str, object] = {"r": self.rank, "lora_alpha": 2 * self.rank}
        if self.targets:
            options["target_modules"] = ALL_LINEAR if self.targets == (ALL_LINEAR,) else list(self.targets)
        if self.is_dora:
            options["use_dora"] = True
        return options | ({} if task is None else {"task_type": task})


def saved_config(folder: str) -> dict[str, Any] | None:
    """Returns the settings of the adapters that peft saved in a folder; None if it has no `adapter_config.json`.

    Raises:
        WorkloadError: the file is not a JSON object, or a setting that the planner reads has the wrong type.
    """
    path = pathlib.Path(folder) / "adapter_config.json"
    remedy = "save the adapters again with save_pretrained"
    try:
        config = reading.json_data(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if not os.path.exists(path):  # such as a name that is too long for a file
            return None
        raise WorkloadError(f"'{path}' cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WorkloadError(f"'{path}' is not JSON ({error}): {remedy}") from error
    if not isinstance(config, dict):
        raise WorkloadError(f"'{path}' is not a JSON object: {remedy}")
    for name, kind in _SETTINGS.items():
        if not isinstance(config.get(name), kind | None):
            raise WorkloadError(f"'{path}' is not valid, because '{name}' is {config[name]!r}: {remedy}")
    return config


_SETTINGS = {"peft_type": str, "r": int, "use_dora": bool, "base_model_name_or_path": str}
"""The settings of `adapter_config.json` that the planner reads, with their types."""


def quantization_options(model_name: str) -> dict[str, object]:
    """Returns the arguments of `transformers.BitsAndBytesConfig` for 4-bit weights, except `bnb_4bit_compute_dtype`.

    The head of a classifier is not quantized, because peft trains it with the adapters. transformers alone quantizes
    heads that have a bias (5.23), and peft (0.21) then raises an error.

    Args:
        model_name: name of the model's class, from which the task follows.
    """
    heads = _HEADS.get(_task(model_name) or "")
    options: dict[str, object] = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    }
    return options | ({} if heads is None else {"llm_int8_skip_modules": heads})


_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""The tasks of peft (`peft.TaskType`) by the ending of the name of the model's class."""

_HEADS = {
    "SEQ_CLS": ["classifier", "score"],
    "TOKEN_CLS": ["classifier", "score"],
    "QUESTION_ANS": ["qa_outputs"],
}
"""Names of the modules that peft trains in full for a task (`modules_to_save`)."""


def _task(model_name: str) -> str | None:
    return next((task for ending, task in _TASKS.items() if model_name.endswith(ending)), None)


def compute_dtype(dtype: str) -> str:
    """Returns the dtype in which products with 4-bit weights are computed, for a model of a dtype such as 'float32'."""
    return "bfloat16" if dtype == "float32" else dtype
