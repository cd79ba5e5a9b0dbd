"""The batches of a run in one or more orders, and the changes of a run that may reduce its memory."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

from planner.run_memory.lengths import Arrange, batch_lengths, coarser, grouped, longest_first, padded, shuffled

MOST_STEPS = 10_000
"""Maximum number of simulated steps in each order."""
_LEAST_STEPS = 1000
"""Minimum number of simulated steps. A shorter epoch is repeated in further random orders."""
_MOST_LENGTHS = 64
"""Maximum number of different lengths of batches. If there are more, batches are padded to a multiple for the
simulation."""
_SEEDS = (0, 1)
_CONSTANT_STEPS = 20
"""Number of simulated steps if all batches are alike, so that only what happens between steps makes a difference."""
_MULTIPLE = 128
"""Multiple to which batches are padded in the change that offers it."""

Orders = tuple[tuple[int, ...], ...]
"""The length of each batch of the run, for each order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
    """The lengths of the batches of a run, in one or more orders."""

    orders: Orders
    name: str
    """The orders in words, for example 'random, seeds 0 and 1'."""
    changes: tuple[tuple[str, Orders], ...] = ()
    """Changes of the run in words, each with the orders of its batches."""
    notes: tuple[str, ...] = ()
    is_fixed: bool = False
    """True if there are no batches of other lengths than these."""

    @property
    def lengths(self) -> list[int]:
        """All different lengths of batches, shortest first."""
        return sorted({length for order in self.orders for length in order})

    @property
    def all_lengths(self) -> list[int]:
        """All different lengths of batches, also those of the changes, shortest first."""
        changed = {length for _, orders in self.changes for order in orders for length in order}
        return sorted(changed.union(self.lengths))

    def padded(self, multiple: int) -> Batches:
        """Returns the batches padded to a multiple of a length, but not beyond the longest one.

        If their lengths are fixed, those between two multiples are padded to the longest of them.
        """
        if multiple == 1:
            return self
        known = self.all_lengths
        longer = {length: padded(length, multiple, known[-1]) for length in known}
        if self.is_fixed:
            longer = {length: max(n for n in known if longer[n] == longer[length]) for length in known}

        def rounded(orders: Orders) -> Orders:
            return tuple(tuple(longer[length] for length in order) for order in orders)

        note = (
            "the steps of some lengths could not be predicted from those of others: batches were simulated as if they "
            f"were padded, so that {len(set(longer.values()))} lengths differ"
        )
        changes = tuple((name, rounded(orders)) for name, orders in self.changes)
        return dataclasses.replace(self, orders=rounded(self.orders), changes=changes, notes=(*self.notes, note))


def given_order(lengths: Sequence[int]) -> Batches:
    """Returns the batches of a source in its own order, and the order with the longest batch first."""
    source, epochs = random.Random(_SEEDS[0]), [list(lengths)]
    while sum(map(len, epochs)) < _LEAST_STEPS:
        epochs.append(source.sample(lengths, len(lengths)))
    order = tuple(itertools.chain.from_iterable(epochs))[:MOST_STEPS]
    changes = (("the longest batch first", (tuple(longest_first(order)),)),) if len(set(order)) > 1 else ()
    return Batches(
        orders=(order,), name="as given, then the same batches in random order", changes=changes, is_fixed=True
    )


def constant(length: int) -> Batches:
    """Returns batches that all have the same length."""
    return Batches(orders=((length,) * _CONSTANT_STEPS,), name="all alike")


def random_orders(samples: Sequence[int], *, batch_size: int, multiple: int, longest: int | None) -> Batches:
    """Returns the batches that are made of samples in random orders, and changes that may reduce their memory.

    Args:
        samples: lengths of the samples.
        batch_size: number of samples in a batch.
        multiple: batches are padded to a multiple of this length.
        longest: longer samples are cut to this length; None for no limit.
    """
    steps = min(max(len(samples) // batch_size, _LEAST_STEPS), MOST_STEPS)

    def orders(arrange: Arrange = shuffled, multiple: int = multiple) -> Orders:
        return tuple(
            tuple(
                batch_lengths(
                    samples,
                    batch_size=batch_size,
                    seed=seed,
                    multiple=multiple,
                    longest=longest,
                    steps=steps,
                    arrange=arrange,
                )
            )
            for seed in _SEEDS
        )

    plain = orders()
    coarse = coarser([length for order in plain for length in order], _MOST_LENGTHS)
    notes: tuple[str, ...] = ()
    if coarse > multiple:
        notes = (
            f"the batches of the run have more than {_MOST_LENGTHS} different lengths: they were simulated as if they "
            f"were padded to multiples of {coarse}",
        )

    def rounded(found: Orders) -> Orders:
        return tuple(tuple(padded(length, coarse, longest) for length in order) for order in found)

    largest = max(length for order in plain for length in order)
    candidates: list[tuple[str, Callable[[], Orders]]] = [
        ("the longest batch first", lambda: tuple(tuple(longest_first(order)) for order in rounded(plain))),
        ("samples grouped by length (group_by_length)", lambda: rounded(orders(grouped))),
    ]
    if multiple < _MULTIPLE < largest:
        candidates.append((f"batches padded to multiples of {_MULTIPLE}", lambda: orders(multiple=_MULTIPLE)))
    candidates.append(("all batches padded to the longest", lambda: tuple((largest,) * steps for _ in _SEEDS)))
    different = len({length for order in plain for length in order}) > 1
    return Batches(
        orders=rounded(plain),
        name=f"random, seeds {' and '.join(map(str, _SEEDS))}",
        changes=tuple((name, make()) for name, make in candidates) if different else (),
        notes=notes,
    )
