"""The libraries of the zoo, and why one is left out."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks.zoo.case import Case

FAMILIES = {
    "transformers": ("transformers_models", ("transformers",)),
    "peft": ("adapters", ("peft",)),
    "diffusers": ("diffusers_models", ("diffusers",)),
    "torch_geometric": ("graphs", ("torch_geometric",)),
    "monai": ("medical", ("monai",)),
    "torchaudio": ("sound", ("torchaudio",)),
    "speechbrain": ("speechbrain_models", ("speechbrain",)),
    "x_transformers": ("attention", ("x_transformers",)),
    "timm": ("timm_models", ("timm",)),
    "recommenders": ("recommenders", ()),
    "reinforcement learning": ("policies", ()),
}
"""By library: the module with its models, and the packages that it needs."""


def cases(wanted: Sequence[str] | None) -> tuple[list[Case], list[str]]:
    """Returns the models of the wanted libraries (None for all), and a reason for each library that is left out."""
    _declare_ops_of_torchvision()
    found: list[Case] = []
    absent = []
    for library, (module, packages) in FAMILIES.items():
        if wanted and library not in wanted:
            continue
        try:
            for package in packages:
                importlib.import_module(package)
        except ImportError as error:
            absent.append(f"{library}, because {error.name or error} is not installed: pip install '.[zoo]'")
            continue
        except OSError as error:  # its compiled part is for another build of torch
            absent.append(f"{library}, which cannot be imported: {error}")
            continue
        found += importlib.import_module(f"benchmarks.zoo.models.{module}").cases()
    return found, absent


def versions() -> Iterator[tuple[str, str]]:
    """Yields the name and the version of torch and of each library that is installed."""
    for package in ("torch", *dict.fromkeys(name for _, packages in FAMILIES.values() for name in packages)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)


def _declare_ops_of_torchvision() -> None:
    """Declares the compiled ops of torchvision if they cannot be loaded, so that it can be imported.

    torchvision's wheel on PyPI needs CUDA libraries, which a CPU build of torch does not have. The models here use
    none of these ops.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            _OPS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for module in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        importlib.import_module("torchvision")


_OPS = torch.library.Library("torchvision", "FRAGMENT")
"""It has to live as long as the ops that it declares."""
