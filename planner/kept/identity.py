"""Says on what the recordings of a workload depend, so that a kept one is used only where a new one would be the same.

Only workloads that the planner itself has made from data have an identity: a model of transformers from a config, and a
synthetic batch. Code of the user's own can depend on anything. What a recording of such a workload depends on:

- the data, and the structure of the model and the batch that were made from it;
- how the step is run: optimizer, number of samples, several cards, stated values;
- the card;
- the versions of the libraries, the planner's own files, and the files of the model's classes;
- other code that Python has run, which may have replaced functions of the libraries;
- variables of the environment that libraries read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from planner.profiles.device import DeviceProfile
from planner.virtual_gpu.values.kernel_calls import cudnn_settings
from planner.workload.own_step import HAVE_OWN_CODE, runs_own_code
from planner.workload.workload import Workload, described, tensors_of

_LIBRARIES = (
    *("torch", "transformers", "peft", "accelerate", "bitsandbytes"),
    *("numpy", "kernels", "flash_attn", "triton", "torchvision", "timm"),
)
"""Libraries that a step of a transformers model may run."""
_VARIABLES = re.compile(
    "(ACCELERATE|BITSANDBYTES|BNB|CUBLAS|CUDA|CUDNN|HF|KMP|MKL|NCCL|NVIDIA|OMP|PEFT|PLANNER|PYTHON|PYTORCH|TORCH"
    "|TRANSFORMERS|TRITON|USE)_?.*"
)
"""Variables of the environment that these libraries, Python or the planner may read."""
_COVERED = {"model", "batch", "made_from", "reference", "notes", "is_by_sample_stated", "dtype", "input_shapes"}
"""Fields of `Workload` whose values are not hashed. Other parts of the identity describe them, or they affect no
recording."""
_OWN_FOLDER = pathlib.Path(__file__).parents[1]
"""Folder of the planner's files."""
_REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes of modules that have lines of their own."""
_OF_PROCESS = ("_original_object_hash",)
"""Attributes that differ from process to process, and on which no op depends."""


def identity(workload: Workload, card: DeviceProfile) -> str | None:
    """Returns the SHA-256 (hex) of all on which the recordings of a workload depend; None if that is not known."""
    if runs_own_code(workload) or any(not tensor.is_meta for _, tensor in tensors_of(workload.batch)):
        return None
    versions = _versions()
    if versions is None:
        return None
    fields = {
        field.name: repr(getattr(workload, field.name))
        for field in dataclasses.fields(workload)
        if field.name not in _COVERED and field.name not in HAVE_OWN_CODE and field.name != "calling"
    }
    parts = {
        "made from": workload.made_from,
        "batch": list(described(workload.batch)),
        "calling": workload.calling.name,
        "fields": fields,
        "card": repr(card),
        "versions": versions,
        "files": list(_files(workload.model)),
        "other code": list(_other_code()),
        "environment": sorted(item for item in os.environ.items() if _VARIABLES.fullmatch(item[0])),
        "default dtype": str(torch.get_default_dtype()),
        "cudnn": repr(cudnn_settings()),
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for line in _structure(workload.model):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _versions() -> dict[str, str] | None:
    """Returns the versions of Python and of the libraries; None if a library is installed from a folder of sources."""
    versions = {"python": sys.version, "platform": sys.platform}
    for name in _LIBRARIES:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            return None
        versions[name] = distribution.version
    return versions


def _files(model: torch.nn.Module) -> Iterator[tuple[str, int, int]]:
    """Yields path, size and time of change of the planner's files, and of those that the model's classes come from.

    These are the files of the classes and of their bases, the other files of their folders, and the folders with the
    functions that models of transformers share.
    """
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    folders = {pathlib.Path(file).parent for file in files if file is not None}
    roots = {root for folder in folders for root in (folder, *folder.parents) if root.name in ("transformers", "peft")}
    folders |= {root / name for root in roots for name in ("", "integrations", "loss", "utils")}
    own = _OWN_FOLDER.resolve()
    sources = {path for folder in folders for path in folder.glob("*.py")}
    for folder in {own, (own / "rewrite").resolve(), (own / "profiles").resolve()}:  # two are links in a checkout
        sources.update(path for path in folder.rglob("*") if path.suffix in (".py", ".toml", ".json", ".csv"))
    for source in sorted(map(str, sources)):
        yield source, *_size_and_time(source)


def _other_code() -> Iterator[tuple[str, int, int]]:
    """Yields path, size and time of change of code that may have replaced functions of the libraries.

    These are loaded modules outside of the planner, the installed libraries and the standard library; `sitecustomize`
    and `usercustomize` wherever they are; and the `*.pth` files, by which a folder of installed libraries runs code
    when Python starts.
    """
    libraries = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    known = (*libraries, *map(sysconfig.get_path, ("stdlib", "platstdlib", "scripts")), str(_OWN_FOLDER))
    folders = tuple(os.path.join(folder, "") for folder in known)
    sources = {str(path) for folder in libraries for path in pathlib.Path(folder).glob("*.pth")}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and (name in ("sitecustomize", "usercustomize") or not file.startswith(folders)):
            sources.add(file)
    for source in sorted(filter(os.path.isfile, sources)):
        yield source, *_size_and_time(source)


def _size_and_time(source: str) -> tuple[int, int]:
    about = os.stat(source)
    return about.st_size, about.st_mtime_ns


def _structure(model: torch.nn.Module) -> Iterator[str]:
    """Yields a line for each module with its attributes, and for each parameter and buffer of a model."""
    seen: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = [f"{key}={_text(value, seen)}" for key, value in vars(module).items() if key not in _REGISTRIES]
        yield f"{name} {type(module).__module__}.{type(module).__qualname__} {attributes}"
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"{name} {type(parameter).__name__} {list(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"{name} {list(buffer.shape)} {buffer.dtype}"


def _text(value: Any, seen: set[int]) -> str:
    """Returns a text that describes a value and its parts.

    Objects that have been described are added to `seen`. If an object is already there, only its class is named.
    """
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, torch.Size)):
        return repr(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        return f"{kind} {list(value.shape)} {value.dtype}"
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return kind
    seen.add(id(value))
    if isinstance(value, (Sequence, Set)):
        parts = [_text(part, seen) for part in value]
        return f"{kind}({', '.join(sorted(parts) if isinstance(value, Set) else parts)})"
    if hasattr(value, "__qualname__"):  # a function or a class
        return f"{kind} {value.__module__}.{value.__qualname__}"
    items = value.items() if isinstance(value, Mapping) else getattr(value, "__dict__", {}).items()
    return f"{kind}({', '.join(f'{key!s}={_text(part, seen)}' for key, part in items if key not in _OF_PROCESS)})"
