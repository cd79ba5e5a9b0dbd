"""Finds the module calls whose forward is worth cutting into segments (`planner.recompute.segments`)."""

from __future__ import annotations

from collections import defaultdict

from planner.recompute.kept_products import PRODUCT_NAMES
from planner.recording.module_calls import COMPILED, NO_REPLAY
from planner.recording.step_graph import Call, Phase, StepGraph

_MIN_OWN_SHARE = 0.1
"""Minimum fraction of all saved bytes that the modules of one type must save to be cut.

Bytes that their submodules save do not count.
"""
_MIN_OWN_OPS = 8
"""Minimum number of ops that a forward must run to be cut, without the ops of submodules."""
_MIN_SUBMODULE_CALLS = 8
"""Minimum number of submodule calls that a forward must make to be cut between them, into halves and quarters."""
_MIN_PRODUCTS = 2
"""Minimum number of products that a block must run to be divided after them."""
_MIN_BLOCK_SHARE = 0.1
"""Minimum fraction of all saved bytes that the blocks of one type and their submodules must save to be divided."""


def long_calls(graph: StepGraph) -> set[int]:
    """Returns the calls that may be cut because their forward runs many ops and saves many bytes.

    All modules of the same type together save more than `_MIN_OWN_SHARE` of all bytes, without their submodules.
    """
    own_bytes, own_ops = _saved_bytes(graph), _own_ops(graph)
    by_type: dict[str, int] = defaultdict(int)
    for index, call in enumerate(graph.calls):
        by_type[graph.module_types[call.module]] += own_bytes.get(index, 0)
    enough = _MIN_OWN_SHARE * sum(own_bytes.values())
    return {
        index
        for index, call in enumerate(graph.calls)
        if own_ops[index] >= _MIN_OWN_OPS and by_type[graph.module_types[call.module]] > enough and _can_run_again(call)
    }


def _own_ops(graph: StepGraph) -> dict[int | None, int]:
    """Returns, for each call, the number of its ops that make or change a storage, without the ops of submodules."""
    counts: dict[int | None, int] = defaultdict(int)
    for op in graph.ops:
        if op.phase is Phase.FORWARD and op.makes_or_changes:
            counts[op.call] += 1
    return counts


def blocks(graph: StepGraph) -> set[int]:
    """Returns the calls that run several products, and whose module type saves many bytes (`_MIN_BLOCK_SHARE`).

    A product is a matrix product, a convolution or an attention op (`planner.recompute.kept_products`).
    """
    products: dict[int, int] = defaultdict(int)
    for op in graph.ops:
        if op.phase is Phase.FORWARD and op.name in PRODUCT_NAMES:
            for call in graph.enclosing(op.call):
                products[call] += 1
    by_type: dict[str, int] = defaultdict(int)
    own_bytes = _saved_bytes(graph)
    for index, saved_bytes in own_bytes.items():
        for kind in {graph.module_types[graph.calls[call].module] for call in graph.enclosing(index)}:
            by_type[kind] += saved_bytes
    enough = _MIN_BLOCK_SHARE * sum(own_bytes.values())
    found = {
        index
        for index, count in products.items()
        if count >= _MIN_PRODUCTS and by_type[graph.module_types[graph.calls[index].module]] > enough
    }
    return {index for index in found if _can_run_again(graph.calls[index])} - _around_compiled(graph)


def _around_compiled(graph: StepGraph) -> set[int]:
    """Returns the calls in which a submodule's call runs compiled."""
    compiled = [index for index, call in enumerate(graph.calls) if call.obstacle == COMPILED]
    return {parent for index in compiled for parent in graph.enclosing(graph.calls[index].parent)}


def calls_with_many_calls(graph: StepGraph) -> set[int]:
    """Returns the calls that directly make at least `_MIN_SUBMODULE_CALLS` calls, and in which none runs compiled."""
    children: dict[int, int] = defaultdict(int)
    for call in graph.calls:
        if call.parent is not None:
            children[call.parent] += 1
    many = {index for index, count in children.items() if count >= _MIN_SUBMODULE_CALLS}
    return {index for index in many if _can_run_again(graph.calls[index])} - _around_compiled(graph)


def _can_run_again(call: Call) -> bool:
    return call.obstacle not in NO_REPLAY and not call.has_hooks


def _saved_bytes(graph: StepGraph) -> dict[int | None, int]:
    """Returns, for each call, the bytes that it saves outside of its submodules.

    A storage counts once, for the call that saved it first.
    """
    first: dict[int, int | None] = {}
    for save in graph.saves:
        if save.storage is not None:
            first.setdefault(save.storage, save.call)
    saved_bytes: dict[int | None, int] = defaultdict(int)
    for storage, call in first.items():
        saved_bytes[call] += graph.storages[storage].size_bytes
    return saved_bytes
