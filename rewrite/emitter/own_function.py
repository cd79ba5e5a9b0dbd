"""Write the source code that finds files of the user, and calls a function that is defined in one of them."""

from __future__ import annotations

import os
import pathlib

from planner.errors import PlanFileError
from planner.rewrite.emitted_code import literal
from planner.rewrite.emitter import quoted


def path_from(folder: pathlib.Path | None, path: pathlib.Path) -> str:
    """Return an expression for the path of the user's file: from the emitted file's folder if they share one."""
    if folder is None or not set(folder.parts[1:2]) & set(path.parts[1:2]):
        return f"pathlib.Path({literal(str(path))})"
    relative = pathlib.PurePath(os.path.relpath(path, folder)).as_posix()
    return f"pathlib.Path(__file__).parent / {literal(relative)}"


def resolved(location: str) -> pathlib.Path:
    """Return the absolute path of a file that a plan names. Raises `PlanFileError` if that is not a path."""
    try:
        return pathlib.Path(location).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # such as a null byte, or links that form a loop
        raise PlanFileError(f"the plan names the file {location[:200]!r}, which is not a path: {error}") from error


def loaded_function(name: str, reference: str, folder: pathlib.Path | None) -> str:
    """Return the source of a function of model and mesh that calls one of the user's own, and returns the model.

    Args:
        name: name of the function in the emitted file.
        reference: file or module of the user's function and its name, such as 'parallel.py:parallelize'.
        folder: as in `model_source`.
    """
    location, _, own = reference.rpartition(":")
    own = quoted.name(own, "the function that divides the model")
    place = pathlib.PurePath(location).name
    doc = f"    {quoted.docstring(f'Divide the model among the processes: the function {own} of {place}.')}\n"
    if not location.lower().endswith(".py"):
        found = f"    module = importlib.import_module({literal(location)})\n"
    else:
        path = resolved(location)
        found = f"""\
    path = {path_from(folder, path)}
    sys.path.append(str(path.parent))
    name = {literal(f"planned_{path.stem}")}
    module = sys.modules.get(name)  # the model may come from the same file
    if module is None:
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
"""
    return f"def {name}(model, mesh):\n{doc}{found}    return module.{own}(model, mesh) or model\n"
