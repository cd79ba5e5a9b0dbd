"""Plan a PyTorch training step that fits a card: `planner.plan(model, batch, vram="6GiB")`.

This module imports torch only when a plan is computed, so that plan files and the search can be used without it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from planner.plan_types.plan import Footprint, Plan
from planner.plan_types.tradeoff import DEFAULT_SECONDS, Tradeoff

if TYPE_CHECKING:
    from collections.abc import Sequence

    import networkx
    import torch

    from planner.workload.call_convention import LossFn

__all__ = ["Footprint", "Plan", "Tradeoff", "plan", "record", "to_networkx", "tradeoff"]


def __getattr__(name: str) -> ModuleType:
    """Import `planner.rewrite` and `planner.profiles` when they are first used: the rewriter needs torch."""
    if name in ("rewrite", "profiles"):
        return importlib.import_module(f"planner.{name}")
    raise AttributeError(f"module 'planner' has no attribute {name!r}")


def plan(
    model: torch.nn.Module,
    batch: Any,
    *,
    vram: str | int | None,
    loss_fn: LossFn | None = None,
    gpu: str | None = None,
    fidelity: str = "rounded",
    optimizer: Any = "adamw",
    force: Sequence[str] = (),
    forbid: Sequence[str] = (),
    only: Sequence[str] | None = None,
    max_slowdown: float | None = None,
    gradients_alive: bool = False,
) -> Plan:
    """Plan one optimizer step of `model` on `batch` so that its memory stays inside `vram`.

    Args:
        model: any module; its weights may be on the CPU or on the meta device. It is not changed.
        batch: a dict of keyword arguments, a dataclass, a tuple, or a tensor. Dimension 0 of its tensors counts the
        samples.
        vram: the memory budget: a size such as "6GiB" or "80%" (of the card), or a number of bytes. If None, the step
            is only rehearsed, and the plan has no decisions.
        loss_fn: called as `loss_fn(output, batch)`; None if the model returns a loss.
        gpu: a profile's name such as "rtx-2060", the path of a profile's TOML file, or "bare". If None, the CUDA card
            of this machine, or a generic Ampere GPU if there is none.
        fidelity: how closely training must match the original: "exact" (same math), "rounded" (lower precision) or
            "partial" (freeze layers).
        optimizer: a name such as "adamw", a torch optimizer, or a function that takes parameters and returns an
        optimizer.
        force: kinds of decision that must be used.
        forbid: kinds of decision that must not be used.
        only: kinds of decision that may be used; all others are forbidden. None allows all.
        max_slowdown: maximum step time, as a multiple of the baseline's; None for no limit.
        gradients_alive: True if your own loop accumulates gradients over several batches. The plan then counts the
            gradients of earlier batches, which the step adds to, and its promise holds for every batch of the loop.

    Returns:
        A certified plan. `Plan.fits` is True if it is inside the budget.

    Raises:
        planner.errors.PlannerError: an argument cannot be used; the message says what to change.
    """
    from planner import pipeline
    from planner.plan_types.constraints import parse_constraints
    from planner.workload.budget import card_and_budget
    from planner.workload.workload import workload

    constraints = parse_constraints(fidelity=fidelity, force=force, forbid=forbid, only=only, max_slowdown=max_slowdown)
    step = workload(model, batch, loss_fn=loss_fn, optimizer=optimizer, gradients_alive=gradients_alive)
    card, vram_bytes = card_and_budget(gpu, vram)
    return pipeline.plan_workload(step, card, vram_bytes=vram_bytes, constraints=constraints)


def tradeoff(
    model: torch.nn.Module,
    batch: Any,
    *,
    vram: str | int | None = None,
    loss_fn: LossFn | None = None,
    gpu: str | None = None,
    fidelity: str = "rounded",
    optimizer: Any = "adamw",
    force: Sequence[str] = (),
    forbid: Sequence[str] = (),
    only: Sequence[str] | None = None,
    max_slowdown: float | None = None,
    gradients_alive: bool = False,
    seconds: float = DEFAULT_SECONDS,
) -> Tradeoff:
    """Compute the trade-off between memory and step time: certified plans from the fastest to the smallest.

    The arguments are those of `plan`, but `vram` only marks the fastest plan that fits this budget.

    Args:
        seconds: approximate time limit of the search. With less time, fewer plans are found between the two ends.

    Raises:
        planner.errors.PlannerError: an argument cannot be used; the message says what to change.
    """
    from planner import pipeline
    from planner.plan_types.constraints import parse_constraints
    from planner.workload.budget import card_and_budget
    from planner.workload.workload import workload

    constraints = parse_constraints(fidelity=fidelity, force=force, forbid=forbid, only=only, max_slowdown=max_slowdown)
    step = workload(model, batch, loss_fn=loss_fn, optimizer=optimizer, gradients_alive=gradients_alive)
    card, vram_bytes = card_and_budget(gpu, vram)
    return pipeline.tradeoff_workload(step, card, vram_bytes=vram_bytes, constraints=constraints, seconds=seconds)


def record(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    gpu: str | None = None,
    optimizer: Any = "adamw",
) -> torch.fx.Graph:
    """Record two training steps as they would run on the card: one graph of aten ops in execution order.

    The arguments are those of `plan`. The `meta` of each node has its phase, module path, source line, FLOPs and bytes;
    see `planner.recording.fx_graph.to_fx`. `planner.to_networkx`
    converts the graph for the algorithms of networkx.

    Raises:
        planner.errors.PlannerError: an argument cannot be used; the message says what to change.
    """
    from planner import pipeline
    from planner.recording.fx_graph import to_fx
    from planner.workload.cards import resolve_card
    from planner.workload.workload import workload

    step = workload(model, batch, loss_fn=loss_fn, optimizer=optimizer)
    return to_fx(pipeline.record_step(step, resolve_card(gpu, None)))


def to_networkx(graph: torch.fx.Graph, *, storages: bool = False) -> networkx.DiGraph[str]:
    """Convert the result of `planner.record` to a `networkx.DiGraph`: nodes are ops, edges are data dependencies.

    Nodes have the attributes `kind`, `name`, `phase`, `module`, `bytes`, `flops`, `moved_bytes`, `line`, `step` and
    `micro_batch`, edges have `bytes`. `examples/recording/step_graph.py` finds the largest op and a minimum cut.

    Args:
        graph: the result of `planner.record`.
        storages: add a node for each tensor between the op that wrote it and its readers, so that a minimum cut by
            `bytes` counts it once; see `planner.recording.fx_graph.to_networkx`.
    """
    from planner.recording.fx_graph import to_networkx

    return to_networkx(graph, storages=storages)
