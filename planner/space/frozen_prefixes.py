"""Frozen prefixes of a model, starting at its input: the last resort if nothing else fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.plan_types.decisions import Freeze


def prefixes(module_starts: Sequence[tuple[str, int]], owners: Sequence[str]) -> tuple[Freeze, ...]:
    """Returns decisions that freeze a prefix of a model, from the shortest prefix to the longest.

    A prefix ends after one of the model's blocks and contains all modules up to there. The last block is never frozen.
    The blocks are the modules whose names end in a number (members of a `Sequential` or `ModuleList`). If there are
    several such lists with at least two blocks, the least deeply nested one is taken.

    Args:
        module_starts: pairs of a module's name and the tick at which its forward begins, for each module call.
        owners: names of all modules that own parameters directly.
    """
    # A module that is called several times counts at its first call.
    order = [name for name, _ in sorted(dict(reversed(list(module_starts))).items(), key=lambda item: item[1])]
    with_parameters = set(owners)
    leaves = [name for name in order if name in with_parameters]
    blocks = _blocks(order)
    prefixes = []
    for block in blocks[:-1]:
        inside = [position for position, leaf in enumerate(leaves) if leaf == block or leaf.startswith(f"{block}.")]
        if inside:
            prefixes.append(Freeze(modules=_merged(leaves[: inside[-1] + 1], owners)))
    return tuple(prefixes)


def _blocks(order: Sequence[str]) -> list[str]:
    numbered: dict[str, list[str]] = {}
    for name in order:
        parent, _, last = name.rpartition(".")
        if last.isdigit():
            numbered.setdefault(parent, []).append(name)
    lists = [members for members in numbered.values() if len(members) > 1]
    return min(lists, key=lambda members: (members[0].count("."), -len(members)), default=[])


def _merged(leaves: Sequence[str], owners: Sequence[str]) -> tuple[str, ...]:
    """Returns `leaves`, each replaced by its outermost parent that has no parameters outside of `leaves`."""
    # Modules that have a parameter outside of `leaves`, directly or in a submodule.
    outside = {path for owner in set(owners) - set(leaves) for path in _with_parents(owner)}
    names: dict[str, None] = {}
    for leaf in leaves:
        name = leaf
        while (parent := name.rpartition(".")[0]) and parent not in outside:
            name = parent
        names[name] = None
    return tuple(names)


def _with_parents(path: str) -> Iterator[str]:
    """Yields a path and the paths of all modules that contain it, except that of the model, which is empty."""
    while path:
        yield path
        path = path.rpartition(".")[0]
