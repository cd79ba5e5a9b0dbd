"""Ops and the tensors in their arguments, such that an op can run again: as part of the text of `replay_tape.py`."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


@functools.cache
def traits_of(op):
    """Of an op: whether it makes and writes nothing; which arguments it writes; whether it may draw random numbers.

    And where a batch norm that writes running statistics, and does not say so, has them and its switch for training.
    """
    arguments = [argument.name for argument in op._schema.arguments]
    aliases = [argument.alias_info for argument in op._schema.arguments]
    written = tuple((n, arguments[n]) for n, alias in enumerate(aliases) if alias is not None and alias.is_write)
    tensors = [result for result in op._schema.returns if "Tensor" in str(result.type)]
    passes = not written and all(result.alias_info is not None for result in tensors)
    draws = torch.Tag.nondeterministic_seeded in op.tags or op.namespace not in ("aten", "prims")
    statistics = ("running_mean", "running_var", "training")
    is_norm = not written and "backward" not in op.__name__ and set(statistics) <= set(arguments)
    return passes, written, draws, tuple(map(arguments.index, statistics)) if is_norm else ()


def random_numbers(args, kwargs, device):
    """How to draw the same random numbers again: the generator's setter and getter, and its state."""
    leaves = tree_leaves((args, kwargs))
    for generator in leaves:
        if isinstance(generator, torch.Generator):
            return generator.set_state, generator.get_state, generator.get_state()
    if device.type == "cpu":
        return torch.set_rng_state, torch.get_rng_state, torch.get_rng_state()
    places = [leaf.device if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    place = next((p for p in places if isinstance(p, torch.device) and p.type == device.type), device)
    module = torch.get_device_module(place)
    getter = functools.partial(module.get_rng_state, place)
    return functools.partial(module.set_rng_state, device=place), getter, getter()


@contextlib.contextmanager
def rng_state_restored(set_state, get_state, state):
    before = get_state()
    set_state(state)
    try:
        yield
    finally:
        set_state(before)


class StorageView:
    """A tensor by its place in a storage."""

    def __init__(self, key, tensor):
        self.key, self.dtype = key, tensor.dtype
        self.layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()

    def of(self, tensor):
        """The tensor of this layout in the storage of another one."""
        if tensor.dtype != self.dtype:
            size, stride, offset = self.layout
            empty = torch.empty(0, dtype=self.dtype, device=tensor.device)
            tensor = empty.set_(tensor.untyped_storage(), offset, size, stride)
        elif self.layout != (tensor.size(), tensor.stride(), tensor.storage_offset()):
            tensor = tensor.as_strided(*self.layout)
        tensor = torch._conj(tensor) if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor


class KeptTensor:
    """A saved tensor that is kept."""

    def __init__(self, tensor):
        self.held, self.version = tensor if tensor.grad_fn is None else tensor.detach(), version_of(tensor)

    def tensor(self):
        refuse_change(self.version, version_of(self.held))
        return self.held


def refuse_change(before, now):
    if before != now:
        raise RuntimeError("a tensor that is needed for the gradients was changed in place after it was used")


def key_of(tensor):
    """The number of a tensor's storage; None where a layout alone does not make the tensor."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor):
        return None
    storage = tensor.untyped_storage()
    return storage._cdata if storage.nbytes() else None


def version_of(tensor):
    return 0 if tensor.is_inference() else tensor._version


def without_bits(tensor):
    """What lies in memory, where a tensor is its conjugate or its negative."""
    tensor = torch._conj(tensor) if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def copy_of(tensor):
    """The same tensor in a copy of its whole storage: others lie there as well."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return whole.clone().as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def tensors_in(values):
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in tensors_in(value)] if isinstance(values, (list, tuple)) else []


def map_args(kind, function, values):
    """The same lists, tuples and dicts with a function of all that is of a kind."""
    if isinstance(values, kind):
        return function(values)
    if isinstance(values, (list, tuple)):
        return [map_args(kind, function, value) for value in values]
    if isinstance(values, dict):
        return {name: map_args(kind, function, value) for name, value in values.items()}
    return values
