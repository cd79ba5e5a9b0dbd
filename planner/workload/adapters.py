"""Adds LoRA adapters to a transformers model with peft, and quantizes its weights with bitsandbytes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import warnings
from typing import Any

import torch

from planner.errors import WorkloadError, first_line
from planner.plan_types.adapter import Adapter, compute_dtype, quantization_options
from planner.workload.unsupported import library
from planner.workload.workload import Workload


def adapted(model: Any, adapter: Adapter, *, dtype: str, upcasts: bool = True) -> torch.nn.Module:
    """Returns the model with adapters. Its other weights are frozen, and perhaps in 4 bits.

    With 4-bit weights the result is that of `from_pretrained(..., quantization_config=...)` and peft's
    `prepare_model_for_kbit_training`, which casts the weights that are not quantized to float32. The weights are
    quantized when they are moved to a device.

    Args:
        model: a transformers model, which is changed. It may be on the meta device.
        dtype: name of the dtype of its weights.
        upcasts: False to leave the weights that are not quantized in this dtype.

    Raises:
        WorkloadError: peft or bitsandbytes is not installed, the model has no layers of these names, or it is on the
            meta device and the adapter is DoRA on 4-bit weights.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses names that transformers has deprecated
        return _adapted(model, adapter, dtype, upcasts=upcasts)


def adapted_workload(workload: Workload, adapter: Adapter) -> Workload:
    """Returns the same training step for a copy of the model with adapters, on the meta device.

    Raises:
        WorkloadError: the model is not one of transformers or has adapters, the optimizer is an object, the step is the
            user's own, or the adapters cannot be added (see `adapted`).
    """
    if why_not := why_not_adapted(workload):
        raise WorkloadError(why_not)
    model = workload.model
    dtype = workload.model_facts().dtype
    return dataclasses.replace(
        workload,
        model=adapted(meta_copy(model), adapter, dtype=dtype),
        dtype=dtype,
        adapter=adapter,
        gradient_names=None,
    )


def why_not_adapted(workload: Workload) -> str | None:
    """Returns the reason why the planner cannot add adapters to the model of a training step; None if it can."""
    if workload.step is not None or not isinstance(workload.optimizer, str):
        return "an optimizer object holds the weights of the model: name the optimizer instead, such as 'adamw'"
    return why_no_adapters(workload.model)


def why_no_adapters(model: torch.nn.Module) -> str | None:
    """Returns the reason why the planner cannot add adapters to a model; None if it can."""
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "config"):
        return (
            f"{type(model).__name__} is not a transformers model: add adapters yourself, with peft.get_peft_model, and "
            "plan the model that it returns"
        )
    return "the model has adapters already" if hasattr(model, "peft_config") else None


def meta_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Returns a copy of the model whose parameters are on the meta device, so that they take no memory."""
    copies: dict[int, Any] = {}
    for parameter in model.parameters():
        copies[id(parameter)] = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, copies)


def _adapted(model: Any, adapter: Adapter, dtype: str, *, upcasts: bool) -> torch.nn.Module:
    peft = library("peft", "LoRA")
    layers = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if _takes_adapters(part)})
    if adapter.is_quantized:
        if adapter.is_dora and any(parameter.is_meta for parameter in model.parameters()):
            raise WorkloadError(
                "DoRA on 4-bit weights needs the values of the weights, from which peft computes magnitudes: plan "
                "your loaded model by planner.plan(model, batch, ...) in Python, or leave out --dora"
            )
        _quantize(model, dtype)
        model.is_loaded_in_4bit = True
        if upcasts:
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    try:
        if adapter.folder:
            config = peft.PeftConfig.from_pretrained(adapter.folder)
            config.inference_mode = False
            config.base_model_name_or_path = model.__dict__.get("name_or_path")  # else peft warns of a moved folder
        else:
            config = peft.LoraConfig(**adapter.lora_options(type(model).__name__))
        # On the meta device, peft allocates no memory for the adapters and draws no random values.
        with torch.device("meta") if _is_on_meta(model) and _has_plain_values(config) else contextlib.nullcontext():
            return peft.get_peft_model(model, config).train()
    except Exception as error:  # peft raises errors of any type for settings that do not go with the model
        if adapter.folder:
            raise WorkloadError(
                f"the adapters in '{adapter.folder}' cannot be added to {type(model).__name__}: "
                f"{first_line(error)}; check their adapter_config.json, and give the model for which they were made"
            ) from error
        remedy = (
            f"give the names of its layers, as in {adapter.rank}:{','.join(layers[:2])}, or {adapter.rank}:all-linear "
            f"for all linear layers (the model has {', '.join(layers)})"
        )
        raise WorkloadError(
            f"{adapter} cannot be added to {type(model).__name__}: {first_line(error)}; "
            + (remedy if layers else "the model has no linear layers")
        ) from error


def _quantize(model: Any, dtype: str) -> None:
    """Replaces the linear layers by 4-bit layers, except for those that transformers leaves in higher precision."""
    bitsandbytes = library("bitsandbytes", "4-bit weights")
    transformers = library("transformers", "4-bit weights")
    integrations: Any = importlib.import_module("transformers.integrations")
    quantizer: Any = importlib.import_module("transformers.quantizers.base").HfQuantizer
    layers = dict(model.named_modules())
    settings = transformers.BitsAndBytesConfig(
        **quantization_options(type(model).__name__), bnb_4bit_compute_dtype=getattr(torch, compute_dtype(dtype))
    )
    skipped = quantizer.get_modules_to_not_convert(model, settings.llm_int8_skip_modules, model._keep_in_fp32_modules)
    integrations.replace_with_bnb_linear(model, modules_to_not_convert=skipped, quantization_config=settings)
    for name, layer in model.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):  # it was created without values
            weight = layers[name].weight.data
            layer.weight = bitsandbytes.nn.Params4bit(
                weight if isinstance(layers[name], torch.nn.Linear) else weight.T.contiguous(),
                requires_grad=False,
                compress_statistics=settings.bnb_4bit_use_double_quant,
                quant_type=settings.bnb_4bit_quant_type,
                module=layer,
            )
            if layer.bias is not None:
                layer.bias = torch.nn.Parameter(layers[name].bias.data, requires_grad=False)
            layer.weight = layer.weight.to(layer.weight.device)  # this quantizes the weight, except on the meta device


def _is_on_meta(model: torch.nn.Module) -> bool:
    return all(parameter.is_meta for parameter in model.parameters())


def _has_plain_values(config: Any) -> bool:
    """True if the adapters can be created on the meta device, because peft needs no values for them.

    Methods other than LoRA may need values: prompt tuning reads the indices of its virtual tokens. Other
    initializations of LoRA may need values, too, for example to decompose the weights. DoRA computes its magnitudes
    from the weights, which also works on the meta device.
    """
    return config.peft_type == "LORA" and config.init_lora_weights in (True, False, "gaussian")


def _takes_adapters(module: torch.nn.Module) -> bool:
    """True for linear layers, also for those of GPT-2, whose weights transformers stores transposed."""
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
