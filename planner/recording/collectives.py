"""Records the buffers of FSDP2 and DistributedDataParallel in a step of one rank, and the collectives that it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from planner.errors import RehearsalError
from planner.plan_types.categories import Category
from planner.recording.op_schema import op_traits
from planner.recording.step_graph import Collective
from planner.recording.storage_table import StorageTable
from planner.virtual_gpu.values.data_dependence import DataDependence
from planner.virtual_gpu.values.shadow_ops import nested_tensors

_SENDING = ("c10d", "_c10d_functional")
_BUFFERS: dict[str, tuple[tuple[int | str, Category], ...]] = {
    "c10d._allgather_base_.default": ((0, Category.COMMUNICATION),),
    "c10d._reduce_scatter_base_.default": ((0, Category.GRADIENT), (1, Category.COMMUNICATION)),
    "c10d.allreduce_.default": ((0, Category.COMMUNICATION),),
    "fsdp.all_gather_copy_in.default": ((0, Category.COMMUNICATION),),
    "fsdp.split_with_sizes_copy.default": (("out", Category.COMMUNICATION),),
    "fsdp.chunk_cat.default": (("out", Category.COMMUNICATION),),
}
"""For each op: the arguments (position or name) whose storages have a category. An earlier category stays."""
_FIND_OUTPUT = (
    "FSDP2 gathers the parameters of a block for backward when the gradient of the block's output arrives. It finds "
    "the output only if the block returns tensors, lists, tuples, dicts or dataclasses, and changes no view among them "
    "in place: write the block so, or choose --sharding ddp"
)
"""Advice if FSDP2 does not notice that the backward of a block begins."""


def ranks(
    table: StorageTable, data_dependence: DataDependence, pause: Callable[[], AbstractContextManager[None]]
) -> Ranks | None:
    """Returns what a recorder needs in a process that is one rank of several; None in any other process."""
    is_rank = torch.distributed.is_available() and torch.distributed.is_initialized()
    return Ranks(table, data_dependence.refusal, pause) if is_rank and torch.distributed.get_world_size() > 1 else None


class Ranks:
    """Notes what a rank does, for a recorder.

    Args:
        table: the storages of the watched device.
        refusal: creates the error for a step that cannot be rehearsed.
        pause: context in which the recorder records nothing.

    Attributes:
        wrappers: tensor types that stand for local tensors. An op on them runs again on the local tensors, and is
            recorded then.
    """

    def __init__(
        self,
        table: StorageTable,
        refusal: Callable[[str, str], RehearsalError],
        pause: Callable[[], AbstractContextManager[None]],
    ) -> None:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
        from torch.distributed.tensor import DTensor

        self.wrappers = (DTensor, AsyncCollectiveTensor)
        self._table, self._refusal, self._pause = table, refusal, pause

    def note(self, op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Collective | None:
        """Sets the categories of buffers that an op uses, and returns the collective that it runs; None if none.

        Raises:
            RehearsalError: the op computes with a parameter that FSDP2 has freed.
        """
        if self._table.has_freed_storages and not op_traits(op).is_view:
            self._refuse_freed((args, kwargs))
        for place, category in _BUFFERS.get(str(op), ()):
            for tensor in _tensors(args[place] if isinstance(place, int) else kwargs[place]):
                self._table.mark_if_temporary(tensor, category)
        if op.namespace not in _SENDING:
            return None
        group = _group(op, args, kwargs)
        if group is None:
            return None
        sizes = [sum(tensor.nbytes for tensor in _tensors(value)) for value in (*args, *kwargs.values())]
        members = torch.distributed.get_process_group_ranks(group)
        return Collective(
            kind=op._schema.name.partition("::")[2],
            size_bytes=max(sizes, default=0),
            cards=len(members),
            span=max(members) - min(members) + 1,
        )

    def _refuse_freed(self, arguments: Any) -> None:
        """Raises RehearsalError if one of the tensors is a parameter without memory, whose values the op would need."""
        for tensor in nested_tensors(arguments):
            storage = self._table.freed_storage_of(tensor)
            if storage is not None:
                raise self._refusal(
                    f"backward needs parameter '{storage.name}', which FSDP2 has freed after forward", _FIND_OUTPUT
                )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which resized storages are recorded, but not the shapes of DTensors and wrappers without memory.

        FSDP2 frees unsharded parameters by resizing their storages to 0, and DTensor finds the shape of a result by
        running the op on fakes of the global shape, on the device. The result of a collective that runs is wrapped
        in a tensor that has a storage without memory. Unsharded parameters, and gradients that FSDP2 keeps whole after
        a micro-batch, get their category. If a parameter is not divided along dimension 0, what is gathered is copied
        once more, from a buffer to the parameter.
        """
        from torch.distributed import _functional_collectives
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        wrap: Callable = _functional_collectives._wrap_tensor_autograd
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_and_note(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
            before = storage.nbytes()
            resized = resize(storage, size_bytes)
            if size_bytes != before:
                self._table.resized(storage)
            return resized

        allocate = FSDPParam.alloc_all_gather_outputs

        def allocate_and_note(parameter: FSDPParam) -> None:
            allocate(parameter)
            for tensor in parameter.all_gather_outputs:
                self._table.mark_if_temporary(tensor, Category.UNSHARDED, parameter._param_fqn or "")

        keep = FSDPParam.to_accumulated_grad_if_needed

        def keep_and_note(parameter: FSDPParam) -> None:
            keep(parameter)
            gradient = parameter.unsharded_accumulated_grad
            if gradient is None:
                gradient = parameter.unsharded_param.grad
            if gradient is not None:
                self._table.mark(gradient, Category.GRADIENT, name=parameter._param_fqn or "")

        def unseen(function: Callable) -> Callable:
            @functools.wraps(function)
            def call(*arguments: Any, **options: Any) -> Any:
                with self._pause():
                    return function(*arguments, **options)

            return call

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resize_and_note),
            mock.patch.object(FSDPParam, "alloc_all_gather_outputs", allocate_and_note),
            mock.patch.object(FSDPParam, "to_accumulated_grad_if_needed", keep_and_note),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen(propagate)),
            mock.patch.object(_functional_collectives, "_wrap_tensor_autograd", unseen(wrap)),
        ):
            yield


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _group(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> torch.distributed.ProcessGroup | None:
    """Returns the process group among the arguments of an op; None for an op that waits."""
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            return torch.distributed.ProcessGroup.unbox(value)
        if argument.name == "group_name":
            return torch.distributed.distributed_c10d._resolve_process_group(value)
    return None
