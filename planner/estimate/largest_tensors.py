"""Lists the largest tensors that are alive at one moment of a recording, each with its module and source line."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from planner.estimate.memory_history import source_of
from planner.plan_types.plan import LiveTensor
from planner.recording.step_graph import Op, StepGraph, round_up

MOST_LISTED = 10
"""Maximum number of items in a list of tensors."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a module's path that is a number, such as the number of a layer."""


def largest_tensors(graph: StepGraph, tick: int, *, granularity_bytes: int) -> tuple[LiveTensor, ...]:
    """Returns the largest tensors alive at a tick, largest first, at most `MOST_LISTED` items.

    Tensors that are the same except for the numbers in the names of their modules, as in the layers of a transformer,
    are one item. So the list holds at least the `MOST_LISTED` largest tensors, if as many are alive.

    Args:
        granularity_bytes: sizes are rounded up to multiples of it.
    """
    groups: dict[LiveTensor, list[tuple[str, str]]] = {}
    for storage, spans in zip(graph.storages, graph.spans(), strict=True):
        if not any(start <= tick < stop for start, stop in spans):
            continue
        op = None if storage.op is None else graph.ops[storage.op]
        module = "" if op is None else op.module
        kind = LiveTensor(
            category=str(storage.category),
            name=_NUMBER.sub("*", storage.name),
            module=_NUMBER.sub("*", module),
            source="" if op is None else source_text(graph, op),
            shape=storage.shape,
            dtype=storage.dtype,
            size_bytes=round_up(storage.size_bytes, granularity_bytes),
            count=1,
        )
        groups.setdefault(kind, []).append((storage.name, module))
    kinds = sorted(groups, key=lambda kind: -kind.size_bytes)[:MOST_LISTED]
    return tuple(_counted(kind, groups[kind]) for kind in kinds)


def _counted(kind: LiveTensor, members: Sequence[tuple[str, str]]) -> LiveTensor:
    """Returns the item of a group, given the names and modules of its tensors."""
    names, modules = ([texts[column] for texts in members] for column in (0, 1))
    return dataclasses.replace(kind, name=_merged(names), module=_merged(modules), count=len(members))


def _merged(paths: Sequence[str]) -> str:
    """Returns the path that some paths have in common, with `*` in the places where their numbers differ."""
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)


def shape_text(shape: Sequence[int], dtype: str) -> str:
    """Returns the text of a shape, such as '8 x 1024 x 768'; empty for memory that belongs to no tensor."""
    return " x ".join(map(str, shape)) if shape else "scalar" if dtype else ""


def source_text(graph: StepGraph, op: Op) -> str:
    """Returns 'path:line' of an op's model code. The path is relative to site-packages or to the working directory."""
    file, line = source_of(graph, op)
    if not file:
        return ""
    path = pathlib.PurePath(file)
    roots = [number for number, part in enumerate(path.parts) if part.endswith("-packages")]
    if roots:
        path = pathlib.PurePath(*path.parts[roots[-1] + 1 :])
    elif path.is_relative_to(pathlib.Path.cwd()):
        path = path.relative_to(pathlib.Path.cwd())
    return f"{path}:{line}"
