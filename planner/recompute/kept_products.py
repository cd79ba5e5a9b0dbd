"""The ops that are worth their memory when a module is recomputed: matrix products, convolutions and attention.

What one call of a module runs of them is numbered in that order; a plan says by number whose results are kept.
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
"""Names in `torch.ops.aten`, all with the overload `default`; for attention the position of its `dropout_p`.

With dropout attention draws random numbers: where it is not run again, what follows would draw others than before.
"""

_NAMES = frozenset(f"aten.{name}.default" for name in PRODUCTS)
_CLEARLY_DENSER = 1.5
"""Time saved for a byte kept: products that differ by less are kept together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """Products of one call whose results are kept."""

    numbers: tuple[int, ...]
    ops: tuple[int, ...]
    storages: frozenset[int]


NOTHING = Kept(numbers=(), ops=(), storages=frozenset())


class Keepable:
    """Which products of a call can be kept for its recompute."""

    def __init__(self, graph: StepGraph, op_ns: list[int], sizes: list[int]) -> None:
        self._graph, self._op_ns, self._sizes = graph, op_ns, sizes
        self._nests = any(op.phase == "recompute" for op in graph.ops)

    @functools.cached_property
    def _by_call(self) -> dict[int, list[int]]:
        """Products by call, those of nested calls too, in the order in which they ran."""
        found: dict[int, list[int]] = {}
        for index, op in enumerate(self._graph.ops):
            if op.name in _NAMES and op.phase == "forward":
                call = op.call
                while call is not None:
                    found.setdefault(call, []).append(index)
                    call = self._graph.calls[call].parent
        return found

    @functools.cached_property
    def _rewritten(self) -> frozenset[int]:
        """Storages that an op other than their first one writes: what they hold is not the product's result."""
        return frozenset(
            storage
            for index, op in enumerate(self._graph.ops)
            if op.writes
            for storage in op.outputs
            if self._graph.storages[storage].op != index
        )

    def choices(self, calls: dict[int, int]) -> list[dict[int, Kept]]:
        """For all calls of one module, what may be kept: by call. Each choice keeps something.

        Args:
            calls: of one module, with the tick after which none of their ops is run again.
        """
        if self._nests or any(self._graph.calls[call].has_hooks for call in calls):
            return []
        products = {call: self._by_call.get(call, []) for call in calls}
        numbers = set.intersection(*(self._usable(products[call], last) for call, last in calls.items()))
        return [
            {call: self._kept(products[call], chosen) for call in calls} for chosen in self._levels(numbers, products)
        ]

    def choices_among(self, ops: dict[int, list[int]], *, first: int) -> list[dict[int, Kept]]:
        """For all calls of one stretch, what may be kept; numbered by its ops, of which the first has number `first`.

        Args:
            ops: of each call, in the order of their numbers.
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
        return {
            number
            for number, index in enumerate(products)
            if (op := self._graph.ops[index]).tick < last_tick and self._is_usable(index, op)
        }

    def _is_usable(self, index: int, op: Op) -> bool:
        own = all(self._graph.storages[storage].op == index for storage in op.outputs)
        rewritten = not self._rewritten.isdisjoint(op.outputs)
        return bool(op.outputs) and own and not rewritten and not op.draws_random_numbers

    def _levels(self, numbers: set[int], products: dict[int, list[int]]) -> list[tuple[int, ...]]:
        """All of them, and those that save clearly more time for a byte, where there are such."""
        if not numbers:
            return []
        density = {
            number: sum(self._op_ns[ops[number]] for ops in products.values())
            / max(sum(self._bytes(ops[number]) for ops in products.values()), 1)
            for number in numbers
        }
        ordered = sorted(numbers, key=lambda number: (-density[number], number))
        steps = [density[one] / max(density[other], 1e-9) for one, other in itertools.pairwise(ordered)]
        levels = [tuple(sorted(ordered))]
        if steps and (steepest := max(steps)) > _CLEARLY_DENSER:
            levels.append(tuple(sorted(ordered[: steps.index(steepest) + 1])))
        return levels

    def _bytes(self, op: int) -> int:
        return sum(self._sizes[storage] for storage in self._graph.ops[op].outputs)

    def _kept(self, products: list[int], numbers: tuple[int, ...]) -> Kept:
        ops = tuple(products[number] for number in numbers)
        storages = frozenset(storage for op in ops for storage in self._graph.ops[op].outputs)
        return Kept(numbers=numbers, ops=ops, storages=storages)
