"""A model that a function of the user's own divides among cards: tensor parallelism, FSDP2 with other units, or both.

The function gets a mesh of cards with named dimensions. The batch is divided along the dimensions whose names begin
with 'dp' (`divides_batch`), and the cards along 'tp' have the same samples.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence

from planner.errors import WorkloadError
from planner.plan_types.decision_base import divides_batch
from planner.plan_types.words import counted

TENSOR_PARALLEL = "tp"
_NAMES = {1: ("tp",), 2: ("dp", "tp"), 3: ("dp_replicate", "dp_shard", "tp")}
"""Names of the dimensions of a mesh that is given by its sizes, by the number of dimensions."""


def named_mesh(count: int, mesh: Sequence[int] | Mapping[str, int] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the names and the sizes of the dimensions of a mesh of `count` cards.

    Args:
        mesh: sizes of the dimensions, in order, by name or without names; None for one dimension 'tp'.

    Raises:
        WorkloadError: the mesh has another number of cards, or a dimension of an unknown name.
    """
    if mesh is None:
        mesh = (count,)
    names = tuple(mesh) if isinstance(mesh, Mapping) else _NAMES.get(len(mesh), ())
    sizes = tuple(mesh.values()) if isinstance(mesh, Mapping) else tuple(mesh)
    described = " x ".join(map(str, sizes))
    if not names or len(names) != len(sizes):
        raise WorkloadError(
            f"a mesh of {described} has {counted(len(sizes), 'dimension')}: give one to three, or names for them"
        )
    total = 1
    for size in sizes:
        if type(size) is not int or size < 1:
            raise WorkloadError(f"a mesh of {described}: each dimension needs a number of cards of at least 1")
        total *= size
    if total != count:
        raise WorkloadError(
            f"a mesh of {described} has {counted(total, 'card')}, not {count}: give the same number with cards"
        )
    for name in names:
        if not divides_batch(name) and name != TENSOR_PARALLEL:
            raise WorkloadError(
                f"dimension '{name}' of the mesh is unknown: 'tp' is for cards with the same samples, and names that "
                "begin with 'dp' for cards with samples of their own; pipeline, context and expert parallelism are not "
                "planned"
            )
    return names, sizes


def reference_of(function: Callable) -> str:
    """Returns file and name of a function that another process can import, 'parallel.py:parallelize'; '' if none can.

    A lambda, a function inside of another one, an object and a function of a notebook cannot be imported.
    """
    name, file = getattr(function, "__qualname__", ""), ""
    if inspect.isfunction(function) and name.isidentifier():
        file = inspect.getsourcefile(function) or ""
    if not file or not os.path.isfile(file):
        return ""
    near = os.path.relpath(file)
    return f"{os.path.abspath(file) if near.startswith(os.pardir) else near}:{name}"
