"""Finds the largest batches of a data loader, and makes batches from a description of their shapes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from planner.errors import RehearsalProcessError, TimeLimitError, WorkloadError
from planner.files import reading
from planner.progress import TimeIsUp, Watch
from planner.virtual_gpu.forked_process import run_in_child
from planner.workload.call_convention import is_graph
from planner.workload.synthetic_batch import MASK
from planner.workload.unsupported import refuse_nesting
from planner.workload.workload import described, map_batch, tensors_of

MOST_BATCHES = 200
"""Maximum number of batches that are taken from a source of batches."""
_MOST_CANDIDATES = 8
"""Maximum number of batches that are rehearsed to find the largest step."""

_MOST_DIFFERENT = 64
"""Maximum number of batches of different shapes that are kept for a simulation of the run."""

_Shapes = tuple[tuple[str, tuple[int, ...], str], ...]
"""Path, shape and dtype of every tensor of a batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchStream:
    """The first batches of a source of batches, in its order."""

    order: tuple[int, ...]
    """For each batch, its index in `different`."""
    different: tuple[Any, ...]
    """One batch of each combination of shapes, without the values of floating-point tensors."""


class Candidates(NamedTuple):
    """The batches that may need the most memory, and the run that they are part of."""

    batches: list[Any]
    notes: tuple[str, ...]
    """Notes for the plan."""
    stream: BatchStream | None
    """All batches of the source; None if it is a single batch, or has too many different shapes."""


def candidate_batches(batch: Any, *, worst_case: bool = True, watch: Watch | None = None) -> Candidates:
    """Returns the batches of a source whose training step may be the largest, and notes for the plan.

    A batch is left out if another batch has the same tensors and is at least as large in every dimension.
    If `batch` is not a source of batches (a `torch.utils.data.DataLoader`, an iterator, or a list of batches as in
    `_is_list_of_batches`), it is the only batch that is returned.

    The source is read in a forked process, so that neither the position of an iterator nor the state of random number
    generators changes here.

    Args:
        worst_case: True to give all batches an attention mask with padding if one of them has padding: which batches
            have none is a matter of chance. False to keep their values.
        watch: limits the time in which the source is read; None for no limit.

    Raises:
        TimeLimitError: the time is up.
        WorkloadError: the source raises an error, or has no batches.
    """
    if not isinstance(batch, (torch.utils.data.DataLoader, Iterator)) and not _is_list_of_batches(batch):
        return Candidates([batch], (), None)
    try:
        kept, stream = run_in_child(lambda: _read(_batches(batch), worst_case=worst_case), watch)
    except TimeIsUp as error:
        raise TimeLimitError(
            f"planning ended {watch.cause if watch else ''} while the data loader was read: give more time, or one "
            "batch instead of the loader"
        ) from error
    except RehearsalProcessError as error:
        raise WorkloadError(
            f"the data loader ended the process that reads it ({error}): iterate over it without the planner to find "
            "the cause"
        ) from error
    if not kept:
        raise WorkloadError("the source of batches is empty: give a data loader with at least one batch")
    seen = len(stream.order)
    first = "first " if seen == MOST_BATCHES else ""
    note = f"the plan is for the batch that needs the most memory among the {first}{seen} batches"
    if seen == 1:
        return Candidates(kept, (), None)
    if not stream.different:
        note += (
            f"; the run was not simulated, because its batches have more than {_MOST_DIFFERENT} different shapes: "
            "let the collate function pad to a multiple of 8 or more"
        )
    kept.sort(key=elements, reverse=True)
    if len(kept) > _MOST_CANDIDATES:
        note += (
            f"; these have {len(kept)} different shapes, and only the {_MOST_CANDIDATES} with the most elements were "
            "rehearsed"
        )
    if isinstance(batch, list) and isinstance(batch[0], (list, tuple)):
        note += "; if the list holds the arguments of one call of the model, give them as a tuple"
    return Candidates(kept[:_MOST_CANDIDATES], (note,), stream if stream.different else None)


