"""The recorded step as a `torch.fx.Graph`: aten ops in execution order, edges where storages flow."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from planner.recording.step_graph import Phase, StepGraph


def to_fx(graph: StepGraph) -> Graph:
    """One node for each recorded op, one placeholder for each storage that was there before the step.

    An argument of a node is the last node before it that made or wrote the storage it reads, so that aliases and
    in-place ops are edges too. Arguments that are no tensors are not recorded: the graph is for reading and cutting,
    not for running. `node.meta` holds `phase`, `module`, `source`, `flops`, `moved_bytes`, `output_bytes`, `shapes`,
    `step` and `micro_batch`.
    """
    result = Graph()
    writer: dict[int, Node] = {}
    for number, storage in enumerate(graph.storages):
        if storage.op is None:
            writer[number] = result.placeholder(f"storage_{number}")
            writer[number].meta = {"phase": str(Phase.SETUP), "output_bytes": storage.size_bytes, "module": ""}
    for index, op in enumerate(graph.ops):
        if op.phase is Phase.SETUP:
            continue
        sources = dict.fromkeys(writer[storage] for storage in op.inputs if storage in writer)
        node = result.call_function(_target(op.name), tuple(sources))
        node.meta = {
            "phase": str(op.phase),
            "module": op.module,
            "source": op.source,
            "flops": op.flops,
            "moved_bytes": op.moved_bytes,
            "output_bytes": sum(graph.storages[s].size_bytes for s in op.outputs if graph.storages[s].op == index),
            "shapes": op.shapes,
            "step": op.step,
            "micro_batch": op.micro_batch,
        }
        for storage in op.outputs:
            writer[storage] = node
    result.output(())
    return result


def _target(name: str) -> object:
    """'aten.addmm.default' -> torch.ops.aten.addmm.default."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
