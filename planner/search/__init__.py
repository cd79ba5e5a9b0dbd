"""Chooses the units to recompute by an integer program. Nothing in this package imports torch: its input is numbers."""
