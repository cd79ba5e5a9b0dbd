"""Runs of identical layers in a model, most of which a rehearsal can leave out.

A transformer has one kind of layer many times in a row. A rehearsal of the model with a few of them shows what one more
layer adds to the step, so that `planner.derive.lengthen` can put the others into the recording.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence

import torch

from planner.recording.step_graph import Phase, StepGraph

KEPT = 6
"""Number of layers of a run that are rehearsed. The two in the middle show what one more layer adds. The others are
their neighbors, and the ends of the run, whose steps may differ: the first layer may compute no gradient of its
input."""

KEPT_WHEN_GATHERED = 8
"""Number of layers of a run that are rehearsed if FSDP2 gathers the parameters of each layer: it does so during the
steps of two other layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Layers in a row that have the same modules and parameters."""

    container: str
    """Path of the `ModuleList` or `Sequential` that has the layers."""
    first: int
    """Position of the first layer in the container."""
    layers: int
    """Number of layers."""
    kept: int = KEPT
    """Number of layers that are rehearsed, from the first one on."""

    @property
    def left_out(self) -> int:
        """Number of layers that a rehearsal leaves out."""
        return self.layers - self.kept

    @property
    def copied(self) -> int:
        """Position of the rehearsed layer that is copied for each layer that is left out.

        It is the first of the two in the middle.
        """
        return self.first + self.kept // 2 - 1

    def position(self, path: str) -> tuple[int, str] | None:
        """Returns the position of the layer that a path leads into, and the rest of the path.

        None if the path does not lead into the container.
        """
        return _position(self.container, path)

    def path(self, position: int, rest: str = "") -> str:
        """Returns the path of the layer at a position, followed by `rest`."""
        return f"{self.container}.{position}{rest}" if self.container else f"{position}{rest}"

    def is_left_out(self, path: str) -> bool:
        """True if a path leads into a layer that the shortened model lacks, or that has another position there."""
        found = self.position(path)
        return found is not None and found[0] >= self.first + self.kept


@functools.lru_cache(maxsize=1 << 16)
def _position(container: str, path: str) -> tuple[int, str] | None:
    """Returns `LayerRun.position`. Results are cached, because recordings name the same paths many times."""
    start = f"{container}." if container else ""
    number, _, _ = path.removeprefix(start).partition(".")
    if not path.startswith(start) or not re.fullmatch("[0-9]+", number):
        return None
    return int(number), path[len(start) + len(number) :]


def layer_runs(model: torch.nn.Module, kept: int = KEPT) -> tuple[LayerRun, ...]:
    """Returns the runs of layers that are not inside of the layers of another run, of which `kept` are rehearsed.

    A run has at least twice as many layers as are rehearsed.
    """
    return tuple(_runs_in("", model, kept))


def _runs_in(path: str, module: torch.nn.Module, kept: int) -> Iterator[LayerRun]:
    is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
    run = _longest_run(path, module, kept) if is_list else None
    if run is not None:
        yield run
    for number, (name, child) in enumerate(module.named_children()):
        if run is None or not run.first <= number < run.first + run.layers:
            yield from _runs_in(f"{path}.{name}" if path else name, child, kept)


def _longest_run(path: str, container: torch.nn.Module, kept: int) -> LayerRun | None:
    first, longest = 0, None
    for _, group in itertools.groupby(_structure(layer) for layer in container.children()):
        layers = len(list(group))
        if layers >= 2 * kept and (longest is None or layers > longest.layers):
            longest = LayerRun(container=path, first=first, layers=layers, kept=kept)
        first += layers
    # A layer or parameter that occurs twice, or children with names of their own, have no position in the list.
    names = [name for name, _ in container.named_children()]
    is_plain = names == [str(number) for number in range(len(container._modules))]
    return longest if is_plain and not _shares_tensors(container) else None


def _structure(layer: torch.nn.Module) -> tuple[object, ...]:
    """Returns what two layers have in common if they are alike: modules, and shapes of parameters and buffers."""
    return (
        tuple((path, type(module), module.training) for path, module in layer.named_modules(remove_duplicate=False)),
        tuple(
            (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor))
            for name, tensor in itertools.chain(layer.named_parameters(), layer.named_buffers())
        ),
    )


def _shares_tensors(container: torch.nn.Module) -> bool:
    """True if two layers of the container share a parameter."""
    count = collections.Counter(id(parameter) for layer in container.children() for parameter in {*layer.parameters()})
    return any(number > 1 for number in count.values())


def shorten(model: torch.nn.Module, runs: Sequence[LayerRun]) -> None:
    """Remove from the model, in place, the layers of each run that are not rehearsed."""
    for run in runs:
        container = model.get_submodule(run.container)
        assert isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential))
        del container[run.first + run.kept : run.first + run.layers]


def is_uniform(graph: StepGraph, run: LayerRun) -> bool:
    """True if the recording of the whole model shows no difference between the layers of a run."""
    return takes_the_same_ops(graph, run) and layers_are_called_alike(graph, run)


def takes_the_same_ops(graph: StepGraph, run: LayerRun) -> bool:
    """True if all layers of a run take the same ops, on the same tensors of the rest of the model, in the recording of
    the whole model.

    The first layer may read other tensors, since no layer makes its input. In the backward, the first and the last
    layer may differ.
    """
    is_inside = [op.phase is not Phase.FORWARD or _position_in(run, op.module) is not None for op in graph.ops]
    ops: dict[tuple[int, bool], list[tuple[object, ...]]] = collections.defaultdict(list)
    for op in graph.ops:
        if (found := _position_in(run, op.module)) is not None:
            position, rest = found
            read = tuple(_origin(graph, run, index, is_inside) for index in op.inputs)
            what = op.name, op.phase, op.step, op.micro_batch, op.shapes, op.dtype, rest
            ops[position, op.phase is Phase.FORWARD].append((what, read))
    inner = range(run.first + 1, run.first + run.layers - 1)
    first, second = ([what for what, _ in ops[position, True]] for position in (run.first, inner.start))
    return (
        len({tuple(ops[position, True]) for position in (*inner, inner.stop)}) == 1
        and len({tuple(ops[position, False]) for position in inner}) == 1
        and bool(first)
        and first == second
    )


def layers_are_called_alike(graph: StepGraph, run: LayerRun) -> bool:
    """True if nothing around the calls of the inner layers tells them apart, in the recording of the whole model.

    From the call of one layer to that of the next, the same ops run, also those of the modules around the layers. After
    the last layer, no op of the forward reads what an inner layer made. All layers but the first have the same hooks,
    and the same obstacles to recomputation.
    """
    described: dict[int, list[object]] = collections.defaultdict(list)
    starts: dict[int, int] = {}
    for call in graph.calls:
        if (found := _position_in(run, call.module)) is not None:
            position, rest = found
            described[position].append((rest, call.obstacle, call.has_hooks))
            if not rest:
                starts.setdefault(position, call.start)
    in_order = [starts.get(run.first + number, -1) for number in range(run.layers)]
    if -1 in in_order or in_order != sorted(in_order):
        return False
    ticks = [op.tick for op in graph.ops]
    _, *inner, last = [bisect.bisect_left(ticks, start) for start in in_order]
    windows = [graph.ops[start:stop] for start, stop in itertools.pairwise((*inner, last))]
    ops = {tuple((op.name, op.phase, op.shapes, op.dtype, repr(op.kernel)) for op in window) for window in windows}
    made = {index for window in windows[:-1] for op in window for index in op.outputs}
    after = itertools.takewhile(lambda op: op.phase is Phase.FORWARD, graph.ops[last:])
    read = {index for op in after if _position_in(run, op.module) is None for index in op.inputs}
    calls = [described[run.first + number] for number in range(1, run.layers)]
    is_read_again = any(_is_made_from(graph, index, inner[0]) for index in made & read)
    return len(ops) == 1 and not is_read_again and all(each == calls[0] for each in calls)


def _is_made_from(graph: StepGraph, index: int, first_op: int) -> bool:
    """True if a storage was made by an op from number `first_op` on."""
    op = graph.storages[index].op
    return op is not None and op >= first_op


def _position_in(run: LayerRun, path: str) -> tuple[int, str] | None:
    found = run.position(path)
    return found if found is not None and run.first <= found[0] < run.first + run.layers else None


def _origin(graph: StepGraph, run: LayerRun, index: int, is_inside: Sequence[bool]) -> object:
    """Returns what identifies a storage that an op of a layer reads; None if a layer or a backward has made it."""
    storage = graph.storages[index]
    if storage.op is not None and is_inside[storage.op]:
        return None
    found = _position_in(run, storage.name)
    return index if found is None else found[1]
