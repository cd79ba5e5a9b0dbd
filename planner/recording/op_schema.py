"""What an op's schema says: whether it is a view, and what it writes in place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import torch

from planner.workspaces import is_known
from planner.workspaces.registry import KernelCall, Layout

_SHORT_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpTraits:
    """What matters of an op's schema."""

    is_view: bool
    """Returns an alias of an argument and writes nothing: no kernel is launched."""
    written: tuple[tuple[int, str], ...]
    """Position and name of every argument that is written in place."""
    scratch_known: bool
    """Whether it is known what the op's CUDA kernel takes beside its outputs."""
    asks_values: bool
    """The shape of its result depends on values, or its result is a value."""

    @property
    def writes(self) -> bool:
        return bool(self.written)

    def written_arguments(self, args: tuple, kwargs: dict) -> list[object]:
        return [args[position] if position < len(args) else kwargs.get(name) for position, name in self.written]


_RUNNING_STATISTICS = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
"""Arguments that these ops write in training mode although their schema does not say so: their last two tensors."""
WRITE_STATISTICS = frozenset(f"{name.replace('::', '.')}.default" for name in _RUNNING_STATISTICS)


def uses_batch_statistics(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether the op normalises over samples, so that a part of a batch gives other results than the batch."""
    if "batch_norm" not in op._schema.name or "backward" in op._schema.name:
        return False
    names = [argument.name for argument in op._schema.arguments]
    training = next((name for name in ("training", "train") if name in names), None)
    if training is None:
        return False
    position = names.index(training)
    in_training = args[position] if position < len(args) else kwargs.get(training, False)
    return bool(in_training) and args[0].shape[0] > 1


_TAKE_NONE = frozenset({torch.Tag.pointwise, torch.Tag.inplace_view})


@functools.cache
def op_traits(op: torch._ops.OpOverload) -> OpTraits:
    schema = op._schema
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in _RUNNING_STATISTICS.get(schema.name, ())
    )
    is_view = any(result.alias_info is not None for result in schema.returns) and not written
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    known = is_view or not takes_tensors or not _TAKE_NONE.isdisjoint(op.tags) or is_known(str(op))
    asks_values = torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags
    return OpTraits(is_view=is_view, written=written, scratch_known=known, asks_values=asks_values)


def draws_random_numbers(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether the op moves a generator on; where it could drop out, only if it does."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given > 0
    return True


def kernel_call(op: torch._ops.OpOverload, args: tuple, kwargs: dict, out: object) -> KernelCall:
    """What a workspace formula may ask about a call."""
    given = {
        argument.name: args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        for position, argument in enumerate(op._schema.arguments)
    }
    results = out if isinstance(out, (tuple, list)) else (out,)
    return KernelCall(
        arguments={name: _as_data(value) for name, value in given.items()},
        outputs=tuple(_as_data(result) for result in results if isinstance(result, torch.Tensor)),
    )


def _as_data(value: object) -> object:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return Layout(shape=tuple(value.shape), stride=tuple(value.stride()), itemsize=value.itemsize, dtype=dtype)
    if isinstance(value, (list, tuple)):
        return tuple(_as_data(item) for item in value)
    return value if isinstance(value, (int, float, bool, str)) else None


_ORDER_OF_BIRTH = {torch.ops.aten.native_dropout.default: (1, 0)}
"""Results that the CUDA kernel allocates in another order than it returns them: the mask of dropout comes first.

Source: aten/src/ATen/native/cuda/Dropout.cu, `dropout_cuda`.
"""


def in_order_of_birth(op: torch._ops.OpOverload, out: object) -> object:
    """The results of an op in the order in which its kernel allocates them."""
    order = _ORDER_OF_BIRTH.get(op)
    return out if order is None else [out[place] for place in order]


_aten = torch.ops.aten
_READ_IN_PART = {_aten.gather, _aten.embedding, _aten.index_select, _aten.index, _aten.take, _aten.nll_loss_forward}
"""Ops that read as many elements of their first argument as they return, or as they have indices."""
_WRITTEN_IN_PART = {_aten.scatter_, _aten.scatter_add_, _aten.index_put_, _aten.index_add_, _aten.index_copy_}
"""Ops that write as many elements of their first argument as they are given."""


_COPIES = {_aten.copy_, _aten._to_copy}


def changed_arguments(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[object]:
    """What an op writes in place that it does not return: foreach, fused and other lists are arguments alone.

    A fused optimizer writes gradients only where it unscales them as well.
    """
    if op._schema.returns:
        return []
    kept = "grads" if op._schema.name.startswith("aten::_fused") and kwargs.get("grad_scale") is None else ""
    traits = op_traits(op)
    named = zip(traits.written, traits.written_arguments(args, kwargs), strict=True)
    return [value for (_, name), value in named if name != kept]


def moved_bytes(op: torch._ops.OpOverload, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> int:
    """Bytes that the op reads and writes; 0 for sparse tensors, which are counted as their parts."""
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
    """Bytes that the op copies between the device and the host; of its tensors, only one lies on the device then."""
    if op.overloadpacket not in _COPIES or not any(tensor.device.type == "cpu" and tensor.dim() for tensor in tensors):
        return 0
    return max(map(_nbytes, on_device))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize if not tensor.is_sparse else 0


def dtype_name(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> str:
    """The dtype that decides the rate: that of the first floating tensor read, else written, else 'fp32'."""
    for tensor in (*read, *written):
        if tensor.is_floating_point():
            return _SHORT_NAMES.get(tensor.dtype, "fp32")
    return "fp32"
