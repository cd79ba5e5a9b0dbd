"""Budgets for promises when the slack of each configuration is only known of plans that were tried."""

from __future__ import annotations

import dataclasses
import math
import random
import types
from collections.abc import Callable

import pytest

from planner.choose.budget_search import PromiseBudgets, search
from planner.choose.fitting import first_to_certify

pytestmark = pytest.mark.no_torch

TIE = 1.05


@dataclasses.dataclass(frozen=True)
class Plan:
    config: str
    peak_bytes: int
    step_ns: int
    slack_bytes: int


class World:
    """Plans of some configurations, each with a slack of its own, and a card."""

    def __init__(self, plans: list[Plan], capacity_bytes: int) -> None:
        self.plans, self.capacity_bytes, self.tried, self.measured = plans, capacity_bytes, [], []

    def ask(self, budget_of, below_ns: float) -> Plan | None:
        inside = [p for p in self.plans if p.peak_bytes <= budget_of(p.config) and p.step_ns < below_ns]
        return min(inside, key=lambda plan: plan.step_ns, default=None)

    def certify_fits(self, plan: Plan) -> bool:
        self.tried.append(plan)
        return self.lacks(plan) <= 0

    def missing_bytes_of(self, plan: Plan) -> int:
        assert plan in self.tried
        self.measured.append(plan)
        return self.lacks(plan)

    def search(
        self,
        attempts: int = 10,
        hopeless: int | None = None,
        predicted: Callable[[Plan], int] = lambda plan: 0,
        predictions: int = 20,
    ) -> Plan | None:
        budgets = PromiseBudgets(self.capacity_bytes, finest_bytes=self.capacity_bytes // 512, tie=TIE)
        return search(
            self.ask,
            self.certify_fits,
            self.missing_bytes_of,
            predicted,
            budgets=budgets,
            tie=TIE,
            attempts=attempts,
            predictions=predictions,
            hopeless=hopeless or attempts,
        )

    def lacks(self, plan: Plan) -> int:
        return plan.peak_bytes + plan.slack_bytes - self.capacity_bytes

    def fitting(self) -> list[Plan]:
        return [plan for plan in self.plans if plan.peak_bytes + plan.slack_bytes <= self.capacity_bytes]


def curve(config: str, slack_bytes: int, *, cost: float, noise: int = 0, seed: int = 0) -> list[Plan]:
    """The less a plan promises, the slower it is."""
    draws = random.Random(seed)
    return [
        Plan(config, peak, round(100_000 * (1 + cost * (1000 - peak) / 1000)), slack_bytes + draws.randint(0, noise))
        for peak in range(1000, 300, -7)
    ]


def drawn_world(seed: int, *, least_bytes: int) -> World:
    """Some configurations with slack that is drawn at random, and a card of at least `least_bytes`."""
    draws = random.Random(seed)
    plans = [
        plan
        for number in range(draws.randint(1, 5))
        for plan in curve(
            f"config {number}", draws.choice((0, 5, 40, 200)), cost=draws.uniform(0.1, 3), noise=draws.choice((0, 10)),
            seed=seed + number,
        )
    ]  # fmt: skip
    return World(plans, draws.randint(least_bytes, 1100))


def test_a_plan_that_fits_at_once_is_taken_without_another_try():
    world = World(curve("a", 0, cost=1.0), 1000)
    assert world.search() == world.plans[0] and len(world.tried) == 1


def test_slack_is_paid_for_by_asking_for_less():
    world = World(curve("a", 150, cost=1.0), 1000)
    assert world.search().step_ns <= TIE * min(plan.step_ns for plan in world.fitting())


def test_a_choice_with_little_slack_is_not_given_up_for_that_of_another():
    """The quickest promises all have a hole of 300; those that are a little slower have none."""
    world = World([*curve("holes", 300, cost=1.0), *curve("none", 0, cost=1.2)], 900)
    found = world.search()
    assert found.config == "none" and found.step_ns <= TIE * min(plan.step_ns for plan in world.fitting())


def test_where_nothing_fits_with_less_all_is_asked_again_for_the_others():
    """What fits promises nearly all of the budget, and is the slowest."""
    tight = [Plan("holes", 950, 100, 200), Plan("holes", 940, 110, 200), Plan("none", 990, 500, 5)]
    assert World(tight, 1000).search().config == "none"


def test_none_is_said_where_nothing_fits_and_after_a_bounded_number_of_tries():
    world = World([*curve("a", 800, cost=1.0), *curve("b", 900, cost=2.0)], 1000)
    assert world.search() is None and len(world.tried) <= 10
    world.tried.clear()
    assert world.search(hopeless=3) is None and len(world.tried) == 3
    assert World([], 1000).search() is None


@pytest.mark.parametrize("seed", range(300))
def test_what_is_settled_for_fits_and_is_hardly_slower_than_the_best(seed):
    world = drawn_world(seed, least_bytes=500)
    found, best_ns = world.search(attempts=30), min((plan.step_ns for plan in world.fitting()), default=math.inf)
    if found is None:
        assert math.isinf(best_ns)
        return
    assert found in world.fitting()
    assert found.step_ns <= 1.06 * best_ns


@pytest.mark.parametrize("seed", range(100))
def test_plans_that_are_rightly_predicted_to_fail_are_not_certified(seed):
    world = drawn_world(seed, least_bytes=700)
    found = world.search(attempts=30, predicted=world.lacks)
    best_ns = min(plan.step_ns for plan in world.fitting())
    assert all(world.lacks(plan) <= 0 for plan in world.tried)
    assert found is not None and found.step_ns <= 1.06 * best_ns


def test_wrong_predictions_do_not_hide_that_a_plan_fits():
    """All plans are predicted to fail. The one that lacks the least by this prediction is certified, and fits."""
    world = World(curve("a", 0, cost=1.0), 1000)
    found = world.search(predicted=lambda plan: plan.peak_bytes)
    assert found is not None and world.tried == [found] and world.lacks(found) <= 0


def test_plans_that_are_wrongly_predicted_to_fit_are_found_out_by_their_certificates():
    world = World(curve("a", 150, cost=1.0), 1000)
    assert world.lacks(world.search(predicted=lambda plan: world.lacks(plan) - 100)) <= 0
    assert any(world.lacks(plan) > 0 for plan in world.tried)


def test_what_a_plan_lacks_is_measured_only_if_smaller_plans_are_asked_for():
    """All plans are predicted to fail. The nearest one is certified in the end, and nothing is tried after it."""
    world = World(curve("a", 800, cost=1.0), 1000)
    assert world.search(predicted=world.lacks) is None
    assert len(world.tried) == 1 and not world.measured
    assert world.search(attempts=3) is None
    assert len(world.tried) == 4 and world.measured == world.tried[1:3]


def test_after_a_number_of_predicted_failures_plans_are_certified():
    world, asked = World(curve("a", 150, cost=1.0), 1000), []

    def fails(plan: Plan) -> int:
        asked.append(plan)
        return 5

    assert world.search(predicted=fails, predictions=3) is not None and len(asked) == 3


@pytest.mark.parametrize("seed", range(30))
def test_a_search_for_one_plan_finds_the_one_that_is_certified_first(seed):
    """The head start rehearses the former, and the latter is needed."""
    many, one = (drawn_world(seed, least_bytes=700) for _ in range(2))
    many.search(predicted=many.lacks)
    one.search(predicted=one.lacks, attempts=1)
    assert one.tried == many.tried[:1]


def test_the_head_start_passes_over_as_many_predicted_failures_as_a_search():
    world, asked = World(curve("a", 150, cost=1.0), 1000), []

    def predicted(plan: Plan) -> int:
        asked.append(plan)
        return 5 if len(asked) <= 3 else 0

    def fastest(budget, *, below_ns: float = math.inf) -> Plan | None:
        return world.ask(budget if callable(budget) else lambda config: budget, below_ns)

    session = types.SimpleNamespace(
        chooser=lambda space, constraints: types.SimpleNamespace(fastest=fastest),
        budget=types.SimpleNamespace(tensor_bytes=1000),
        predicted_missing_bytes=predicted,
    )
    assert first_to_certify(session, None, None) is asked[3]


def test_only_one_plan_is_certified_if_nothing_is_predicted_to_fit():
    world = World(curve("a", 800, cost=1.0), 1000)
    assert world.search(predicted=world.lacks) is None and len(world.tried) == 1


@pytest.mark.parametrize("seed", range(60))
def test_the_number_of_certificates_is_limited(seed):
    world = drawn_world(seed, least_bytes=500)
    world.search(attempts=5, predicted=lambda plan: 0)
    assert len(world.tried) <= 5


def test_a_plan_with_less_slack_between_the_failed_one_and_a_much_slower_one_is_found():
    """The plan that fits promises more than one that fails: its slack is smaller."""
    plans = [Plan("a", 990, 100, 100), Plan("a", 940, 110, 10), Plan("a", 900, 120, 200), Plan("a", 700, 200, 0)]
    for predicted in (lambda plan: 0, lambda plan: plan.peak_bytes + plan.slack_bytes - 1000):
        world = World(plans, 1000)
        assert world.search(predicted=predicted) == plans[1]


def test_a_near_plan_that_is_wrongly_predicted_to_fail_is_certified_before_a_much_slower_one_is_taken():
    plans = [Plan("a", 990, 100, 0), Plan("a", 700, 200, 0)]
    assert World(plans, 1000).search(predicted=lambda plan: 5 if plan.peak_bytes > 900 else 0) == plans[0]
    world = World(plans, 1000)
    assert world.search(predicted=lambda plan: 200 if plan.peak_bytes > 900 else 0) == plans[1]
    assert world.tried == plans[1:]
