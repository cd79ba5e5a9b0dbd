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


def by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known to update each parameter from its own gradient and state alone."""
    known = any(type(optimizer) is getattr(torch.optim, name, None) for name in _BY_PARAMETER)
    return known and not has_step_hooks(optimizer)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something of the user's runs before or after each step, on all gradients or weights."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
