"""The categories into which the memory of a training step is divided."""

from __future__ import annotations

import enum


class Category(enum.StrEnum):
    """A use of memory, in the order in which reports list them."""

    PARAMETER = "parameters"
    UNSHARDED = "unsharded parameters"
    GRADIENT = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATION = "activations"
    LOGITS = "logits and loss"
    AUTOCAST = "autocast copies"
    TEMPORARY = "temporaries"
    COMMUNICATION = "communication buffers"
    INPUT = "inputs"
    WORKSPACE = "workspaces"
    SLACK = "allocator slack"
    CONTEXT = "CUDA context"
    NCCL = "NCCL"

    @property
    def key(self) -> str:
        """The category's key in JSON, such as 'optimizer_state'."""
        return self.lower().replace(" ", "_")
