"""What a call on virtual tensors returns, remembered: the second layer of a model asks what the first one asked.

Results on the virtual GPU depend on what the arguments look like, not on what they hold. `FakeTensorMode` remembers
results too, for every kind of tensor and with symbolic shapes; for plain strided tensors of fixed shape a smaller key
says as much and is made in a fraction of the time. Whatever is not plain is left to `FakeTensorMode`.

What one child process found out is handed back (`fresh`, `remember`), and those that are forked later begin with it.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from planner.virtual_gpu.shadow_values import tensors_in

_PLAIN_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
_PLAIN_VALUES = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_NOT_BY_LOOKS = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
)
_MORE_THAN_LOOKS = ("aten::as_strided", "aten::set_", "aten::resize_", "aten::lift")
"""These depend on the size of a storage, or change one."""
_WRITES_ONLY = ("aten::_foreach_", "aten::_fused_")
"""Return nothing, and leave everything looking as it did."""


class _NotPlainError(Exception):
    """A tensor or a value that a key or a description cannot stand for."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """A tensor as it was returned: an argument, a view of one, or new."""

    argument: int | None
    """Position of the argument that it is, or whose storage it shares."""
    is_argument: bool
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Result:
    """What a call returned: nothing, one tensor, or a tuple or list of them."""

    kind: type
    tensors: tuple[_Made | None, ...] = ()


_results: dict[tuple, _Result | None] = {}
"""Of calls by their keys, in this process and those that it was forked from."""
_MOST_VALUES = 2_000_000
"""In the keys that are kept, about 100 bytes each."""


class CallMemo:
    """Of one fake mode, which makes the tensors."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def __call__(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """The result of a call: made from what is remembered, or by `run`."""
        if not _goes_by_looks(func) or torch.is_inference_mode_enabled():
            return run()
        try:
            key = self._key(func, args, kwargs)
        except _NotPlainError:
            return run()
        if key not in _results:
            out = run()
            _results[key] = self._describe(out, args, kwargs)
            return out
        result = _results[key]
        if result is None:
            return run()
        if result.kind is type(None):
            return None
        if result.kind is FakeTensor:
            return self._make(result.tensors[0], args)
        return result.kind(self._make(each, args) for each in result.tensors)

    def _key(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple:
        key: list[Any] = [func, torch.get_default_dtype()]
        found = self._add(key, args)
        for name, value in kwargs.items():
            key.append(name)
            found |= self._add(key, (value,))
        if not found and kwargs.get("device") is None:
            raise _NotPlainError  # where its result lies depends on a default
        return tuple(key)

    def _add(self, key: list[Any], values: Iterable[Any]) -> bool:
        """Append what values look like; whether a tensor is among them."""
        found = False
        for value in values:
            kind = type(value)
            if self._is_plain(value):
                key += (value.fake_device, value.dtype, value.shape, value.stride(), value.storage_offset())
                found = True
            elif kind in _PLAIN_VALUES:
                key += (kind, value)
            elif kind in (list, tuple):
                key.append(len(value))
                found |= self._add(key, value)
            else:
                raise _NotPlainError
        return found

    def _describe(self, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Result | None:
        """What has to be known to make the result again; None if that is not enough."""
        if out is None:
            return _Result(kind=type(None))
        results = out if type(out) in (tuple, list) else (out,)
        if any(each is not None and not self._is_plain(each) for each in results):
            return None
        storages = [_storage(each) for each in results if each is not None]
        elsewhere = {_storage(each) for each in tensors_in((kwargs, [v for v in args if isinstance(v, (list, tuple))]))}
        if len(set(storages)) != len(storages) or not elsewhere.isdisjoint(storages):
            return None  # two results share a storage, or one is that of an argument without a place of its own
        try:
            made = tuple(None if each is None else _described(each, args) for each in results)
            return _Result(kind=type(out), tensors=made)
        except _NotPlainError:
            return None

    def _is_plain(self, tensor: Any) -> bool:
        return (
            type(tensor) is FakeTensor
            and tensor.fake_mode is self._mode
            and tensor.constant is None
            and tensor.layout is torch.strided
            and tensor.dtype in _PLAIN_DTYPES
            and not tensor.is_neg()
            and not tensor.is_inference()
        )

    def _make(self, made: _Made | None, args: Sequence[Any]) -> FakeTensor | None:
        if made is None:
            return None
        if made.is_argument:
            return args[made.argument]
        if made.argument is None:
            return FakeTensor(self._mode, _meta(made), made.device)
        view = torch.empty(0, dtype=made.dtype, device="meta")
        view.set_(args[made.argument].untyped_storage(), made.offset, made.shape, made.stride)
        return FakeTensor(self._mode, view, made.device)


def known() -> int:
    """How many calls are known."""
    return len(_results)


def fresh(*, since: int) -> bytes:
    """The calls that became known after so many, for `remember` in another process."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(list(itertools.islice(_results.items(), since, None)))
    return buffer.getvalue()


def remember(calls: bytes) -> None:
    """Take over what a child process found out, for children to come."""
    _results.update(pickle.loads(calls))
    if sum(map(len, _results)) > _MOST_VALUES:
        _results.clear()


class _Pickler(pickle.Pickler):
    """Knows ops by name, and the virtual GPU by the name that its device has where it is not installed."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            packet = value.overloadpacket
            return _op, (value.namespace, packet.__name__, value._overloadname)
        if isinstance(value, torch.device) and value.type == torch._C._get_privateuse1_backend_name():
            return torch.device, ("privateuseone", value.index)
        return NotImplemented


def _op(namespace: str, name: str, overload: str) -> torch._ops.OpOverload:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _described(out: FakeTensor, args: Sequence[Any]) -> _Made:
    tensors = [(at, each) for at, each in enumerate(args) if isinstance(each, FakeTensor)]
    for at, each in tensors:
        if each is out:
            return _Made(argument=at, is_argument=True)
    owners = [at for at, each in tensors if _storage(each) == _storage(out)]
    made = _Made(
        argument=owners[0] if owners else None,
        is_argument=False,
        shape=tuple(out.shape),
        stride=out.stride(),
        offset=out.storage_offset(),
        dtype=out.dtype,
        device=out.fake_device,
    )
    if len(owners) > 1:
        raise _NotPlainError  # which of them it is a view of cannot be told
    if not owners and out.untyped_storage().nbytes() != _meta(made).untyped_storage().nbytes():
        raise _NotPlainError  # a new storage that is larger than its tensor
    return made


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _meta(made: _Made) -> torch.Tensor:
    return torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")


@functools.cache
def _goes_by_looks(func: torch._ops.OpOverload) -> bool:
    """Whether the looks of its arguments decide what a call returns, views included."""
    if func.namespace != "aten" or not isinstance(func, torch._ops.OpOverload):
        return False
    if not _NOT_BY_LOOKS.isdisjoint(func.tags) or func._schema.name.startswith(_MORE_THAN_LOOKS):
        return False
    returned = [str(each.type) for each in func._schema.returns]
    if not returned:
        return func._schema.name.startswith(_WRITES_ONLY)
    return all(each in ("Tensor", "Tensor[]") for each in returned)
