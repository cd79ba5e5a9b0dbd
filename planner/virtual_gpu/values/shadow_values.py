"""Values that a rehearsal knows: some fake tensors have a *shadow*, a real tensor on the host with their values.

A fake tensor has a shape but no values. Yet models ask for some values: how many tokens a mask keeps, the largest
position, how to split a tensor. If a value follows only from shapes and constants, the ops that compute it also run on
real CPU tensors, the shadows, so the answer is true. Values that depend on the batch, on weights or on random numbers
are unknown, with a few documented exceptions that are *assumed* (the constants `ASSUMED_...` in `shadow_ops`). Each
shadow has the set of assumptions on which it depends. If the model asks for its value, the plan notes them.

These tensors have a shadow: integers and booleans of up to `MOST_ELEMENTS` elements (`MOST_IN_LINE` if at most one
dimension is larger than 1), floats of the same sizes on the host or computed from the batch, other floats of up to
`MOST_FLOATS`, integers and booleans of any size whose rows are alike (positions of tokens), and tensors of any size
with one value everywhere (ones, zeros, a full mask). A shadow belongs to a storage, so views share it and in-place ops
change it, as on the card.

An op that reads an unknown value makes its result unknown, and an in-place op also makes its target unknown. To forget
a value is always safe: if the model asks for it, the rehearsal ends with an error that names the line.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from planner.virtual_gpu.values.shadow import NOTHING, ShadowValue, of_one_row, one_row, works_by_rows
from planner.virtual_gpu.values.shadow_ops import (
    ASSUMED_CHOICES,
    ASSUMED_DRAWS,
    ASSUMED_FINITE,
    ASSUMED_RANDOM,
    CHOICES,
    CONSTANT_ARGUMENTS,
    CONSTANTS,
    DRAWS,
    PICKS,
    PLACES,
    RANDOM,
    UNINITIALISED,
    covers_its_storage,
    is_elementwise,
    nested_tensors,
    on_host,
    takes_long,
)

_aten = torch.ops.aten

MOST_ELEMENTS = 2**19
"""Maximum number of elements of a tensor for which every value is computed."""
MOST_IN_LINE = 2**22
"""Maximum number if at most one dimension is larger than 1, as for the positions of the tokens of a long sequence."""
MOST_FLOATS = 16
"""Maximum number for a floating point tensor on the card whose values depend on no assumption.

