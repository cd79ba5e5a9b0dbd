"""The search compared with brute force: on small problems every answer is the best of all selections."""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlannerError
from planner.search import brute, curve, cutting_loop, milp
from planner.search.cutting_loop import CuttingLoop
from planner.search.integer_program import Program, solver_of
from planner.search.linear_rows import Row, RowKey, RowSource, cover
from planner.search.presolve import Presolve, normal_form
from planner.search.problem import CheckpointProblem, Hold, Recompute, SharedCondition
from planner.search.shared import written_out
from planner.search.symmetry import fold

pytestmark = [pytest.mark.slow, pytest.mark.no_torch]

SIZES = (lambda rng: 1, lambda rng: 512, lambda rng: 10**9 + 7, lambda rng: 10**11 + rng.randint(0, 3))
"""Bytes are multiples of one of these: small, allocator-like, odd, and large with differences of one byte."""


def random_tree(rng: random.Random, count: int) -> tuple[tuple[int, ...], ...]:
    """A path for each unit of a random tree: the unit and what it is nested in."""
    paths: list[tuple[int, ...]] = []
    for unit in range(count):
        parent = rng.choice([(), *paths])
        paths.append((*parent, unit))
    return tuple(paths)


def random_problem(rng: random.Random) -> CheckpointProblem:
    """Up to 8 units, nested or not; holds with any number of literals; several recomputes a unit."""
    count, events, unit_bytes = rng.randint(1, 8), rng.randint(1, 10), rng.choice(SIZES)
    paths = random_tree(rng, count) if rng.random() < 0.8 else ()

    def units(least: int, most: int) -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(count), rng.randint(least, min(count, most)))))

    def members() -> tuple[int, ...]:
        return rng.choice(paths) if paths and rng.random() < 0.6 else units(int(rng.random() < 0.9), 3)

    holds = []
    for _ in range(rng.randint(0, 14)):
        start = rng.randint(-1, events)
        holds.append(
            Hold(
                size_bytes=rng.randint(0, 9) * unit_bytes(rng),
                start=start,
                stop=rng.randint(start, events + 2),
                unless=tuple(members() for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))),
                when=units(0, rng.choice([0, 0, 1, 2])),
            )
        )
    return CheckpointProblem(
        fixed_bytes=np.array([rng.randint(0, 9) * unit_bytes(rng) for _ in range(events)], np.int64),
        holds=tuple(holds),
        recomputes=tuple(
            Recompute(
                unit=rng.randrange(count), at=rng.randrange(events), extra_bytes=rng.randint(0, 12) * unit_bytes(rng)
            )
            for _ in range(rng.randint(0, 8))
        ),
        cost_ns=tuple(rng.choice([0, 1, 2, 3, 5, 1000, 10**9]) for _ in range(count)),
        paths=paths,
    )


def with_shared_conditions(rng: random.Random, problem: CheckpointProblem) -> CheckpointProblem:
    """Adds conditions that contain earlier ones, and makes some of the holds depend on them, too."""
    count = len(problem.cost_ns)
    shared: list[SharedCondition] = []
    for number in range(rng.randint(1, 6)):
        members = tuple(sorted(rng.sample(range(count), rng.randint(int(rng.random() < 0.95), count))))
        shared.append(
            SharedCondition(
                before=rng.choice([None, number - 1, rng.randrange(number)]) if number else None,
                unless=(members,) if rng.random() < 0.5 else (),
                when=tuple(sorted(rng.sample(range(count), rng.randint(0, min(2, count))))),
            )
        )
    holds = tuple(
        dataclasses.replace(
            hold,
            shared=rng.randrange(len(shared)),
            unless=rng.choice([(), hold.unless]),
            when=rng.choice([(), hold.when]),
        )
        if rng.random() < 0.6
        else hold
        for hold in problem.holds
    )
    return dataclasses.replace(problem, holds=holds, shared=tuple(shared))


def with_conditions_written_out(problem: CheckpointProblem) -> CheckpointProblem:
    holds = []
    for hold in problem.holds:
        unless, when = written_out((hold.unless, hold.when), hold.shared, problem.shared)
        holds.append(dataclasses.replace(hold, unless=unless, when=when, shared=None))
    return dataclasses.replace(problem, holds=tuple(holds), shared=())


