"""Shared parts of the measurements on a card: cases and models, prediction, measurement, comparison, results."""
