"""A cache of the results of calls on fake tensors, in front of the cache of `FakeTensorMode`.

The key of an entry is an op, the metadata of its tensor arguments (device, dtype, shape, strides, offset) and the
values of its other arguments. For the ops that are cached, a fake result depends on nothing else. The entry says how to
create the result: it is one of the arguments, a view of an argument, or a new tensor with given metadata. So the second
layer of a model reuses the results of an equal first layer, and a rehearsal reuses those of earlier rehearsals.

The cache of `FakeTensorMode` does not suffice for two reasons. Its keys cover every kind of tensor and symbolic shapes,
and take longer to build than many calls take to run; the smaller keys of this cache suffice for plain strided tensors
of fixed shape. And it is lost when its process ends, but each rehearsal runs in a new child process. The entries of
this cache are sent back to the parent (`fresh`, `remember`), and children that are forked later start with them.
`FakeTensorMode` and its cache handle all other tensors and ops.

Time saved: `plan examples/roberta_84m --vram 6GiB --batch-size 64 --seq-len 128` takes 10.2, 10.4 and 10.4 CPU seconds
with this cache and 12.6, 12.6 and 12.1 without it (17 % less); the rehearsals in child processes alone take 5.5 s
instead of 7.5 s. The times are sums of user and system time of the process and all its children, after `import
planner.cli`, in three alternating runs each, on two CPU cores without a GPU; Python 3.11.7, torch 2.13.0+cpu,
transformers 5.23.0. "Without" means that `FakeTensorCache.__call__` is replaced by a function that only calls `run`.
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

from planner.virtual_gpu.values.shadow_ops import nested_tensors

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
"""Types of argument values that can be part of a key."""
_MORE_THAN_METADATA_TAGS = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
)
"""Ops with one of these tags are not cached: they depend on tensor values, or change the shape of an argument."""
_MORE_THAN_METADATA = ("aten::as_strided", "aten::set_", "aten::resize_", "aten::lift")
"""Ops whose names begin so are not cached: they depend on the size of a storage, or change it."""
_WRITES_ONLY = ("aten::_foreach_", "aten::_fused_")
"""Ops whose names begin so are cached if they return nothing: they change only tensor values."""


class _NotPlainError(Exception):
    """Raised for a tensor or value that cannot be part of a key or of a `_TensorRecipe`."""


@dataclasses.dataclass(frozen=True, slots=True)
class _TensorRecipe:
    """Describes how to create a returned tensor: it is an argument, a view of an argument, or a new tensor."""

    argument: int | None
    """Position of the argument that is returned or that has the same storage as the result; None for a new tensor."""
    is_argument: bool
    """True if the argument itself is returned. The following attributes are then not used."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Result:
    """The result of a call: nothing, one tensor, or a tuple or list of tensors."""

    kind: type
    """Type of the result: NoneType, FakeTensor, tuple or list."""
    tensors: tuple[_TensorRecipe | None, ...] = ()
    """The returned tensors; None stands for an element that is None."""


_results: dict[tuple, _Result | None] = {}
"""The table: results by key, from this process and its parent. None if `FakeTensorMode` must run the call."""
_MOST_VALUES = 2_000_000
"""Maximum number of values in all keys together, of about 100 bytes each. If there are more, the table is cleared."""


