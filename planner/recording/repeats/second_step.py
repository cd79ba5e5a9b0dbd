"""Puts the gradients of the first recorded step into the second one, instead of computing them again.

The second of two steps runs the same forwards and backwards as the first one if both begin in the same state: with the
same storages (apart from the optimizer state, which the first update makes), the same numbers and text in the
attributes of modules, the same known values in buffers, and the same random state of the host. Then the forwards and
backwards that were recorded in the first step are copied into the second one, and only the second update is run. It
differs from the first update because the optimizer state already exists.

The user's own code may depend on state that is not compared. So copies are made only for steps without such code, which
are the steps of transformers models that the planner has built from a config. `tests/zoo/test_second_steps.py` compares
recordings with copied gradients to recordings with computed gradients, for all models of `tests/zoo`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from planner.recording.module_state import host_random_state, plain_state
from planner.recording.recorder import Recorder
from planner.recording.step_graph import Call, Op


@runtime_checkable
class StepInParts(Protocol):
    """A training step whose gradients and update can be called separately."""

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """Runs all forwards and backwards of the step, and returns the loss."""
        ...

    def update(self) -> None:
        """Updates the parameters, and sets their gradients to None."""
        ...


@dataclasses.dataclass(frozen=True)
class _Position:
    """How far a recording has come."""

    tick: int
    ops: int
    calls: int
    writes: int
    storages: int

    @classmethod
    def of(cls, recorder: Recorder) -> _Position:
        table, calls = recorder.table, recorder.calls.all
        return cls(table.tick, len(recorder.ops), len(calls), len(recorder.writes), len(table.storages))


@dataclasses.dataclass(frozen=True)
class _Made:
    """A tensor that is alive when the gradients are known: the loss, or the gradient of a parameter."""

    parameter: torch.nn.Parameter | None
    """The parameter; None for the loss."""
    storage: int
    birth: int
    size: int
    """Number of elements for which the storage has memory."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def again(self) -> torch.Tensor:
        """Returns a new tensor like this one."""
        whole = torch.empty(self.size, dtype=self.dtype, device=self.device)
        return whole.as_strided(self.shape, self.stride, self.offset)


