"""Builds the activation checkpointing problem of a recording: what can be recomputed, what that frees and costs."""
