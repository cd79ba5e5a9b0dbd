"""The batches of a run in one or more orders, and the changes of a run that may reduce its memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence

from planner.run_memory.batches import (
    Arrange,
    BatchShape,
    batches_of_samples,
    batches_of_tokens,
    by_size,
    coarser,
    grouped,
    largest_first,
    padded,
    shuffled,
)

MOST_STEPS = 10_000
"""Maximum number of simulated steps in each order."""
_LEAST_STEPS = 1000
"""Minimum number of simulated steps. A shorter epoch is repeated in further random orders."""
_MOST_SHAPES = 64
"""Maximum number of different lengths of batches. If there are more, batches are padded to a multiple for the
simulation."""
_SEEDS = (0, 1)
_CONSTANT_STEPS = 20
"""Number of simulated steps if all batches are alike, so that only what happens between steps makes a difference."""
_MULTIPLE = 128
"""Multiple to which batches are padded, or their tokens limited, in the changes that offer it."""

Orders = tuple[tuple[BatchShape, ...], ...]
"""The shape of each batch of the run, for each order."""
Change = tuple[str, Orders]
"""A change of the run in words, and the orders of its batches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
    """The shapes of the batches of a run, in one or more orders."""

    orders: Orders
    name: str
    """The orders in words, for example 'random, seeds 0 and 1'."""
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    is_fixed: bool = False
    """True if there are no batches of other shapes than these."""
    by_tokens: Callable[[int], Change | None] = lambda parts: None
    """Returns the change to batches with a limit on their tokens, for a number of micro-batches; None if it is of no
    use."""

    @property
    def shapes(self) -> list[BatchShape]:
        """All different shapes of batches, smallest first."""
        return sorted({shape for order in self.orders for shape in order}, key=by_size)

    @property
    def all_shapes(self) -> list[BatchShape]:
        """All different shapes of batches, also those of `changes`, smallest first."""
        changed = {shape for _, orders in self.changes for order in orders for shape in order}
        return sorted(changed.union(self.shapes), key=by_size)

    def with_samples(self, fewest: int) -> Batches:
        """Returns the batches that have at least `fewest` samples."""
        if self.shapes[0].samples >= fewest:
            return self
        return self._mapped({shape: shape for shape in self.all_shapes if shape.samples >= fewest})

    def padded(self, multiple: int) -> Batches:
        """Returns the batches padded to a multiple of a length, but not beyond the longest one.

        If their shapes are fixed, those between two multiples are padded to the longest of them.
        """
        if multiple == 1:
            return self
        return self._noted(self._padded(multiple, lambda shape: shape.samples))

    def reduced(self, most: int) -> Batches:
        """Returns the batches with at most `most` different shapes, each at least as large as the one it replaces."""
        multiple = coarser((shape.length for shape in self.all_shapes), most)
        return self._noted(self._padded(multiple, lambda shape: 0))

    def _padded(self, multiple: int, group: Callable[[BatchShape], int]) -> dict[BatchShape, BatchShape]:
        """Returns for each shape the largest one with the same padded length in its group."""
        known = self.all_shapes
        longest = max(shape.length for shape in known)
        largest: dict[tuple[int, int], BatchShape] = {}
        keys = {shape: (padded(shape.length, multiple, longest), group(shape)) for shape in known}
        for shape in known:
            length = shape.length if self.is_fixed else keys[shape][0]
            largest[keys[shape]] = BatchShape(shape.samples, length)
        return {shape: largest[key] for shape, key in keys.items()}

    def _noted(self, larger: Mapping[BatchShape, BatchShape]) -> Batches:
        note = (
            "the steps for some batches could not be predicted from those for others: batches were simulated as if "
            f"they were padded, so that {len(set(larger.values()))} shapes differ"
        )
        return dataclasses.replace(self._mapped(larger), notes=(*self.notes, note))

    def _mapped(self, others: Mapping[BatchShape, BatchShape]) -> Batches:
        """Returns the batches with other shapes, without those for which there is none."""

        def mapped(orders: Orders) -> Orders:
            return tuple(tuple(others[shape] for shape in order if shape in others) for order in orders)

        changes = tuple((name, mapped(orders)) for name, orders in self.changes)
        return dataclasses.replace(self, orders=mapped(self.orders), changes=changes)


