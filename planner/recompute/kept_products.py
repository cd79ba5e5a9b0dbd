"""Selective activation checkpointing: the ops whose outputs are worth keeping when a module is recomputed.

These ops are matrix products, convolutions and attention, which take most of the time of a recompute. The code calls
all three kinds *products*. Products are numbered in execution order within one call of a module, and a plan lists the
numbers of the products whose outputs are kept.
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
    "_grouped_mm": None,
    "convolution": None,
    "_scaled_dot_product_flash_attention": 3,
    "_scaled_dot_product_efficient_attention": 5,
    "_scaled_dot_product_cudnn_attention": 5,
    "_scaled_dot_product_flash_attention_for_cpu": 3,
}
"""Maps the name of each product in `torch.ops.aten` to the position of its argument `dropout_p` (None: it has none).

The overload is always `default`. Attention with dropout draws random numbers. If a recompute skipped it, later ops
would draw other numbers than in the first run. So the output of attention with dropout is never kept.
"""

PRODUCT_NAMES = frozenset(f"aten.{name}.default" for name in PRODUCTS)
"""Names of the ops in a recording that are products."""
_MIN_DENSITY_DROP = 1.5
"""Minimum drop in density between products that are kept and products that are recomputed (`_alternatives`).

The density of a product, such as a matrix multiplication, is the time that keeping its result saves, per byte. A choice
that keeps only some products is offered if the least dense of them is at least this many times as dense as the densest
of the others.
"""

_MOST_DROPS = 4
"""Maximum number of alternatives that keep only some of the products (`_alternatives`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """The products of one call whose outputs are kept."""

    numbers: tuple[int, ...]
    """Numbers of the products, counted among the products of the call. For a segment: their op numbers in the
    forward of the module."""
    ops: tuple[int, ...]
    """Indices of the products in the recording."""
    storages: frozenset[int]
    """Storages of the outputs of these products."""


NOTHING = Kept(numbers=(), ops=(), storages=frozenset())


class Keepable:
    """Finds the products whose outputs can be kept for a recompute, and proposes which of them to keep.

    Args:
        graph: a what-if recording.
        op_ns: time of each op in ns.
        sizes: bytes of each storage, rounded up as the allocator does.
    """

    def __init__(self, graph: StepGraph, op_ns: list[int], sizes: list[int]) -> None:
        self._graph, self._op_ns, self._sizes = graph, op_ns, sizes
        self._nests = any(op.phase == "recompute" for op in graph.ops)

    @functools.cached_property
    def _by_call(self) -> dict[int, list[int]]:
        """For each call: indices of its products in execution order, including the products of nested calls."""
        products: dict[int, list[int]] = {}
        for index, op in enumerate(self._graph.ops):
            if op.name in PRODUCT_NAMES and op.phase == "forward":
                for call in self._graph.enclosing(op.call):
                    products.setdefault(call, []).append(index)
        return products

    @functools.cached_property
    def _overwritten(self) -> frozenset[int]:
        """Storages that are changed in place after the op that made them."""
        return frozenset(
            storage
            for index, op in enumerate(self._graph.ops)
            if op.writes
            for storage in op.outputs
            if self._graph.storages[storage].op != index
        )

    def choices(self, calls: dict[int, int]) -> list[dict[int, Kept]]:
        """Returns the alternatives for one module; each maps every call to the products that it keeps (at least one).

        Args:
            calls: for each call of the module, the tick at which its recompute ends: later ops are not recomputed.
        """
        if self._nests or any(self._graph.calls[call].has_hooks for call in calls):
            return []
        products = {call: self._by_call.get(call, []) for call in calls}
        numbers = set.intersection(*(self._usable(products[call], last) for call, last in calls.items()))
        return [
            {call: self._kept(products[call], chosen) for call in calls}
            for chosen in self._alternatives(numbers, products)
        ]

    def choices_among(self, ops: dict[int, list[int]], *, first: int) -> list[dict[int, Kept]]:
        """Returns the alternatives for one segment; each maps every call to the products that it keeps (at least one).

        Args:
            ops: for each call of the segment, indices of the segment's ops in the order of their numbers.
            first: the number of the segment's first op in the whole forward.
        """
        numbers = set.intersection(
            *(
                {number for number, op in enumerate(among) if self._graph.ops[op].name in PRODUCT_NAMES}
                & self._usable(among, self._graph.ticks)
                for among in ops.values()
            )
        )
        return [
            {
                call: dataclasses.replace(self._kept(among, chosen), numbers=tuple(first + number for number in chosen))
                for call, among in ops.items()
            }
            for chosen in self._alternatives(numbers, ops)
        ]

    def _usable(self, products: list[int], last_tick: int) -> set[int]:
        """Returns the numbers of the products that can be kept, among those that run before `last_tick`."""
        return {
            number
            for number, index in enumerate(products)
            if (op := self._graph.ops[index]).tick < last_tick and self._is_usable(index, op)
        }

    def _is_usable(self, index: int, op: Op) -> bool:
        """True if a recompute can skip the op and take its kept output instead.

        The op must make its output storages, no later op may overwrite them, and the op must draw no random numbers.
        """
        makes_outputs = all(self._graph.storages[storage].op == index for storage in op.outputs)
        overwritten = not self._overwritten.isdisjoint(op.outputs)
        return bool(op.outputs) and makes_outputs and not overwritten and not op.draws_random_numbers

    def _alternatives(self, numbers: set[int], products: dict[int, list[int]]) -> list[tuple[int, ...]]:
        """Returns sets of product numbers, which are the alternatives for what a call keeps.

        The first set has all products. For the others, products are sorted by time saved per byte kept. Where this
        ratio drops by more than the factor `_MIN_DENSITY_DROP` from one product to the next, the products before the
        drop are a set. Only the `_MOST_DROPS` steepest drops are used.
        This is a heuristic, and other subsets are not tried.
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
        steep = sorted((n for n, drop in enumerate(drops) if drop > _MIN_DENSITY_DROP), key=lambda n: (-drops[n], n))
        return [tuple(sorted(ordered)), *(tuple(sorted(ordered[: number + 1])) for number in steep[:_MOST_DROPS])]

    def _bytes(self, op: int) -> int:
        return sum(self._sizes[storage] for storage in self._graph.ops[op].outputs)

    def _kept(self, products: list[int], numbers: tuple[int, ...]) -> Kept:
        ops = tuple(products[number] for number in numbers)
        storages = frozenset(storage for op in ops for storage in self._graph.ops[op].outputs)
        return Kept(numbers=numbers, ops=ops, storages=storages)