class FakeTensorCache:
    """Runs ops on the fake tensors of one `FakeTensorMode`.

    The metadata of a result is looked up if an op ran on arguments like these before, in any mode of this process.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def __call__(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """Returns the result of `func(*args, **kwargs)`: from the table if it has the call, else by `run()`."""
        if not _depends_on_metadata_only(func) or torch.is_inference_mode_enabled():
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
        try:
            if result.kind is FakeTensor:
                return self._create(result.tensors[0], args)
            return result.kind([self._create(recipe, args) for recipe in result.tensors])
        except _NotPlainError:
            return run()

    def _key(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple:
        """Returns the key of a call: the op, the default dtype, and the metadata or values of its arguments.

        Raises `_NotPlainError` if the call must not be cached.
        """
        key: list[Any] = [func, torch.get_default_dtype()]
        has_tensor = self._add(key, args)
        for name, value in kwargs.items():
            key.append(name)
            has_tensor |= self._add(key, (value,))
        if not has_tensor and kwargs.get("device") is None:
            raise _NotPlainError  # The device of the result depends on a default that the key does not hold.
        return tuple(key)

    def _add(self, key: list[Any], values: Iterable[Any]) -> bool:
        """Appends values to a key, with tensors replaced by their metadata. Returns True if one of them is a tensor."""
        # The length of each nested list is part of the key; the number of metadata fields of a tensor is fixed, and no
        # plain value has the type of its first field followed by a dtype, so that different calls have different keys.
        has_tensor = False
        for value in values:
            kind = type(value)
            if self._is_plain(value):
                key += (value.fake_device, value.dtype, value.shape, value.stride(), value.storage_offset())
                has_tensor = True
            elif kind in _PLAIN_VALUES:
                key += (kind, value)  # With its type, because 1, 1.0 and True are equal.
            elif kind in (list, tuple):
                key.append(len(value))
                has_tensor |= self._add(key, value)
            else:
                raise _NotPlainError
        return has_tensor

    def _describe(self, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Result | None:
        """Describes a result so that it can be created again; None if the description cannot be exact."""
        if out is None:
            return _Result(kind=type(None))
        results = out if type(out) in (tuple, list) else (out,)
        if any(tensor is not None and not self._is_plain(tensor) for tensor in results):
            return None
        # Results must share storages as they do in a real call: otherwise the memory curve would change.
        storages = [_storage(tensor) for tensor in results if tensor is not None]
        nested = [value for value in args if isinstance(value, (list, tuple))]
        unaddressable = {_storage(tensor) for tensor in nested_tensors((kwargs, nested))}
        if len(set(storages)) != len(storages) or not unaddressable.isdisjoint(storages):
            return None  # Two results share a storage, or one shares it with an argument that has no position.
        try:
            recipes = tuple(None if tensor is None else _recipe(tensor, args) for tensor in results)
            return _Result(kind=type(out), tensors=recipes)
        except _NotPlainError:
            return None

    def _is_plain(self, tensor: Any) -> bool:
        """True for a strided tensor of this fake mode that its metadata describes completely."""
        return (
            type(tensor) is FakeTensor
            and tensor.fake_mode is self._mode
            and tensor.constant is None
            and tensor.layout is torch.strided
            and tensor.dtype in _PLAIN_DTYPES
            and not tensor.is_neg()
            and not tensor.is_inference()
        )

    def _create(self, recipe: _TensorRecipe | None, args: Sequence[Any]) -> FakeTensor | None:
        """Creates a returned tensor, or takes it from the arguments.

        Raises `_NotPlainError` for a view of a storage whose memory was freed (`resize_(0)`): `set_` would enlarge it.
        """
        if recipe is None:
            return None
        if recipe.argument is None:
            return FakeTensor(self._mode, _meta(recipe), recipe.device)
        if recipe.is_argument:
            return args[recipe.argument]
        storage = args[recipe.argument].untyped_storage()
        if not storage.nbytes():
            raise _NotPlainError
        view = torch.empty(0, dtype=recipe.dtype, device="meta")
        view.set_(storage, recipe.offset, recipe.shape, recipe.stride)
        return FakeTensor(self._mode, view, recipe.device)


def known() -> int:
    """Returns the number of entries in the table."""
    return len(_results)


def fresh(*, since: int) -> bytes:
    """Returns the entries of the table after the first `since`, pickled for `remember` in another process."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(list(itertools.islice(_results.items(), since, None)))
    return buffer.getvalue()


def remember(calls: bytes) -> None:
    """Adds entries from a child process (`fresh`) to the table, so that children forked later have them."""
    _results.update(pickle.loads(calls))
    if sum(map(len, _results)) > _MOST_VALUES:
        _results.clear()


class _Pickler(pickle.Pickler):
    """Pickles ops by name, and the virtual GPU as `privateuseone`.

    This is the name of the device in the parent process, which has not installed the virtual GPU.
    """

    def reducer_override(self, value: Any) -> Any:
        """Returns (function, arguments) that create an op or the virtual GPU; `NotImplemented` for other values."""
        if isinstance(value, torch._ops.OpOverload):
            packet = value.overloadpacket
            return _op, (value.namespace, packet.__name__, value._overloadname)
        if isinstance(value, torch.device) and value.type == torch._C._get_privateuse1_backend_name():
            return torch.device, ("privateuseone", value.index)
        return NotImplemented


def _op(namespace: str, name: str, overload: str) -> torch._ops.OpOverload:
    """Returns the op with this name. Used when a pickle is read."""
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _recipe(out: FakeTensor, args: Sequence[Any]) -> _TensorRecipe:
    """Describes how to create a returned tensor from the positional arguments."""
    inputs = [(position, value) for position, value in enumerate(args) if isinstance(value, FakeTensor)]
    for position, value in inputs:
        if value is out:
            return _TensorRecipe(argument=position, is_argument=True)
    owners = [position for position, value in inputs if _storage(value) == _storage(out)]
    recipe = _TensorRecipe(
        argument=owners[0] if owners else None,
        is_argument=False,
        shape=tuple(out.shape),
        stride=out.stride(),
        offset=int(out.storage_offset()),
        dtype=out.dtype,
        device=out.fake_device,
    )
    if len(owners) > 1:
        raise _NotPlainError  # The result may be a view of any of them.
    if not owners and out.untyped_storage().nbytes() != _meta(recipe).untyped_storage().nbytes():
        raise _NotPlainError  # The new storage is larger than its tensor.
    return recipe


def _storage(tensor: torch.Tensor) -> int:
    """Returns a number that identifies a tensor's storage while the storage is alive."""
    return tensor.untyped_storage()._cdata


def _meta(recipe: _TensorRecipe) -> torch.Tensor:
    """Returns a new meta tensor with the shape, strides and dtype of the recipe."""
    return torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype, device="meta")


@functools.cache
def _depends_on_metadata_only(func: torch._ops.OpOverload) -> bool:
    """True if the metadata of the arguments is enough to know what a call returns, so that the call can be cached."""
    if func.namespace != "aten" or not isinstance(func, torch._ops.OpOverload):
        return False
    if not _MORE_THAN_METADATA_TAGS.isdisjoint(func.tags) or func._schema.name.startswith(_MORE_THAN_METADATA):
        return False
    return_types = [str(returned.type) for returned in func._schema.returns]
    if not return_types:
        return func._schema.name.startswith(_WRITES_ONLY)
    return all(return_type in ("Tensor", "Tensor[]") for return_type in return_types)