def given_order(shapes: Sequence[BatchShape]) -> Batches:
    """Returns the batches of a source in its own order, and the order with the largest batch first."""
    source, epochs = random.Random(_SEEDS[0]), [list(shapes)]
    while sum(map(len, epochs)) < _LEAST_STEPS:
        epochs.append(source.sample(shapes, len(shapes)))
    order = tuple(itertools.chain.from_iterable(epochs))[:MOST_STEPS]
    changes = (("the largest batch first", (tuple(largest_first(order)),)),) if len(set(order)) > 1 else ()
    return Batches(
        orders=(order,), name="as given, then the same batches in random order", changes=changes, is_fixed=True
    )


def constant(shape: BatchShape) -> Batches:
    """Returns batches that all have the same shape."""
    return Batches(orders=((shape,) * _CONSTANT_STEPS,), name="all alike")


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
                batches_of_samples(
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
    coarse = coarser((shape.length for order in plain for shape in order), _MOST_SHAPES)
    notes: tuple[str, ...] = ()
    if coarse > multiple:
        notes = (
            f"the batches of the run have more than {_MOST_SHAPES} different lengths: they were simulated as if they "
            f"were padded to multiples of {coarse}",
        )

    def rounded(found: Orders) -> Orders:
        return tuple(
            tuple(BatchShape(shape.samples, padded(shape.length, coarse, longest)) for shape in order)
            for order in found
        )

    largest = max((shape for order in plain for shape in order), key=by_size)
    candidates: list[tuple[str, Callable[[], Orders]]] = [
        ("the longest batch first", lambda: tuple(tuple(largest_first(order)) for order in rounded(plain))),
        ("samples grouped by length (group_by_length)", lambda: rounded(orders(grouped))),
    ]
    if multiple < _MULTIPLE < largest.length:
        candidates.append((f"batches padded to multiples of {_MULTIPLE}", lambda: orders(multiple=_MULTIPLE)))
    candidates.append(("all batches padded to the longest", lambda: tuple((largest,) * steps for _ in _SEEDS)))
    different = len({shape for order in plain for shape in order}) > 1
    return Batches(
        orders=rounded(plain),
        name=f"random, seeds {' and '.join(map(str, _SEEDS))}",
        changes=tuple((name, make()) for name, make in candidates) if different else (),
        notes=notes,
        by_tokens=functools.partial(
            _by_tokens,
            samples,
            batch_size=batch_size,
            multiple=max(multiple, coarse),
            longest=largest.length,
            steps=steps,
        ),
    )


def _by_tokens(
    samples: Sequence[int], parts: int, *, batch_size: int, multiple: int, longest: int, steps: int
) -> Change | None:
    """Returns the change to batches of as many tokens each, which have `batch_size` samples on average.

    Returns:
        None if such a batch is not smaller than the largest batch with a fixed number of samples.
    """
    mean_tokens = sum(padded(length, multiple, longest) for length in samples) * batch_size / len(samples)
    most_tokens = max(2 * parts * longest, -(-round(mean_tokens) // _MULTIPLE) * _MULTIPLE)
    if most_tokens >= batch_size * longest:
        return None
    orders = tuple(
        tuple(
            batches_of_tokens(
                samples,
                most_tokens=most_tokens,
                parts=parts,
                seed=seed,
                multiple=multiple,
                longest=longest,
                steps=steps,
            )
        )
        for seed in _SEEDS
    )
    mean_samples = sum(shape.samples for shape in orders[0]) / len(orders[0])
    return f"batches of at most {most_tokens:,} tokens, {mean_samples:.1f} samples on average", orders