class StepWithRepeatedGradients:
    """Calls a step, and computes its gradients in the first call only, if those of the second call would be the same.

    Args:
        step: the step.
        recorder: the active recorder of the rehearsal, which makes a plain recording.
        model: a model without the user's own code. If it has hooks that run in backward, both calls compute gradients.
    """

    def __init__(self, step: StepInParts, recorder: Recorder, model: torch.nn.Module) -> None:
        self._step, self._recorder, self._model = step, recorder, model
        self._first: _Gradients | None = None
        self._has_hooks = _has_hooks_in_backward(model)

    def __call__(self, batch: Any) -> None:
        if self._first is None:
            self._first = _Gradients(self._recorder, self._state())
            loss = self._step.compute_gradients(batch)
            self._first.end(loss, self._model)
        elif not self._has_hooks and self._first.can_be_repeated(self._state()):
            loss = self._first.repeat()
        else:
            loss = self._step.compute_gradients(batch)
        self._step.update()
        del loss  # here, as the user's loop frees it after the update

    def _state(self) -> tuple[object, ...]:
        """Returns the state that the forwards may read, except the values of parameters, so that it can be compared."""
        values = [
            self._value_of_buffer(name, module, buffer)
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        return plain_state(self._model), host_random_state(), values

    def _value_of_buffer(self, name: str, module: torch.nn.Module, buffer: torch.Tensor) -> object:
        """Returns the values of a buffer if the rehearsal knows them, and they are no counter of a norm."""
        value = self._recorder.data_dependence.known.value(buffer)
        return None if value is None or _is_counter(name, module) else value.tolist()


class _Gradients:
    """The recorded forwards and backwards of a step, which can be repeated.

    Args:
        recorder: the recorder, before the first forward.
        state: the numbers and text that the step may read.
    """

    def __init__(self, recorder: Recorder, state: object) -> None:
        self._recorder, self._state = recorder, state
        self._step = recorder.step
        self._begin = self._end = _Position.of(recorder)
        self._alive_before = {*self._alive()}
        self._made: list[_Made] | None = None

    def end(self, loss: torch.Tensor, model: torch.nn.Module) -> None:
        """Ends the recorded part: `loss` and all gradients of `model` have been computed."""
        self._end, self._micro_batch = _Position.of(self._recorder), self._recorder.micro_batch
        born = {index: birth for index, birth in self._alive() if index >= self._begin.storages}
        gradients = [(each, each.grad) for each in model.parameters() if each.grad is not None]
        tensors: list[tuple[torch.nn.Parameter | None, torch.Tensor]] = [(None, loss), *gradients]
        reads_counter = _reads_counter(self._recorder, model, self._recorder.ops[self._begin.ops :])
        made = [_made(*pair, self._recorder.table.storage_of(pair[1]), born) for pair in tensors]
        storages = sorted(each.storage for each in made if each is not None)
        if not reads_counter and None not in made and storages == sorted(born):
            self._made = [each for each in made if each is not None]

    def can_be_repeated(self, state: object) -> bool:
        """True if forwards and backwards would now run as they did.

        Args:
            state: the numbers and text that the step may read now.
        """
        left = {*self._alive()}
        new = {index for index, _ in left - self._alive_before}
        return (
            self._made is not None
            and self._alive_before <= left
            and not any(self._begin.storages <= index < self._end.storages for index in new)
            and state == self._state
        )

    def repeat(self) -> torch.Tensor:
        """Adds a copy of the forwards and backwards to the recording, sets the gradients, and returns the loss."""
        assert self._made is not None
        recorder, table = self._recorder, self._recorder.table
        begin, end, now = self._begin, self._end, _Position.of(recorder)
        last_op = table.birth_op
        ticks, ops = now.tick - begin.tick, now.ops - begin.ops

        def storage(index: int) -> int:
            return index if index < begin.storages else index + now.storages - begin.storages

        for old in table.storages[begin.storages : end.storages]:
            lives = [(birth + ticks, death + ticks) for birth, death in old.lives if death <= end.tick]
            made_by = last_op if old.op is None or old.op < begin.ops else old.op + ops
            table.storages.append(dataclasses.replace(old, lives=lives, op=made_by))
        for old_op in recorder.ops[begin.ops : end.ops]:
            recorder.ops.append(self._moved_op(old_op, now, storage))
        for old_call in recorder.calls.all[begin.calls : end.calls]:
            recorder.calls.all.append(self._moved_call(old_call, now, storage))
        for tick, written, call in recorder.writes[begin.writes : end.writes]:
            recorder.writes.append((tick + ticks, storage(written), _plus(call, now.calls - begin.calls)))
        released = [tick + ticks for tick in table.cache_releases if begin.tick < tick <= end.tick]
        table.cache_releases.extend(released)
        with recorder.pause(), torch.no_grad():
            tensors = [each.again() for each in self._made]
        table.tick = end.tick + ticks
        for each, tensor in zip(self._made, tensors, strict=True):
            table.begins(tensor.untyped_storage(), storage(each.storage), each.birth + ticks)
            if each.parameter is not None:
                each.parameter.grad = tensor
        recorder.micro_batch, recorder.seen_backward = self._micro_batch, True
        recorder.forwards[recorder.step] = recorder.forwards[self._step]
        table.birth_op = len(recorder.ops) - 1
        return tensors[0]

    def _moved_op(self, op: Op, now: _Position, storage: Callable[[int], int]) -> Op:
        begin = self._begin
        return dataclasses.replace(
            op,
            tick=op.tick + now.tick - begin.tick,
            step=self._recorder.step,
            call=_plus(op.call, now.calls - begin.calls),
            forward_op=_plus(op.forward_op, now.ops - begin.ops),
            inputs=tuple(map(storage, op.inputs)),
            outputs=tuple(map(storage, op.outputs)),
            written=tuple(map(storage, op.written)),
        )

    def _moved_call(self, call: Call, now: _Position, storage: Callable[[int], int]) -> Call:
        ticks = now.tick - self._begin.tick
        return dataclasses.replace(
            call,
            parent=_plus(call.parent, now.calls - self._begin.calls),
            start=call.start + ticks,
            end=call.end + ticks,
            inputs=tuple(map(storage, call.inputs)),
            made_inputs=tuple(map(storage, call.made_inputs)),
        )

    def _alive(self) -> Iterator[tuple[int, int]]:
        """Yields the index and the birth of each storage that is alive now."""
        return ((index, birth) for index, birth, death in self._recorder.table.lives() if death is None)


def _made(
    parameter: torch.nn.Parameter | None, tensor: torch.Tensor, storage: int | None, born: dict[int, int]
) -> _Made | None:
    """Returns a description of a tensor; None if a new tensor like it would not have a storage like the tensor's.

    Args:
        storage: index of the tensor's storage.
        born: for each storage that the step has made and that is alive, the tick of its birth.
    """
    if type(tensor) is not FakeTensor or storage not in born or tensor.layout is not torch.strided:
        return None
    size, rest = divmod(tensor.untyped_storage().nbytes(), tensor.itemsize)
    if rest:
        return None
    place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    return _Made(parameter, storage, born[storage], size, *place, tensor.dtype, tensor.device)


def _has_hooks_in_backward(model: torch.nn.Module) -> bool:
    return any(module._backward_hooks or module._backward_pre_hooks for module in model.modules()) or any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in model.parameters()
    )


def _is_counter(name: str, module: torch.nn.Module) -> bool:
    """True if the buffer is the number of batches of a norm that counts them and does not use their number itself."""
    return name == "num_batches_tracked" and isinstance(module, _NormBase) and module.momentum is not None


def _reads_counter(recorder: Recorder, model: torch.nn.Module, ops: Sequence[Op]) -> bool:
    """True if one of the ops, or the model's Python code, read the number of batches of a norm."""
    counters = {
        recorder.table.storage_of(buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and _is_counter(name, module)
    }
    return not counters.isdisjoint(recorder.numbers_asked) or any(
        not counters.isdisjoint(op.inputs) for op in ops if op.name != "aten.add_.Tensor"
    )


def _plus(index: int | None, more: int) -> int | None:
    return None if index is None else index + more
