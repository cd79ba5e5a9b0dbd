"""From a recording to the activation checkpointing problem: what can be recomputed, what it frees and costs."""
