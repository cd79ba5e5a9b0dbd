"""Builds transformers models from their configs, as `from_pretrained` would load them, but without weights."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import re
from typing import Any

import torch

from planner.errors import PlannerError, WorkloadError, first_line
from planner.files import reading
from planner.plan_types.adapter import Adapter
from planner.plan_types.plan import TrainingProgram
from planner.workload.adapters import adapted
from planner.workload.programs import PROGRAMS
from planner.workload.unsupported import library

_LENGTH_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions")
"""Attributes of configs with the maximum number of tokens in a sample. A model has one of them, or none."""
_MOST_LAYERS, _MOST_SIZE = 10_000, 2**40
"""Largest number of layers, and any other number, in a config: transformers would build larger models for hours."""
_MOST_HEADER_BYTES = 100_000_000
"""Maximum size of the header of a file of safetensors, as in the format itself."""
_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def transformers_model(
    config: Any,
    reference: str,
    *,
    dtype: str,
    adapter: Adapter | None,
    program: TrainingProgram | None,
    device: str,
) -> tuple[torch.nn.Module, TrainingProgram | None]:
    """Returns the model of a config in training mode, with the dtypes that `from_pretrained` would give its weights.

    The second value is `program` with the facts of this model.

    Args:
        config: the config. `architectures` in it names the class of the model.
        reference: the path or hub id of the config, for messages and to look for weights.
        dtype: name of the dtype of the weights.
        adapter: adapters to add to the model; None to train its weights.
        program: the program that trains the model, which is prepared as this program does; None for other loops.
        device: device on which the weights are created.

    Raises:
        WorkloadError: the class of the model is unknown or raises an error, weights cannot have this dtype, or the
            program cannot train the model.
    """
    model_class: Any = _model_class(config, reference)
    chosen = _dtype(dtype)
    try:
        with torch.device(device):
            model = model_class._from_config(config, dtype=chosen)
    except Exception as error:  # configs are data from elsewhere, and a model class may raise anything
        raise WorkloadError(f"model '{reference}' cannot be built from its config: {first_line(error)}") from error
    for pattern, kept in model._get_dtype_plan(chosen).items():  # modules that transformers keeps in float32
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if re.search(pattern, name) and tensor.is_floating_point():
                tensor.data = tensor.data.to(kept)
    trainer = None if program is None else PROGRAMS[program.name]
    model.train()
    if adapter is not None:
        model = adapted(model, adapter, dtype=dtype, upcasts=trainer is None or trainer.upcasts_before_adapters)
    if trainer is not None and program is not None:
        program = trainer.prepare(model, adapter, dtype, program)
    return model, program


def sequence_length(config: Any, model: torch.nn.Module, asked: int | None, *, default: int) -> int:
    """Returns the number of tokens in a sample: the one that is asked for, or `default` if the model allows that many.

    Raises:
        WorkloadError: the model has a table of positions (absolute positions) that is shorter than what is asked for.
    """
    name, limit = next(((name, n) for name in _LENGTH_LIMITS if (n := getattr(config, name, None))), ("", None))
    table = None if limit is None else _positions_in_table(model, limit)
    if asked is None:
        return min(default, table or limit or default)
    if table is not None and asked > table:
        raise WorkloadError(
            f"--seq-len {asked} is more than the {table} positions that the model has ({name} is {limit} in its "
            f"config): give --seq-len {table} or less"
        )
    return asked


def _positions_in_table(model: torch.nn.Module, limit: int) -> int | None:
    """Returns the number of tokens for which a model has embeddings of positions; None if it has no such embeddings.

    Args:
        limit: the number of positions in the config. A table has a few rows more if its first rows are not used.
    """
    for name, module in model.named_modules():
        own_name = name.rpartition(".")[2]
        is_table = isinstance(module, torch.nn.Embedding) and ("position" in own_name or own_name == "wpe")
        if is_table and limit <= module.num_embeddings <= limit + 2:
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return min(limit, module.num_embeddings - unused)
    return None


def stored_dtype(config: Any, reference: str) -> str | None:
    """Returns the name of the dtype of the saved weights: from the config, or else from the weights in the folder."""
    if (dtype := getattr(config, "dtype", None)) is not None:
        return str(dtype).removeprefix("torch.")
    folder = pathlib.Path(reference)
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with file.open("rb") as stream:
            header = stream.read(min(int.from_bytes(stream.read(8), "little"), _MOST_HEADER_BYTES))
        try:
            entries = [entry for name, entry in reading.parsed_json(header).items() if name != "__metadata__"]
            dtypes = [_SAFETENSORS_DTYPES[entry["dtype"]] for entry in entries if entry["dtype"] in _SAFETENSORS_DTYPES]
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise WorkloadError(f"'{file}' is not a valid safetensors file: remove it, or give --dtype") from error
        if dtypes:
            return dtypes[0]
    return None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise WorkloadError(f"weights cannot have dtype '{name}': choose float32, bfloat16 or float16")
    return dtype


def transformers_config(reference: str, forms: str) -> Any:
    """Returns the transformers config that a file, a model folder or a hub id contains.

    Args:
        reference: the path or the hub id.
        forms: the forms that MODEL can have on the command line, for error messages.

    Raises:
        WorkloadError: there is no such config, or transformers is not installed.
    """
    transformers = library("transformers", f"model '{reference}'")
    transformers.utils.logging.set_verbosity_error()
    path = pathlib.Path(reference)
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and (other := _other_library(path)) is not None:
        raise WorkloadError(other)
    if path.exists() and not path.is_dir() and not path.is_file():
        raise WorkloadError(f"'{reference}' is a device or a pipe: give a regular file, or {forms}")
    if path.is_dir() and not file.is_file():
        raise WorkloadError(f"folder '{reference}' has no config.json: give a transformers model folder, or {forms}")
    try:
        if file.is_file():
            settings = reading.json_data(file)
            if not isinstance(settings, dict) or "model_type" not in settings:
                if (other := _other_library(file.parent)) is not None:
                    raise WorkloadError(other)
                raise WorkloadError(f"'{file}' has no model_type: give a transformers config.json, or {forms}")
            return _config_of(transformers, settings, file)
        return transformers.AutoConfig.from_pretrained(reference)
    except PlannerError:
        raise
    except OSError as error:
        if file.exists():
            raise WorkloadError(f"'{file}' cannot be read: {error.strerror}") from error
        missing = f"there is no such file or folder in {_here()}, and no such hub id: "
        raise WorkloadError(f"model '{reference}' is unknown: {missing}{first_line(error)}; give {forms}") from error
    except ValueError as error:
        missing = "" if file.exists() else f"there is no such file or folder in {_here()}, and no such hub id: "
        raise WorkloadError(f"model '{reference}' is unknown: {missing}{first_line(error)}; give {forms}") from error


def _here() -> str:
    """Returns the working directory, which another program may have deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "the working directory, which was deleted"


