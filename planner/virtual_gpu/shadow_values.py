"""Values that a rehearsal does know: small tensors carry a real twin on the host, computed by the same ops.

A fake tensor has a shape and no values. Yet models ask for some: how many tokens a mask keeps, the largest position,
how to split a tensor. Where such a value follows from shapes and constants alone, the same ops run beside on real CPU
tensors and the answer is true. What follows from the batch, from weights or from chance stays unknown, with a few
documented exceptions that are *assumed* (`ASSUMED_RANDOM`, `ASSUMED_FINITE`, `ASSUMED_CHOICES`, and masks and labels of
the batch): a twin remembers what it was assumed from, and whoever takes an answer from it is told.

What is tracked: integers and booleans up to `MOST_ELEMENTS`; floats on the host up to that, on the card up to
`MOST_FLOATS`. A tensor that holds one value everywhere (ones, zeros, a full mask) is known at any size.
A twin belongs to a storage, so views share it and in-place ops change it, as they do on the card.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

MOST_ELEMENTS = 2**16
MOST_FLOATS = 16
_MOST_BYTES = 8 * MOST_ELEMENTS

ASSUMED_RANDOM = "random numbers that decide something are all 0.5"
ASSUMED_DRAWS = "random choices (randperm, multinomial, randint) fall in order"
ASSUMED_FINITE = "all values are finite"
ASSUMED_CHOICES = "choices by value (top k, argmax) are spread evenly, so that experts are balanced"

ASSUMED_MASK = "masks of the batch are all true"
ASSUMED_LABELS = "no label of the batch is ignored"

_aten = torch.ops.aten

_RANDOM = {_aten.rand.default, _aten.rand_like.default, _aten.uniform.default, _aten.uniform_.default}
_DRAWS = {_aten.randperm.default, _aten.multinomial.default, _aten.randint.default, _aten.randint.low}
_CHOICES = {_aten.topk.default: 1, _aten.argmax.default: 0, _aten.max.dim: 1}
"""Ops that choose positions along a dimension by value, and which of their results holds the positions."""
_CONSTANTS = {
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
"""Ops whose result has one value everywhere, whatever their argument holds. None: it is the argument of this name:"""
_CONSTANT_ARGUMENTS = ("fill_value", "value")
_UNINITIALISED = {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default}
_UNINITIALISED |= {_aten.new_empty.default, _aten.new_empty_strided.default}
_ELEMENTWISE = {_aten._to_copy.default, _aten.clone.default, _aten.rsub.Scalar, _aten.floor_divide.default}
"""Ops that are elementwise, though not tagged so."""
_PICKS = {_aten.index.Tensor, _aten.index_select.default, _aten.gather.default, _aten.repeat.default}
_PICKS |= {_aten.upsample_nearest1d.default, _aten.upsample_nearest2d.default, _aten.flip.default, _aten.roll.default}
"""Ops whose result holds elements of their first argument and nothing else."""


class _ShadowValue:
    """What is known of a storage: all its bytes, or one value that every element has."""

    __slots__ = ("assumed", "storage", "value")

    def __init__(
        self,
        *,
        storage: torch.UntypedStorage | None = None,
        value: torch.Tensor | None = None,
        assumed: frozenset[str] = frozenset(),
    ) -> None:
        self.storage, self.value, self.assumed = storage, value, assumed

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor for a fake one on this storage; None if it reads the bytes as another type."""
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if self.value is not None:
            return self.value.expand(tensor.shape) if tensor.dtype == self.value.dtype else None
        real = torch.empty(0, dtype=tensor.dtype)
        return real.set_(self.storage, tensor.storage_offset(), tensor.shape, tensor.stride())


_NOTHING = _ShadowValue()
"""What an empty tensor holds is known."""