def _is_list_of_batches(batch: Any) -> bool:
    """True for a list of mappings, dataclasses or graphs, or of tuples or lists that have tensors of the same kinds.

    A list of tensors is one batch: the positional arguments of the model, as the default collate function of PyTorch's
    `DataLoader` returns them. So is a list such as [images, targets], in which two lists contain different things.
    """
    if not isinstance(batch, list) or not batch:
        return False
    if all(isinstance(item, (list, tuple)) for item in batch):
        return len({tuple(map(_kind, item)) for item in batch}) == 1 and len(batch[0]) > 0
    return all(isinstance(item, Mapping) or dataclasses.is_dataclass(item) or is_graph(item) for item in batch)


def _kind(value: Any) -> tuple[object, ...]:
    """Returns what two values have in common that play the same part in two batches: dtype and rank, or the type."""
    return (value.dtype, value.dim()) if isinstance(value, torch.Tensor) else (type(value),)


def _batches(source: Iterable[Any]) -> Iterator[Any]:
    """Yields the first batches of a source as plain dicts, tuples and tensors."""
    batches = itertools.islice(source, MOST_BATCHES)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except BaseException as error:  # the user's code, which may also try to end the process
            lines = str(error).strip().splitlines() or [type(error).__name__]
            in_worker = "in DataLoader worker process" in lines[0]  # the traceback there ends with type and message
            text = lines[-1].partition(": ")[2] if in_worker else lines[0]
            raise WorkloadError(
                f"the data loader raised {type(error).__name__}: {text}; iterate over it without the planner to find "
                "the cause"
            ) from error
        refuse_nesting(batch)
        yield map_batch(lambda tensor: tensor, batch)


def _read(batches: Iterable[Any], *, worst_case: bool) -> tuple[list[Any], BatchStream]:
    """Returns the batches that no other batch covers (`_covers`), and all of them as a stream."""
    kept: dict[_Shapes, Any] = {}
    different: dict[_Shapes, Any] = {}
    order: list[_Shapes] = []
    is_padded = False
    for batch in batches:
        is_padded = is_padded or (worst_case and any(has_padding(*each) for each in tensors_of(batch)))
        shapes = tuple(described(batch))
        order.append(shapes)
        if shapes in different:
            continue
        different[shapes] = _without_values(batch)
        if any(_covers(other, shapes) for other in kept):
            continue
        kept = {other: value for other, value in kept.items() if not _covers(shapes, other)}
        kept[shapes] = batch
    if is_padded:
        kept = {shapes: _with_padding(batch) for shapes, batch in kept.items()}
        different = {shapes: _with_padding(batch) for shapes, batch in different.items()}
    numbers = {shapes: number for number, shapes in enumerate(different)}
    few = tuple(different.values()) if len(different) <= _MOST_DIFFERENT else ()
    return list(kept.values()), BatchStream(order=tuple(numbers[shapes] for shapes in order), different=few)


def _without_values(batch: Any) -> Any:
    """Returns a batch whose floating-point tensors have no values, so that it is quickly sent to another process."""
    return map_batch(
        lambda tensor: tensor.to("meta") if tensor.is_floating_point() and not tensor.is_sparse else tensor, batch
    )


def has_padding(name: str, tensor: torch.Tensor) -> bool:
    """True if a tensor of a batch is an attention mask [samples, tokens] in which a position is padding.

    Args:
        name: path of the tensor in the batch.
    """
    return _is_mask(name, tensor) and not bool(tensor.bool().all())


def _is_mask(name: str, tensor: torch.Tensor) -> bool:
    is_mask = MASK in name.rsplit(".", 1)[-1] and tensor.dtype in (torch.bool, torch.int32, torch.int64)
    return is_mask and tensor.dim() == 2 and tensor.device.type == "cpu" and tensor.numel() > 0


