"""One model of the zoo, and the result for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from planner.workload.call_convention import LossFn
from planner.workload.workload import Workload, workload

EXACT = "exact"
ASSUMED = "other bytes, and an assumption says so"
REFUSED = "refused"
WRONG = "wrong bytes"
ERROR = "error"
SLOW = "too slow"
NOT_BUILT = "not buildable"
SKIPPED = "skipped"
RESULTS = (EXACT, ASSUMED, REFUSED, WRONG, ERROR, SLOW, NOT_BUILT, SKIPPED)
"""The results, from good to bad. The last two say nothing about the planner."""

FITS = "fits"
NO_PLAN = "no plan fits"
PLANS = (FITS, NO_PLAN, REFUSED, ERROR)
"""How planning under a budget ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to make a model small and to feed it. A case has several if it is not known which of them trains."""

    how: str
    """The settings in a few words."""
    build: Callable[[], tuple[torch.nn.Module, Any, LossFn | None]]
    """Returns the model, the batch and the loss function, with real tensors on the CPU."""
    optimizer: Any = "adamw"

    def workload(self) -> Workload:
        """Builds the model and its batch, always with the same random values."""
        torch.manual_seed(0)
        model, batch, loss_fn = self.build()
        for module in model.modules():  # moving a model to a card copies tensors that are parts of storages, too
            for name, buffer in module.named_buffers(recurse=False):
                if _is_part(buffer):
                    module._buffers[name] = buffer.clone()
            for parameter in module.parameters(recurse=False):
                if _is_part(parameter):
                    parameter.data = parameter.data.clone()
        return workload(model.train(), batch, loss_fn=loss_fn, optimizer=self.optimizer)


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model of the zoo."""

    library: str
    name: str
    candidates: Callable[[], Iterator[Candidate]]
    """Yields ways to build the model. The first one with which a plain step runs is used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result for one model."""

    library: str
    name: str
    result: str
    """One of `RESULTS`."""
    note: str = ""
    """Why the result is not exact."""
    how: str = ""
    """The settings of the model that was built."""
    parameters: int = 0
    """Number of elements of the parameters."""
    peak_bytes: int = 0
    """Peak of the bytes of tensors in a real step on the CPU."""
    plan: str = ""
    """One of `PLANS`; empty if no plan was asked for."""
    plan_note: str = ""
    """The techniques of the plan, or why there is none."""
    seconds: float = 0.0
    """Time for everything, in seconds."""

    @property
    def key(self) -> tuple[str, str]:
        return self.library, self.name


def single(build: Callable[[], tuple[Any, ...]], *, optimizer: Any = "adamw") -> Callable[[], Iterator[Candidate]]:
    """Returns the candidates of a model that is built in one way: `build` returns (model, batch[, loss_fn])."""

    def built() -> tuple[torch.nn.Module, Any, LossFn | None]:
        model, batch, *loss_fn = build()
        return model, batch, loss_fn[0] if loss_fn else None

    return lambda: iter((Candidate(how="", build=built, optimizer=optimizer),))


def mean_square(output: Any, batch: Any) -> torch.Tensor:
    """Returns the sum of the mean squares of all floating-point tensors of an output that depend on parameters."""
    from torch.utils._pytree import tree_leaves

    found = [leaf for leaf in tree_leaves(_plain(output)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([tensor.abs().float().square().mean() for tensor in found if tensor.numel()]).sum()


def _plain(output: Any) -> Any:
    """Returns an output with mappings and dataclasses as dicts, which the tree functions of torch flatten."""
    if isinstance(output, dict):
        return {str(key): _plain(value) for key, value in output.items()}
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: _plain(getattr(output, field.name)) for field in dataclasses.fields(output)}
    if isinstance(output, (list, tuple)):
        return [_plain(value) for value in output]
    return output
