"""Write the source code that finds files of the user, and calls a function that is defined in one of them."""

from __future__ import annotations

import os
import pathlib

from planner.rewrite.emitted_code import literal


def path_from(folder: pathlib.Path | None, path: pathlib.Path) -> str:
    """Return an expression for the path of the user's file: from the emitted file's folder if they share one."""
    if folder is None or not set(folder.parts[1:2]) & set(path.parts[1:2]):
        return f"pathlib.Path({literal(str(path))})"
    relative = pathlib.PurePath(os.path.relpath(path, folder)).as_posix()
    return f"pathlib.Path(__file__).parent / {literal(relative)}"


def loaded_function(name: str, reference: str, folder: pathlib.Path | None) -> str:
    """Return the source of a function of model and mesh that calls one of the user's own, and returns the model.

    Args:
        name: name of the function in the emitted file.
        reference: file or module of the user's function and its name, such as 'parallel.py:parallelize'.
        folder: as in `model_source`.
    """
    location, _, own = reference.rpartition(":")
    doc = f'    """Divide the model among the processes: the function {own} of {pathlib.PurePath(location).name}."""\n'
    if not location.lower().endswith(".py"):
        found = f"    module = importlib.import_module({literal(location)})\n"
    else:
        path = pathlib.Path(location).resolve()
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
