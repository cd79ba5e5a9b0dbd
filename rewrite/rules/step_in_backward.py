"""Step in backward: update each parameter as soon as its gradient is complete, and free the gradient at once.

The gradients then never exist all together (Lv et al., Full Parameter Fine-tuning for Large Language Models with
Limited Resources, 2023; LOMO, or optimizer-in-backward in torchtune). The hook is
`torch.Tensor.register_post_accumulate_grad_hook`. Unlike a setup with one optimizer per parameter, the optimizer stays
one object, so schedulers and its `state_dict` work as before.

It cannot be combined with whatever needs all gradients first: clipping by global norm, micro-batches, data-parallel
training, and optimizers that look across parameters.
"""

from __future__ import annotations

import contextlib
import functools
import inspect

import torch

from planner.errors import DecisionError
from planner.plan_types.decisions import StepInBackward
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode
from planner.rewrite.rewriting import Rewriting
from planner.workload.torch_optimizers import by_parameter, sparse_lookups, why_not_sparse


def step_in_backward(rewriting: Rewriting, decision: StepInBackward) -> None:
    """Make the step's backward update the parameters.

    Raises:
        DecisionError: if the optimizer is not known to treat each parameter separately, or does not support a sparse
            gradient that the model produces.
    """
    optimizer = rewriting.optimizer
    eight_bit = type(optimizer).__module__.partition(".")[0] == "bitsandbytes"
    if not eight_bit and not by_parameter(optimizer):
        raise DecisionError(
            f"step-in-backward needs an optimizer that treats each parameter separately, which is not known of this "
            f"{type(optimizer).__name__}: use an optimizer of torch.optim other than LBFGS and Muon, without step "
            "hooks, or forbid step-in-backward"
        )
    # An optimizer that does not support sparse gradients would otherwise raise in the middle of a backward.
    for name, weight in sparse_lookups(rewriting.model).items():
        groups = (group for group in optimizer.param_groups if any(p is weight for p in group["params"]))
        if (why := next((why_not_sparse(optimizer, group) for group in groups), None)) is not None:
            raise DecisionError(
                f"{why}, which '{name}' produces: use SGD or Adagrad without weight_decay, or sparse=False"
            )
    rewriting.backward = functools.partial(stepping_in_backward, optimizer, by_position=eight_bit)


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


@contextlib.contextmanager
def stepping_in_backward(optimizer, *, by_position=False):
    """Inside this context, backward updates each parameter as soon as its gradient is complete, and frees the gradient.

    For each update, `optimizer.param_groups` holds that parameter only, so that a step does not loop over all of them.
    An optimizer that identifies parameters by position (`by_position=True`, bitsandbytes) sees all of them instead, of
    which one has a gradient.
    """
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    group_of = {parameter: group for group, parameters in groups for parameter in parameters}
    updated = set()
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_distributed and torch.distributed.get_world_size() > 1:
        raise RuntimeError(
            "a step in backward would use gradients before they are reduced over the processes: train in one process"
        )
    if any(parameter.grad is not None for parameter in group_of):
        raise RuntimeError("a parameter has a gradient from before the step: call optimizer.zero_grad() first")

    def update(parameter):
        if parameter in updated:
            raise RuntimeError(
                "a parameter got a second gradient after its update: something in the model runs its own backward "
                "(reentrant checkpointing?), which a step in backward does not support"
            )
        updated.add(parameter)
        if not by_position:
            for group, _ in groups:
                group["params"] = [parameter] if group is group_of[parameter] else []
        optimizer.step()
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(update) for p in group_of if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for group, parameters in groups:
            group["params"] = parameters


def step_in_backward_source(plan: Plan, decision: StepInBackward) -> EmittedCode:
    """Return the emitted counterpart of `step_in_backward`."""
    by_position = ", by_position=True" if any(other.eight_bit_state for other in plan.decisions) else ""
    return EmittedCode(
        imports=("import contextlib",),
        functions=(inspect.getsource(stepping_in_backward),),
        backward=f"stepping_in_backward(optimizer{by_position})",
    )
