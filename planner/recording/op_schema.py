"""Properties of an op from its schema: whether it is a view, what it writes in place, how many bytes it moves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

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
    """The properties of an op that do not depend on its arguments."""

    is_view: bool
    """True if the op returns an alias of an argument and writes nothing; it launches no kernel."""
    written: tuple[tuple[int, str], ...]
    """Position and name of every argument that is written in place."""
    scratch_known: bool
    """True if the scratch memory of the op's CUDA kernel is known."""
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
"""Arguments that these ops write in training mode, which their schema does not declare: their last two tensors."""
WRITE_STATISTICS = frozenset(f"{name.replace('::', '.')}.default" for name in _RUNNING_STATISTICS)
"""Names of these ops."""


def uses_batch_statistics(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """True if the op normalises over samples, so that a micro-batch gives different results than the batch."""
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
"""Tags of ops that take no scratch memory."""


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
    known = is_view or not takes_tensors or not _TAKE_NONE.isdisjoint(op.tags) or is_known(str(op))
    asks_values = torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags
    return OpTraits(is_view=is_view, written=written, scratch_known=known, asks_values=asks_values)


def draws_random_numbers(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """True if the op advances a random generator; an op with a dropout probability does so if it is above 0."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            dropout_p: Any = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return dropout_p > 0
    return True


def kernel_call(op: torch._ops.OpOverload, args: tuple, kwargs: dict, out: object) -> KernelCall:
    """Returns the arguments and outputs of a call as plain data, for the formula of its workspace."""
    arguments = {
        argument.name: args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        for position, argument in enumerate(op._schema.arguments)
    }
    results = out if isinstance(out, (tuple, list)) else (out,)
    return KernelCall(
        arguments={name: _as_data(value) for name, value in arguments.items()},
        outputs=tuple(_layout(result) for result in results if isinstance(result, torch.Tensor)),
    )


def _layout(tensor: torch.Tensor) -> Layout:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Layout(shape=tuple(tensor.shape), stride=tuple(tensor.stride()), itemsize=tensor.itemsize, dtype=dtype)


def _as_data(value: object) -> object:
    """Returns tensors as layouts, lists as tuples, plain values unchanged, and None for anything else."""
    if isinstance(value, torch.Tensor):
        return _layout(value)
    if isinstance(value, (list, tuple)):
        return tuple(_as_data(item) for item in value)
    return value if isinstance(value, (int, float, bool, str)) else None


_ORDER_OF_BIRTH = {torch.ops.aten.native_dropout.default: (1, 0)}
"""Outputs that the CUDA kernel allocates in another order than it returns them: the mask of dropout comes first.

Source: aten/src/ATen/native/cuda/Dropout.cu, `dropout_cuda`.
"""


def in_order_of_birth(op: torch._ops.OpOverload, out: Any) -> Any:
    """Returns the outputs of an op in the order in which its kernel allocates them."""
    order = _ORDER_OF_BIRTH.get(op)
    return out if order is None else [out[position] for position in order]


_aten = torch.ops.aten
_READ_IN_PART = {_aten.gather, _aten.embedding, _aten.index_select, _aten.index, _aten.take, _aten.nll_loss_forward}
"""Ops that read only as many elements of their first argument as they return, or as they have indices."""
_WRITTEN_IN_PART = {_aten.scatter_, _aten.scatter_add_, _aten.index_put_, _aten.index_add_, _aten.index_copy_}
"""Ops that write only as many elements of their first argument as the source argument has."""
_COPIES = {_aten.copy_, _aten._to_copy}


def changed_arguments(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[object]:
    """Returns the arguments that an op writes in place but does not return, such as the lists of foreach and fused ops.

    Gradients are included only if a fused optimizer also unscales them.
    """
    if op._schema.returns:
        return []
    kept = "grads" if op._schema.name.startswith("aten::_fused") and kwargs.get("grad_scale") is None else ""
    traits = op_traits(op)
    named = zip(traits.written, traits.written_arguments(args, kwargs), strict=True)
    return [value for (_, name), value in named if name != kept]


def moved_bytes(op: torch._ops.OpOverload, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> int:
    """Returns the bytes that the op reads and writes; 0 for sparse tensors, whose parts are counted instead."""
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
    """Returns the bytes that the op copies between device and host; such an op has one tensor on the device."""
    if op.overloadpacket not in _COPIES or not any(tensor.device.type == "cpu" and tensor.dim() for tensor in tensors):
        return 0
    return max(map(_nbytes, on_device))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize if not tensor.is_sparse else 0


def dtype_name(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> str:
    """Returns the compute dtype: that of the first floating point tensor read, else written, else 'fp32'."""
    for tensor in (*read, *written):
        if tensor.is_floating_point():
            return _SHORT_NAMES.get(tensor.dtype, "fp32")
    return "fp32"
