"""Shard: several cards train one model, each with its part of the batch, by PyTorch's own engines.

- FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao et al., PyTorch FSDP, 2023; Rajbhandari et al., ZeRO, 2020): each
  card has a part of every parameter, of its gradient and of its optimizer state. The parameters of a unit are gathered
  before its forward and its backward. They stay gathered in between if the unit is in `kept`, or is the `tail`.
- `DistributedDataParallel`: each card has the whole model, and gradients are averaged in backward. They are views of
  its buckets; if accelerate prepares the model, they are separate tensors.
- `ZeroRedundancyOptimizer`: as with DistributedDataParallel, but each card has the optimizer state of only a part of
  the parameters.
- A function of the user's own, `parallelize(model, mesh)` (`_divide_by_own_function`).

If the batch is split, gradients are reduced over the cards in each micro-batch, or once in a step: then each card adds
up whole gradients until the last micro-batch (`no_sync`, and `set_requires_gradient_sync` of FSDP2).

`fully_shard` replaces the parameters of the model by shards (DTensors). An optimizer that was made before still has the
old parameters in its groups, and gets the new ones here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.device_mesh

from planner.errors import DecisionError
from planner.plan_types.decision_base import divides_batch, micro_batches_of
from planner.plan_types.decisions import Shard, ShardedPrecision
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode, assignment, call, literal
from planner.rewrite.loss_terms import loss_terms_of, terms_source
from planner.rewrite.portable.batch_slicing import count_samples, map_tensors, marking_last
from planner.rewrite.portable.loss_and_clipping import clip_divided_gradients, weighted
from planner.rewrite.portable.loss_terms import as_tensor, share_of_part, share_of_rank
from planner.rewrite.portable.placement import placement_on
from planner.rewrite.portable.rank_states import CHECKPOINT_FUNCTIONS, receive_from_rank_0, refuse_other_model
from planner.rewrite.portable.recompute_check import attributes_of
from planner.rewrite.rewriting import Change, Rewriting


def shard(rewriting: Rewriting, decision: Shard) -> None:
    """Shard the model over the cards of the process group, or wrap it for data-parallel training.

    Raises:
        DecisionError: if the number of processes is not that of the plan, a unit cannot be sharded, or an optimizer has
            taken a step already.
    """
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if processes != decision.cards:
        raise DecisionError(
            f"the plan is for {decision.cards} cards, but the number of processes is {processes}: start them with "
            f"torchrun --nproc-per-node {decision.cards}, and call torch.distributed.init_process_group() before the "
            "plan is applied"
        )
    if any(hasattr(module, "_get_fsdp_state") for module in rewriting.model.modules()):
        raise DecisionError("the model is sharded already: apply a plan for several cards once, to a new model")
    rewriting.changes.append(Change(place="the model", intact=_refuse_to_undo, restore=lambda: None))
    if "nccl" in torch.distributed.get_backend_config():
        rewriting.device_type = "cuda"  # the model may be on the host: FSDP2 moves one unit after the other
    if decision.divides_batch_by > 1:
        rewriting.rank_share = functools.partial(
            share_of_rank,
            batch_size=rewriting.batch_size,
            loss_terms=loss_terms_of(rewriting),
            not_by_sample=rewriting.not_by_sample,
            alike=decision.cards // decision.divides_batch_by,
        )
    if decision.way == "own":
        _divide_by_own_function(rewriting, decision)
    elif decision.way == "fsdp":
        _fully_shard(rewriting, decision)
    else:
        _replicate(rewriting, decision)


def _refuse_to_undo() -> bool:
    raise DecisionError(
        "a model on several cards cannot be put together again: save it with torch.distributed.checkpoint, and load it "
        "into a new model"
    )


def _fully_shard(rewriting: Rewriting, decision: Shard) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dimensions = ("replicate", "shard")[-len(decision.mesh) :]
    mesh = init_device_mesh(rewriting.device_type, decision.mesh, mesh_dim_names=dimensions)
    options: dict[str, Any] = {"mesh": mesh}
    if rewriting.sharded_precision is not None:
        options["mp_policy"] = rewriting.sharded_precision
    if not decision.prepared_by:
        options["shard_placement_fn"] = placement_on(decision.mesh[-1])
    if decision.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=rewriting.device_type == "cuda")
    model = rewriting.model
    before = {name: id(parameter) for name, parameter in model.named_parameters()}  # the parameters would stay alive
    units: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        ((name,), {"reshard_after_forward": name not in decision.kept}) for name in decision.units
    ]
    if decision.tail:
        units.append((decision.tail, {"reshard_after_forward": False}))
    for names, reshard in (*units, (("",), {})):
        modules = [rewriting.module(name, decision.kind) for name in names]
        try:
            fully_shard(modules if len(modules) > 1 else modules[0], **reshard, **options)
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise DecisionError(
                f"FSDP2 cannot shard '{names[0] or type(model).__name__}' ({error}): plan with sharding ddp"
                f"{'' if decision.prepared_by else ' or zero1'}"
            ) from error
    after = dict(model.named_parameters())
    rewriting.replace_in_optimizers({number: after[name] for name, number in before.items()})
    if decision.reduces_once:
        rewriting.no_sync = functools.partial(_without_reduction, model)


@contextlib.contextmanager
def _without_reduction(model: Any) -> Iterator[None]:
    """Context of a micro-batch whose gradients FSDP2 adds up whole on this card."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _divide_by_own_function(rewriting: Rewriting, decision: Shard) -> None:
    """Call the user's function with the model and a `DeviceMesh` of the planned cards, whose dimensions have names.

    What it sets up has to average the gradients of cards with different samples, as `fully_shard` and
    DistributedDataParallel do.

    Raises:
        DecisionError: if there is no function, it raises an error, returns another model, renames parameters, or does
            not average the gradients of cards with different samples; if it divides nothing, or ends the process.
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
    except (Exception, SystemExit) as error:  # the user's code
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
    if rewriting.wrapper is None and all(after[name] is parameter for name, parameter in before.items()):
        raise DecisionError(
            "your function divides nothing: no parameter has changed, and no model in DistributedDataParallel was "
            "returned, so that each card would train the whole model alone; use parallelize_module, fully_shard or "
            "DistributedDataParallel in it"
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


def _replicate(rewriting: Rewriting, decision: Shard) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapper = DistributedDataParallel(rewriting.model, gradient_as_bucket_view=not decision.prepared_by)
    rewriting.wrapper = wrapper
    if decision.reduces_once:
        rewriting.no_sync = wrapper.no_sync
    if decision.way == "ddp":
        return
    for name, replaced in rewriting.optimizers.items():
        if replaced.state:
            raise DecisionError(
                f"{type(replaced).__name__} has taken a step already, and its state cannot be divided: apply the plan "
                "before the first step"
            )
        accepted = inspect.signature(type(replaced)).parameters
        named = [p.name for p in accepted.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]
        if unknown := [option for option in named if option not in replaced.defaults]:
            raise DecisionError(
                f"{type(replaced).__name__} has an option '{unknown[0]}' that is not in its defaults, so that its "
                "state cannot be divided (ZeRO-1): use sharding fsdp or ddp, or an optimizer of torch.optim"
            )
        rewriting.optimizers[name] = ZeroRedundancyOptimizer(
            [dict(group) for group in replaced.param_groups],
            optimizer_class=type(replaced),
            **{option: value for option, value in replaced.defaults.items() if option in accepted},
        )


def _share_functions(plan: Plan) -> list[Callable]:
    """Return the functions with which an emitted step weighs the loss of a rank."""
    split = [share_of_part] if micro_batches_of(plan.decisions) > 1 else []
    return [share_of_rank, as_tensor, *split, count_samples, map_tensors, weighted]


def shard_source(plan: Plan, decision: Shard) -> EmittedCode:
    """Return the code that does the same as `shard` in an emitted file, which torchrun starts on each card."""
    if decision.way == "own":
        return _own_source(plan, decision)
    terms = terms_source(plan)
    functions = _share_functions(plan)
    reduces_once = decision.reduces_once and micro_batches_of(plan.decisions) > 1
    if reduces_once:
        functions.append(marking_last)
    if decision.way == "fsdp" and not decision.prepared_by:
        functions.append(placement_on)
    receives = decision.way == "fsdp" and not decision.offload  # set_model_state_dict needs all tensors on one device
    if receives:
        functions += [receive_from_rank_0, refuse_other_model, attributes_of]
    functions += CHECKPOINT_FUNCTIONS
    imported = ["StateDictOptions", "get_state_dict", *(["set_model_state_dict"] if receives else []), "set_state_dict"]
    named = ", not_by_sample=NOT_BY_SAMPLE" if plan.workload.not_by_sample else ""
    common = dataclasses.replace(
        terms,
        imports=(
            *terms.imports,
            "import warnings",
            "import torch.distributed.checkpoint",
            f"from torch.distributed.checkpoint.state_dict import {', '.join(imported)}",
        ),
        functions=(*terms.functions, *map(inspect.getsource, functions)),
        share=f"share_of_rank(batch, batch_size=BATCH_SIZE, loss_terms=loss_terms{named})",
        cards=decision.cards,
    )
    if decision.way != "fsdp":
        return dataclasses.replace(
            common,
            imports=(
                *common.imports,
                "from torch.nn.parallel import DistributedDataParallel",
                *(["from torch.distributed.optim import ZeroRedundancyOptimizer"] if decision.way == "zero1" else []),
                *(["import contextlib"] if reduces_once else []),
            ),
            around_micro_batch="contextlib.nullcontext() if is_last else model.no_sync()" if reduces_once else "",
            wrapped=f"DistributedDataParallel(model, gradient_as_bucket_view={not decision.prepared_by})",
            optimizer_class="ZeroRedundancyOptimizer" if decision.way == "zero1" else "",
        )
    names = ("replicate", "shard")[-len(decision.mesh) :]
    mesh = f"init_device_mesh(device, {literal(decision.mesh)}, mesh_dim_names={literal(names)})"
    options = ["mesh=mesh"]
    if any(other.kind == ShardedPrecision.kind for other in plan.decisions):
        options.append("mp_policy=SHARDED_PRECISION")
    if not decision.prepared_by:
        options.append(f"shard_placement_fn=placement_on({decision.mesh[-1]})")
    if decision.offload:
        options.append("offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available())")
    reshard = "reshard_after_forward=name not in KEPT, " if decision.kept else ""
    return dataclasses.replace(
        common,
        imports=(
            *common.imports,
            "from torch.distributed.device_mesh import init_device_mesh",
            f"from torch.distributed.fsdp import {'CPUOffloadPolicy, ' if decision.offload else ''}fully_shard",
            *([] if decision.prepared_by else ["import torch.distributed.tensor"]),
        ),
        constants=(
            *terms.constants,
            *((_UNITS, assignment("UNITS", decision.units)) if decision.units else ()),
            *((_KEPT, assignment("KEPT", decision.kept)) if decision.kept else ()),
            *((_TAIL, assignment("TAIL", decision.tail)) if decision.tail else ()),
        ),
        rewriting=(
            f"mesh = {mesh}\n{call('options = dict', options)}\n",
            *(
                [f"for name in UNITS:\n    fully_shard(model.get_submodule(name), {reshard}**options)\n"]
                if decision.units
                else []
            ),
            *([_SHARD_TAIL] if decision.tail else []),
            "fully_shard(model, **options)\n",
        ),
        before_micro_batch="model.set_requires_gradient_sync(is_last)\n" if reduces_once else "",
        shards=True,
        receives=receives,
        communicates_on_host=decision.offload,
    )


def _own_source(plan: Plan, decision: Shard) -> EmittedCode:
    """Return the code that calls the user's own function.

    Raises:
        DecisionError: if the function cannot be imported.
    """
    if not decision.function:
        raise DecisionError(
            "the function that divides the model cannot be imported by another file: write it with def in a Python "
            "file, outside of other functions, or use rewrite.apply(plan, model, parallelize=...)"
        )
    is_file = decision.function.rpartition(":")[0].lower().endswith(".py")
    state = "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict"
    functions: list[Callable] = [clip_divided_gradients]
    code = EmittedCode()
    if decision.divides_batch_by > 1:
        alike = decision.cards // decision.divides_batch_by
        named = ", not_by_sample=NOT_BY_SAMPLE" if plan.workload.not_by_sample else ""
        share = f"share_of_rank(batch, batch_size=BATCH_SIZE, loss_terms=loss_terms{named}, alike={alike})"
        code = dataclasses.replace(terms_source(plan), share=share)
        functions += _share_functions(plan)
    return dataclasses.replace(
        code,
        imports=(
            *code.imports,
            *(["import importlib.util", "import pathlib", "import sys"] if is_file else ["import importlib"]),
            "import warnings",
            "import torch.distributed.checkpoint",
            state,
            "from torch.distributed.device_mesh import init_device_mesh",
        ),
        functions=(*code.functions, *map(inspect.getsource, [*functions, *CHECKPOINT_FUNCTIONS])),
        rewriting=(
            f"mesh = init_device_mesh(device, {literal(decision.mesh)}, "
            f"mesh_dim_names={literal(decision.dimensions)})\n",
            "parallel = parallelize(model, mesh)\n",
            "model.to(device)  # what the function has left on the host\n",
        ),
        wrapped="parallel",
        clipping=clip_divided_gradients.__name__,
        loads=(("parallelize", decision.function),),
        part=_part_of_batch(decision),
        cards=decision.cards,
        shards=True,
    )


def _part_of_batch(decision: Shard) -> str:
    """Return an expression over `rank`: the number of the part of the batch of this process, from 0."""
    text, stride = "", decision.cards
    for name, size in zip(decision.dimensions, decision.mesh, strict=True):
        stride //= size
        if not divides_batch(name) or size == 1:
            continue
        own = f"rank // {stride}" if stride > 1 else "rank"
        if stride * size < decision.cards:
            own = f"{own} % {size}"
        text = f"({text}) * {size} + {own}" if text else own
    return text or "0"


_UNITS = "# FSDP2 gathers the parameters of each of these modules together. All other parameters form one more unit."
_TAIL = "# The parameters of these modules together are one more unit, which stays gathered until backward."
_SHARD_TAIL = "fully_shard([model.get_submodule(name) for name in TAIL], reshard_after_forward=False, **options)\n"
_KEPT = "# These modules stay gathered between forward and backward."
