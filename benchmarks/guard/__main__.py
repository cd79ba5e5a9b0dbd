"""How well accumulation is guarded: wrong gradients that pass, right ones that are refused, and what it costs.

    python -m benchmarks.guard [losses | zoo | cost] [--seeds 3] [--limit-s 1200]

losses: small models with losses that people write; how far the gradient of the micro-batches is off that of the batch
is measured in fp64, and beside it stands what is said in the first 16 batches. zoo: the same for the transformers
models of the tests, one batch each, with their own losses. cost: peak memory and time of steps with a trial, over those
without.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.guard import zoo
from benchmarks.guard.cost import costs
from benchmarks.guard.losses import CASES
from benchmarks.guard.trying import Outcome, outcomes, plan_of
from planner.assemble import versions
from planner.errors import PlannerError

RIGHT = 1e-6
"""Of a gradient in fp64: what is off by less is rounding, of constants that are taken in fp32."""

WRONG = 1e-2
"""What is off by less may be told."""

BATCHES = 16
"""In as many the guard looks now and then."""


def of_losses(seeds: int, deadline: float) -> Iterator[Outcome]:
    options = {"sizes": (1, 2, 6, 8, 16), "dtypes": ("fp32", "bf16"), "trains": True, "batches": BATCHES}
    for case in CASES:
        plan = plan_of(case)
        for seed in range(seeds):
            if time.monotonic() > deadline:
                return
            yield from outcomes(case, plan, seed=seed, **options)


def of_zoo(deadline: float, console: Console) -> Iterator[Outcome]:
    options = {"sizes": (1, 2, 4), "dtypes": ("fp32", "bf16"), "trains": False, "batches": 1}
    done: set[str] = set()
    for case in zoo.cases():
        name = case.name.removesuffix(zoo.AS_IT_IS)
        if name in done or time.monotonic() > deadline:
            continue
        try:
            yield from outcomes(case, plan_of(case), seed=0, **options)
            done.add(name)
        except (PlannerError, RuntimeError, ValueError, IndexError, TypeError) as why:  # it takes no random tokens
            console.print(f"{case.name}: {type(why).__name__}: {str(why).splitlines()[0][:150]}")


def by_truth(found: Sequence[Outcome]) -> Table:
    table = Table("parts off in fp64", "samples of a micro-batch", "trained", "refused", "told", "passed")
    bounds = (0.0, RIGHT, 1e-3, WRONG, math.inf)
    for low, high in itertools.pairwise(bounds):
        for name, is_one in (("one", True), ("more", False)):
            rows = [outcome for outcome in found if (outcome.size == 1) == is_one and low <= outcome.off < high]
            refused, told = ([row.at for row in rows if row.seen == seen] for seen in ("refused", "told"))
            passed = len(rows) - len(refused) - len(told)
            band = f"below {high:.0e}" if high < 1 else f"{low:.0%} and more"
            table.add_row(band, name, str(len(rows)), _by_batch(refused), _by_batch(told), str(passed))
    return table


def _by_batch(batches: Sequence[int]) -> str:
    """How many, and how many of them not in the first batch."""
    later = sum(batch > 1 for batch in batches)
    return f"{len(batches)}" + (f" ({later} later)" if later else "")


def astonishing(found: Sequence[Outcome]) -> Table:
    """By case: what is wrong and passed, or was seen later; and what is right and was refused or told."""
    table = Table("case", "dtype", "samples of a micro-batch", "off", "seen")
    rows: defaultdict[tuple, list[Outcome]] = defaultdict(list)
    for outcome in found:
        if (outcome.off >= WRONG and outcome.at != 1) or (outcome.off < RIGHT and outcome.seen != "nothing"):
            rows[outcome.case, outcome.dtype, outcome.seen, outcome.at].append(outcome)
    for (case, dtype, seen, at), some in rows.items():
        sizes = ", ".join(map(str, sorted({outcome.size for outcome in some})))
        batch = f" in batch {at}" if at else ""
        table.add_row(case, dtype, sizes, f"{max(outcome.off for outcome in some):.1e}", f"{seen}{batch} ({len(some)})")
    return table


def noise(found: Sequence[Outcome]) -> Table:
    """How far gradients were off in trials."""
    table = Table("dtype", "where nothing is off: largest", "where it is, by 1 % or more: smallest")
    for dtype in dict.fromkeys(outcome.dtype for outcome in found):
        compared = [outcome for outcome in found if outcome.dtype == dtype and outcome.compared is not None]
        right = max((o.compared for o in compared if o.off < RIGHT and o.seen == "nothing"), default=0.0)
        wrong = min((o.compared for o in compared if o.off >= WRONG and o.seen == "refused"), default=0.0)
        table.add_row(dtype, f"{right:.1e}", f"{wrong:.1e}")
    return table


def of_cost() -> Table:
    table = Table("split", "step: peak, time over those of a step without a trial")
    for cost in costs():
        table.add_row(
            cost.split, "; ".join(f"{step}: {peak:.3f}, {spent:.1f}" for step, peak, spent in cost.relative())
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", default=["losses", "zoo", "cost"], help="losses, zoo, cost")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=1200.0, help="for each")
    given = parser.parse_args()
    logging.getLogger("planner.rewrite").propagate = False
    torch.set_num_threads(1)
    console = Console(width=140)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    for which in given.which:
        deadline = time.monotonic() + given.limit_s
        console.rule(which)
        if which == "cost":
            console.print(of_cost())
            continue
        found = list(of_losses(given.seeds, deadline) if which == "losses" else of_zoo(deadline, console))
        console.print(f"{len({outcome.case for outcome in found})} cases, {len(found)} trainings")
        for table in (by_truth(found), noise(found), astonishing(found)):
            console.print(table)
        console.print("refused:", ", ".join(sorted({outcome.case for outcome in found if outcome.seen == "refused"})))


if __name__ == "__main__":
    main()
