"""Chooses units by an integer program, on numbers alone: nothing in this package imports torch."""
