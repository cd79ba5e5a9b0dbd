"""What is known of torch's optimizers."""

from __future__ import annotations

import torch

_BY_PARAMETER = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)
"""Names in `torch.optim`; LBFGS looks at all gradients together, and Muon takes matrices alone."""


def by_parameter(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether such an optimizer updates each parameter from its own gradient and state alone."""
    return any(kind is getattr(torch.optim, name, None) for name in _BY_PARAMETER)
