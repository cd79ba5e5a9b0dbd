"""Converts a recording to a `torch.fx.Graph` or a `networkx.DiGraph` of its aten ops and the data flow between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from planner.recording.step_graph import Phase, StepGraph

if TYPE_CHECKING:
    import networkx


def to_fx(graph: StepGraph) -> Graph:
    """Converts a recording to a graph with one node per op, in execution order.

    Storages that existed before the step (parameters, inputs, optimizer state) become placeholders. The arguments of a
    node are the nodes that last made or wrote the storages that the op reads, so data that flows through aliases and
    in-place ops is included. Other arguments are not recorded: the graph can be analyzed and cut, but not run.

    `node.meta` of an op has the attributes `phase`, `module`, `source`, `flops`, `moved_bytes`, `shapes`, `step` and
    `micro_batch` of `Op`, and two more:

    - `output_bytes`: bytes of the storages that the op makes.
    - `reads`: for each storage that the op reads: (name of the node that last wrote it, storage index, its bytes).

    `node.meta` of a placeholder has `phase` ('setup'), `module` ('') and `output_bytes` (bytes of the storage).

    Args:
        graph: the recording.
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
        reads = {number: writer[number] for number in op.inputs if number in writer}
        node = result.call_function(_target(op.name), tuple(dict.fromkeys(reads.values())))
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
            "reads": tuple((source.name, s, graph.storages[s].size_bytes) for s, source in reads.items()),
        }
        for number in op.outputs:
            writer[number] = node
    result.output(())
    return result


def to_networkx(graph: Graph, *, storages: bool = False) -> networkx.DiGraph[str]:
    """Converts a recorded step to a directed acyclic graph of its ops, for the algorithms of networkx.

    The nodes are the ops, and the storages that existed before the step (parameters, inputs, optimizer state). A node
    has the attributes `kind` ('op' or 'storage'), `name` (such as 'aten.addmm.default'), `phase`, `module` (path),
    `bytes` (of the storages that the op makes, or of the storage), `flops`, `moved_bytes`, `line` ('file.py:12'),
    `step` and `micro_batch`. An edge leads from the node that last wrote a storage to an op that reads it. The
    attribute `bytes` of an edge is the total size of these storages.

    Args:
        graph: the result of `planner.record`.
        storages: True to put a node of kind 'tensor' between an op and the readers of each storage that it wrote. The
            edge to this node has the attribute `bytes`, the edges from it do not. A minimum cut then counts a tensor
            once, however many ops read it: networkx gives an edge without the capacity attribute infinite capacity.

    Returns:
        The graph. Its node names are those of `graph`; nodes of kind 'tensor' are named '<op node>:storage_<index>'.

    Example:
        >>> steps = planner.to_networkx(planner.record(model, batch))
        >>> max(steps, key=lambda node: steps.nodes[node]["bytes"])  # the largest allocation
        'addmm_default'
    """
    import networkx

    result: networkx.DiGraph[str] = networkx.DiGraph()
    for node in graph.nodes:
        if node.op == "output":
            continue
        result.add_node(node.name, **_attributes(node))
        for source, number, size_bytes in node.meta.get("reads", ()):
            if storages and result.nodes[source]["kind"] == "op":
                tensor = f"{source}:storage_{number}"
                result.add_node(tensor, kind="tensor", name=f"storage_{number}", bytes=size_bytes)
                result.add_edge(source, tensor, bytes=size_bytes)
                result.add_edge(tensor, node.name)
            elif result.has_edge(source, node.name):
                result.edges[source, node.name]["bytes"] += size_bytes
            else:
                result.add_edge(source, node.name, bytes=size_bytes)
    return result


def _attributes(node: Node) -> dict[str, Any]:
    """Returns the attributes of the networkx node for a node of the fx graph."""
    meta, is_op = node.meta, node.op == "call_function"
    return {
        "kind": "op" if is_op else "storage",
        "name": str(node.target),
        "phase": meta["phase"],
        "module": meta["module"],
        "bytes": meta["output_bytes"],
        "flops": meta.get("flops", 0),
        "moved_bytes": meta.get("moved_bytes", 0),
        "line": meta.get("source", ""),
        "step": meta.get("step"),
        "micro_batch": meta.get("micro_batch"),
    }


def _target(name: str) -> Callable[..., Any]:
    """Returns the op with this name: `torch.ops.aten.addmm.default` for 'aten.addmm.default'."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