Models ask for values that come from the batch, and not for those of constants such as tables of rotary embeddings."""


class ShadowValues:
    """The shadows of one rehearsal."""

    def __init__(self) -> None:
        self._shadows: dict[int, tuple[ShadowValue, weakref.ref]] = {}
        """(shadow, weak reference to the storage) by the storage's address, until the storage dies."""

    # ---- reading ----------------------------------------------------------------------------------------------

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self._shadow(tensor) is not None

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns a real tensor with the values; None if they are not known. The caller must not write to it."""
        shadow = self._shadow(tensor)
        if shadow is None:
            return None if isinstance(tensor, FakeTensor) else tensor
        with unset_fake_temporarily():
            return shadow.of(tensor)

    def assumptions(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """Returns the assumptions on which the known values of these tensors depend."""
        return _union(shadow for tensor in tensors if (shadow := self._shadow(tensor)) is not None)

    # ---- writing ----------------------------------------------------------------------------------------------

    def learn(self, tensor: torch.Tensor, real: torch.Tensor, assumed: frozenset[str] = frozenset()) -> None:
        """Sets the values of a fake tensor to those of `real`, which depend on the assumptions `assumed`."""
        if real.numel() == 0:
            return
        untyped = tensor.untyped_storage()
        if untyped.nbytes() > _most_bytes(tensor):
            self._forget(tensor)
            return
        with unset_fake_temporarily():
            if real._is_zerotensor():  # a tangent of forward-mode differentiation, which has no memory
                real = real.clone()
            first = real.as_strided((), ())
            if covers_its_storage(tensor) and bool((real == first).all()):
                shadow = ShadowValue(value=first.clone(), assumed=assumed)
            else:
                shadow = ShadowValue(storage=torch.UntypedStorage(untyped.nbytes()), assumed=assumed)
                target = shadow.of(tensor)
                assert target is not None  # None only for a shadow with one value.
                # Along an expanded dimension all positions are the same element, which `copy_` may write only once.
                once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
                target[once].copy_(real[once])
        self._put(tensor, shadow)

    def assume(self, tensor: torch.Tensor, value: bool | int | float, assumption: str) -> None:
        """Assumes that every element of the fake tensor's storage is `value`."""
        self._put(tensor, self._constant(value, tensor.dtype, frozenset((assumption,))))

    def shadow(self, tensor: torch.Tensor) -> ShadowValue | None:
        """Returns what is known about the values of a tensor's storage, for `take_over`; None if nothing is known."""
        return self._shadow(tensor)

    def take_over(self, tensor: torch.Tensor, shadow: ShadowValue | None) -> None:
        """Makes `shadow` the shadow of the tensor's storage, unless it is None."""
        if shadow is not None:
            self._put(tensor, shadow)

    # ---- following the ops ------------------------------------------------------------------------------------

    def follow(self, op: torch._ops.OpOverload, args: tuple, kwargs: dict, out: Any, written: list) -> None:
        """Updates the shadows after an op has run on fake tensors: sets those of its results, if they can be known.

        Args:
            out: result of the op on the fake tensors.
            written: arguments that the op changes in place; they lose their shadows if their new values are not known.
        """
        if op in UNINITIALISED:
            # Integers count as 0 until they are written in place, as in `empty_like(order).scatter_(...)`.
            if not out.is_floating_point() and not out.is_complex() and is_tracked(out) and covers_its_storage(out):
                self._put(out, self._constant(0, out.dtype))
            return
        # The order matters: a constant is known even if its arguments are not, a random result is unknown even if they
        # are known. All other ops are run on the values of their arguments.
        results = [tensor for tensor in nested_tensors(out) if tensor.layout is torch.strided]
        if op.overloadpacket in CONSTANTS and self._follow_constant(op, args, kwargs, results):
            return
        if op in RANDOM:
            self._follow_random(results)
        elif op in DRAWS:
            self._follow_draw(results[0], *self._draws_from(op, args))
        elif torch.Tag.nondeterministic_seeded in op.tags:
            self._forget_all(written)
        elif op in CHOICES and args[0] not in self and args[0].is_floating_point():
            self._follow_choice(op, args, kwargs, out)
        elif op is _aten.isnan.default and args[0] not in self:
            self.assume(results[0], False, ASSUMED_FINITE)
        else:
            self._follow_known(op, args, kwargs, results, written)

    def compute(self, op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
        """Returns the result of the op on the known values of its arguments, as real tensors.

        Returns None if a value is not known, or if the op cannot run on the host.
        """
        with unset_fake_temporarily():
            known, (args, kwargs) = self._real((args, kwargs))
        return _computed(op, args, kwargs) if known else None

    def _follow_known(self, op: Any, args: tuple, kwargs: dict, results: list, written: list) -> None:
        """Finds the shadows of an op's results from the shadows of its arguments."""
        targets = list(nested_tensors(written))
        overwrites = op.overloadpacket is _aten.copy_  # `copy_` does not read its target.
        shadows: list[ShadowValue] = []
        for tensor in nested_tensors((args, kwargs)):
            if isinstance(tensor, FakeTensor) and not (overwrites and tensor is targets[0]):
                shadow = self._shadow(tensor)
                if shadow is None:
                    self._forget_all(targets)
                    return
                shadows.append(shadow)
        assumed = _union(shadows)
        # The three cases after the first compute only one element, which stands for the whole tensor.
        if targets:
            self._run_in_place(op, args, kwargs, targets, assumed, overwrites)
        elif op in PICKS and isinstance(args[0], FakeTensor) and _has_value(shadows[0], results[0].dtype):
            self._put(results[0], ShadowValue(value=shadows[0].value, assumed=assumed))
        elif op is _aten.cat.default and (common := _common_value(shadows)) is not None:
            with unset_fake_temporarily():
                value = common.to(results[0].dtype)
            self._put(results[0], ShadowValue(value=value, assumed=assumed))
        elif shadows and is_elementwise(op) and all(shadow.value is not None for shadow in shadows):
            value = _computed(op, self._one_element(args), self._one_element(kwargs))
            if value is not None:
                with unset_fake_temporarily():
                    value = value.reshape(-1)[:1].reshape(())
                self._put(results[0], ShadowValue(value=value, assumed=assumed))
        elif all(is_tracked(t, floats=bool(assumed) or op in PLACES) for t in results):
            for fake, value in zip(results, nested_tensors(self.compute(op, args, kwargs)), strict=False):
                if fake not in self:  # A view of an argument shares its shadow already.
                    self.learn(fake, value, assumed)
        elif len(results) == 1 and not results[0].is_floating_point() and works_by_rows(op, args, results[0]):
            self._follow_repeated_rows(op, args, kwargs, results[0], assumed)

    def _follow_repeated_rows(self, op: Any, args: tuple, kwargs: dict, result: Any, assumed: frozenset[str]) -> None:
        """Sets the shadow of a large result whose rows are alike, because those of the arguments are."""
        with unset_fake_temporarily():
            known, real = self._real((args, kwargs))
            rows = one_row(real, result) if known else None
        if rows is None or not covers_its_storage(result) or result in self:
            return
        row = _computed(op, *rows)
        if isinstance(row, torch.Tensor) and row.numel() <= _most_elements(row):
            with unset_fake_temporarily():
                self._put(result, of_one_row(row, assumed))

    def _run_in_place(
        self, op: Any, args: tuple, kwargs: dict, targets: list, assumed: frozenset[str], overwrites: bool
    ) -> None:
        """Runs an in-place op on the shadows of its targets. The targets lose their shadows if this is not possible."""
        for target in targets:
            shadow = self._shadow(target) or (ShadowValue() if overwrites and covers_its_storage(target) else None)
            if shadow is None or shadow.row_bytes or target.untyped_storage().nbytes() > _most_bytes(target):
                self._forget_all(targets)
                return
            if shadow.storage is None and target.numel():
                shadow = self._written_out(target, shadow)
                self._put(target, shadow)
            shadow.assumed |= assumed
        if self.compute(op, args, kwargs) is None:
            self._forget_all(targets)

    def _written_out(self, tensor: torch.Tensor, shadow: ShadowValue) -> ShadowValue:
        """Converts a shadow with one value for all elements to one that has all bytes of the tensor's storage."""
        with unset_fake_temporarily():
            storage = torch.UntypedStorage(tensor.untyped_storage().nbytes())
            if shadow.value is not None:
                whole = torch.empty(0, dtype=shadow.value.dtype, device="cpu").set_(storage)
                whole.fill_(shadow.value)
        return ShadowValue(storage=storage, assumed=shadow.assumed)

    def _follow_constant(self, op: Any, args: tuple, kwargs: dict, results: list[torch.Tensor]) -> bool:
        """Sets the shadow of a constant op's result. Returns False if it cannot, as for a part of a storage."""
        value = CONSTANTS[op.overloadpacket]
        if value is None:
            names = [argument.name for argument in op._schema.arguments]
            position = next(names.index(name) for name in CONSTANT_ARGUMENTS if name in names)
            value = args[position] if position < len(args) else kwargs[names[position]]
        if isinstance(value, torch.Tensor) or not results or not covers_its_storage(results[0]):
            return False
        self._put(results[0], self._constant(value, results[0].dtype))
        return True

    def _constant(
        self, value: bool | int | float, dtype: torch.dtype, assumed: frozenset[str] = frozenset()
    ) -> ShadowValue:
        """Returns the shadow of a tensor that has one value everywhere."""
        with unset_fake_temporarily():
            return ShadowValue(value=torch.tensor(value, dtype=dtype, device="cpu"), assumed=assumed)

    def _follow_random(self, results: list[torch.Tensor]) -> None:
        """Assumes that uniform random numbers are 0.5 (stochastic depth, for example, compares them with a rate)."""
        for result in results:
            if result.is_floating_point():
                self.assume(result, 0.5, ASSUMED_RANDOM)

    def _draws_from(self, op: Any, args: tuple) -> tuple[int, int]:
        """Returns the range [low, high) from which an op of `DRAWS` takes its integers."""
        match op:
            case _aten.multinomial.default:
                return 0, args[0].shape[-1]
            case _aten.randint.low:
                return args[0], args[1]
            case _:
                return 0, args[0]

    def _follow_draw(self, result: torch.Tensor, low: int, high: int) -> None:
        """Assumes that an op that draws random integers returned low, low + 1, ..., high - 1, low, low + 1, ..."""
        if is_tracked(result):
            with unset_fake_temporarily():
                real = (
                    (low + torch.arange(result.numel(), device="cpu") % (high - low))
                    .reshape(result.shape)
                    .to(result.dtype)
                )
            self.learn(result, real, frozenset((ASSUMED_DRAWS,)))

    def _follow_choice(self, op: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Assumes that positions chosen by value (`CHOICES`) are 0, 1, 2, ... and, after the last position, 0 again."""
        positions = out[CHOICES[op]] if isinstance(out, (tuple, list)) else out
        argument = {name.name: number for number, name in enumerate(op._schema.arguments)}["dim"]
        dim = kwargs.get("dim", args[argument] if len(args) > argument else (-1 if op is _aten.topk.default else None))
        if dim is None or not args[0].dim() or positions.numel() > _most_elements(positions):
            return
        with unset_fake_temporarily():
            spread = torch.arange(positions.numel(), device="cpu") % args[0].shape[dim]
            if op is _aten.topk.default:
                moved = positions.movedim(dim, -1).shape
                spread = spread.reshape(moved).movedim(-1, dim)
            real = spread.reshape(positions.shape).to(positions.dtype)
        self.learn(positions, real, frozenset((ASSUMED_CHOICES,)))

    # ---- the table of shadows -----------------------------------------------------------------------------------

    def _shadow(self, tensor: torch.Tensor) -> ShadowValue | None:
        """Returns the shadow of a tensor's storage; None if its values are not known."""
        if tensor.layout is not torch.strided:
            return None
        if not tensor.numel():
            return NOTHING
        entry = self._shadows.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else None

    def _put(self, tensor: torch.Tensor, shadow: ShadowValue) -> None:
        """Makes `shadow` the shadow of a tensor's storage until the storage dies."""
        untyped = tensor.untyped_storage()
        pointer = untyped._cdata
        self._shadows[pointer] = (shadow, weakref.ref(untyped, lambda _: self._shadows.pop(pointer, None)))

    def _forget(self, tensor: torch.Tensor) -> None:
        """Forgets the known values (the shadow) of a tensor's storage."""
        if tensor.layout is torch.strided:
            self._shadows.pop(tensor.untyped_storage()._cdata, None)

    def _forget_all(self, tensors: list) -> None:
        """Removes the shadows of all tensors in a nested list."""
        for tensor in nested_tensors(tensors):
            self._forget(tensor)

    def _real(self, value: Any) -> tuple[bool, Any]:
        """Returns (True if all tensors in a nested value are known, the nested value with real tensors instead)."""
        if isinstance(value, FakeTensor):
            shadow = self._shadow(value)
            real = shadow.of(value) if shadow is not None else None
            return real is not None, real
        if isinstance(value, (list, tuple)):
            items = [self._real(item) for item in value]
            return all(known for known, _ in items), type(value)(item for _, item in items)
        if isinstance(value, dict):
            entries = {name: self._real(item) for name, item in value.items()}
            return all(known for known, _ in entries.values()), {name: item for name, (_, item) in entries.items()}
        return True, value

    def _one_element(self, value: Any) -> Any:
        """Returns a nested value in which each tensor is replaced by the value that all its elements have."""
        if isinstance(value, FakeTensor):
            shadow = self._shadow(value)
            assert shadow is not None  # The caller has checked that all values are known.
            return shadow.value
        if isinstance(value, (list, tuple)):
            return type(value)(self._one_element(item) for item in value)
        if isinstance(value, dict):
            return {name: self._one_element(item) for name, item in value.items()}
        return value


def is_tracked(tensor: torch.Tensor, *, floats: bool = False) -> bool:
    """True if a tensor is small enough to compute every value of it.

    Args:
        floats: True if floating point tensors on the card have the same limit as integers.
    """
    few_floats = tensor.device.type != "cpu" and tensor.is_floating_point() and not floats
    return tensor.layout is torch.strided and tensor.numel() <= (MOST_FLOATS if few_floats else _most_elements(tensor))


def _most_elements(tensor: torch.Tensor) -> int:
    return MOST_IN_LINE if max(tensor.shape, default=1) == tensor.numel() else MOST_ELEMENTS


def _most_bytes(tensor: torch.Tensor) -> int:
    return 8 * (_most_elements(tensor) if covers_its_storage(tensor) else MOST_ELEMENTS)


def _computed(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Returns the result of the op on real tensors; an empty tuple if the op returns nothing.

    Returns None if it takes long, or fails on the host: it may have no kernel for a dtype, or an index is too large.
    """
    with unset_fake_temporarily():
        if takes_long((args, kwargs)):
            return None
        try:
            out = op(*args, **on_host(kwargs))
        except (NotImplementedError, RuntimeError, IndexError):  # reasons: see the docstring
            return None
    return () if out is None else out


def _has_value(shadow: ShadowValue, dtype: torch.dtype) -> bool:
    """True if all elements of a storage have one known value of this dtype."""
    return shadow.value is not None and shadow.value.dtype == dtype


def _common_value(shadows: list[ShadowValue]) -> torch.Tensor | None:
    """Returns the value that all elements of all shadows have; None if there is no such value."""
    values = [shadow.value for shadow in shadows]
    with unset_fake_temporarily():
        same = all(value is not None and bool(value == values[0]) for value in values)
    return values[0] if same else None


def _union(shadows: Iterable[ShadowValue]) -> frozenset[str]:
    """Returns the union of the assumptions of all shadows."""
    assumed: frozenset[str] = frozenset()
    return assumed.union(*(shadow.assumed for shadow in shadows))
