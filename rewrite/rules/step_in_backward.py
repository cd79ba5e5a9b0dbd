"""Step in backward: update each parameter as soon as its gradient is complete, and free the gradient at once.

So the gradients of all parameters never exist at the same time (Lv et al., Full Parameter Fine-tuning for Large
Language Models with Limited Resources, 2023; called LOMO there, and optimizer-in-backward in torchtune). The update
runs in a hook, `torch.Tensor.register_post_accumulate_grad_hook`. Some implementations create one optimizer per
parameter. Here the optimizer stays one object, so schedulers and its `state_dict` work as before.

It cannot be combined with methods that need all gradients before the first update: clipping by the global norm,
micro-batches, data-parallel training, and optimizers that combine values of several parameters.
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
    """Make the backward of the training step update the parameters.

    Raises:
        DecisionError: if the optimizer is not known to update each parameter separately, or does not support the sparse
            gradients that the model produces.
    """
    optimizer = rewriting.optimizer
    eight_bit = type(optimizer).__module__.partition(".")[0] == "bitsandbytes"
    if not eight_bit and not by_parameter(optimizer):
        raise DecisionError(
            "step-in-backward needs an optimizer that updates each parameter separately, and this "
            f"{type(optimizer).__name__} is not known to do so: use an optimizer of torch.optim other than LBFGS and "
            "Muon, without step hooks, or forbid step-in-backward"
        )
    # An optimizer that does not support sparse gradients would otherwise raise in the middle of a backward.
    for name, weight in sparse_lookups(rewriting.model).items():
        groups = (group for group in optimizer.param_groups if any(p is weight for p in group["params"]))
        if (why := next((why_not_sparse(optimizer, group) for group in groups), None)) is not None:
            raise DecisionError(
                f"{why}, which '{name}' produces: use SGD or Adagrad without weight_decay, or create that layer with "
                "sparse=False"
            )
    rewriting.backward = functools.partial(stepping_in_backward, optimizer, by_position=eight_bit)


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


@contextlib.contextmanager
def stepping_in_backward(optimizer, *, by_position=False):
    """Inside this context, backward updates each parameter as soon as its gradient is complete, and frees the gradient.

    During an update, `optimizer.param_groups` holds only that parameter, so that `optimizer.step()` does not loop over
    all parameters. With `by_position=True`, for bitsandbytes, the groups keep all parameters, because the optimizer
    identifies each one by its position. Only one parameter has a gradient then, so the others are not updated.
    """
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    group_of = {parameter: group for group, parameters in groups for parameter in parameters}
    updated = set()
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_distributed and torch.distributed.get_world_size() > 1:
        raise RuntimeError(
            "step-in-backward would update parameters before their gradients are summed over the processes: train in "
            "one process, or plan again with step-in-backward forbidden"
        )
    if any(parameter.grad is not None for parameter in group_of):
        raise RuntimeError("a parameter already has a gradient before the step: call optimizer.zero_grad() first")

    def update(parameter):
        if parameter in updated:
            raise RuntimeError(
                "a parameter got a second gradient after its update: the model seems to call backward inside the step, "
                "for example by reentrant checkpointing, so plan again with step-in-backward forbidden"
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
    """Return the code that does the same as `step_in_backward` in an emitted file."""
    by_position = ", by_position=True" if any(other.eight_bit_state for other in plan.decisions) else ""
    return EmittedCode(
        imports=("import contextlib",),
        functions=(inspect.getsource(stepping_in_backward),),
        backward=f"stepping_in_backward(optimizer{by_position})",
    )
