"""Record an op so that it can run again: facts about the op, and references to its tensors (see `replay_tape.py`).

In-place ops and views make many tensors share one storage. So what an op reads, writes and creates is a set of
storages, and a tensor is referred to by its storage and its layout in that storage (`StorageView`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


@functools.cache
def traits_of(op):
    """Return facts about an op from its schema.

    1. True if the op only makes views: it creates no storage and writes to none.
    2. True if it only writes to arguments: it creates no storage.
    3. The arguments that it writes to, as (position, name).
    4. True if it may draw random numbers. Custom ops count as such, since their schema does not say.
    5. For a batch norm that updates its running statistics although its schema does not declare the write: the
       positions of running_mean, running_var and training. Empty for other ops.
    """
    arguments = [argument.name for argument in op._schema.arguments]
    aliases = [argument.alias_info for argument in op._schema.arguments]
    written = tuple((n, arguments[n]) for n, alias in enumerate(aliases) if alias is not None and alias.is_write)
    tensors = [result for result in op._schema.returns if "Tensor" in str(result.type)]
    is_alias = all(result.alias_info is not None for result in tensors)
    draws = torch.Tag.nondeterministic_seeded in op.tags or op.namespace not in ("aten", "prims")
    statistics = ("running_mean", "running_var", "training")
    is_norm = not written and "backward" not in op.__name__ and set(statistics) <= set(arguments)
    indices = tuple(map(arguments.index, statistics)) if is_norm else ()
    return is_alias and not written, is_alias and bool(written), written, draws, indices


def device_of(module, args, kwargs):
    """Return the device of a module's first parameter, or else of the first tensor among the arguments of its call."""
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in itertools.chain(module.parameters(), tensors)), torch.device("cpu"))


