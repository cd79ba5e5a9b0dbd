"""Run a model without side effects: everything that a forward or a backward writes is restored afterwards.

The check of micro-batches runs on the user's model itself, because a copy would need its memory a second time. Two
things are restored:

- Tensors that existed before and that an op writes to. A `TorchDispatchMode` copies the bytes of their storage to the
  host before the first write, so that no other tensors are copied.
- Attributes and containers of the model and its loss function, which `object_snapshot` notes beforehand.

What is not restored: writes by code other than torch's ops, writes to sparse tensors, and effects of hooks outside of
the model. Hooks are called as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.recording.op_schema import op_traits
from planner.rewrite.accumulation_check.object_snapshot import ObjectSnapshot


class SideEffectGuard:
    """Restores a model and its loss function to the state that they have now, as often as `restoring` is used.

    Attributes:
        is_complete: False if the two hold too many objects for a snapshot. Some objects are then not restored.
        iterator: name of the type of an iterator that they hold, whose position is not restored; None if there is none.
        drew_on_host: True if generators of numpy or Python drew random numbers during the last use of `restoring`.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Callable | None = None) -> None:
        self._snapshot = ObjectSnapshot([model, loss_fn])
        self._cards = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
        self.is_complete = self._snapshot.is_complete
        self.iterator = self._snapshot.iterator
        self.drew_on_host = False

    @property
    def lost_iterator(self) -> str | None:
        """Name of the type of an iterator that has moved since this object was created, or may have; else None."""
        return self._snapshot.lost_iterator

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Context that restores everything at its end. Run the model, its backward and its loss function inside."""
        with contextlib.ExitStack() as stack:
            # The stack unwinds in reverse order: bytes of tensors, autocast cache, generators, objects.
            stack.callback(self._restore_objects)
            stack.enter_context(torch.random.fork_rng(list(self._cards)))
            stack.callback(torch.clear_autocast_cache)  # may hold weights that were cast under no_grad
            copies = _CopyOnWrite()
            stack.callback(copies.restore)
            with copies:
                yield

    def _restore_objects(self) -> None:
        self.drew_on_host = self._snapshot.restore()


class _CopyOnWrite(TorchDispatchMode):
    """Copies the storage of a tensor to the host before the first write, unless an op in this context created it."""

    def __init__(self) -> None:
        super().__init__()
        self._made_here: set[int | None] = set()
        """Keys of the storages that ops in this context created."""
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        traits = op_traits(op)
        if traits.writes:
            for tensor in tree_leaves(traits.written_arguments(args, kwargs)):
                self._copy(tensor)
        result = op(*args, **kwargs)
        if not traits.is_view:
            results = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
            storages = {_storage_key(leaf) for leaf in results} - self._made_here
            if storages:  # an op may return one of its arguments
                self._made_here |= storages - {_storage_key(leaf) for leaf in tree_leaves((args, kwargs))}
        return result

    def _copy(self, tensor: Any) -> None:
        key = _storage_key(tensor)
        if key is None or key in self._made_here or key in self._copies:
            return
        storage = tensor.untyped_storage()
        if not storage.data_ptr():  # a tensor that wraps others has no bytes of its own
            return
        self._copies[key] = storage, _bytes_of(storage).to("cpu", copy=True)

    def restore(self) -> None:
        """Write all copies back, into the storages that they were taken from."""
        with torch.no_grad():
            for storage, before in self._copies.values():
                now = _bytes_of(storage)  # it may have grown (`resize_`)
                if len(now) >= len(before):
                    now[: len(before)].copy_(before)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A view of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage_key(value: object) -> int | None:
    """Return a number that identifies the storage of a tensor; None for sparse tensors and for other objects."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return value.untyped_storage()._cdata
