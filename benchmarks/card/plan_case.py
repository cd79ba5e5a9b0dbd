"""Plan for one model and budget of `benchmarks.card.budgets`, in a process that does not use the card.

    python -m benchmarks.card.plan_case NAME BUDGET PLAN.json --gpu h100

BUDGET is a size, a share of the baseline's total such as 60%, or 'as-it-is' for the baseline: a plan without decisions.
"""

from __future__ import annotations

import argparse
import pathlib

from benchmarks.card.budgets import CASES, Case
from planner import pipeline
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.plan import Plan
from planner.workload.budget import card_and_budget
from planner.workload.loading import load_workload

AS_IT_IS = "as-it-is"


def planned(case: Case, budget: str, gpu: str) -> Plan:
    """Returns the plan, which may not fit.

    Raises:
        PlannerError: the case cannot be planned.
    """
    work = load_workload(case.reference, batch_size=case.batch_size, seq_len=case.seq_len, optimizer="adamw")
    constraints = parse_constraints(fidelity=case.fidelity, force=(), forbid=())
    card, vram_bytes = card_and_budget(gpu, None if budget == AS_IT_IS or budget.endswith("%") else budget)
    if budget.endswith("%"):
        whole = pipeline.plan_workload(work, card, vram_bytes=None, constraints=constraints)
        vram_bytes = int(float(budget.removesuffix("%")) / 100 * whole.baseline.total_bytes)
    return pipeline.plan_workload(work, card, vram_bytes=vram_bytes, constraints=constraints)


def main() -> None:
    """Compute the plan and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(CASES))
    parser.add_argument("budget")
    parser.add_argument("plan", type=pathlib.Path)
    parser.add_argument("--gpu", required=True)
    options = parser.parse_args()
    planned(CASES[options.name], options.budget, options.gpu).save(options.plan)


if __name__ == "__main__":
    main()
