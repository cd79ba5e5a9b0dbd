"""The conditions under which storages are held, compared with the reasons to hold them, one tick at a time."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.recompute import conditions
from planner.recompute.conditions import SharedConditions
from planner.recompute.holds import holds_at, times_of
from planner.search import brute
from planner.search.problem import CheckpointProblem, exclusive_units, longest_paths

TICKS = 12

Pieces = list[tuple[int, int, str, tuple[int, ...]]]


def problem_of(storages: list[Pieces], paths: tuple[tuple[int, ...], ...], count: int, longest: int):
    """The checkpoint problem of storages of 1, 2, 4 ... bytes that are held for these reasons."""
    exclusive, numbered = exclusive_units(paths, count), SharedConditions()
    last = max((stop for pieces in storages for _, stop, *_ in pieces), default=0)
    fixed_bytes, times = np.zeros(last, np.int64), []
    for number, pieces in enumerate(storages):
        conditional = []
        for start, stop, condition in times_of(pieces, exclusive, numbered):
            if condition is None:
                fixed_bytes[start:stop] += 1 << number
            else:
                conditional.append((start, stop, condition))
        times.append((1 << number, conditional))
    holds, shared = holds_at(times, numbered, longest=longest)
    return CheckpointProblem(
        fixed_bytes=fixed_bytes, holds=holds, recomputes=(), cost_ns=(1,) * count, paths=paths, shared=shared
    )


def random_pieces(rng: random.Random, paths: tuple[tuple[int, ...], ...], count: int) -> Pieces:
    pieces: Pieces = []
    for _ in range(rng.randint(0, 10)):
        start, stop = sorted((rng.randint(0, TICKS), rng.randint(0, TICKS)))
        kind = rng.choice(["unless", "unless", "when", "when", "fixed"] if rng.random() < 0.4 else ["unless", "when"])
        members = rng.choice(paths) if rng.random() < 0.5 else tuple(rng.sample(range(count), rng.randint(1, count)))
        units = {"unless": tuple(sorted(members)), "when": members[:1], "fixed": ()}[kind]
        pieces.append((start, stop, kind, units))
    return pieces


def is_held(pieces: Pieces, tick: int, selected: tuple[int, ...]) -> bool:
    """The definition: any reason that is valid at the tick."""
    return any(
        start <= tick < stop and (kind == "fixed" or (kind == "when") == any(unit in selected for unit in units))
        for start, stop, kind, units in pieces
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_a_storage_is_held_for_any_of_its_reasons(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    parents = [rng.choice([None, *range(unit)]) for unit in range(count)]
    nested = []
    for unit in range(count):
        path = [unit]
        while (parent := parents[path[-1]]) is not None:
            path.append(parent)
        nested.append(tuple(sorted(path)))
    paths = tuple(nested)
    storages = [random_pieces(rng, paths, count) for _ in range(rng.randint(1, 3))]
    for longest, most_covered in ((0, 0), (0, 1024), (rng.randint(1, 20), rng.randint(0, 3)), (10**6, 1024)):
        with mock.patch.object(conditions, "_MOST_COVERED", most_covered):
            problem = problem_of(storages, paths, count, longest)
        for selection in brute.every_selection(problem):
            expected = [
                sum(1 << n for n, pieces in enumerate(storages) if is_held(pieces, tick, selection.units))
                for tick in range(len(problem.fixed_bytes))
            ]
            assert brute.curve(problem, selection.units) == expected


def mask_of(layers: int, *, is_argument: bool) -> tuple[Pieces, tuple[tuple[int, ...], ...]]:
    """The reasons to hold a mask that all layers save. Each layer has two units; if the mask is an argument of a layer,
    its units hold it when they are selected."""
    pieces: Pieces = []
    for layer in range(layers):
        units, back = (2 * layer, 2 * layer + 1), 6 * layers - 3 * layer
        if is_argument:
            pieces += [(3 * layer, back, "when", (unit,)) for unit in units]
        pieces.append((3 * layer + 1, back, "unless", units if not is_argument else units[:1]))
    return pieces, tuple((2 * layer, 2 * layer + 1) for layer in range(layers))


@pytest.mark.parametrize("is_argument", [True, False])
def test_the_conditions_of_a_mask_grow_with_the_layers_and_not_with_their_square(is_argument: bool) -> None:
    sizes = []
    for layers in (100, 200):
        pieces, paths = mask_of(layers, is_argument=is_argument)
        problem = problem_of([pieces], paths, 2 * layers, longest=1000)
        members = sum(len(one.when) + sum(map(len, one.unless)) for one in (*problem.holds, *problem.shared))
        sizes.append((len(problem.holds), len(problem.shared), members))
    assert all(larger <= 2 * size + 2 for size, larger in zip(*sizes, strict=True))
    assert (sizes[1][1] == 0) == is_argument


def test_a_reason_of_the_whole_model_in_each_layer_does_not_replace_the_reasons_of_all_layers(monkeypatch) -> None:
    """The units of each layer hold the mask if they are selected. When the layer's backward has read it, autograd holds
    it unless the model or the layer is checkpointed."""

    class Counting(SharedConditions):
        calls = 0

        def number(self, before, reason) -> int:
            self.calls += 1
            return super().number(before, reason)

    def calls(layers: int) -> int:
        model, pieces = 2 * layers, []
        for layer in range(layers):
            units, back = (2 * layer, 2 * layer + 1), 9 * layers - 3 * layer
            pieces += [(3 * layer, back + 2, "when", (unit,)) for unit in units]
            pieces.append((back, back + 1, "unless", (*units, model)))
        paths = tuple((2 * layer, 2 * layer + 1, model) for layer in range(layers))
        numbered = Counting()
        times_of(pieces, exclusive_units(paths, 2 * layers + 1), numbered)
        return numbered.calls

    monkeypatch.setattr(conditions, "_MOST_COVERED", 20)
    assert calls(200) <= 2.1 * calls(100)


def test_a_mask_that_each_layer_holds_or_recomputes_is_always_held() -> None:
    pieces, paths = mask_of(3, is_argument=True)
    (hold, *others) = problem_of([pieces], paths, 6, longest=1000).holds
    assert (hold.unless, hold.when) == ((), (0, 1))
    assert [(other.start, other.stop, other.unless) for other in others] == [(1, 18, ((),))]


def test_a_path_that_another_one_contains_is_left_out() -> None:
    assert longest_paths([(0, 1), (0, 1, 2), (0, 3), (4,), (1, 2)]) == [(0, 1, 2), (0, 3)]