def _with_padding(batch: Any) -> Any:
    """Returns the batch with masks in which the last position of each sample is padding, unless they have padding."""
    full = {
        id(tensor) for name, tensor in tensors_of(batch) if _is_mask(name, tensor) and not has_padding(name, tensor)
    }

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in full:
            return tensor
        mask = tensor.clone()
        mask[:, -1] = 0
        return mask

    return map_batch(padded, batch)


def _covers(larger: _Shapes, smaller: _Shapes) -> bool:
    """True if two batches have the same tensors, and no dimension is larger in `smaller`."""
    if [(path, len(shape), dtype) for path, shape, dtype in larger] != [
        (path, len(shape), dtype) for path, shape, dtype in smaller
    ]:
        return False
    pairs = (zip(a[1], b[1], strict=True) for a, b in zip(larger, smaller, strict=True))
    return all(size >= other for pair in pairs for size, other in pair)


def elements(batch: Any) -> int:
    """Returns the number of elements of all tensors of a batch."""
    sizes: list[int] = []
    map_batch(lambda tensor: sizes.append(tensor.numel()), batch)
    return sum(sizes)


def read_shapes(path: pathlib.Path) -> Any:
    """Returns the content of a file that describes a batch, for `batch_of_shapes`.

    Raises:
        WorkloadError: the file cannot be read or is not JSON.
    """
    try:
        return reading.json_data(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise WorkloadError(f"'{path}' cannot be read as JSON: {why}") from error


def batch_of_shapes(shapes: Any, device: str) -> Any:
    """Returns a batch with tensors of the stated shapes, filled with random values unless `device` is 'meta'.

    Args:
        shapes: JSON data that is nested like the batch: objects become dicts of keyword arguments, and lists become
            tuples of positional arguments. A tensor is a list of integers, its shape; or an object with `shape` and
            optionally `dtype` (float32 by default) and `below` (2 by default): random integers are smaller than it.

    Raises:
        WorkloadError: the data does not describe a batch.
    """
    if isinstance(shapes, dict) and "shape" in shapes:
        return _tensor(shapes, device)
    if isinstance(shapes, dict) and shapes:
        return {name: batch_of_shapes(inner, device) for name, inner in shapes.items()}
    if isinstance(shapes, list) and all(type(size) is int for size in shapes):
        return _tensor({"shape": shapes}, device)
    if isinstance(shapes, list):
        return tuple(batch_of_shapes(inner, device) for inner in shapes)
    raise WorkloadError(
        f"the input shapes contain {json.dumps(shapes)[:80]}, which is neither a shape such as [8, 512] nor an object "
        'such as {"shape": [8, 512], "dtype": "int64", "below": 50257}'
    )


def _tensor(stated: dict[str, Any], device: str) -> torch.Tensor:
    """Returns the tensor that an object with the keys `shape`, `dtype` and `below` describes."""
    if unknown := set(stated) - {"shape", "dtype", "below"}:
        raise WorkloadError(
            f"a tensor of the input shapes has the unknown key '{min(unknown)}': use shape, dtype and below"
        )
    shape, dtype, below = (
        stated["shape"],
        getattr(torch, str(stated.get("dtype", "float32")), None),
        stated.get("below", 2),
    )
    if not isinstance(dtype, torch.dtype):
        raise WorkloadError(f"the input shapes have the unknown dtype '{stated['dtype']}': use a name such as int64")
    if (
        not isinstance(shape, list)
        or not all(type(size) is int and size >= 0 for size in shape)
        or type(below) is not int
    ):
        raise WorkloadError(
            f"the input shapes contain {json.dumps(stated)[:80]}: shape must be a list of integers, and below an "
            "integer"
        )
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, device=device).to(dtype)
        return torch.randint(max(below, 1), shape, device=device).to(dtype)
    except (RuntimeError, TypeError) as error:  # of an unusual dtype, or too large
        raise WorkloadError(
            f"the input shapes contain {json.dumps(stated)[:80]}, of which no tensor can be made: "
            f"{str(error).splitlines()[0][:120]}"
        ) from error