class ShadowValues:
    """The twins of one rehearsal."""

    def __init__(self) -> None:
        self._twins: dict[int, tuple[_ShadowValue, weakref.ref]] = {}

    # ---- asking -----------------------------------------------------------------------------------------------

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self._twin(tensor) is not None

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor, or None if it is not known. It must not be written to."""
        twin = self._twin(tensor)
        if twin is None:
            return None if isinstance(tensor, FakeTensor) else tensor
        with unset_fake_temporarily():
            return twin.of(tensor)

    def assumptions(self, tensors: Iterator[torch.Tensor]) -> frozenset[str]:
        """What the values of these tensors were assumed from."""
        return frozenset().union(*(twin.assumed for t in tensors if (twin := self._twin(t)) is not None))

    # ---- telling ----------------------------------------------------------------------------------------------

    def learn(self, tensor: torch.Tensor, real: torch.Tensor, assumed: frozenset[str] = frozenset()) -> None:
        """From now on the fake tensor's whole storage holds what `real` holds."""
        if real.numel() == 0:
            return
        untyped = tensor.untyped_storage()
        if untyped.nbytes() > _MOST_BYTES:
            self._forget(tensor)
            return
        with unset_fake_temporarily():
            first = real.as_strided((), ())
            if _covers_its_storage(tensor) and bool((real == first).all()):
                twin = _ShadowValue(value=first.clone(), assumed=assumed)
            else:
                twin = _ShadowValue(storage=torch.UntypedStorage(untyped.nbytes()), assumed=assumed)
                once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
                twin.of(tensor)[once].copy_(real[once])  # an expanded tensor is written once
        self._put(tensor, twin)

    def assume(self, tensor: torch.Tensor, value: bool | int | float, assumption: str) -> None:
        """From now on every element of the fake tensor's storage is taken to be `value`."""
        with unset_fake_temporarily():
            one = torch.tensor(value, dtype=tensor.dtype)
        self._put(tensor, _ShadowValue(value=one, assumed=frozenset((assumption,))))

    def twin(self, tensor: torch.Tensor) -> _ShadowValue | None:
        """What is known of the tensor's storage, for another storage that stands for the same memory (`take_over`)."""
        return self._twin(tensor)

    def take_over(self, tensor: torch.Tensor, twin: _ShadowValue | None) -> None:
        """From now on the tensor's storage holds what `twin` says."""
        if twin is not None:
            self._put(tensor, twin)

    # ---- following the ops ------------------------------------------------------------------------------------

    def follow(self, op: torch._ops.OpOverload, args: tuple, kwargs: dict, out: Any, written: list) -> None:
        """Run the op on twins too, if all that it reads is known; forget what it overwrites with unknown values.

        Args:
            out: what the op returned for the fake tensors.
            written: arguments that the op changes in place.
        """
        if op in _UNINITIALISED:
            return
        results = [tensor for tensor in tensors_in(out) if tensor.layout is torch.strided]
        if op.overloadpacket in _CONSTANTS and self._follow_constant(op, args, kwargs, results):
            return
        if op in _RANDOM:
            self._follow_random(results)
        elif op in _DRAWS:
            self._follow_draw(results[0], *self._draws_from(op, args))
        elif torch.Tag.nondeterministic_seeded in op.tags:
            self._forget_all(written)
        elif op in _CHOICES and args[0] not in self and args[0].is_floating_point():
            self._follow_choice(op, args, kwargs, out)
        elif op is _aten.isnan.default and args[0] not in self:
            self.assume(results[0], False, ASSUMED_FINITE)
        else:
            self._follow_known(op, args, kwargs, results, written)

    def compute(self, op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
        """What the op gives for the true values; None if one of them is not known, or the host has no such kernel."""
        with unset_fake_temporarily():
            known, (args, kwargs) = self._real((args, kwargs))
        return _computed(op, args, kwargs) if known else None

    def _follow_known(self, op: Any, args: tuple, kwargs: dict, results: list, written: list) -> None:
        targets = list(tensors_in(written))
        overwrites = op.overloadpacket is _aten.copy_
        twins = []
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, FakeTensor) and not (overwrites and tensor is targets[0]):
                twin = self._twin(tensor)
                if twin is None:
                    self._forget_all(targets)
                    return
                twins.append(twin)
        assumed = frozenset().union(*(twin.assumed for twin in twins))
        if targets:
            self._run_in_place(op, args, kwargs, targets, assumed, overwrites)
        elif op in _PICKS and twins and twins[0].value is not None and isinstance(args[0], FakeTensor):
            self._put(results[0], _ShadowValue(value=twins[0].value, assumed=assumed))
        elif op is _aten.cat.default and _are_alike(twins):
            with unset_fake_temporarily():
                value = twins[0].value.to(results[0].dtype)
            self._put(results[0], _ShadowValue(value=value, assumed=assumed))
        elif twins and _is_elementwise(op) and all(twin.value is not None for twin in twins):
            value = _computed(op, self._one_element(args), self._one_element(kwargs))
            if value is not None:
                with unset_fake_temporarily():
                    value = value.reshape(-1)[:1].reshape(())
                self._put(results[0], _ShadowValue(value=value, assumed=assumed))
        elif all(_is_tracked(tensor) for tensor in results):
            for fake, value in zip(results, tensors_in(self.compute(op, args, kwargs)), strict=False):
                if fake not in self:  # a result on the storage of an argument has its twin already
                    self.learn(fake, value, assumed)

    def _run_in_place(
        self, op: Any, args: tuple, kwargs: dict, targets: list, assumed: frozenset[str], overwrites: bool
    ) -> None:
        for target in targets:
            twin = self._twin(target) or (_ShadowValue() if overwrites and _covers_its_storage(target) else None)
            if twin is None or target.untyped_storage().nbytes() > _MOST_BYTES:
                self._forget_all(targets)
                return
            if twin.storage is None and target.numel():
                self._put(target, self._written_out(target, twin))
            self._twin(target).assumed |= assumed
        if self.compute(op, args, kwargs) is None:
            self._forget_all(targets)

    def _written_out(self, tensor: torch.Tensor, twin: _ShadowValue) -> _ShadowValue:
        """A twin with all bytes of the tensor's storage, instead of one value that stands for all."""
        with unset_fake_temporarily():
            storage = torch.UntypedStorage(tensor.untyped_storage().nbytes())
            if twin.value is not None:
                whole = torch.empty(0, dtype=twin.value.dtype).set_(storage)
                whole.fill_(twin.value)
        return _ShadowValue(storage=storage, assumed=twin.assumed)

    def _follow_constant(self, op: Any, args: tuple, kwargs: dict, results: list[torch.Tensor]) -> bool:
        """Whether the op made one value everywhere in a storage, which is then known."""
        value = _CONSTANTS[op.overloadpacket]
        if value is None:
            names = [argument.name for argument in op._schema.arguments]
            position = next(names.index(name) for name in _CONSTANT_ARGUMENTS if name in names)
            value = args[position] if position < len(args) else kwargs[names[position]]
        if isinstance(value, torch.Tensor) or not results or not _covers_its_storage(results[0]):
            return False
        with unset_fake_temporarily():
            self._put(results[0], _ShadowValue(value=torch.tensor(value, dtype=results[0].dtype)))
        return True

    def _follow_random(self, results: list[torch.Tensor]) -> None:
        for result in results:
            if result.is_floating_point():
                self.assume(result, 0.5, ASSUMED_RANDOM)

    def _draws_from(self, op: Any, args: tuple) -> tuple[int, int] | None:
        """The range [low, high) of what is drawn."""
        match op:
            case _aten.multinomial.default:
                return 0, args[0].shape[-1]
            case _aten.randint.low:
                return args[0], args[1]
            case _:
                return 0, args[0]

    def _follow_draw(self, result: torch.Tensor, low: int, high: int) -> None:
        if _is_tracked(result):
            with unset_fake_temporarily():
                real = (low + torch.arange(result.numel()) % (high - low)).reshape(result.shape).to(result.dtype)
            self.learn(result, real, frozenset((ASSUMED_DRAWS,)))

    def _follow_choice(self, op: Any, args: tuple, kwargs: dict, out: Any) -> None:
        positions = out[_CHOICES[op]] if isinstance(out, (tuple, list)) else out
        argument = {name.name: number for number, name in enumerate(op._schema.arguments)}["dim"]
        dim = kwargs.get("dim", args[argument] if len(args) > argument else (-1 if op is _aten.topk.default else None))
        if dim is None or not args[0].dim() or positions.numel() > MOST_ELEMENTS:
            return
        with unset_fake_temporarily():
            spread = torch.arange(positions.numel()) % args[0].shape[dim]
            if op is _aten.topk.default:
                moved = positions.movedim(dim, -1).shape
                spread = spread.reshape(moved).movedim(-1, dim)
            real = spread.reshape(positions.shape).to(positions.dtype)
        self.learn(positions, real, frozenset((ASSUMED_CHOICES,)))

    # ---- twins ------------------------------------------------------------------------------------------------

    def _twin(self, tensor: torch.Tensor) -> _ShadowValue | None:
        if tensor.layout is not torch.strided:
            return None
        if not tensor.numel():
            return _NOTHING
        found = self._twins.get(tensor.untyped_storage()._cdata)
        return found[0] if found else None

    def _put(self, tensor: torch.Tensor, twin: _ShadowValue) -> None:
        untyped = tensor.untyped_storage()
        pointer = untyped._cdata
        self._twins[pointer] = (twin, weakref.ref(untyped, lambda _: self._twins.pop(pointer, None)))

    def _forget(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            self._twins.pop(tensor.untyped_storage()._cdata, None)

    def _forget_all(self, tensors: list) -> None:
        for tensor in tensors_in(tensors):
            self._forget(tensor)

    def _real(self, value: Any) -> tuple[bool, Any]:
        """Whether all tensors in a nested value are known, and the same with real tensors."""
        if isinstance(value, FakeTensor):
            twin = self._twin(value)
            real = twin.of(value) if twin is not None else None
            return real is not None, real
        if isinstance(value, (list, tuple)):
            pairs = [self._real(item) for item in value]
            return all(known for known, _ in pairs), type(value)(item for _, item in pairs)
        if isinstance(value, dict):
            pairs = {name: self._real(item) for name, item in value.items()}
            return all(known for known, _ in pairs.values()), {name: item for name, (_, item) in pairs.items()}
        return True, value

    def _one_element(self, value: Any) -> Any:
        """A nested value with the one value of each uniform tensor in its place."""
        if isinstance(value, torch.Tensor):
            return self._twin(value).value if isinstance(value, FakeTensor) else value
        if isinstance(value, (list, tuple)):
            return type(value)(self._one_element(item) for item in value)
        if isinstance(value, dict):
            return {name: self._one_element(item) for name, item in value.items()}
        return value


def learn_buffer(known: ShadowValues, fake: torch.Tensor, real: torch.Tensor) -> None:
    """The values of a model's buffer, where there are any and they are of the kind that decides something."""
    if real.device.type == "cpu" and not real.is_floating_point() and not real.is_complex() and _is_tracked(real):
        known.learn(fake, real)


def assume_full(known: ShadowValues, name: str, tensor: torch.Tensor) -> None:
    """Take a mask of the batch to be all true, and its labels to be counted (1): sequences are full."""
    last = name.rsplit(".", 1)[-1].lower()
    if "mask" in name.lower():
        known.assume(tensor, 1, ASSUMED_MASK)
    elif "label" in last and not tensor.is_floating_point():
        known.assume(tensor, 1, ASSUMED_LABELS)


def _is_tracked(tensor: torch.Tensor) -> bool:
    """Whether all values of such a tensor are worth computing."""
    on_card = tensor.device.type != "cpu"
    most = MOST_FLOATS if on_card and tensor.is_floating_point() else MOST_ELEMENTS
    return tensor.layout is torch.strided and tensor.numel() <= most


def _computed(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """The op on real tensors; None where the host cannot do it (no kernel for a type, an assumed index too large)."""
    with unset_fake_temporarily():
        try:
            out = op(*args, **_on_host(kwargs))
        except (NotImplementedError, RuntimeError, IndexError):
            return None
    return () if out is None else out


def _are_alike(twins: list[_ShadowValue]) -> bool:
    """Whether all have the same one value everywhere."""
    with unset_fake_temporarily():
        return all(twin.value is not None and bool(twin.value == twins[0].value) for twin in twins)


def _is_elementwise(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags or op in _ELEMENTWISE


def _covers_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def _on_host(kwargs: dict) -> dict:
    return {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
