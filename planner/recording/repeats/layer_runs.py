"""Runs of identical layers in a model, most of which a rehearsal can leave out.

A transformer has one kind of layer many times in a row. A rehearsal of the model with a few of them shows what one more
layer adds to the step, so that `planner.derive.lengthen` can put the others into the recording.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence

import torch

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

    def lacks(self, path: str) -> bool:
        """True if a path leads into a layer that the shortened model lacks."""
        found = self.position(path)
        return found is not None and self.kept <= found[0] - self.first < self.layers

    def leads_elsewhere(self, path: str) -> bool:
        """True if a path does not lead to the same module in the shortened model.

        The shortened model lacks this module, or the module belongs to a layer after the run, whose position changes.
        """
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

    A run has at least twice as many layers as are rehearsed. No parameter of a run is used in another place of the
    model, or has a hook for its gradient.
    """
    return tuple(_runs_in("", model, kept, _places(model)))


def _places(module: torch.nn.Module) -> collections.Counter[int]:
    """Returns the number of names that each parameter has in a module, by `id`."""
    return collections.Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _runs_in(path: str, module: torch.nn.Module, kept: int, places: collections.Counter[int]) -> Iterator[LayerRun]:
    is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
    run = _longest_run(path, module, kept, places) if is_list else None
    if run is not None:
        yield run
    for number, (name, child) in enumerate(module.named_children()):
        if run is None or not run.first <= number < run.first + run.layers:
            yield from _runs_in(f"{path}.{name}" if path else name, child, kept, places)


def _longest_run(path: str, container: torch.nn.Module, kept: int, places: collections.Counter[int]) -> LayerRun | None:
    first, longest = 0, None
    for _, group in itertools.groupby(_structure(layer) for layer in container.children()):
        layers = len(list(group))
        if layers >= 2 * kept and (longest is None or layers > longest.layers):
            longest = LayerRun(container=path, first=first, layers=layers, kept=kept)
        first += layers
    # A layer that occurs twice, or children with names of their own, have no position in the list.
    names = [name for name, _ in container.named_children()]
    is_plain = names == [str(number) for number in range(len(container._modules))]
    if longest is None or not is_plain:
        return None
    layers_of_run = [*container.children()][longest.first : longest.first + longest.layers]
    return longest if all(_is_separate(layer, places) for layer in layers_of_run) else None


def _is_separate(layer: torch.nn.Module, places: collections.Counter[int]) -> bool:
    """True if no parameter of a layer is in another place of the model, or has a hook for its gradient."""
    return all(places[parameter] == number for parameter, number in _places(layer).items()) and not any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in layer.parameters()
    )


def _structure(layer: torch.nn.Module) -> tuple[object, ...]:
    """Returns what two layers have in common if they are alike: modules, and shapes of parameters and buffers."""
    return (
        tuple((path, type(module), module.training) for path, module in layer.named_modules(remove_duplicate=False)),
        tuple(
            (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor))
            for name, tensor in itertools.chain(layer.named_parameters(), layer.named_buffers())
        ),
    )


def shorten(model: torch.nn.Module, runs: Sequence[LayerRun]) -> None:
    """Remove from the model, in place, the layers of each run that are not rehearsed."""
    for run in runs:
        container = model.get_submodule(run.container)
        assert isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential))
        del container[run.first + run.kept : run.first + run.layers]
