"""From what a user types to a workload: a config, a model folder or hub id, or a Python callable."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from planner.errors import PlannerError, WorkloadError
from planner.workload.synthetic_batch import synthetic_batch
from planner.workload.workload import Workload, batch_size_of, resized, workload

DEFAULT_SEQ_LEN = 512
"""Tokens per sample where none are asked for, if the model takes that many."""

FORMS = "config.json, a model folder or hub id, path/file.py:name, package.module:name, or a saved plan"


def load_workload(
    reference: str,
    *,
    batch_size: int | None,
    seq_len: int | None,
    optimizer: str,
    gradients_alive: bool = False,
    with_weights: bool = False,
) -> Workload:
    """The workload that `reference` names. Models are built on the meta device where they let themselves be.

    Args:
        with_weights: make random weights and a random batch on the CPU, to train with.

    Raises:
        WorkloadError: nothing of that name, or it fails; the message quotes it.
    """
    asked = _Asked(
        batch_size=batch_size,
        seq_len=seq_len,
        optimizer=optimizer,
        gradients_alive=gradients_alive,
        device="cpu" if with_weights else "meta",
    )
    if ":" in reference and not pathlib.Path(reference).exists():
        return _from_callable(reference, asked)
    path = pathlib.Path(reference)
    if not path.exists() and (path.suffix == ".json" or (path.parent != pathlib.Path() and path.parent.is_dir())):
        raise WorkloadError(f"'{reference}' does not exist: give {FORMS}")
    if path.suffix == ".py":
        raise WorkloadError(
            f"'{reference}' names a file but nothing in it: write {reference}:name of a function or class"
        )
    if path.is_file() or path.is_dir() or not reference.startswith((".", "/")):
        return _from_transformers(reference, asked)
    raise WorkloadError(f"model '{reference}' does not exist: give {FORMS}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """What of the workload does not come from the reference."""

    batch_size: int | None
    seq_len: int | None
    optimizer: str
    gradients_alive: bool
    device: str
    """Where model and batch are made."""


# ---- transformers --------------------------------------------------------------------------------------------------


def _from_transformers(reference: str, asked: _Asked) -> Workload:
    config = _config(reference)
    model_class = _model_class(config, reference)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # training has no use for key-value caches
    try:
        with torch.device(asked.device):
            model = model_class(config)
    except Exception as error:
        raise WorkloadError(f"model '{reference}' cannot be built from its config: {_first_line(error)}") from error
    model.train()
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or DEFAULT_SEQ_LEN
    seq_len = asked.seq_len or min(DEFAULT_SEQ_LEN, limit)
    batch = synthetic_batch(model, batch_size=asked.batch_size or 1, seq_len=seq_len, device=asked.device)
    takes_tokens = "input_ids" in batch or ("labels" in batch and batch["labels"].dim() == 2)
    return workload(
        model,
        batch,
        optimizer=asked.optimizer,
        seq_len=seq_len if takes_tokens else None,
        reference=reference,
        gradients_alive=asked.gradients_alive,
    )


def _config(reference: str) -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise WorkloadError(f"model '{reference}' needs transformers: pip install transformers") from None
    transformers.utils.logging.set_verbosity_error()
    path = pathlib.Path(reference)
    file = path / "config.json" if path.is_dir() else path
    if path.exists() and not file.is_file():
        raise WorkloadError(f"folder '{reference}' has no config.json: give a transformers model folder, or {FORMS}")
    try:
        if file.is_file():
            settings = json.loads(file.read_text())
            if not isinstance(settings, dict) or "model_type" not in settings:
                raise WorkloadError(f"'{file}' has no model_type: give a transformers config.json, or {FORMS}")
            return transformers.AutoConfig.for_model(**settings)
        return transformers.AutoConfig.from_pretrained(reference)
    except PlannerError:
        raise
    except (OSError, ValueError) as error:
        missing = (
            "" if file.exists() else f"there is no such file or folder below {pathlib.Path.cwd()}, and no such hub id: "
        )
        raise WorkloadError(f"model '{reference}' is unknown: {missing}{_first_line(error)}; give {FORMS}") from error


def _model_class(config: Any, reference: str) -> type[torch.nn.Module]:
    import transformers

    names = list(getattr(config, "architectures", None) or ())
    for name in names:
        if (found := getattr(transformers, name, None)) is not None:
            return found
    for auto in (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForSeq2SeqLM,
    ):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise WorkloadError(
        f"config of '{reference}' names no architecture that transformers has ({', '.join(names) or 'none named'}): "
        'add "architectures": ["...ForCausalLM"] to it'
    )


# ---- Python callables ----------------------------------------------------------------------------------------------


def _from_callable(reference: str, asked: _Asked) -> Workload:
    function = _callable(reference)
    try:
        accepted = inspect.signature(function).parameters
    except ValueError as error:
        raise WorkloadError(f"'{reference}' cannot be called to make a model: {error}") from error
    arguments = {
        name: value
        for name, value in (("batch_size", asked.batch_size), ("seq_len", asked.seq_len))
        if value is not None and name in accepted
    }
    answer = _call(function, arguments, reference, asked.device)
    if isinstance(answer, tuple) and not 1 <= len(answer) <= 3:
        raise WorkloadError(
            f"'{reference}' returned {len(answer)} things: return model, (model, batch) or (model, batch, loss_fn)"
        )
    model, batch, loss_fn = (*answer, None, None)[:3] if isinstance(answer, tuple) else (answer, None, None)
    if batch is None and hasattr(model, "main_input_name"):
        seq_len = asked.seq_len or DEFAULT_SEQ_LEN
        batch = synthetic_batch(model, batch_size=asked.batch_size or 1, seq_len=seq_len, device=asked.device)
    if batch is None:
        raise WorkloadError(f"'{reference}' returned no batch: return (model, batch) or (model, batch, loss_fn)")
    if asked.batch_size is not None and batch_size_of(batch) != asked.batch_size:
        batch = resized(batch, asked.batch_size, device=asked.device)
    return workload(
        model,
        batch,
        loss_fn=loss_fn,
        optimizer=asked.optimizer,
        seq_len=asked.seq_len if "seq_len" in accepted else None,
        reference=reference,
        gradients_alive=asked.gradients_alive,
    )


def _call(function: Callable[..., Any], arguments: dict[str, int], reference: str, device: str) -> Any:
    """Call it on the device: on meta no weights are made. On the CPU if it needs real numbers."""
    try:
        with torch.device(device):
            return function(**arguments)
    except Exception:  # whatever it was on meta: the second try decides, and its error is told
        try:
            return function(**arguments)
        except Exception as error:
            raise WorkloadError(
                f"'{reference}' raised {_first_line(error)}: call it once by itself and mend it"
            ) from error


def _callable(reference: str) -> Callable[..., Any]:
    place, _, name = reference.rpartition(":")
    module = _module_from_file(pathlib.Path(place)) if place.endswith(".py") else _module_by_name(place)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        own = (n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__ and callable(v))
        offered = ", ".join(sorted(name for name in own if not name.startswith("_"))[:8])
        raise WorkloadError(f"'{place}' has no '{name}': it offers {offered or 'no callable'}")
    if not callable(found):
        raise WorkloadError(
            f"'{reference}' is a {type(found).__name__}, not a function or class: write a function that returns it"
        )
    return found


def _module_from_file(path: pathlib.Path) -> Any:
    if not path.is_file():
        raise WorkloadError(f"file '{path}' does not exist: give {FORMS}")
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.append(folder)  # for its own imports; at the end, so that it hides nothing
    name = f"planned_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise WorkloadError(f"file '{path}' raised {_first_line(error)} while it was imported") from error
    return module


def _module_by_name(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WorkloadError(f"module '{name}' cannot be imported: {_first_line(error)}") from error
    except Exception as error:
        raise WorkloadError(f"module '{name}' raised {_first_line(error)} while it was imported") from error


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
