"""Values that a rehearsal has all the same: whole numbers that a model makes from nothing but numbers.

Positions, causal masks and the like start from `arange` or `ones`, not from the batch. The same ops, run beside on the
CPU, give their values, so that a model may look at them: transformers, for one, asks whether positions are those of
several packed sequences, and passes a mask to attention if they are. What depends on the batch stays unknown.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from planner.op_schema import traits_of

LARGEST_ELEMENTS = 1 << 16
"""Tensors with more elements are not followed."""

_WITHOUT_VALUES = ("empty", "new_empty")


class KnownValues:
    """Real twins of fake storages. Aliases share their storage and so their values."""

    def __init__(self) -> None:
        self._twins: dict[int, tuple[weakref.ref, torch.UntypedStorage]] = {}  # by fake storage pointer

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a fake tensor are known."""
        return self._twin(tensor) is not None

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values on the CPU; None if they are not known. Outside of any dispatch mode."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        twin = self._twin(tensor)
        if twin is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(twin, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _twin(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        if not self._twins or tensor.is_floating_point() or tensor.is_sparse:
            return None
        _, twin = self._twins.get(tensor.untyped_storage()._cdata, (None, None))
        return twin

    def follow(self, op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], out: object) -> None:
        """Run an op on the twins of its arguments, after it ran on fakes. Outside of any dispatch mode."""
        traits = traits_of(op)
        if traits.is_view or not (self._twins or _is_followed(out)):
            return
        if _is_followed(out) and _is_a_function_of_its_arguments(op):
            operands = [self.of(tensor) for tensor in _tensors((args, kwargs))]
            if all(operand is not None and operand.device.type == "cpu" for operand in operands):
                args, kwargs = tree_map_only(torch.Tensor, self.of, (args, kwargs))
                kwargs = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs
                values = op(*args, **kwargs)
                if not traits.writes:
                    self._learn(out, values)
                return
        for tensor in _tensors(traits.written_arguments(args, kwargs)):
            if isinstance(tensor, FakeTensor) and not tensor.is_sparse:
                self._twins.pop(tensor.untyped_storage()._cdata, None)

    def _learn(self, fake: torch.Tensor, values: torch.Tensor) -> None:
        twin = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(values).untyped_storage()
        storage = fake.untyped_storage()
        pointer = storage._cdata
        self._twins[pointer] = (weakref.ref(storage, lambda _: self._twins.pop(pointer, None)), twin)


def _is_followed(out: object) -> bool:
    return (
        isinstance(out, FakeTensor)
        and not out.dtype.is_floating_point
        and not out.dtype.is_complex
        and not out.is_sparse
        and 0 < out.numel() <= LARGEST_ELEMENTS
    )


def _is_a_function_of_its_arguments(op: torch._ops.OpOverload) -> bool:
    return (
        op.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op._schema.name.removeprefix("aten::").startswith(_WITHOUT_VALUES)
    )


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