def random_numbers(args, kwargs, device):
    """Return functions that set and read the state of the random number generator of an op, and the present state."""
    leaves = tree_leaves((args, kwargs))
    for generator in leaves:
        if isinstance(generator, torch.Generator):
            return generator.set_state, generator.get_state, generator.get_state()
    if device.type == "cpu":
        return torch.set_rng_state, torch.get_rng_state, torch.get_rng_state()
    # With several devices of one type, each has its own generator: take that of the device of the op's arguments.
    devices = [leaf.device if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    device = next((d for d in devices if isinstance(d, torch.device) and d.type == device.type), device)
    module = torch.get_device_module(device)
    getter = functools.partial(module.get_rng_state, device)
    return functools.partial(module.set_rng_state, device=device), getter, getter()


@contextlib.contextmanager
def rng_state_restored(set_state, get_state, state):
    """Draw random numbers from `state` inside the context. After it, continue from the state before it."""
    before = get_state()
    set_state(state)
    try:
        yield
    finally:
        set_state(before)


class StorageView:
    """A reference to a tensor, by its storage, layout and dtype. It does not keep the tensor's memory alive."""

    def __init__(self, key, tensor):
        self.key, self.dtype = key, tensor.dtype
        self.layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()

    def of(self, tensor):
        """Return the tensor that this reference describes, as a view of the storage of `tensor`."""
        if tensor.dtype != self.dtype:
            size, stride, offset = self.layout
            empty = torch.empty(0, dtype=self.dtype, device=tensor.device)
            tensor = empty.set_(tensor.untyped_storage(), offset, size, stride)
        elif self.layout != (tensor.size(), tensor.stride(), tensor.storage_offset()):
            tensor = tensor.as_strided(*self.layout)
        tensor = torch._conj(tensor) if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor


def may_overlap(view, other):
    """Return False if it is certain that two views of one storage have no byte in common, such as two chunks."""
    if view.dtype != other.dtype:
        return True
    (sizes, strides, start), (other_sizes, other_strides, other_start) = view.layout, other.layout
    stop, other_stop = (
        offset + sum((n - 1) * stride for n, stride in zip(size, step, strict=True)) + 1
        for size, step, offset in (view.layout, other.layout)
    )
    if stop <= other_start or other_stop <= start:
        return False
    if strides != other_strides:
        return True
    # With equal strides, both are boxes in one grid, unless a row of one goes on in the next row of the grid.
    outer = None
    for stride, n, other_n in sorted(zip(strides, sizes, other_sizes, strict=True), reverse=True):
        if stride == 0:
            return True
        first, other_first = start // stride, other_start // stride
        start, other_start = start % stride, other_start % stride
        if outer is not None and max(first + n, other_first + other_n) * stride > outer:
            return True
        if first + n <= other_first or other_first + other_n <= first:
            return False
        outer = stride
    return True


class KeptTensor:
    """A saved tensor that stays in memory, as autograd would keep it."""

    def __init__(self, tensor):
        self.kept, self.version = tensor if tensor.grad_fn is None else tensor.detach(), version_of(tensor)

    def tensor(self):
        """Return the saved tensor. Raise `RuntimeError` if it was changed in place after it was saved.

        Autograd checks that itself, but not if there are saved tensor hooks.
        """
        refuse_change(self.version, version_of(self.kept))
        return self.kept


def refuse_change(before, now):
    if before != now:
        raise RuntimeError(
            "a tensor that backward needs was changed in place after the forward used it: change a copy of it instead, "
            "such as tensor.clone()"
        )


def is_parameter(tensor):
    """Return True for a parameter, and for every leaf that requires gradients.

    Autograd saves such a leaf itself. If the program sets its `.data` before backward, as quantization written by hand
    does, then backward reads the new data.
    """
    return isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def present_data(leaf, key, tensor):
    """Return what autograd would return for a saved leaf: the leaf itself, if its data was replaced in the meantime.

    `key` is the number of its storage when it was saved, `tensor` is the leaf as it was then. `leaf` is a weak
    reference, or None if the saved tensor was not a leaf. For example, a forward may set `.data` of a buffer for one op
    and set it back.
    """
    now = None if leaf is None else leaf()
    return tensor if now is None or key_of(now) == key else now


def key_of(tensor):
    """Return a number that identifies the tensor's storage, or None if storage and layout do not define the tensor.

    They do not for sparse, nested and quantized tensors, wrapper subclasses, and tensors without memory.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor):
        return None
    storage = tensor.untyped_storage()
    return storage._cdata if storage.nbytes() else None


def version_of(tensor):
    """Return how often the tensor was written to in place; 0 for an inference tensor, which does not count writes."""
    return 0 if tensor.is_inference() else tensor._version


def without_bits(tensor):
    """Return the tensor without its lazy conjugation or negation: the numbers as they are in memory."""
    tensor = torch._conj(tensor) if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def copy_of(tensor):
    """Copy the whole storage of a tensor, which may hold other tensors too, and return the tensor in the copy."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return whole.clone().as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def tensors_in(values):
    """Return the tensors in nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in tensors_in(value)] if isinstance(values, (list, tuple)) else []


def map_args(kind, function, values):
    """Apply a function to every value of type `kind` in nested lists, tuples and dicts; tuples become lists."""
    if isinstance(values, kind):
        return function(values)
    if isinstance(values, (list, tuple)):
        return [map_args(kind, function, value) for value in values]
    if isinstance(values, dict):
        return {name: map_args(kind, function, value) for name, value in values.items()}
    return values


class TapeEntry(NamedTuple):
    """A recorded op. It refers to tensors by the numbers of their storages (`key_of`)."""

    op: object
    args: list  # arguments of the op; a `StorageView` in place of each tensor
    kwargs: dict
    outputs: list  # storage numbers of the tensors that the op returned, in their order
    read: dict  # storage numbers that the op reads; dicts are in the order of insertion, sets in that of addresses
    created: dict
    changed: dict  # created or written to
    random: object  # how to draw the same random numbers again; None if the op draws none

    def run_again(self, values):
        """Run the op again on `values`, tensors by storage number.

        Return the tensors in the storages that the op creates or writes to, by storage number. Running statistics are
        not updated a second time: the op gets copies of them.
        """
        args, kwargs = map_args(StorageView, lambda view: view.of(values[view.key]), [self.args, self.kwargs])
        for number in traits_of(self.op)[-1][:-1]:
            args[number] = None if args[number] is None else args[number].clone()
        with contextlib.nullcontext() if self.random is None else rng_state_restored(*self.random):
            result = self.op(*args, **kwargs)
        pairs = zip(self.outputs, tensors_in(result), strict=True)
        return {key: without_bits(tensor) for key, tensor in pairs if key in self.changed}


class DeferredTensor:
    """Stands in for a saved tensor until backward asks for it."""

    def __init__(self, segment, part, tensor, view, writes):
        self.segment, self.part, self.view, self.writes = segment, part, view, writes
        self.leaf = weakref.ref(tensor) if tensor.is_leaf else None

    def tensor(self):
        return present_data(self.leaf, self.view.key, self.segment.value(self))

    def __del__(self):
        wanted = self.segment.wanted[self.part]
        wanted[self.view.key] -= 1
        if not wanted[self.view.key]:  # backward cannot ask for this storage any more: do not recompute it
            del wanted[self.view.key]


def halves(parts):
    """Return the middle one of `parts`, the middle one of the parts after it, and so on."""
    return {parts[len(parts) // 2], *halves(parts[len(parts) // 2 + 1 :])} if parts else set()


def leading_to(wanted, ops):
    """Return the ops that the wanted storages depend on, and a set of these storages and all that the ops read."""
    needed, chosen = set(wanted), []
    for entry in reversed(ops):
        if not needed.isdisjoint(entry.changed):
            needed.update(entry.read)
            chosen.append(entry)
    return chosen[::-1], needed
