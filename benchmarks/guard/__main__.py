"""Test the accumulation check: wrong gradients that pass, right ones that are refused, and its cost.

    python -m benchmarks.guard [losses | gradients | zoo | cost] [--seeds 3] [--limit-s 1200] [--form whole]

The parts are:

- losses: trains small models with common losses. The error of the accumulated gradient relative to that of the whole
  batch is measured in fp64, and compared with the result of the check in the first 16 batches.
- gradients: does the same for models and losses whose samples are coupled in the backward only.
- zoo: does the same for the transformers models of the tests, for one batch each, with their own losses.
- cost: measures the peak memory and the time of steps with a check, relative to steps without.

--form measures what a simpler check would find. `weights` only watches the calls of loss functions, and `coupling` does
not watch them. `values` compares values of the loss instead of gradients. `first` compares in the first batch only.
`unperturbed` compares values of the loss for the unchanged parameters only. `classless` chooses samples without regard
to their classes.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.guard import gradients, losses, zoo
from benchmarks.guard.cost import costs
from benchmarks.guard.losses import Case
from benchmarks.guard.trying import Outcome, outcomes, plan_of
from planner.assemble import versions
from planner.errors import PlannerError
from planner.rewrite.accumulation_check import AccumulationCheck, CouplingCheck, coupling_check, sample_choice
from planner.rewrite.accumulation_check.gradient_probe import GradientProbe

RIGHT = 1e-6
"""Maximum relative error of a right gradient in fp64: rounding, of constants that are stored in fp32."""

WRONG = 1e-2
"""Minimum relative error of a gradient that the check should refuse; below it a warning is enough."""

_PARTS = ("losses", "gradients", "zoo", "cost")
_FORMS = ("whole", "weights", "coupling", "values", "first", "unperturbed", "classless")

BATCHES = 16
"""Number of batches that are trained; the check looks at some of them."""


def of_cases(cases: Sequence[Case], seeds: int, deadline: float) -> Iterator[Outcome]:
    """Yields the outcomes for small models."""
    options = {"sizes": (1, 2, 6, 8, 16), "dtypes": ("fp32", "bf16"), "trains": True, "batches": BATCHES}
    for case in cases:
        plan = plan_of(case)
        for seed in range(seeds):
            if time.monotonic() > deadline:
                return
            yield from outcomes(case, plan, seed=seed, **options)


def of_zoo(deadline: float, console: Console) -> Iterator[Outcome]:
    """Yields the outcomes for the transformers models. Models that cannot run are printed."""
    options = {"sizes": (1, 2, 4), "dtypes": ("fp32", "bf16"), "trains": False, "batches": 1}
    done: set[str] = set()
    for case in zoo.cases():
        name = case.name.removesuffix(zoo.UNFILLED)
        if name in done or time.monotonic() > deadline:
            continue
        try:
            yield from outcomes(case, plan_of(case), seed=0, **options)
            done.add(name)
        except (PlannerError, RuntimeError, ValueError, IndexError, TypeError) as why:  # it accepts no random tokens
            console.print(f"{case.name}: {type(why).__name__}: {str(why).splitlines()[0][:150]}")


def by_truth(found: Sequence[Outcome]) -> Table:
    """Returns the verdicts by the true error of the gradient."""
    table = Table("error in fp64", "samples per micro-batch", "trained", "refused", "warned", "passed")
    bounds = (0.0, RIGHT, 1e-3, WRONG, math.inf)
    for low, high in itertools.pairwise(bounds):
        for name, is_one in (("one", True), ("more", False)):
            inside = [outcome for outcome in found if low <= outcome.off < high or outcome.off == high == math.inf]
            rows = [outcome for outcome in inside if (outcome.size == 1) == is_one]
            refused, warned = ([row.at for row in rows if row.seen == seen] for seen in ("refused", "warned"))
            passed = len(rows) - len(refused) - len(warned)
            band = f"below {high:.0e}" if high < 1 else f"{low:.0%} and more"
            table.add_row(band, name, str(len(rows)), _by_batch(refused), _by_batch(warned), str(passed))
    return table


def _by_batch(batches: Sequence[int]) -> str:
    """Formats the number of batches, and how many of them are not the first."""
    later = sum(batch > 1 for batch in batches)
    return f"{len(batches)}" + (f" ({later} later)" if later else "")


def mistakes(found: Sequence[Outcome]) -> Table:
    """Returns, by case, wrong gradients that passed or were seen late, and right ones that were refused or warned."""
    table = Table("case", "dtype", "samples per micro-batch", "error", "verdict")
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
    """Returns the errors of the gradients that the check itself compared."""
    table = Table("dtype", "largest error of right gradients", "smallest error of gradients wrong by 1 % or more")
    for dtype in dict.fromkeys(outcome.dtype for outcome in found):
        compared = [outcome for outcome in found if outcome.dtype == dtype and outcome.compared is not None]
        right = max((o.compared for o in compared if o.off < RIGHT and o.seen == "nothing"), default=0.0)
        wrong = min((o.compared for o in compared if o.off >= WRONG and o.seen == "refused"), default=0.0)
        table.add_row(dtype, f"{right:.1e}", f"{wrong:.1e}")
    return table


def of_cost() -> Table:
    """Returns memory and time of checked steps over those of unchecked ones."""
    table = Table("split", "step: peak and time over those of a step without a check")
    for cost in costs():
        table.add_row(
            cost.split, "; ".join(f"{step}: {peak:.3f}, {spent:.1f}" for step, peak, spent in cost.relative())
        )
    return table


def use_form(form: str) -> None:
    """Replace the check in this process by the form that `--form` names."""
    whole = CouplingCheck._choices
    if form == "weights":
        CouplingCheck.refuse_coupled_samples = lambda *_, **__: None  # type: ignore[method-assign]  # on purpose
        CouplingCheck.refuse_dependence_on_calls = lambda *_, **__: None  # type: ignore[method-assign]  # on purpose
    elif form == "first":
        coupling_check._CHECKED_BATCHES = (1,)
    elif form == "coupling":
        AccumulationCheck.watch_part = lambda *_: None  # type: ignore[method-assign]  # on purpose
    elif form == "unperturbed":
        compare = GradientProbe.compare_losses

        def unperturbed(probe: GradientProbe, halves: Any, *, perturbed: bool = False) -> Any:
            return None if perturbed else compare(probe, halves)

        GradientProbe.compare_losses = unperturbed  # type: ignore[method-assign]  # on purpose
    elif form == "classless":
        sample_choice._by_class = lambda *_: iter(())
    elif form == "values":

        def values(check: CouplingCheck, batch: Any, samples: int) -> Iterator[Any]:
            yield from ((halves, False) for halves, _ in whole(check, batch, samples))

        CouplingCheck._choices = values  # type: ignore[method-assign]  # on purpose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", default=list(_PARTS), help="parts to run (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=1200.0, help="seconds for each part")
    parser.add_argument("--form", choices=_FORMS, default="whole")
    options = parser.parse_args()
    use_form(options.form)
    logging.getLogger("planner.rewrite").propagate = False
    torch.set_num_threads(1)
    console = Console(width=140)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    for which in options.which:
        deadline = time.monotonic() + options.limit_s
        console.rule(which)
        if which == "cost":
            console.print(of_cost())
            continue
        if which == "zoo":
            found = list(of_zoo(deadline, console))
        else:
            cases = {"losses": losses.CASES, "gradients": gradients.CASES}[which]
            found = list(of_cases(cases, options.seeds, deadline))
        console.print(f"{len({outcome.case for outcome in found})} cases, {len(found)} trainings")
        for table in (by_truth(found), noise(found), mistakes(found)):
            console.print(table)
        console.print("refused:", ", ".join(sorted({outcome.case for outcome in found if outcome.seen == "refused"})))


if __name__ == "__main__":
    main()
