"""Step in backward: gradients are used one by one and never exist all together.

Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources (LOMO), 2023; the hook is
`torch.Tensor.register_post_accumulate_grad_hook`. The optimizer stays one object: its schedulers and its state_dict
are what they were.
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
    """Let the step's backward update the parameters.

    Raises:
        DecisionError: for an optimizer whose step looks at all gradients together, or may do so, or that cannot take
            a sparse gradient which the model makes.
    """
    optimizer = rewriting.optimizer
    eight_bit = type(optimizer).__module__.partition(".")[0] == "bitsandbytes"
    if not eight_bit and not by_parameter(optimizer):
        raise DecisionError(
            f"step-in-backward needs an optimizer that treats each parameter by itself, and of this "
            f"{type(optimizer).__name__} that is not known: use one of torch.optim, but for LBFGS and Muon, without "
            "step hooks, or forbid step-in-backward"
        )
    for name, weight in sparse_lookups(rewriting.model).items():  # in the middle of a backward it would be too late
        groups = (group for group in optimizer.param_groups if any(each is weight for each in group["params"]))
        if (why := next((why_not_sparse(optimizer, group) for group in groups), None)) is not None:
            raise DecisionError(
                f"{why}, which '{name}' makes: use SGD or Adagrad without weight_decay, or sparse=False"
            )
    rewriting.backward = functools.partial(stepping_in_backward, optimizer, by_position=eight_bit)


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


@contextlib.contextmanager
def stepping_in_backward(optimizer, *, by_position=False):
    """Inside, a backward updates each parameter as soon as its gradient is whole, and drops the gradient.

    One parameter at a time is all that the optimizer is shown, so that a step does not look through all of them; one
    that knows its parameters by their position is shown them all, and finds a gradient at one.
    """
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    group_of = {parameter: group for group, parameters in groups for parameter in parameters}
    updated = set()
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if together and torch.distributed.get_world_size() > 1:
        raise RuntimeError("a step in backward uses gradients before those of other processes are added to them")
    if any(parameter.grad is not None for parameter in group_of):
        raise RuntimeError("a gradient is left from before the step, which would be lost: optimizer.zero_grad() first")

    def update(parameter):
        if parameter in updated:
            raise RuntimeError(
                "a parameter got a second gradient after its update: something in the model runs a backward of its "
                "own (reentrant checkpointing?), and no step can be taken inside of such a backward"
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
    by_position = ", by_position=True" if any(other.eight_bit_state for other in plan.decisions) else ""
    return EmittedCode(
        imports=("import contextlib",),
        functions=(inspect.getsource(stepping_in_backward),),
        backward=f"stepping_in_backward(optimizer{by_position})",
    )