def layered_problem(rng: random.Random) -> CheckpointProblem:
    """Equal layers one after the other, each a unit with a smaller unit in it: full of symmetry."""
    layers = rng.randint(2, 4)
    outer, inner, kept, extra, outer_ns, inner_ns = (rng.randint(1, 9) for _ in range(6))
    holds, recomputes = [], []
    for layer in range(layers):
        whole, part, stop = 2 * layer, 2 * layer + 1, 2 * layers - layer
        holds += [
            Hold(size_bytes=outer * 512, start=layer + 1, stop=stop, unless=((whole,),), when=()),
            Hold(size_bytes=inner * 512, start=layer + 1, stop=stop, unless=((whole, part),), when=()),
            Hold(size_bytes=kept * 512, start=layer + 1, stop=stop, unless=(), when=(whole, part)),
        ]
        recomputes += [
            Recompute(unit=whole, at=stop - 1, extra_bytes=(outer + inner + extra) * 512),
            Recompute(unit=part, at=stop - 1, extra_bytes=inner * 512),
        ]
    return CheckpointProblem(
        fixed_bytes=np.full(2 * layers + 1, 512, np.int64),
        holds=tuple(holds),
        recomputes=tuple(recomputes),
        cost_ns=(outer_ns + inner_ns, inner_ns) * layers,
        paths=tuple((2 * layer, 2 * layer + 1) for layer in range(layers)),
    )


