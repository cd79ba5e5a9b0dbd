"""The types that cross a border between rooms: plans, decisions, constraints. None of them needs torch."""
