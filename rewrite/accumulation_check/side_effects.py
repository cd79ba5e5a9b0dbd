"""A look at a model that leaves no trace: what is written while it lasts is afterwards as it was.

Of every tensor that is older than the look and written by an op, the bytes are copied to the host before the first
write, and put back. So is what the model and its loss function hold (`held_state`). Not seen: what is written by other
code than torch's ops, or into sparse tensors, and how often hooks are called.
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
    """A model and its loss function, as they are now.

    Attributes:
        is_whole: whether they do not hold more objects than are noted.
        drew_on_host: whether numbers were drawn in the last look that are not torch's.
    """

    def __init__(self, model: torch.nn.Module, function: Callable | None = None) -> None:
        self._held = ObjectSnapshot([model, function])
        self._cards = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
        self.is_whole = self._held.is_whole
        self.drew_on_host = False

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Around forwards and backwards of the model, and calls of its loss function."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._give_back)
            stack.enter_context(torch.random.fork_rng(list(self._cards)))
            stack.callback(torch.clear_autocast_cache)  # of weights without gradients
            writes = _CopiesOfWritten()
            stack.callback(writes.restore)
            with writes:
                yield

    def _give_back(self) -> None:
        self.drew_on_host = self._held.restore()


class _CopiesOfWritten(TorchDispatchMode):
    """Copies what is written, unless an op made it meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        traits = op_traits(op)
        if traits.writes:
            for tensor in tree_leaves(traits.written_arguments(args, kwargs)):
                self._copy(tensor)
        result = op(*args, **kwargs)
        if not traits.is_view:
            made = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
            new = {_storage(leaf) for leaf in made} - self._made
            if new:
                self._made |= new - {_storage(leaf) for leaf in tree_leaves((args, kwargs))}
        return result

    def _copy(self, tensor: Any) -> None:
        key = _storage(tensor)
        if key is None or key in self._made or key in self._copies:
            return
        storage = tensor.untyped_storage()
        if not storage.data_ptr():  # of a tensor that is made of others
            return
        self._copies[key] = storage, _bytes_of(storage).to("cpu", copy=True)

    def restore(self) -> None:
        with torch.no_grad():
            for written, before in self._copies.values():
                whole = _bytes_of(written)  # it may have grown
                if len(whole) >= len(before):
                    whole[: len(before)].copy_(before)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return value.untyped_storage()._cdata