def budgets(rng: random.Random, problem: CheckpointProblem) -> list[int]:
    """Around the smallest peak, and at and just below peaks that can be reached."""
    peaks = sorted({selection.peak_bytes for selection in brute.every_selection(problem)})
    return [peaks[0] - 1, peaks[0], rng.choice(peaks), rng.choice(peaks) - 1, peaks[len(peaks) // 2]]


def assert_same_as_brute(problem: CheckpointProblem, rng: random.Random) -> None:
    for budget_bytes in budgets(rng, problem):
        best, found = brute.solve(problem, budget_bytes), milp.solve(problem, budget_bytes)
        assert (best is None) == (found is None)
        if best is not None and found is not None:
            assert (found.cost_ns, len(found.units)) == (best.cost_ns, len(best.units))
            assert brute.peak(problem, found.units) == found.peak_bytes <= budget_bytes
            assert all(len(set(path).intersection(found.units)) <= 1 for path in problem.paths)
            assert (found.status, found.gap) == ("optimal", 0.0)
            assert milp.Search(problem).may_fit(budget_bytes, below_ns=best.cost_ns + 1)
            assert not milp.Search(problem).may_fit(budget_bytes, below_ns=best.cost_ns)
    least, found = brute.smallest_peak(problem), milp.smallest_peak(problem)
    assert (found.peak_bytes, found.cost_ns) == (least.peak_bytes, least.cost_ns)
    assert (found.status, found.gap) == ("optimal", 0.0)
    assert milp.Search(problem).may_fit(least.peak_bytes)
    assert not milp.Search(problem).may_fit(least.peak_bytes - 1)


@pytest.mark.parametrize("block", range(16))
@pytest.mark.thorough_after(3)
def test_the_search_finds_what_trying_everything_finds(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        assert_same_as_brute(random_problem(rng), rng)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.thorough_after(1)
def test_symmetry_changes_the_effort_and_not_the_answer(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        assert_same_as_brute(layered_problem(rng), rng)


def test_a_folded_relaxation_leads_to_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is folded for programs of many layers only, since small ones are solved at once."""
    monkeypatch.setattr(cutting_loop, "_MANY_COLUMNS", 0)
    for seed in range(12):
        rng = random.Random(seed)
        assert_same_as_brute(rng.choice([random_problem, layered_problem])(rng), rng)


@pytest.mark.thorough_after(2)
@pytest.mark.parametrize("block", range(4))
def test_layers_that_share_a_tensor_are_solved_like_others(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        problem = layered_problem(rng)
        shared = Hold(
            size_bytes=rng.randint(1, 3),
            start=1,
            stop=len(problem.cost_ns),
            unless=(),
            when=tuple(range(len(problem.cost_ns))),
        )
        assert_same_as_brute(dataclasses.replace(problem, holds=(*problem.holds, shared)), rng)


@pytest.mark.parametrize("block", range(6))
@pytest.mark.thorough_after(1)
def test_conditions_that_contain_others_are_solved_like_written_out_ones(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        problem = with_shared_conditions(rng, rng.choice([random_problem, layered_problem])(rng))
        assert_same_as_brute(problem, rng)
        same = with_conditions_written_out(problem)
        for selection in brute.every_selection(problem):
            assert brute.peak(same, selection.units) == selection.peak_bytes
            assert curve.peak(problem, selection.units) == selection.peak_bytes


def test_a_condition_that_contains_others_has_the_rows_of_a_written_out_one() -> None:
    """Otherwise layers would differ in the conditions that they belong to, and could not be folded into one."""
    shared = [SharedCondition(before=k - 1 if k else None, unless=(), when=(2 * k, 2 * k + 1)) for k in range(4)]
    problem = CheckpointProblem(
        fixed_bytes=np.zeros(1, np.int64),
        holds=(
            Hold(size_bytes=1, start=0, stop=1, unless=(), when=(), shared=3),
            *(Hold(size_bytes=9, start=0, stop=1, unless=((unit,),), when=()) for unit in range(8)),
        ),
        recomputes=(),
        cost_ns=(1,) * 8,
        paths=tuple((2 * k, 2 * k + 1) for k in range(4)),
        shared=tuple(shared),
    )
    sources = [RowSource(Presolve(p).above(0)) for p in (problem, with_conditions_written_out(problem))]
    rows = [[row.columns.tolist() for row in source.links(*source.column_of)] for source in sources]
    assert rows[0] == rows[1] == [[8, 2 * k, 2 * k + 1] for k in range(4)]


@pytest.mark.thorough_after(3)
@pytest.mark.parametrize("block", range(8))
def test_a_tolerance_is_kept_and_the_gap_stays_honest(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        problem = random_problem(rng)
        tolerance_ns = rng.choice([1, 3, 1000, 10**9])
        for budget_bytes in budgets(rng, problem):
            best = brute.solve(problem, budget_bytes)
            found = milp.solve(problem, budget_bytes, tolerance_ns=tolerance_ns)
            assert (best is None) == (found is None)
            if best is not None and found is not None:
                assert brute.peak(problem, found.units) == found.peak_bytes <= budget_bytes
                assert best.cost_ns <= found.cost_ns <= best.cost_ns + tolerance_ns
                assert (1.0 - found.gap) * found.cost_ns <= best.cost_ns * (1 + 1e-9) + 1e-6
                assert found.status == "optimal"


@pytest.mark.thorough_after(3)
@pytest.mark.parametrize("block", range(8))
def test_only_selections_below_a_cost_are_found_and_all_of_them(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        problem = random_problem(rng)
        for budget_bytes in budgets(rng, problem):
            best = brute.solve(problem, budget_bytes)
            least_ns = 5 if best is None else best.cost_ns
            for below_ns in (0, least_ns, least_ns + 1, least_ns + rng.choice([2, 1000, 10**9])):
                tolerance_ns = rng.choice([0, 0, 2, 1000])
                found = milp.solve(problem, budget_bytes, tolerance_ns=tolerance_ns, below_ns=below_ns)
                assert (found is None) == (best is None or best.cost_ns >= below_ns)
                if best is not None and found is not None:
                    assert best.cost_ns <= found.cost_ns <= min(best.cost_ns + tolerance_ns, below_ns - 1)
                    assert found.status == "optimal"


@pytest.mark.parametrize("block", range(4))
def test_the_smallest_peak_is_found_to_within_its_tolerances(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        problem = rng.choice([random_problem, layered_problem])(rng)
        least = brute.smallest_peak(problem)
        tolerance_bytes, tolerance_ns = rng.choice([0, 1, 512, 10**10]), rng.choice([0, 2, 1000])
        found = milp.smallest_peak(problem, tolerance_bytes=tolerance_bytes, tolerance_ns=tolerance_ns)
        cheapest = brute.solve(problem, found.peak_bytes)
        assert least.peak_bytes <= found.peak_bytes <= least.peak_bytes + tolerance_bytes
        assert cheapest is not None
        assert found.cost_ns <= cheapest.cost_ns + tolerance_ns
        assert (1.0 - found.gap) * found.peak_bytes <= least.peak_bytes * (1 + 1e-12)
        assert found.status == "optimal"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_compiled_curve_is_the_curve_of_the_definitions(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    problem = with_shared_conditions(rng, problem) if seed % 2 else problem
    units = [unit for unit in range(len(problem.cost_ns)) if rng.random() < 0.4]
    evaluated = curve.evaluate(problem, units)
    assert evaluated.dtype == np.int64
    assert evaluated.tolist() == brute.curve(problem, units)
    assert curve.peak(problem, units) == brute.peak(problem, units)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_the_normal_form_of_a_condition_means_the_same(seed: int) -> None:
    problem = random_problem(random.Random(seed))
    exclusive = Presolve(problem).above(0).exclusive
    for hold, selection in itertools.product(problem.holds, brute.every_selection(problem)):
        unless, when = normal_form((hold.unless, hold.when), exclusive)
        normal = dataclasses.replace(hold, unless=unless, when=when)
        assert brute.alive(problem, normal, selection.units) == brute.alive(problem, hold, selection.units)


@pytest.mark.parametrize("seed", range(30))
def test_a_reduced_problem_has_the_same_curve_above_the_floor(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    problem = with_shared_conditions(rng, problem) if seed % 2 else problem
    floor_bytes = rng.choice(budgets(rng, problem))
    reduced = Presolve(problem).above(floor_bytes)
    for selection in brute.every_selection(problem):
        if set(selection.units) <= set(reduced.useful):
            peak_bytes = brute.peak(reduced.problem, selection.units)
            assert max(peak_bytes, floor_bytes) == max(selection.peak_bytes, floor_bytes)


@pytest.mark.parametrize("seed", range(30))
def test_a_search_with_other_fixed_bytes_is_that_of_the_changed_problem(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    problem = with_shared_conditions(rng, problem) if seed % 2 else problem
    original = milp.Search(problem)
    fixed = problem.fixed_bytes + np.array([rng.randint(-3, 3) for _ in problem.fixed_bytes], np.int64)
    changed = dataclasses.replace(problem, fixed_bytes=fixed)
    search = original.with_fixed_bytes(fixed)
    for budget_bytes in budgets(rng, changed):
        found, expected = search.solve(budget_bytes), milp.solve(changed, budget_bytes)
        assert (found and found.units) == (expected and expected.units)
    assert search.smallest_peak().peak_bytes == milp.smallest_peak(changed).peak_bytes
    assert original.smallest_peak().peak_bytes == milp.smallest_peak(problem).peak_bytes


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.thorough_after(20)
def test_a_larger_budget_never_costs_more(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    costs_ns = []
    for budget_bytes in sorted(budgets(rng, problem)):
        found = milp.solve(problem, budget_bytes)
        costs_ns.append(float("inf") if found is None else found.cost_ns)
    assert costs_ns == sorted(costs_ns, reverse=True)


def two_layers(size_bytes: int) -> CheckpointProblem:
    """Two units that free `size_bytes` each at event 1 and need 1 byte less to recompute; one costs 2, the other 3."""
    return CheckpointProblem(
        fixed_bytes=np.array([10, 10, 10], np.int64),
        holds=tuple(Hold(size_bytes=size_bytes, start=1, stop=2, unless=((unit,),), when=()) for unit in (0, 1)),
        recomputes=tuple(Recompute(unit=unit, at=2, extra_bytes=size_bytes - 1) for unit in (0, 1)),
        cost_ns=(2, 3),
        paths=(),
    )


@pytest.mark.parametrize("size_bytes", [1, 512, 10**6 + 1, 10**12 + 1])
def test_a_budget_is_kept_to_the_byte(size_bytes: int) -> None:
    problem = two_layers(size_bytes)
    assert milp.solve(problem, 10 + 2 * size_bytes).units == ()
    assert milp.solve(problem, 10 + 2 * size_bytes - 1).units == (0,)
    assert milp.solve(problem, 10 + size_bytes).units == (0,)
    assert milp.solve(problem, 10 + size_bytes - 1).units == (0, 1)
    assert milp.solve(problem, 10 + size_bytes - 2) is None or size_bytes == 1
    assert milp.smallest_peak(problem).peak_bytes == 10 + size_bytes - 1


def test_recomputes_of_one_unit_are_separate_peaks() -> None:
    problem = dataclasses.replace(
        two_layers(100), recomputes=tuple(Recompute(unit=0, at=2, extra_bytes=extra) for extra in (60, 70, 80))
    )
    assert curve.peak(problem, (0,)) == 110
    assert curve.peak(problem, (0, 1)) == 90


def test_among_equal_costs_fewer_units_are_selected() -> None:
    problem = CheckpointProblem(
        fixed_bytes=np.zeros(1, np.int64),
        holds=tuple(Hold(size_bytes=10, start=0, stop=1, unless=((0, unit),), when=()) for unit in (1, 2, 3)),
        recomputes=(),
        cost_ns=(6, 2, 2, 2),
        paths=((0, 1), (0, 2), (0, 3)),
    )
    assert milp.solve(problem, 0).units == (0,)


def test_nothing_is_selected_where_everything_fits() -> None:
    found = milp.solve(two_layers(512), 10**9)
    assert (found.units, found.cost_ns, found.status, found.gap) == ((), 0, "optimal", 0.0)


def test_a_problem_without_units_or_events_has_an_answer() -> None:
    problem = CheckpointProblem(fixed_bytes=np.zeros(0, np.int64), holds=(), recomputes=(), cost_ns=(), paths=())
    assert milp.solve(problem, 0).units == ()
    assert milp.smallest_peak(problem).peak_bytes == 0
    unavoidable = dataclasses.replace(problem, fixed_bytes=np.array([7], np.int64))
    assert milp.solve(unavoidable, 6) is None
    assert milp.smallest_peak(unavoidable).peak_bytes == 7


def test_the_same_question_gets_the_same_answer() -> None:
    rng = random.Random(5)
    for problem in (layered_problem(rng), random_problem(rng), random_problem(rng)):
        budget_bytes = budgets(rng, problem)[-1]
        first, second = (milp.solve(problem, budget_bytes) for _ in range(2))
        assert (first.units, first.cost_ns) == (second.units, second.cost_ns)
        loose = [milp.solve(problem, budget_bytes, tolerance_ns=3, below_ns=10**12) for _ in range(2)]
        assert (loose[0].units, loose[0].gap) == (loose[1].units, loose[1].gap)
        assert milp.smallest_peak(problem).units == milp.smallest_peak(problem).units


def test_without_time_a_selection_that_fits_is_returned_as_unproven() -> None:
    found = milp.solve(two_layers(512), 10 + 512, time_limit_seconds=0.0)
    assert (found.status, found.gap) == ("time limit", 1.0)
    assert found.peak_bytes <= 10 + 512
    assert milp.smallest_peak(two_layers(512), time_limit_seconds=0.0).status == "time limit"


def test_a_search_that_runs_out_of_time_rounds_the_linear_relaxation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest peak needs almost all of 300 layers recomputed; the greedy search makes at most 100 moves."""
    layers = 300
    problem = CheckpointProblem(
        fixed_bytes=np.zeros(layers + 1, np.int64),
        holds=tuple(Hold(size_bytes=512, start=0, stop=1 + u, unless=((u,),), when=()) for u in range(layers)),
        recomputes=tuple(Recompute(unit=u, at=1 + u, extra_bytes=512) for u in range(layers)),
        cost_ns=(1,) * layers,
        paths=(),
    )
    best = milp.smallest_peak(problem)
    assert best.peak_bytes == 512
    monkeypatch.setattr(CuttingLoop, "left_seconds", property(lambda loop: 60.0 if loop.effort.rounds < 3 else -1.0))
    found = milp.smallest_peak(problem)
    assert (found.peak_bytes, found.status) == (512, "time limit")
    assert milp.solve(problem, 512).peak_bytes == 512


def test_without_time_nothing_is_called_impossible() -> None:
    with pytest.raises(milp.SearchTimeout, match="520 bytes"):
        milp.solve(two_layers(512), 520, time_limit_seconds=0.0)
    assert issubclass(milp.SearchTimeout, PlannerError)
    assert milp.solve(two_layers(512), 520) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost_ns": (2, -3)}, "unit 1 costs -3 ns"),
        ({"recomputes": (Recompute(unit=0, at=3, extra_bytes=1),)}, "outside the events 0..2"),
        ({"recomputes": (Recompute(unit=2, at=0, extra_bytes=1),)}, "units are 0..1"),
        ({"holds": (Hold(size_bytes=1, start=0, stop=1, unless=(), when=(), shared=0),)}, "0 shared conditions"),
        ({"shared": (SharedCondition(before=0, unless=(), when=()),)}, "to a later one"),
        ({"shared": (SharedCondition(before=None, unless=(), when=(2,)),)}, "units are 0..1"),
        ({"holds": (Hold(size_bytes=-1, start=0, stop=1, unless=(), when=(0,)),)}, "hold 0 has -1 bytes"),
    ],
)
def test_a_problem_that_means_nothing_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        milp.solve(dataclasses.replace(two_layers(512), **change), 10)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-9, 9).filter(bool), min_size=1, max_size=6), st.integers(-20, 20), st.data())
def test_a_cover_excludes_the_violation_and_nothing_that_fits(
    coefficients: list[int], upper: int, data: st.DataObject
) -> None:
    row = Row(columns=np.arange(len(coefficients)), coefficients=np.array(coefficients), upper=upper)
    values = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(coefficients), max_size=len(coefficients))))
    if row.coefficients @ values <= upper:
        return
    cut = cover(row, values)
    assert cut.coefficients @ values[cut.columns] > cut.upper
    for point in itertools.product((0, 1), repeat=len(coefficients)):
        if row.coefficients @ np.array(point) <= upper:
            assert cut.coefficients @ np.array(point)[cut.columns] <= cut.upper


