"""What an op's schema says: whether it is a view, and what it writes in place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

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
"""Arguments that these ops write in training mode although their schema does not say so."""


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


@functools.cache
def traits_of(op: torch._ops.OpOverload) -> OpTraits:
    schema = op._schema
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in _RUNNING_STATISTICS.get(schema.name, ())
    )
    aliases = any(result.alias_info is not None for result in schema.returns)
    asks_values = torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags
    return OpTraits(is_view=aliases and not written, written=written, asks_values=asks_values)


def dtype_name(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> str:
    """The dtype that decides the rate: that of the first floating tensor read, else written, else 'fp32'."""
    for tensor in (*read, *written):
        if tensor.is_floating_point():
            return _SHORT_NAMES.get(tensor.dtype, "fp32")
    return "fp32"
