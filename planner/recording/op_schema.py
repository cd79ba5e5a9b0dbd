"""Properties of an op that follow from its schema and its arguments: if it is a view, what it writes, bytes moved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from planner.virtual_gpu import sparse_tensors
from planner.virtual_gpu.values.data_dependent_ops import BOUNDED
from planner.workspaces import is_known

_SHORT_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpTraits:
    """The properties of an op that do not depend on the arguments of a call."""

    name: str
    """The op's name with its overload, such as 'aten.add.Tensor'."""
    is_view: bool
    """True if the op returns an alias of an argument and writes nothing. Such an op launches no kernel."""
    written: tuple[tuple[int, str], ...]
    """Position and name of every argument that is written in place."""
    scratch_known: bool
    """True if the scratch memory of the op's CUDA kernel is known: by a formula, or because it takes none."""
    asks_values: bool
    """True if the result, or its shape, depends on the values of tensors."""

    @property
    def writes(self) -> bool:
        """True if the op writes an argument in place."""
        return bool(self.written)

    def written_arguments(self, args: tuple, kwargs: dict) -> list[object]:
        """Returns the arguments of a call that the op writes in place."""
        return [args[position] if position < len(args) else kwargs.get(name) for position, name in self.written]


_RUNNING_STATISTICS = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
"""Maps the names of norm ops to the arguments that they write in training mode although their schema does not say so.

The arguments are the last two tensor arguments of each op.
"""
WRITE_STATISTICS = frozenset(f"{name.replace('::', '.')}.default" for name in _RUNNING_STATISTICS)
"""Names of the norm ops that write running statistics, as in `Op.name`."""


def uses_batch_statistics(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """True if the op normalizes over the samples of the batch, so that its results change if the batch is split."""
    if "batch_norm" not in op._schema.name or "backward" in op._schema.name:
        return False
    names = [argument.name for argument in op._schema.arguments]
    training = next((name for name in ("training", "train") if name in names), None)
    if training is None:
        return False
    position = names.index(training)
    in_training = args[position] if position < len(args) else kwargs.get(training, False)
    return bool(in_training) and args[0].shape[0] > 1


_OF_RANKS = ("c10d", "_c10d_functional", "fsdp")
"""Namespaces of the ops that copy buffers and exchange them with other ranks. NCCL's memory is not the allocator's."""
_NO_SCRATCH_TAGS = frozenset({torch.Tag.pointwise, torch.Tag.inplace_view})
"""Ops with one of these tags take no scratch memory."""


@functools.cache
def op_traits(op: torch._ops.OpOverload) -> OpTraits:
    """Returns the properties of an op."""
    schema = op._schema
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in _RUNNING_STATISTICS.get(schema.name, ())
    )
    is_view = any(result.alias_info is not None for result in schema.returns) and not written
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    known = (
        is_view
        or not takes_tensors
        or op.namespace in _OF_RANKS
        or not _NO_SCRATCH_TAGS.isdisjoint(op.tags)
        or is_known(str(op))
    )
    of_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    asks_values = not of_values.isdisjoint(op.tags) or str(op) in BOUNDED
    return OpTraits(name=str(op), is_view=is_view, written=written, scratch_known=known, asks_values=asks_values)


def draws_random_numbers(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """True if the op advances a random generator. Ops with an argument `dropout_p` do so only if it is above 0."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            dropout_p: Any = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return dropout_p > 0
    return True


def numbers_in(value: object) -> Iterator[str]:
    """Yields the numbers in nested lists, tuples and dicts as text, in order."""
    if isinstance(value, (int, float, complex)):
        yield repr(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from numbers_in(item)


_ALLOCATION_ORDER = {torch.ops.aten.native_dropout.default: (1, 0)}
"""Positions of an op's outputs in the order in which its CUDA kernel allocates them, for ops that return another order.

Dropout allocates its mask first. Source: aten/src/ATen/native/cuda/Dropout.cu, `dropout_cuda`.
"""


def in_order_of_birth(op: torch._ops.OpOverload, out: Any) -> Any:
    """Returns the outputs of an op in the order in which its CUDA kernel allocates them."""
    order = _ALLOCATION_ORDER.get(op)
    return out if order is None else [out[position] for position in order]


_aten = torch.ops.aten
_READ_IN_PART = {_aten.gather, _aten.embedding, _aten.index_select, _aten.index, _aten.take, _aten.nll_loss_forward}
"""Ops that read only some elements of their first argument: one per element of the result, or per index (nll_loss)."""
_WRITTEN_IN_PART = {_aten.scatter_, _aten.scatter_add_, _aten.index_put_, _aten.index_add_, _aten.index_copy_}
"""Ops that write only some elements of their first argument: one per element of the source argument."""
_COPIES = {_aten.copy_, _aten._to_copy}


def changed_arguments(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[object]:
    """Returns the arguments that an op writes in place but does not return, such as the lists of foreach and fused ops.

    The schema of a fused optimizer op says that it writes the gradients. It does so only to unscale them, so they are
    included only if the call has a `grad_scale`.
    """
    if op._schema.returns:
        return []
    not_written = "grads" if op._schema.name.startswith("aten::_fused") and kwargs.get("grad_scale") is None else ""
    traits = op_traits(op)
    named = zip(traits.written, traits.written_arguments(args, kwargs), strict=True)
    return [value for (_, name), value in named if name != not_written]


def moved_bytes(op: torch._ops.OpOverload, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> int:
    """Returns the bytes that the op reads and writes. Sparse tensors count 0."""
    packet = op.overloadpacket
    if torch.Tag.inplace_view in op.tags:
        return 0
    if packet in _READ_IN_PART and len(read) > 1:
        picked = written if packet is not _aten.nll_loss_forward else read[1:]
        return sum(map(_nbytes, picked)) + sum(map(_nbytes, (*read[1:], *written)))
    if packet in _WRITTEN_IN_PART and len(read) > 1:
        return sum(map(_nbytes, read[1:])) + 2 * max(map(_nbytes, read[1:]))
    return sum(map(_nbytes, (*read, *written)))


def host_bytes(op: torch._ops.OpOverload, on_device: Sequence[torch.Tensor], tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes that a copy between device and host moves; 0 for all other ops.

    Args:
        on_device: tensors on the device that the op reads or writes. A copy has one.
        tensors: all tensors that the op reads or returns.
    """
    if op.overloadpacket not in _COPIES or not any(tensor.device.type == "cpu" and tensor.dim() for tensor in tensors):
        return 0
    return max(map(_nbytes, on_device))


def _nbytes(tensor: torch.Tensor) -> int:
    return sparse_tensors.stored_bytes(tensor) if tensor.is_sparse else tensor.numel() * tensor.itemsize


def dtype_name(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> str:
    """Returns the compute dtype of an op, such as 'bf16'.

    It is the dtype of the first floating point tensor that the op reads, or else writes, or else 'fp32'.
    """
    for tensor in (*read, *written):
        if tensor.is_floating_point():
            return _SHORT_NAMES.get(tensor.dtype, "fp32")
    return "fp32"