def test_a_condition_is_bounded_by_each_chain_of_its_units() -> None:
    problem = CheckpointProblem(
        fixed_bytes=np.zeros(1, np.int64),
        holds=(
            Hold(size_bytes=1, start=0, stop=1, unless=(), when=(0, 1, 2)),
            *(Hold(size_bytes=9, start=0, stop=1, unless=((unit,),), when=()) for unit in (0, 1, 2)),
        ),
        recomputes=(),
        cost_ns=(1, 1, 1),
        paths=((0, 1), (0, 2)),
    )
    source = RowSource(Presolve(problem).above(0))
    (number,) = source.column_of
    assert [row.columns.tolist() for row in source.links(number)] == [[3, 0, 1], [3, 0, 2]]


@pytest.mark.parametrize("seed", range(40))
def test_the_cliques_of_nested_units_are_all_maximal_cliques(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 12)
    tree = random_tree(rng, count)
    variants = tuple(tuple(2 * unit + k for unit in path for k in (0, 1)) for path in tree)  # two units per module
    hold = Hold(size_bytes=8, start=0, stop=2, unless=tuple((u,) for u in range(2 * count)), when=())
    problem = CheckpointProblem(
        fixed_bytes=np.array([1, 1]), holds=(hold,), recomputes=(), cost_ns=(1,) * (2 * count), paths=variants
    )
    reduced = Presolve(problem).above(0)
    graph = networkx.Graph()
    graph.add_nodes_from(range(2 * count))
    graph.add_edges_from((unit, other) for unit, others in enumerate(reduced.exclusive) for other in others)
    units = sorted(rng.sample(range(2 * count), rng.randint(1, 2 * count)))
    expected = sorted(tuple(sorted(clique)) for clique in networkx.find_cliques(graph.subgraph(units)))
    assert RowSource(reduced)._cliques(units) == expected


