"""Compares rehearsals with real training steps, for hundreds of small models of many libraries."""
