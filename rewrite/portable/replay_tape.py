"""A forward that writes its ops down, and stretches of it that run again: `rules/segment_checkpoint.py`.

The text that runs here is the text that is emitted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from bisect import bisect
from collections import Counter
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.rewrite.portable.module_forward import detached
from planner.rewrite.portable.replay_ops import (
    KeptTensor,
    StorageView,
    copy_of,
    key_of,
    map_args,
    random_numbers,
    refuse_change,
    rng_state_restored,
    tensors_in,
    traits_of,
    version_of,
    without_bits,
)


def replayed(forward, stretches):
    """A forward that keeps nothing of its stretches but their starts for backward; unchanged without gradients.

    A stretch is (first op, op after the last, ops whose results are kept, ops at which it is divided). Ops are numbered
    as a call runs them: those that make a tensor on the module's device, or change one.
    """

    @functools.wraps(forward)
    def wrapper(module, /, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        device = next((tensor.device for tensor in itertools.chain(module.parameters(), tensors)), torch.device("cpu"))
        with (
            Tape(stretches, device) as tape,
            torch.autograd.graph.saved_tensors_hooks(tape.pack, lambda packed: packed.tensor()),
        ):
            return forward(module, *args, **kwargs)

    return wrapper


class Tape(TorchDispatchMode):
    """Writes down what a forward runs in its stretches."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # what makes compilers leave it out holds on to the arguments of its first call

    def __init__(self, stretches, device):
        super().__init__()
        self.device, self.ahead = device, list(reversed(stretches))
        self.count, self.sequence, self.is_paused = 0, None, False
        self.stop, self.kept, self.stops, self.stretch, self.stretches = 0, (), (), None, []
        self.statistics = set()
        self.known = {}  # a storage that is known here has its number for itself as long as its reference lives

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        passes, written_at, draws, statistics = traits_of(op)
        if passes or self.is_paused:
            return op(*args, **kwargs)
        stretch, written, noted = self.stretch_at(self.count), {}, None
        is_kept = self.count in self.kept and not written_at
        if written_at:
            written = self.storages([args[n] if n < len(args) else kwargs.get(name) for n, name in written_at])
            for key, tensor in written.items():
                for other in self.stretches:
                    other.before_write(key, tensor)
        if statistics and args[statistics[-1]]:  # it is training, and writes to them although it does not say so
            self.write_statistics([args[n] for n in statistics[:-1]])
        if stretch and not is_kept:
            random = random_numbers(args, kwargs, self.device) if draws else None
            noted = stretch.note(op, args, kwargs, written, random)
        given = set(map(key_of, tensors_in([*args, *kwargs.values()])))
        result = op(*args, **kwargs)
        made = {key: tensor for key, tensor in self.storages(result).items() if key not in given}
        if made or written:
            if stretch and is_kept:
                for key, tensor in made.items():
                    stretch.start_from(key, detached(tensor))
            elif stretch:
                stretch.add(noted, result, made, written, bisect(self.stops, self.count))
            self.count += 1
            self.sequence = torch.autograd._get_sequence_nr()
        return result

    def write_statistics(self, tensors):
        """Of a batch norm. What it computes does not depend on them; other ops may have read them, or will."""
        for tensor in tensors_in(tensors):
            key = key_of(tensor)
            self.know(key, tensor)
            self.statistics.add(key)
            for stretch in self.stretches:
                if key in stretch.starts:
                    stretch.before_write(key, tensor)

    def storages(self, values):
        """The tensors on the device, by their storages."""
        on_device = (tensor for tensor in tensors_in(values) if tensor.device.type == self.device.type)
        return {key: tensor for tensor in on_device for key in [key_of(tensor)] if key is not None}

    def know(self, key, tensor):
        if key not in self.known:
            self.known[key] = StorageWeakRef(tensor.untyped_storage())

    def __exit__(self, *raised):
        super().__exit__(*raised)
        if self.stretch:
            self.stretch.complete()
        self.stretch, self.stretches = None, []  # autograd holds on to `pack` as long as it keeps anything

    def stretch_at(self, number):
        """The stretch that op `number` is in, or None; those before it are complete."""
        if self.stretch and number >= self.stop:
            self.stretch.complete()
            self.stretch = None
        if not self.stretch and self.ahead and self.ahead[-1][0] <= number:
            _, self.stop, self.kept, self.stops = self.ahead.pop()
            self.stretch = Stretch(self, parts=len(self.stops) + 1)
            self.stretches.append(self.stretch)
            return self.stretch_at(number)
        return self.stretch

    @contextlib.contextmanager
    def pause(self):
        """For a backward that the forward itself runs."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def pack(self, tensor):
        """What autograd keeps: for the op that comes if its node is there already, else for the one that just ran."""
        comes = torch.autograd._get_sequence_nr() != self.sequence
        number = self.count if comes else self.count - 1
        stretch = self.stretch_at(number)
        return (stretch and stretch.saved(tensor, bisect(self.stops, number))) or KeptTensor(tensor)


class Stretch:
    """Ops that can run again, and what they read of what was there before them.

    A part of a stretch starts from tensors that parts before it make. Of these few are there at a time: on the way to a
    part, those at half of the parts that backward has yet to ask for are held, at half of the rest, and so on.
    """

    def __init__(self, tape, parts):
        self.tape, self.ops, self.starts, self.made, self.blank = tape, [[] for _ in range(parts)], {}, set(), set()
        self.wanted, self.writes, self.is_complete = [Counter() for _ in range(parts)], Counter(), False
        self.to_make, self.to_pass, self.crossing, self.on_the_way = [], [], [], {}
        self.results, self.pending, self.parts_run = {}, Counter(), set()

    def note(self, op, args, kwargs, written, random):
        """An op that is about to run."""
        self.blank -= written.keys()
        read, statistics = set(), traits_of(op)[-1]
        given = {n: args[n].detach() for n in statistics[:-1] if args[n] is not None} if statistics else {}
        args = [given[n] if n in given else self.pieces(value, read) for n, value in enumerate(args)]
        return TapeEntry(op, args, self.pieces(kwargs, read), [], read, set(), set(), random)

    def add(self, noted, result, made, written, part):
        """It has run, and made and written to these storages."""
        for key, tensor in made.items():
            self.tape.know(key, tensor)
            self.made.add(key)
        for key in written:
            self.writes[key] += 1
        if noted.op.__name__.startswith(("empty", "new_empty")):
            self.blank.update(made)
        noted.outputs.extend(key_of(tensor) for tensor in tensors_in(result))
        noted.made.update(made)
        noted.changed.update(made, written)
        self.ops[part].append(noted)

    def pieces(self, values, read):
        return map_args(torch.Tensor, lambda tensor: self.piece(tensor, read), values)

    def piece(self, tensor, read):
        """Stands for an argument. One that is still blank was written by nobody seen here: it is kept as it is."""
        key = key_of(tensor)
        if key is None:
            return tensor.detach() if tensor.requires_grad else tensor
        if key in self.tape.statistics:
            return tensor.detach().clone()
        if key in self.blank:
            self.made.discard(key)
        if key not in self.made and key not in self.starts:
            self.start_from(key, tensor)
        read.add(key)
        return StorageView(key, tensor)

    def start_from(self, key, tensor):
        """Hold what was there before, apart from the graph, with the number of times that it was written to."""
        self.tape.know(key, tensor)
        if tensor.requires_grad or tensor.dim():  # the numbers of Python that become tensors are more than their value
            tensor = detached(tensor)
        self.starts[key] = without_bits(tensor), version_of(tensor)

    def before_write(self, key, tensor):
        """What was there before, and is about to change, is copied."""
        if not self.is_complete and key not in self.made and key not in self.starts:
            self.start_from(key, tensor)
        if key in self.starts:
            self.start_from(key, copy_of(self.starts[key][0]))

    def saved(self, tensor, part):
        """Stands for a tensor that the stretch makes again; None for others."""
        key = key_of(tensor)
        if key not in self.made or key in self.blank:
            return None
        self.wanted[part][key] += 1
        return DeferredTensor(self, part, StorageView(key, tensor), self.writes[key])

    def complete(self):
        """Leave out ops that lead to no saved tensor, and let go of what only they need."""
        self.plan()
        read = set().union(*(noted.read for ops in self.to_make + self.to_pass for noted in ops))
        self.starts = {key: start for key, start in self.starts.items() if key in read}
        self.ops, self.is_complete = None, True

    def plan(self):
        """By part: ops that make what is saved in it, ops that make what later parts read, what comes from before."""
        self.to_make, self.to_pass, self.crossing, after = [], [], [], set()
        changed = [set().union(*(noted.changed for noted in ops)) for ops in self.ops]
        before = list(itertools.accumulate(changed, set.union, initial=set()))[:-1]
        for ops, wanted, changed_before in reversed(list(zip(self.ops, self.wanted, before, strict=True))):
            make, reads = leading_to(wanted, ops)
            on, also_reads = leading_to(after, ops)
            after = (reads | also_reads) & changed_before
            self.to_make.insert(0, make)
            self.to_pass.insert(0, on)
            self.crossing.insert(0, after)

    def value(self, later):
        """A tensor that was saved; the first one of a part that is asked for runs the part again."""
        key = later.part, later.piece.key
        refuse_change(later.writes, self.writes[later.piece.key])
        if key not in self.results:
            self.run(later.part)
        tensor = self.results[key]
        self.pending[key] -= 1
        if not self.pending[key]:
            del self.results[key]
        return later.piece.of(tensor)

    def run(self, part):
        if not self.is_complete:
            self.plan()
        at = max((number for number in self.on_the_way if number <= part), default=0)
        values = dict(self.on_the_way.get(at, {}))
        to_hold = halves([n for n in range(at + 1, part) if self.wanted[n] and n not in self.parts_run])
        self.parts_run.add(part)
        with self.tape.pause(), torch.enable_grad(), torch.autocast(self.tape.device.type, enabled=False):
            for number in range(at, part):
                self.again(self.to_pass[number], values, self.crossing[number + 1])
                if number + 1 in to_hold:
                    self.on_the_way[number + 1] = dict(values)
            self.on_the_way.pop(part, None)
            self.again(self.to_make[part], values, self.wanted[part].keys())
        for key, times in self.wanted[part].items():
            self.results[part, key], self.pending[part, key] = values[key], times

    def again(self, ops, values, to_keep):
        """Run ops on values by storage, which become those to keep."""
        last_use = {key: noted for noted in ops for key in noted.read | noted.changed}
        for key in values.keys() - last_use.keys() - to_keep:
            del values[key]
        changed = set().union(*(noted.changed - noted.made for noted in ops))
        for key in values.keys() & changed:
            values[key] = copy_of(values[key])
        for key in (last_use.keys() & self.starts.keys()) - values.keys():
            tensor, version = self.starts[key]
            refuse_change(version, version_of(tensor))
            values[key] = copy_of(tensor) if key in changed else tensor
        for noted in ops:
            values |= noted.again(values)
            for key in (noted.read | noted.changed) - to_keep:
                if last_use[key] is noted:
                    values.pop(key, None)


def halves(parts):
    """The part in the middle, the one in the middle of those after it, and so on."""
    return {parts[len(parts) // 2], *halves(parts[len(parts) // 2 + 1 :])} if parts else set()


def leading_to(wanted, ops):
    """Those ops that lead to storages, and all that they and the storages need."""
    needed, found = set(wanted), []
    for noted in reversed(ops):
        if not needed.isdisjoint(noted.changed):
            needed |= noted.read
            found.append(noted)
    return found[::-1], needed


class TapeEntry(NamedTuple):
    """An op that ran, with pieces in the place of tensors; by storage: what it returned, read, made, made or wrote."""

    op: object
    args: tuple
    kwargs: dict
    outputs: list
    read: set
    made: set
    changed: set
    random: object

    def again(self, values):
        """The storages that it makes or changes when it runs again; running statistics are left alone."""
        args, kwargs = map_args(StorageView, lambda piece: piece.of(values[piece.key]), [self.args, self.kwargs])
        for number in traits_of(self.op)[-1][:-1]:
            args[number] = None if args[number] is None else args[number].clone()
        with contextlib.nullcontext() if self.random is None else rng_state_restored(*self.random):
            result = self.op(*args, **kwargs)
        pairs = zip(self.outputs, tensors_in(result), strict=True)
        return {key: without_bits(tensor) for key, tensor in pairs if key in self.changed}


class DeferredTensor:
    """Stands for a saved tensor until backward asks for it."""

    def __init__(self, stretch, part, piece, writes):
        self.stretch, self.part, self.piece, self.writes = stretch, part, piece, writes

    def tensor(self):
        return self.stretch.value(self)

    def __del__(self):
        wanted = self.stretch.wanted[self.part]
        wanted[self.piece.key] -= 1
        if not wanted[self.piece.key]:  # nobody can ask for it any more
            del wanted[self.piece.key]