@pytest.mark.parametrize("seed", range(20))
def test_folding_finds_the_classes_of_colour_refinement(seed: int) -> None:
    rng = random.Random(seed)
    problem = layered_problem(rng)
    source = RowSource(Presolve(problem).above(0))
    events = range(len(problem.fixed_bytes))
    program = Program(
        cost=np.append(problem.cost_ns, [0] * (source.column_count - len(problem.cost_ns))),
        limit=source.limits(),
        integral=np.ones(source.column_count, bool),
        rows=(*source.paths(), *source.rows([RowKey(event=event) for event in events], 10**6)),
    )
    graph = networkx.Graph()
    for column in range(source.column_count):
        graph.add_node(column, colour=f"{program.cost[column]} {program.limit[column]}")
    for number, row in enumerate(program.rows):
        graph.add_node(("row", number), colour=f"row {row.upper}")
        for column, coefficient in zip(row.columns.tolist(), row.coefficients.tolist(), strict=True):
            graph.add_edge(("row", number), column, coefficient=str(coefficient))
    colours = networkx.weisfeiler_lehman_subgraph_hashes(
        graph, edge_attr="coefficient", node_attr="colour", iterations=2 * len(graph)
    )
    last = [colours[column][-1] for column in range(source.column_count)]
    assert fold(program).class_of.tolist() == [list(dict.fromkeys(last)).index(colour) for colour in last]


def test_folding_joins_equal_columns_and_keeps_the_optimum() -> None:
    ones = np.ones(6, np.int64)
    rows = (
        Row(columns=np.arange(6), coefficients=np.array([-2, -3, -2, -3, -2, -3]), upper=-7),
        *(Row(columns=np.array([k, k + 1]), coefficients=ones[:2], upper=1) for k in (0, 2, 4)),
    )
    program = Program(cost=np.array([2, 4, 2, 4, 2, 4]), limit=ones, integral=ones > 0, rows=rows)
    folded = fold(program)
    assert folded.class_of.tolist() == [0, 1, 0, 1, 0, 1]
    assert len(folded.program.rows) == 2
    bounds = [solver_of(p).solve(time_limit_seconds=10.0).bound for p in (program, folded.program)]
    assert bounds == pytest.approx([8, 8])


def test_the_search_does_not_import_torch() -> None:
    check = "import sys, planner.search.milp, planner.search.brute; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
