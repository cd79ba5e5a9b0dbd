"""Frozen prefixes of a model, starting at its input: the last resort if nothing else fits."""

from __future__ import annotations

from collections.abc import Sequence

from planner.plan_types.decisions import Freeze


def prefixes(module_starts: Sequence[tuple[str, int]], owners: Sequence[str]) -> tuple[Freeze, ...]:
    """Frozen prefixes of a model, from short to long. Each ends after one of its blocks; the last block stays trained.

    The blocks are the members of the shallowest list of modules (names that end in a number) with at least two of them.

    Args:
        module_starts: names of modules with the tick at which their forward begins.
        owners: names of modules that own parameters directly.
    """
    # A module that is called several times counts at its first call.
    order = [name for name, _ in sorted(dict(reversed(list(module_starts))).items(), key=lambda item: item[1])]
    leaves = [name for name in order if name in set(owners)]
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
    """Replaces leaves by their outermost parents that contain no other owner of parameters."""
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
