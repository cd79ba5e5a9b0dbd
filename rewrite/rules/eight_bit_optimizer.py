"""8-bit optimizer: AdamW with its state in 8 bits (bitsandbytes).

Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021. As in transformers' Trainer, embeddings keep 32-bit
state; bitsandbytes itself keeps 32-bit state for tensors of fewer than 4096 elements.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from planner.errors import DecisionError
from planner.plan_types.decisions import Optimizer
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode
from planner.rewrite.optimizers import OPTIMIZERS
from planner.rewrite.rewriting import Rewriting
from planner.workload.torch_optimizers import has_step_hooks, sparse_lookups

_TAKEN_OVER = ("lr", "betas", "eps", "weight_decay")
"""Hyperparameters that are copied from the replaced optimizer, group by group."""


def eight_bit_optimizer(rewriting: Rewriting, decision: Optimizer) -> None:
    """Replace AdamW or Adam by `bitsandbytes.optim.AdamW8bit` with the same groups and hyperparameters.

    Raises:
        DecisionError: if bitsandbytes is not installed, the optimizer is not AdamW or Adam, uses options that 8-bit
            AdamW does not have, has already stepped (its state would be lost), or if gradients are sparse.
    """
    replaced = rewriting.optimizer
    for lookup in sparse_lookups(rewriting.model):
        raise DecisionError(
            f"optimizer adamw8bit does not support sparse gradients, which '{lookup}' produces: use sparse=False, or "
            "forbid 8bit-optimizer"
        )
    _refuse_what_cannot_be_taken_over(replaced)
    bitsandbytes = _bitsandbytes()
    groups = [_group(group, replaced.defaults) for group in replaced.param_groups]
    replacement = bitsandbytes.optim.AdamW8bit(groups, lr=float(replaced.defaults["lr"]))
    keep_embeddings_in_32_bits(replacement, rewriting.model)
    rewriting.optimizer = replacement


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise DecisionError(
            f"optimizer adamw8bit needs bitsandbytes ({error}): pip install bitsandbytes, or forbid 8bit-optimizer"
        ) from error
    return bitsandbytes


def _refuse_what_cannot_be_taken_over(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise DecisionError(
            f"optimizer adamw8bit replaces AdamW or Adam, not {kind}: use one of them, or forbid 8bit-optimizer"
        )
    if optimizer.state:
        raise DecisionError(
            f"optimizer adamw8bit cannot take over the state of a {kind} that has stepped: apply the plan before "
            "training starts, and resume from a state that the 8-bit optimizer saved"
        )
    if has_step_hooks(optimizer):
        raise DecisionError(
            f"optimizer adamw8bit would lose the step hooks of {kind}: remove them or forbid 8bit-optimizer"
        )
    for index, group in enumerate(optimizer.param_groups):
        for option in ("amsgrad", "maximize"):
            if group[option]:
                raise DecisionError(f"optimizer adamw8bit has no {option}, which group {index} of {kind} uses")
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        if group["weight_decay"] and not decoupled:
            raise DecisionError(
                f"group {index} of Adam adds weight_decay {group['weight_decay']} to the gradient, but 8-bit AdamW "
                "decays the weights directly: use AdamW, set weight_decay to 0, or forbid 8bit-optimizer"
            )


def _group(group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group with the hyperparameters, and with the keys that users or schedulers added."""
    added = {name: value for name, value in group.items() if name not in defaults}
    return {**added, **{name: group[name] for name in _TAKEN_OVER}, "lr": float(group["lr"])}


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def keep_embeddings_in_32_bits(optimizer, model):
    """Keep 32-bit state for embeddings, as transformers' Trainer does.

    bitsandbytes' manager of such overrides is shared by the whole process; this optimizer gets its own.
    """
    manager = object.__new__(type(optimizer.mng))
    manager.initialize()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    optimizer.mng = manager


def eight_bit_optimizer_source(plan: Plan, decision: Optimizer) -> EmittedCode:
    """Return the emitted counterpart of `eight_bit_optimizer`."""
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
