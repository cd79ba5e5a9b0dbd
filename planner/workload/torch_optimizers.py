"""Facts about the optimizers of `torch.optim`: their implementations on CUDA, their state, and sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from planner.workload.optimizer_choice import OPTIMIZERS

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
"""Optimizers of `torch.optim` that update each parameter from its own gradient and state.

LBFGS is missing, since it uses all gradients together; Muon is missing, since it accepts only matrices.
"""


def by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer is in `_BY_PARAMETER` and has no step hooks: it can update parameters one by one."""
    known = any(type(optimizer) is getattr(torch.optim, name, None) for name in _BY_PARAMETER)
    return known and not has_step_hooks(optimizer)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if the user registered a hook that runs before or after each step. Such a hook can read all gradients."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """True if a learning-rate scheduler was created for the optimizer, which then has a `step` of its own."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


_LATER_STEP = 100_000
"""Number of the step whose state RAdam and ASGD get in a rehearsal. All later updates of RAdam run the same ops, and so
do those of ASGD if `t0` is smaller by at least two."""


def skip_first_steps(optimizers: Iterable[object], learn: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """Sets the state of optimizers whose first updates run fewer ops and need less memory to that of a later step.

    The for-loop of RAdam adapts its step only from the sixth update on (with the default betas). The for-loop of ASGD
    averages the parameters only after step `t0`. If `t0` is 99,999 or more (the default is 1,000,000), a rehearsal does
    not reach the averaging.

    Args:
        learn: sets the known value of a fake tensor.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, (torch.optim.ASGD, torch.optim.RAdam)):
            for group in optimizer.param_groups:
                for state in (optimizer.state.get(parameter, {}) for parameter in group["params"]):
                    count, weight = state.get("step"), state.get("mu")
                    if isinstance(weight, FakeTensor):
                        learn(weight, torch.tensor(1 / max(1, _LATER_STEP - group["t0"]), dtype=weight.dtype))
                    elif weight is None and isinstance(count, torch.Tensor) and count.device.type == "cpu":
                        state["step"] = torch.tensor(float(_LATER_STEP), dtype=count.dtype)


_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Optimizers of `torch.optim` that have a fused CUDA kernel: their classes take the argument `fused`."""

_FOREACH = tuple(name for name in _BY_PARAMETER if name != "SparseAdam")
"""Optimizers of `torch.optim` that use the foreach implementation on CUDA by default."""


def kernel_instead_of_foreach(optimizer: object) -> str | None:
    """Returns the implementation that can replace foreach to save its temporaries.

    It is 'fused' if the optimizer's class has a fused kernel that trains the same, else 'for-loop', or None if the
    implementations of the class are not known. A for-loop is never better than a fused kernel: it moves more bytes and
    has temporaries of its own.

    The fused kernel of SGD with momentum raises a TypeError in the step in which a parameter has its first gradient
    after others had theirs (a branch that the first steps skip), so it is not used.

    Args:
        optimizer: an optimizer object, a name such as 'adamw', or a function that returns an optimizer.
    """
    kind = kind_of(optimizer)
    if any(kind is getattr(torch.optim, name, None) for name in _FUSED):
        return "for-loop" if kind is torch.optim.SGD and _keeps_momentum(optimizer) else "fused"
    return "for-loop" if any(kind is getattr(torch.optim, name, None) for name in _FOREACH) else None


def _keeps_momentum(optimizer: object) -> bool:
    if isinstance(optimizer, torch.optim.Optimizer):
        return any(group["momentum"] != 0 for group in optimizer.param_groups)
    return optimizer == "sgd-momentum"


def kind_of(optimizer: object) -> type[torch.optim.Optimizer] | None:
    """Returns the class of an optimizer that is given as an object or by name.

    Returns None for an unknown name, and for a function, which may return any optimizer.
    """
    if isinstance(optimizer, str):
        return OPTIMIZERS[optimizer].kind if optimizer in OPTIMIZERS else None
    return type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None


def why_no_kernel(kernel: str, optimizer: object, model: torch.nn.Module) -> str | None:
    """Returns the reason why the optimizer cannot update `model` with another implementation; None if it can.

    Args:
        kernel: the implementation, 'fused' or 'for-loop'.
        optimizer: an optimizer object, a name such as 'adamw', or a function that returns an optimizer.
    """
    kind = kind_of(optimizer)
    if kind is None:
        return "the class of an optimizer that a function returns is not known in advance: give the optimizer itself"
    best = kernel_instead_of_foreach(optimizer)
    if best is None:
        return f"{kind.__name__} is not known to have another implementation than its default"
    if kernel == "fused" and best != "fused":
        if kind is torch.optim.SGD:
            return "the fused kernel of SGD with momentum fails if a parameter has its first gradient after others"
        return f"{kind.__name__} has no fused kernel"
    if sparse_lookups(model):
        return "an embedding produces sparse gradients"
    # If the user chose an implementation for a parameter group, it is not changed.
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            for option in ("fused", "foreach"):
                if group.get(option) is not None:
                    return f"{kind.__name__} was created with {option}={group[option]}, which is kept"
            if group.get("differentiable"):
                return f"{kind.__name__} was created with differentiable=True"
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if kernel == "fused" and not issubclass(kind, torch.optim.Adam) and any(map(_is_sharded, parameters)):
        return f"the fused kernel of {kind.__name__} does not take sharded parameters (DTensor)"
    unsupported = sorted({str(p.dtype).removeprefix("torch.") for p in parameters if not p.is_floating_point()})
    return f"a parameter is {unsupported[0]}, not floating point" if unsupported else None


def _is_sharded(parameter: torch.Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def sparse_lookups(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the weights of the embeddings that are trained and produce sparse gradients, by module name."""
    lookups = {name: module for name, module in model.named_modules() if isinstance(module, _LOOKUPS)}
    return {name: m.weight for name, m in lookups.items() if m.sparse and m.weight.requires_grad}


def may_take_sparse(name: str) -> bool:
    """True if the optimizer of this name ('sgd' or 'torch.optim.SGD') accepts sparse gradients."""
    path = OPTIMIZERS[name].path if name in OPTIMIZERS else name
    return path.removeprefix("torch.optim.") in _TAKING_SPARSE


def why_not_dense(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the reason why the optimizer refuses dense gradients; None if it accepts them."""
    return "SparseAdam does not support dense gradients" if type(optimizer) is torch.optim.SparseAdam else None


def why_not_sparse(optimizer: torch.optim.Optimizer, group: dict) -> str | None:
    """Returns the reason why the optimizer refuses sparse gradients in this group; None if no reason is known."""
    name = type(optimizer).__name__
    if type(optimizer).__module__.partition(".")[0] not in ("torch", "bitsandbytes"):
        return None  # The user's own optimizer may accept them.
    if not any(type(optimizer) is getattr(torch.optim, kind) for kind in _TAKING_SPARSE):
        return f"{name} does not support sparse gradients"
    decays = group.get("weight_decay", 0) != 0
    return f"{name} does not support sparse gradients together with weight_decay" if decays else None


def moves_all_its_state(optimizer: object) -> bool:
    """True if each update of this optimizer is known to read and write all of its state.

    This is not so for ASGD, which does not update its average until a given step.
    """
    return kernel_instead_of_foreach(optimizer) is not None and kind_of(optimizer) is not torch.optim.ASGD


def keeps_alike(kind: type[torch.optim.Optimizer] | None) -> bool:
    """True if the optimizer's state is known to take the same number of bytes for every element of a parameter.

    This is not so for Adafactor, which keeps one value for each row and each column of a parameter.
    """
    elementwise = (name for name in _BY_PARAMETER if name not in ("Adafactor", "SparseAdam"))
    return any(kind is getattr(torch.optim, name, None) for name in elementwise)


_TAKING_SPARSE = ("Adagrad", "SGD", "SparseAdam")
"""Optimizers of `torch.optim` that accept sparse gradients. SparseAdam accepts only sparse gradients."""

_LOOKUPS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
"""Modules that can produce sparse gradients (`sparse=True`)."""


def several_processes() -> bool:
    """True if this process is in a `torch.distributed` process group with at least one other process."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def half_precision_notes(model: torch.nn.Module) -> tuple[str, ...]:
    """Returns a note on trained float16 weights; empty if there are none."""
    if not any(parameter.requires_grad and parameter.dtype == torch.float16 for parameter in model.parameters()):
        return ()
    return (
        "trained weights are float16: small gradients become zero, and a gradient scaler refuses float16 gradients; "
        "bfloat16 or float32 weights (--dtype) train more safely",
    )
