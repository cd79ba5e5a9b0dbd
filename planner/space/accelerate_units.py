"""The units that accelerate 1.15 makes of a model for FSDP2 (`accelerate.utils.fsdp_utils.fsdp2_prepare_model`).

Each module of the named classes is a unit, and so are the input embeddings. The last norm and the output embeddings are
one unit together, the last one, which stays gathered until backward. If input and output embeddings share their
weights, the input embeddings belong to this unit, too. All other parameters form the unit of the model itself.

accelerate checkpoints the modules of the named classes (`fsdp2_apply_ac`), and no others.
`tests/ranks/test_accelerate_units.py` compares this file with accelerate's functions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from planner.errors import WorkloadError


def classes_of(paths: Iterable[str], model: torch.nn.Module) -> tuple[str, ...]:
    """Returns the names of the classes of the modules with these paths, sorted."""
    return tuple(sorted({type(model.get_submodule(path)).__name__ for path in paths}))


def units_of(model: torch.nn.Module, classes: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the paths of the units in the order in which accelerate makes them, and of the modules of the last unit.

    Args:
        classes: names of classes whose modules are units.

    Raises:
        WorkloadError: accelerate cannot prepare this model for FSDP2.
    """
    paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
    units = list(blocks_of(model, classes))
    embeddings = {name: _embedding(model, name) for name in ("get_input_embeddings", "get_output_embeddings")}
    given, made = embeddings.values()
    is_tied = given is not None and getattr(given, "weight", None) is getattr(made, "weight", object())
    together = [_final_norm(model), *([given] if is_tied else []), made]
    if not is_tied and given is not None and paths[id(given)] not in units:
        units.append(paths[id(given)])
    tail = [paths[id(module)] for module in together if module is not None and paths[id(module)] not in units]
    return tuple(units), tuple(tail)


def blocks_of(model: torch.nn.Module, classes: Iterable[str]) -> tuple[str, ...]:
    """Returns the paths of the modules of these classes, inner ones before outer ones, without the model itself."""
    kinds = tuple(kind for name in classes if (kind := _class_of_name(model, name)) is not None)
    stack, found = [("", model)], []
    while stack:
        path, module = stack.pop()
        stack += [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
        found.append((path, module))
    return tuple(path for path, module in reversed(found) if path and isinstance(module, kinds))


def _class_of_name(module: torch.nn.Module, name: str) -> type | None:
    """Returns the class of the first module, depth first, whose class has this name; None if there is none."""
    return next((type(found) for found in module.modules() if type(found).__name__ == name), None)


def _embedding(model: torch.nn.Module, method: str) -> torch.nn.Module | None:
    try:
        return getattr(model, method, lambda: None)()
    except NotImplementedError as error:
        raise WorkloadError(
            f"accelerate asks {type(model).__name__} for its embeddings ({method}) to prepare it for FSDP2, and the "
            "model has none: plan with --sharding ddp, or without --for"
        ) from error


def _final_norm(model: torch.nn.Module) -> torch.nn.Module | None:
    """Returns the last norm among the direct children of the base model; None if there is none."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    if not isinstance(base, torch.nn.Module):
        return None
    norms = [child for _, child in base.named_children() if "Norm" in type(child).__name__]
    return norms[-1] if norms else None
