"""Divide a model among cards by a function of the user's own, and refuse what its optimizer could not train.

The function gets the model and a `DeviceMesh` with named dimensions. The gradients of cards with different samples must
be averaged by what it sets up: `fully_shard` or DistributedDataParallel over the dimensions that divide the batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed.device_mesh

from planner.errors import DecisionError
from planner.plan_types.decisions import Shard, divides_batch
from planner.rewrite.rewriting import Rewriting


def parallelize_by_own_function(rewriting: Rewriting, decision: Shard) -> None:
    """Call the user's function with the model and a mesh of the planned cards.

    Raises:
        DecisionError: if there is no function, it raises an error, returns another model, renames parameters, or does
            not average the gradients of cards with different samples.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if rewriting.parallelize is None:
        where = f" ({decision.function})" if decision.function else ""
        raise DecisionError(
            f"the plan was made with a function that divides the model among cards{where}: pass it as parallelize=..."
        )
    model = rewriting.model
    before = dict(model.named_parameters())
    mesh = init_device_mesh(rewriting.device_type, decision.mesh, mesh_dim_names=decision.dimensions)
    try:
        returned = rewriting.parallelize(model, mesh)
    except Exception as error:  # the user's code
        lines = str(error).strip().splitlines()
        raise DecisionError(
            f"your function raised {type(error).__name__} when it divided the model among cards: "
            f"{lines[0] if lines else 'no message'}"
        ) from error
    if returned is not None and returned is not model:
        if getattr(returned, "module", None) is not model:
            raise DecisionError(
                f"your function returned another {type(returned).__name__}: change the model in place, and return it, "
                "nothing, or DistributedDataParallel(model)"
            )
        rewriting.wrapper = returned
    after = dict(model.named_parameters())
    if renamed := sorted(set(before) ^ set(after)):
        raise DecisionError(
            f"your function renames or replaces parameters, such as '{renamed[0]}', so that a plan cannot name the "
            "modules: leave wrappers out, as for activation checkpointing, which the plan adds itself"
        )
    if any(parameter.device.type != rewriting.device_type for parameter in after.values()):
        model.to(rewriting.device_type)  # what the function has left on the host
    if rewriting.wrapper is None:
        _refuse_unaveraged(after, decision, mesh)
    rewriting.replace_in_optimizers({id(before[name]): after[name] for name in before})


def _refuse_unaveraged(
    parameters: dict[str, torch.nn.Parameter], decision: Shard, mesh: torch.distributed.device_mesh.DeviceMesh
) -> None:
    """Refuse parameters that cards with different samples would train differently."""
    names = [name for name in decision.dimensions if divides_batch(name) and mesh[name].size() > 1]
    for path, parameter in parameters.items():
        own = getattr(parameter, "device_mesh", None)
        groups = [] if own is None else [_ranks(own, dimension) for dimension in range(own.ndim)]
        for name in names:
            different = _ranks(mesh, name)
            if parameter.requires_grad and not any(different <= group for group in groups):
                raise DecisionError(
                    f"your function leaves '{path}' without an average of its gradients over '{name}', where cards "
                    "have different samples: use fully_shard or DistributedDataParallel there, or a mesh without this "
                    "dimension"
                )


def _ranks(mesh: torch.distributed.device_mesh.DeviceMesh, dimension: int | str) -> set[int]:
    """Returns the ranks with which this one communicates along a dimension of a mesh."""
    return set(torch.distributed.get_process_group_ranks(mesh.get_group(dimension)))


def refuse_mixed_lists(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that updates lists of parameters in which some are DTensors and some are not.

    PyTorch's foreach and fused implementations raise an error for such lists (torch 2.11 to 2.13).

    Raises:
        DecisionError: the message names a parameter of each kind.
    """
    from torch.distributed.tensor import DTensor

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            divided = next((p for p in trained if isinstance(p, DTensor)), None)
            plain = next((p for p in trained if not isinstance(p, DTensor)), None)
            if divided is None or plain is None or not _uses_lists(group, plain.device.type):
                continue
            kind = type(optimizer).__name__
            raise DecisionError(
                f"PyTorch's {kind} cannot update plain tensors and DTensors together, and '{names.get(id(plain))}' is "
                f"a plain tensor, '{names.get(id(divided))}' a DTensor: give an optimizer that loops over parameters "
                f"(optimizer=lambda parameters: {kind}(parameters, foreach=False)), or let your function turn all "
                "parameters into DTensors, as fully_shard and SequenceParallel do"
            )


def _uses_lists(group: dict, device_type: str) -> bool:
    """True if the optimizer updates the parameters of a group by foreach or fused kernels, as it does on a card."""
    if group.get("fused") or group.get("foreach"):
        return True
    return group.get("foreach", False) is None and device_type != "cpu"