def _config_of(transformers: Any, settings: dict[str, Any], file: pathlib.Path) -> Any:
    """Returns the config with the settings of a file.

    Raises:
        WorkloadError: a setting is of the wrong type, or has a value that transformers does not accept; or transformers
            cannot read or write a file that it needs.
        ValueError: transformers does not know the type of the model.
    """
    if not isinstance(settings["model_type"], str):
        raise WorkloadError(f"'{file}' is not a config of a model: its model_type is not a string; correct the file")
    if settings["model_type"] not in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(**settings)  # its error lists the known types
    for name, value in settings.items():
        most = _MOST_LAYERS if name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") else _MOST_SIZE
        if isinstance(value, int) and abs(value) > most:
            raise WorkloadError(f"'{file}' cannot be used: '{name}' is larger than {most:,}; correct this setting")
    names = settings.get("architectures")
    if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
        raise WorkloadError(f"'{file}' cannot be used: its architectures are not a list of names; correct the file")
    try:
        return transformers.AutoConfig.for_model(**settings)
    except OSError as error:  # no setting is wrong: for example, there is no folder for temporary files
        raise WorkloadError(f"'{file}' cannot be used: {first_line(error)}") from error
    except Exception as error:  # configs are data from elsewhere, and their classes raise errors of many types
        raise WorkloadError(f"'{file}' cannot be used: {first_line(error)}; correct this setting") from error


def _other_library(folder: pathlib.Path) -> str | None:
    """Returns an error message if the folder holds a model of diffusers or timm; None if not."""
    found = {}
    for name in ("config.json", "model_index.json"):
        with contextlib.suppress(OSError, ValueError):
            found[name] = reading.json_data(folder / name)
    function = "give a Python function that returns (model, batch, loss_fn), as path/file.py:name"
    if "model_index.json" in found or "_diffusers_version" in found.get("config.json", {}):
        name = found.get("config.json", {}).get("_class_name", "UNet2DConditionModel")
        return (
            f"'{folder}' holds a model of diffusers, whose training step the planner does not know: {function}; build "
            f"the model there with diffusers.{name}.from_config (examples/unet.py shows such a function)"
        )
    if "architecture" in (config := found.get("config.json", {})) and "model_type" not in config:
        return (
            f"'{folder}' holds a model of timm: {function}; build the model there with "
            f"timm.create_model({config['architecture']!r})"
        )
    return None


def _model_class(config: Any, reference: str) -> type[torch.nn.Module]:
    """Returns the class that `architectures` in the config names, else the language model class for the config."""
    transformers: Any = importlib.import_module("transformers")
    names = list(getattr(config, "architectures", None) or ())
    for name in names:
        if (model_class := getattr(transformers, name, None)) is not None:
            return model_class
    for auto in (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForSeq2SeqLM,
    ):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise WorkloadError(
        f"the config of '{reference}' names no architecture that transformers has "
        f'({", ".join(names) or "none named"}): add "architectures": ["...ForCausalLM"] to it'
    )
