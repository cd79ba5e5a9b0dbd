"""The types that all sub-packages of the planner share: plans, decisions, constraints. None of them needs torch."""
