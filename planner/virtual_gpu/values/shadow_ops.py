"""Tables and helpers for `shadow_values`: how the known values of an op's result are found from those of its inputs."""

from __future__ import annotations

import torch

ASSUMED_RANDOM = "random numbers that the code branches on are all 0.5"
ASSUMED_DRAWS = "randperm, multinomial and randint return their possible values in ascending order"
ASSUMED_FINITE = "all values are finite"
ASSUMED_CHOICES = (
    "positions chosen by value (topk, argmax) are spread evenly, as for experts that receive equal numbers of tokens"
)

ASSUMED_MASK = "all masks of the batch are true everywhere, so that sequences have full length"
ASSUMED_PADDING = "every sample of the batch has one position of padding, so that attention gets a mask"
ASSUMED_LONGEST = "all lengths of the batch are the longest of them"
ASSUMED_LABELS = "no label of the batch is ignored"
ASSUMED_VALUES = "every batch has the values of"
"""Followed by the name of a tensor of the batch that the user gave."""

_aten = torch.ops.aten

# These sets decide how the shadow of an op's result is found. An op that is in none of them is run on the shadows.
RANDOM = {_aten.rand.default, _aten.rand_like.default, _aten.uniform.default, _aten.uniform_.default}
DRAWS = {_aten.randperm.default, _aten.multinomial.default, _aten.randint.default, _aten.randint.low}
CHOICES = {_aten.topk.default: 1, _aten.argmax.default: 0, _aten.max.dim: 1}
"""Ops that choose positions along a dimension by value, mapped to the index of the output that has the positions."""
CONSTANTS = {
    _aten.zeros: 0,
    _aten.zeros_like: 0,
    _aten.new_zeros: 0,
    _aten.zero_: 0,
    _aten.ones: 1,
    _aten.ones_like: 1,
    _aten.new_ones: 1,
    _aten.full: None,
    _aten.full_like: None,
    _aten.new_full: None,
    _aten.fill_: None,
}
"""Ops whose result has one value everywhere, mapped to this value; None if an argument gives it."""
CONSTANT_ARGUMENTS = ("fill_value", "value")
"""Names of the arguments that give the value of an op in `CONSTANTS`."""
UNINITIALISED = {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default}
UNINITIALISED |= {_aten.new_empty.default, _aten.new_empty_strided.default}
ELEMENTWISE = {_aten._to_copy.default, _aten.clone.default, _aten.rsub.Scalar, _aten.floor_divide.default}
"""Elementwise ops to which torch has not given the tag `pointwise`."""
PICKS = {_aten.index.Tensor, _aten.index_select.default, _aten.gather.default, _aten.repeat.default}
PICKS |= {_aten.upsample_nearest1d.default, _aten.upsample_nearest2d.default, _aten.flip.default, _aten.roll.default}
PICKS |= {_aten.all.default, _aten.any.default}
"""Ops whose result has only elements of their first argument, if both have the same dtype."""
BY_ROWS = {_aten.cat.default, _aten.cumsum.default}
"""Ops that work along one dimension, their second argument. If it is not dimension 0, each row of the result depends
only on the same row of the arguments."""
PLACES = {_aten.scatter.value, _aten.scatter.src}
"""Ops that put elements at known positions, as a router of experts does. Their results are also known for floats."""


_MOST_READ = 2**30
"""Maximum number of elements of a tensor that an op reads on the host; reading them takes about a second. A tensor that
repeats one value (`expand`) can have any number of elements in a few bytes."""


def takes_long(arguments: object) -> bool:
    """True if an op on these real tensors would take long, although they take little memory."""
    return any(tensor.numel() > _MOST_READ for tensor in nested_tensors(arguments))


def nested_tensors(value: object) -> list[torch.Tensor]:
    """Returns the tensors in nested lists, tuples and dicts, in order."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: object, found: list[torch.Tensor]) -> None:
    """Appends the tensors of `value` to `found`. A list is quicker than a generator, and this runs for each op."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def is_elementwise(op: torch._ops.OpOverload) -> bool:
    """True if each element of the result depends only on the elements at the same position in the arguments."""
    return torch.Tag.pointwise in op.tags or op in ELEMENTWISE


def covers_its_storage(tensor: torch.Tensor) -> bool:
    """True if the tensor has as many bytes as its storage, so that it covers the whole storage."""
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def on_host(kwargs: dict) -> dict:
    """Returns the keyword arguments, with the CPU as `device` if there is a `device`."""
    return {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
