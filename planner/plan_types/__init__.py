"""The types that rooms exchange: plans, decisions, constraints. None of them needs torch."""
