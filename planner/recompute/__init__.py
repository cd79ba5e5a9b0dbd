"""Builds the activation checkpointing problem of a recording: what can be recomputed, the bytes freed and the time."""
