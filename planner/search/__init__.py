"""Choosing, on numbers alone: nothing in here knows of torch."""
