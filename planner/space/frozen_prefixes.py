"""Frozen prefixes of a model, from its input up: the last resort, where nothing else fits."""

from __future__ import annotations

from collections.abc import Sequence

from planner.plan_types.decisions import Freeze


def prefixes(module_starts: Sequence[tuple[str, int]], owners: Sequence[str]) -> tuple[Freeze, ...]:
    """Frozen prefixes of a model, short to long: everything up to the end of one of its blocks.

    Args:
        module_starts: modules in the order in which their forward begins, with the tick.
        owners: modules that own parameters directly.

    Blocks are the members of the shallowest list of modules (names ending in a number) with at least two of them.
    """
    order = [name for name, _ in sorted(dict(reversed(list(module_starts))).items(), key=lambda item: item[1])]
    leaves = [name for name in order if name in set(owners)]
    blocks = _blocks(order)
    found = []
    for block in blocks[:-1]:
        inside = [position for position, leaf in enumerate(leaves) if leaf == block or leaf.startswith(f"{block}.")]
        if inside:
            found.append(Freeze(modules=_merged(leaves[: inside[-1] + 1], owners)))
    return tuple(found)


def _blocks(order: Sequence[str]) -> list[str]:
    numbered: dict[str, list[str]] = {}
    for name in order:
        parent, _, last = name.rpartition(".")
        if last.isdigit():
            numbered.setdefault(parent, []).append(name)
    lists = [members for members in numbered.values() if len(members) > 1]
    return min(lists, key=lambda members: (members[0].count("."), -len(members)), default=[])


def _merged(leaves: Sequence[str], owners: Sequence[str]) -> tuple[str, ...]:
    """The same leaves, named by their outermost modules that contain no other owner of parameters."""
    kept = set(leaves)
    names: list[str] = []
    for leaf in leaves:
        name = leaf
        while (parent := name.rpartition(".")[0]) and all(
            owner in kept for owner in owners if owner == parent or owner.startswith(f"{parent}.")
        ):
            name = parent
        if name not in names:
            names.append(name)
    return tuple(names)
