"""Selective activation checkpointing: the ops whose outputs are worth keeping when a module is recomputed.

The ops are matrix products, convolutions and attention, which take most of the time of a recompute; the code calls all
of them products. Products are numbered in execution order within one call of a module, and a plan lists the numbers of
the products whose outputs are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from planner.recording.step_graph import Op, StepGraph

PRODUCTS: dict[str, int | None] = {
    "mm": None,
    "addmm": None,
    "bmm": None,
    "baddbmm": None,
    "convolution": None,
    "_scaled_dot_product_flash_attention": 3,
    "_scaled_dot_product_efficient_attention": 5,
    "_scaled_dot_product_cudnn_attention": 5,
    "_scaled_dot_product_flash_attention_for_cpu": 3,
}
"""Names in `torch.ops.aten`, all with the overload `default`; for attention, the position of its `dropout_p`.

Attention with dropout draws random numbers. If a recompute skipped it, the ops after it would draw other numbers than
in the first run, so its output is never kept.
"""

_NAMES = frozenset(f"aten.{name}.default" for name in PRODUCTS)
_CLEARLY_DENSER = 1.5
"""Minimum ratio of time saved per kept byte between products that are kept and products that are recomputed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """The products of one call whose outputs are kept."""

    numbers: tuple[int, ...]
    """Numbers of the products within the call; in a segment, numbers of ops."""
    ops: tuple[int, ...]
    """Indices of the products in the recording."""
    storages: frozenset[int]
    """Storages of their outputs."""


NOTHING = Kept(numbers=(), ops=(), storages=frozenset())


class Keepable:
    """Finds the products of calls whose outputs can be kept for the recompute.

    Args:
        op_ns: time of each op in ns.
        sizes: bytes of each storage, rounded as the allocator does.
    """

    def __init__(self, graph: StepGraph, op_ns: list[int], sizes: list[int]) -> None:
        self._graph, self._op_ns, self._sizes = graph, op_ns, sizes
        self._nests = any(op.phase == "recompute" for op in graph.ops)

    @functools.cached_property
    def _by_call(self) -> dict[int, list[int]]:
        """The products of each call, those of nested calls included, in execution order."""
        products: dict[int, list[int]] = {}
        for index, op in enumerate(self._graph.ops):
            if op.name in _NAMES and op.phase == "forward":
                for call in self._graph.enclosing(op.call):
                    products.setdefault(call, []).append(index)
        return products

    @functools.cached_property
    def _rewritten(self) -> frozenset[int]:
        """Storages that a later op overwrites, so that they no longer hold the product's output."""
        return frozenset(
            storage
            for index, op in enumerate(self._graph.ops)
            if op.writes
            for storage in op.outputs
            if self._graph.storages[storage].op != index
        )

    def choices(self, calls: dict[int, int]) -> list[dict[int, Kept]]:
        """Returns the alternatives for one module: for each alternative, the products that every call keeps (at least
        one).

        Args:
            calls: the calls of one module, each with the tick after which none of its ops is recomputed.
        """
        if self._nests or any(self._graph.calls[call].has_hooks for call in calls):
            return []
        products = {call: self._by_call.get(call, []) for call in calls}
        numbers = set.intersection(*(self._usable(products[call], last) for call, last in calls.items()))
        return [
            {call: self._kept(products[call], chosen) for call in calls} for chosen in self._levels(numbers, products)
        ]

    def choices_among(self, ops: dict[int, list[int]], *, first: int) -> list[dict[int, Kept]]:
        """Returns the alternatives for one segment: for each alternative, the products that every call keeps.

        Args:
            ops: the numbered ops of the segment, for each call.
            first: the number of the segment's first op in the whole forward.
        """
        numbers = set.intersection(
            *(
                {number for number, op in enumerate(among) if self._graph.ops[op].name in _NAMES}
                & self._usable(among, self._graph.ticks)
                for among in ops.values()
            )
        )
        return [
            {
                call: dataclasses.replace(self._kept(among, chosen), numbers=tuple(first + number for number in chosen))
                for call, among in ops.items()
            }
            for chosen in self._levels(numbers, ops)
        ]

    def _usable(self, products: list[int], last_tick: int) -> set[int]:
        """Returns the numbers of the products that can be kept, among those that run before `last_tick`."""
        return {
            number
            for number, index in enumerate(products)
            if (op := self._graph.ops[index]).tick < last_tick and self._is_usable(index, op)
        }

    def _is_usable(self, index: int, op: Op) -> bool:
        """True if the op's outputs are its own storages, are not overwritten, and the op may be skipped."""
        own = all(self._graph.storages[storage].op == index for storage in op.outputs)
        rewritten = not self._rewritten.isdisjoint(op.outputs)
        return bool(op.outputs) and own and not rewritten and not op.draws_random_numbers

    def _levels(self, numbers: set[int], products: dict[int, list[int]]) -> list[tuple[int, ...]]:
        """Returns the sets of products to offer: all of them and, if the gap is clear, those that save the most time.

        A heuristic: products are sorted by time saved per byte kept, and the steepest drop separates the second set.
        Other subsets are not offered.
        """
        if not numbers:
            return []
        density = {
            number: sum(self._op_ns[ops[number]] for ops in products.values())
            / max(sum(self._bytes(ops[number]) for ops in products.values()), 1)
            for number in numbers
        }
        ordered = sorted(numbers, key=lambda number: (-density[number], number))
        drops = [density[denser] / max(density[sparser], 1e-9) for denser, sparser in itertools.pairwise(ordered)]
        levels = [tuple(sorted(ordered))]
        if drops and (steepest := max(drops)) > _CLEARLY_DENSER:
            levels.append(tuple(sorted(ordered[: drops.index(steepest) + 1])))
        return levels

    def _bytes(self, op: int) -> int:
        return sum(self._sizes[storage] for storage in self._graph.ops[op].outputs)

    def _kept(self, products: list[int], numbers: tuple[int, ...]) -> Kept:
        ops = tuple(products[number] for number in numbers)
        storages = frozenset(storage for op in ops for storage in self._graph.ops[op].outputs)
        return Kept(numbers=numbers, ops=ops, storages=storages)
