"""Estimates the memory and the time that a recorded step takes on a card."""
