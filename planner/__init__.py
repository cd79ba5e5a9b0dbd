"""Plan a PyTorch training step that fits into the memory of a GPU: `planner.plan(model, batch, vram="6GiB")`.

This module imports torch only when a plan is computed, so that plan files and the search can be used without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from planner.plan_types.words import DEFAULT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import networkx
    import torch

    from planner.plan_types.plan import Footprint, Plan
    from planner.plan_types.tradeoff import Tradeoff
    from planner.plan_types.words import Fewest, FidelityName, Sharding, Techniques
    from planner.progress import Progress, Report
    from planner.snapshot.explain import explain
    from planner.whole_run.request import Between
    from planner.workload.call_convention import LossFn, Parallelize, StepFn
    from planner.workload.optimizer_choice import OptimizerChoice

__all__ = ["Footprint", "Plan", "Progress", "Tradeoff", "explain", "plan", "record", "to_networkx", "tradeoff"]


_HOMES = {
    "Footprint": "planner.plan_types.plan",
    "Plan": "planner.plan_types.plan",
    "Progress": "planner.progress",
    "Tradeoff": "planner.plan_types.tradeoff",
    "explain": "planner.snapshot.explain",
}
"""Names of this module that are imported when they are first used, and the modules that define them."""


def __getattr__(name: str) -> Any:
    """Import types, `explain`, `planner.rewrite` and `planner.profiles` when they are first used.

    So the command can handle Ctrl-C early, and plan files can be read without torch, which the rewriter needs.
    """
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("torch-planner")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("rewrite", "profiles"):
        return importlib.import_module(f"planner.{name}")
    raise AttributeError(f"module 'planner' has no attribute {name!r}")


def plan(
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    batch: Any,
    *,
    vram: str | int | None,
    loss_fn: LossFn | None = None,
    step: StepFn | None = None,
    gpu: str | None = None,
    fidelity: FidelityName = "rounded",
    optimizer: OptimizerChoice = "adamw",
    force: Techniques = (),
    forbid: Techniques = (),
    only: Techniques | None = None,
    max_slowdown: float | None = None,
    margin: str | int | None = None,
    gradients_alive: bool = False,
    by_sample: Sequence[str] | None = None,
    values: Mapping[str, float] | None = None,
    worst_case: bool = True,
    alloc_conf: str | None = None,
    cudnn_benchmark: bool | None = None,
    eval_batch_size: int | None = None,
    between: Between = (),
    cards: int | Fewest | None = None,
    mesh: tuple[int, ...] | Mapping[str, int] | None = None,
    parallelize: Parallelize | None = None,
    sharding: Sharding | None = None,
    offload_shards: bool = False,
    cards_per_node: int | None = None,
    link: str | None = None,
    time_limit: str | float | None = None,
    progress: bool | Report | None = None,
) -> Plan:
    """Plan one optimizer step of `model` on `batch` so that its memory stays inside `vram`.

    Args:
        model: any module; its weights may be on the CPU or on the meta device. It is not changed.
        batch: a dict of keyword arguments, a dataclass, a graph of torch_geometric, a tuple, or a tensor. Dimension 0
            of its tensors counts the samples. It may also be a `torch.utils.data.DataLoader`, a list of batches, or an
            iterator over batches: the plan is then for the batch whose step needs the most memory, among the first 200.
            If their shapes differ, the run over all of them is simulated in the allocator, too, and `Plan.run` has its
            memory. A list of tensors is one batch.
        vram: the memory budget of the process: a size such as "6GiB", a percentage of the card's memory such as "80%",
            or a number of bytes. If None, the step is only rehearsed, and the plan changes nothing.
        loss_fn: called as `loss_fn(output, batch)`; None if the model returns a loss.
        step: your own training step, called as `step(model, optimizer, batch)`; None for one forward, loss, backward
            and update. With `step`, `model` may be a dict of modules, which the step gets as a `torch.nn.ModuleDict`.
            It has to contain everything that has tensors, such as a frozen teacher.
        gpu: a profile's name such as "rtx-2060", the path of a profile's TOML file, or "bare". If None, the CUDA card
            of this machine, or a generic Ampere GPU if there is none.
        fidelity: how closely training must match the original: "exact" (same math), "rounded" (lower precision),
            "adapted" (train LoRA adapters of a transformers model if nothing else fits) or "partial" (freeze layers).
        optimizer: a name such as "adamw", a torch optimizer, or a function that takes parameters and returns an
            optimizer. With `step`, it may be a dict or tuple of these, which the step gets in this form; a name or
            function in a dict gets the parameters of the submodule that its key names, or of the whole model.
        force: names of techniques that the plan must use, such as "checkpoint" or "offload"
            (`planner.plan_types.words.Technique` lists the names).
        forbid: names of techniques that the plan must not use.
        only: names of the techniques that the plan may use; all others are forbidden. None allows all techniques.
        max_slowdown: maximum step time, as a multiple of the step time of the unchanged step; None for no limit.
        margin: memory of the card that the plan leaves free, for the display and for whatever else needs some: a size
            such as "500MiB" or a percentage of the card's memory. If None, 3 % of the card. A budget of at most the
            rest is not reduced. For the generic card the default is 0, and a percentage is one of the budget.
        gradients_alive: True if your own loop accumulates gradients over several batches. The plan then also counts
            the gradients of earlier batches, which are in memory before the step, so that it holds for every batch.
        by_sample: names of the tensors of the batch whose dimension 0 is the batch dimension, such as ("x", "labels").
            Only these are split into micro-batches. If None, the planner takes the tensors whose dimension 0 has the
            size of the batch, and rehearses the model with twice or half the samples; if both fail, the batch is not
            split.
        values: numbers by line of the model's code, such as {"model.py:42": 100}. The number is the value that the
            line reads from a tensor (`.item()`, a condition), or the largest number of elements that it selects.
        worst_case: True to take the masks of the batch as full, or as full up to one position of each sample if an
            attention mask has padding, and its lengths as the longest one, so that the plan holds for all batches of
            this shape; False to use their own values, if the batch is on the CPU.
        alloc_conf: options of PyTorch's caching allocator with which you train, in the notation of PYTORCH_ALLOC_CONF,
            such as "expandable_segments:True"; "" for PyTorch's defaults. If None, the options that are set in the
            environment of this process.
        cudnn_benchmark: True if you train with `torch.backends.cudnn.benchmark = True`. Each convolution then runs the
            algorithm that is the fastest on the card, and the plan counts an upper bound of its workspace. If None, the
            setting of this process.
        eval_batch_size: number of samples in a batch of the evaluation that happens between steps; None for none.
        between: what else happens between steps: functions of your own, called as `function(model, optimizer)` or
            `function(model)`, in a list or in a dict with names; or "average" (a moving average of the weights),
            "save" (saving a checkpoint), "resume" (loading a checkpoint onto the card).
        cards: number of cards that train the model together, each with its part of `batch`; None for one. `vram` is
            then the budget of each card. "fewest" finds the smallest number of cards with which a plan fits.
        mesh: with `cards`: the number of copies of the model, and of the cards that hold one copy together (hybrid
            sharding); None to shard it over all cards. With `parallelize`: the sizes of the dimensions of the mesh,
            such as {"dp": 2, "tp": 4}; (2, 4) means the same, and None one dimension "tp".
        parallelize: with `cards`: your own function that divides the model among them, called as
            `parallelize(model, mesh)` with a `DeviceMesh`. It may use `parallelize_module`, `fully_shard` and
            DistributedDataParallel. Dimensions whose names begin with "dp" divide the batch. If None, the planner
            divides the model.
        sharding: with `cards`: "ddp" (a copy on each card), "zero1" (the same, with divided optimizer state), "fsdp"
            (FSDP2: parameters, gradients and state are divided) or "zero2" (FSDP2 whose parameters stay gathered
            between forward and backward); None to choose the fastest one that fits.
        offload_shards: with `cards`: True to keep shards, their gradients and the optimizer state in host memory, where
            the optimizer then runs (FSDP2's `CPUOffloadPolicy`).
        cards_per_node: with `cards`: number of cards in a machine; None for 8. Between machines the step time counts a
            network instead of the link.
        link: with `cards`: the link between them, such as "nvlink-4" or "pcie"; None for the fastest one of the card.
        time_limit: maximum time for planning, such as "30s" or a number of seconds; None for no limit. When it is over,
            the best plan that has been certified is returned, and its first note says what was not tried.
        progress: True to show the present stage, the time and the best plan so far: in a live line on a terminal, in
            the output of a notebook's cell, and else in one line every ten seconds on standard error. False to show
            nothing. None shows it in notebooks only. A function is called with a `planner.Progress` at each change,
            and about once a second.

    Returns:
        A certified plan. `Plan.fits` is True if it is inside the budget and respects `max_slowdown`; if not,
        `Plan.shortfall` says what is missing.

    Raises:
        planner.errors.TimeLimitError: the time was over before any plan was certified.
        planner.errors.PlannerError: an argument cannot be used; the message says what to change.
    """
    from planner.arguments import check_arguments, plain
    from planner.ask import LiveWorkload, Question, ask
    from planner.plan_types.constraints import parse_constraints
    from planner.space.own_sharding import reference_of
    from planner.space.sharding import several_cards
    from planner.whole_run.request import RunRequest

    check_arguments(locals())
    constraints = parse_constraints(
        fidelity=fidelity, force=force, forbid=forbid, only=only, max_slowdown=plain(max_slowdown), margin=plain(margin)
    )
    work = LiveWorkload(
        model=model,
        batch=batch,
        loss_fn=loss_fn,
        step=step,
        optimizer=optimizer,
        gradients_alive=gradients_alive,
        by_sample=by_sample,
        values=plain(values or {}),
        worst_case=worst_case,
        parallelize=parallelize,
    )
    run = RunRequest(eval_batch_size=plain(eval_batch_size), between=between)
    reference = None if parallelize is None else reference_of(parallelize)
    together = several_cards(
        plain(cards),
        mesh=plain(mesh),
        parallelize=reference,
        way=sharding,
        offload=offload_shards,
        per_node=plain(cards_per_node),
        link=link,
    )
    question = Question(
        work=work,
        gpu=gpu,
        vram=plain(vram),
        constraints=constraints,
        alloc_conf=alloc_conf,
        cudnn_benchmark=cudnn_benchmark,
        run=run,
        cards=together,
    )
    return ask(question, progress=progress, time_limit=plain(time_limit))


def tradeoff(
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    batch: Any,
    *,
    vram: str | int | None = None,
    loss_fn: LossFn | None = None,
    step: StepFn | None = None,
    gpu: str | None = None,
    fidelity: FidelityName = "rounded",
    optimizer: OptimizerChoice = "adamw",
    force: Techniques = (),
    forbid: Techniques = (),
    only: Techniques | None = None,
    max_slowdown: float | None = None,
    margin: str | int | None = None,
    gradients_alive: bool = False,
    by_sample: Sequence[str] | None = None,
    values: Mapping[str, float] | None = None,
    worst_case: bool = True,
    alloc_conf: str | None = None,
    cudnn_benchmark: bool | None = None,
    seconds: float = DEFAULT_SECONDS,
    progress: bool | Report | None = None,
) -> Tradeoff:
    """Compute the trade-off between memory and step time: certified plans, the fastest plan first.

    Each plan of the result needs less memory and takes more time than the plan before it. The arguments are those of
    `plan`, except that `vram` does not limit the plans: `Tradeoff.chosen` is the fastest plan inside this budget.

    Args:
        seconds: time limit. With less time, fewer plans are found.

    Returns:
        The plans, the baseline, and whether the search was complete.

    Raises:
        planner.errors.TimeLimitError: the time was over before any plan was certified.
        planner.errors.PlannerError: an argument cannot be used; the message says what to change.
    """
    from planner.arguments import check_arguments, plain
    from planner.ask import LiveWorkload, Question, ask
    from planner.plan_types.constraints import parse_constraints

    check_arguments(locals())
    constraints = parse_constraints(
        fidelity=fidelity, force=force, forbid=forbid, only=only, max_slowdown=plain(max_slowdown), margin=plain(margin)
    )
    work = LiveWorkload(
        model=model,
        batch=batch,
        loss_fn=loss_fn,
        step=step,
        optimizer=optimizer,
        gradients_alive=gradients_alive,
        by_sample=by_sample,
        values=plain(values or {}),
        worst_case=worst_case,
    )
    question = Question(
        work=work,
        gpu=gpu,
        vram=plain(vram),
        constraints=constraints,
        alloc_conf=alloc_conf,
        cudnn_benchmark=cudnn_benchmark,
        is_tradeoff=True,
    )
    return ask(question, progress=progress, time_limit=plain(seconds))


def record(
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    step: StepFn | None = None,
    gpu: str | None = None,
    optimizer: OptimizerChoice = "adamw",
) -> torch.fx.Graph:
    """Rehearse two training steps and return them as one graph of aten ops, in the order in which they run.

    The arguments are those of `plan`. The graph can be analyzed but not run. The `meta` of each node has the phase,
    module path, source line, FLOPs and bytes of an op; see `planner.fx_graph.to_fx`. `planner.to_networkx`
    converts the graph to one of networkx.

    Raises:
        planner.errors.PlannerError: an argument cannot be used; the message says what to change.
    """
    from planner.arguments import check_arguments
    from planner.ask import LiveWorkload, Question, ask
    from planner.fx_graph import to_fx

    check_arguments(locals())
    work = LiveWorkload(model=model, batch=batch, loss_fn=loss_fn, step=step, optimizer=optimizer)
    return to_fx(ask(Question(work=work, gpu=gpu), progress=False, time_limit=None))


def to_networkx(graph: torch.fx.Graph, *, storages: bool = False) -> networkx.DiGraph[str]:
    """Convert the result of `planner.record` to a `networkx.DiGraph`: nodes are ops, edges are data dependencies.

    Nodes have the attributes `kind`, `name`, `phase`, `module`, `bytes`, `flops`, `moved_bytes`, `line`, `step` and
    `micro_batch`, edges have `bytes`. `examples/recording/step_graph.py` finds the largest op and a minimum cut.

    Args:
        graph: the result of `planner.record`.
        storages: if True, add a node for each tensor between the op that wrote it and the ops that read it, so that a
            minimum cut by `bytes` counts each tensor once; see `planner.fx_graph.to_networkx`.
    """
    from planner.fx_graph import to_networkx

    return to_networkx(graph, storages=storages)
