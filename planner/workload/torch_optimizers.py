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


_CLASSES = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
"""By the name that users may give instead of an optimizer."""

_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Those of `torch.optim` with a fused kernel on CUDA (`torch/optim/*.py`: they have `fused` among their defaults)."""

_FOREACH = tuple(name for name in _BY_PARAMETER if name != "SparseAdam")
"""Those that step by foreach on CUDA unless told otherwise."""


def kernel_beside_foreach(kind: type[torch.optim.Optimizer]) -> str | None:
    """The implementation that spares foreach's temporaries: 'fused', else 'for-loop'; None for what is no torch class.

    A loop is never better than a fused kernel: it moves more bytes and makes temporaries of its own.
    """
    for names, kernel in ((_FUSED, "fused"), (_FOREACH, "for-loop")):
        if any(kind is getattr(torch.optim, name, None) for name in names):
            return kernel
    return None


def kind_of(optimizer: object) -> type[torch.optim.Optimizer] | None:
    """Class of an optimizer that is there or named; None where only a function knows."""
    if isinstance(optimizer, str):
        return _CLASSES.get(optimizer)
    return type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None


def why_no_kernel(kernel: str, optimizer: object, model: torch.nn.Module) -> str | None:
    """What keeps `optimizer`, an object or a name, from stepping on `model` by this kernel; None if nothing does."""
    kind = kind_of(optimizer)
    if kind is None:
        return "what a function makes is not known before it is made: give the optimizer itself"
    best = kernel_beside_foreach(kind)
    if best is None:
        return f"{kind.__name__} is not known to be able to step in another way than it does"
    if kernel == "fused" and best != "fused":
        return f"{kind.__name__} has no fused kernel"
    if sparse_lookups(model):
        return "an embedding makes sparse gradients"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            for option in ("fused", "foreach"):
                if group.get(option) is not None:
                    return f"{kind.__name__} was made with {option}={group[option]}, which is a choice already"
            if group.get("differentiable"):
                return f"{kind.__name__} was made with differentiable=True"
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    odd = sorted({str(p.dtype).removeprefix("torch.") for p in parameters if not p.is_floating_point()})
    return f"a parameter is {odd[0]}, not floating point" if odd else None


def sparse_lookups(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Names and weights of the trained embeddings that make sparse gradients."""
    lookups = {name: module for name, module in model.named_modules() if isinstance(module, _LOOKUPS)}
    return {name: m.weight for name, m in lookups.items() if m.sparse and m.weight.requires_grad}


def may_take_sparse(name: str) -> bool:
    """Whether an optimizer of this name, ours or torch's with its module, takes sparse gradients."""
    kind = _CLASSES.get(name)
    return (name.removeprefix("torch.optim.") if kind is None else kind.__name__) in _TAKING_SPARSE


def why_not_dense(optimizer: torch.optim.Optimizer) -> str | None:
    """What keeps an optimizer from taking a dense gradient; None if nothing does."""
    return "SparseAdam does not support dense gradients" if type(optimizer) is torch.optim.SparseAdam else None


def why_not_sparse(optimizer: torch.optim.Optimizer, group: dict) -> str | None:
    """What keeps an optimizer from taking a sparse gradient in a group; None if nothing is known to do so."""
    name = type(optimizer).__name__
    if type(optimizer).__module__.partition(".")[0] not in ("torch", "bitsandbytes"):
        return None  # somebody's own, who knows
    if not any(type(optimizer) is getattr(torch.optim, kind) for kind in _TAKING_SPARSE):
        return f"{name} does not support sparse gradients"
    decays = group.get("weight_decay", 0) != 0
    return f"{name} does not support sparse gradients together with weight_decay" if decays else None


def moves_all_its_state(kind: type[torch.optim.Optimizer] | None) -> bool:
    """Whether each update is known to read and write all state; ASGD leaves its average alone until it is wanted."""
    return kind is not None and kernel_beside_foreach(kind) is not None and kind is not torch.optim.ASGD


def keeps_alike(kind: type[torch.optim.Optimizer] | None) -> bool:
    """Whether it is known to keep as many bytes for each element; Adafactor keeps those of rows and columns."""
    elementwise = (name for name in _BY_PARAMETER if name not in ("Adafactor", "SparseAdam"))
    return any(kind is getattr(torch.optim, name, None) for name in elementwise)


_TAKING_SPARSE = ("Adagrad", "SGD", "SparseAdam")
"""Those of `torch.optim` that take sparse gradients, the last one no others."""

_LOOKUPS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
