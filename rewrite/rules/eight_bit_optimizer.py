"""8-bit optimizer: replace AdamW or Adam by bitsandbytes' AdamW, which stores its state in 8 bits per element.

The method is from Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021. The state of embeddings stays in
32 bits, as in transformers' Trainer. bitsandbytes also keeps 32-bit state for tensors of fewer than 4096 elements.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decisions import Optimizer
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode
from planner.rewrite.rewriting import Rewriting
from planner.workload.call_convention import Calling
from planner.workload.optimizer_choice import OPTIMIZERS
from planner.workload.torch_optimizers import has_scheduler, has_step_hooks, sparse_lookups
from planner.workload.unsupported import library

_TAKEN_OVER = ("lr", "betas", "eps", "weight_decay")
"""Hyperparameters that are copied from each parameter group of the replaced optimizer."""


def eight_bit_optimizer(rewriting: Rewriting, decision: Optimizer) -> None:
    """Replace AdamW or Adam by `bitsandbytes.optim.AdamW8bit` with the same groups and hyperparameters.

    Raises:
        DecisionError: if bitsandbytes is not installed, if gradients are sparse, or if the optimizer is not AdamW or
            Adam, has step hooks or (for a step of the user's own) a scheduler, uses options that 8-bit AdamW does not
            have, or has taken a step already, so that its state would be lost.
    """
    for lookup in sparse_lookups(rewriting.model):
        raise DecisionError(
            f"optimizer adamw8bit does not support sparse gradients, which '{lookup}' produces: create that layer with "
            "sparse=False, or forbid 8bit-optimizer"
        )
    chosen = rewriting.chosen_optimizers(decision.optimizers, decision.kind)
    for replaced in chosen.values():
        _refuse_what_cannot_be_taken_over(replaced)
        if rewriting.calling is Calling.STEP and has_scheduler(replaced):
            raise DecisionError(
                f"optimizer adamw8bit would replace {type(replaced).__name__}, and the learning-rate scheduler that "
                "was created for it would have no effect: create it in the step function, or forbid 8bit-optimizer"
            )
    bitsandbytes = _bitsandbytes()
    for name, replaced in chosen.items():
        groups = [_group(group, replaced.defaults) for group in replaced.param_groups]
        replacement = bitsandbytes.optim.AdamW8bit(groups, lr=float(replaced.defaults["lr"]))
        keep_embeddings_in_32_bits(replacement, rewriting.model)
        rewriting.optimizers[name] = replacement


def _bitsandbytes() -> Any:
    try:
        return library("bitsandbytes", "optimizer adamw8bit")
    except WorkloadError as error:
        raise DecisionError(f"{error}, or forbid 8bit-optimizer") from error


def _refuse_what_cannot_be_taken_over(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise DecisionError(
            f"optimizer adamw8bit replaces AdamW or Adam, not {kind}: use AdamW or Adam, or forbid 8bit-optimizer"
        )
    if optimizer.state:
        raise DecisionError(
            f"optimizer adamw8bit cannot take over the state of {kind}, which has already taken a step: apply the plan "
            "before the first step, and resume only from a state that the 8-bit optimizer saved; or forbid "
            "8bit-optimizer"
        )
    if has_step_hooks(optimizer):
        raise DecisionError(
            f"optimizer adamw8bit would not call the step hooks that are registered on {kind}: remove the hooks, or "
            "forbid 8bit-optimizer"
        )
    for index, group in enumerate(optimizer.param_groups):
        for option in ("amsgrad", "maximize"):
            if group[option]:
                raise DecisionError(
                    f"optimizer adamw8bit has no {option}, which parameter group {index} of {kind} uses: turn it off, "
                    "or forbid 8bit-optimizer"
                )
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        if group["weight_decay"] and not decoupled:
            raise DecisionError(
                f"parameter group {index} of Adam has weight_decay {group['weight_decay']}, and Adam adds weight decay "
                "to the gradient, which 8-bit AdamW cannot do: use AdamW, set weight_decay to 0, or forbid "
                "8bit-optimizer"
            )


def _group(group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group for the 8-bit optimizer, made from a group of the replaced optimizer.

    It has the parameters, the hyperparameters `_TAKEN_OVER`, and the keys that users or schedulers added to the group.
    """
    added = {name: value for name, value in group.items() if name not in defaults}
    return {**added, **{name: group[name] for name in _TAKEN_OVER}, "lr": float(group["lr"])}


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def keep_embeddings_in_32_bits(optimizer, model):
    """Make an 8-bit optimizer keep 32-bit state for embeddings, as transformers' Trainer does.

    bitsandbytes stores such exceptions in one manager for the whole process. The optimizer gets its own manager, so
    that other optimizers are not affected.
    """
    manager = object.__new__(type(optimizer.mng))
    manager.initialize()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    optimizer.mng = manager


def eight_bit_optimizer_source(plan: Plan, decision: Optimizer) -> EmittedCode:
    """Return the code that does the same as `eight_bit_optimizer` in an emitted file."""
    choice = OPTIMIZERS["adam" if plan.workload.optimizer == "adam" else "adamw"]
    arguments = "".join(f"        {name}={choice.hyperparameters[name]!r},\n" for name in _TAKEN_OVER)
    return EmittedCode(
        imports=("import bitsandbytes",),
        functions=(inspect.getsource(keep_embeddings_in_32_bits),),
        optimizer=f'''\
def make_optimizer(model):
    """AdamW with 8-bit state. Embeddings and tensors of fewer than 4096 elements keep 32-bit state."""
    optimizer = bitsandbytes.optim.AdamW8bit(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
{arguments}    )
    keep_embeddings_in_32_bits(optimizer, model)
    return optimizer
''',
    )
