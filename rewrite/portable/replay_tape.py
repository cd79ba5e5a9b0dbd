"""Recompute segments of a forward op by op: the mechanism behind `rewrite/rules/segment_checkpoint.py`.

`torch.utils.checkpoint` recomputes a function: it keeps the arguments and calls the Python code again. That needs a
function, and a long forward written in one piece has none for its parts. Here the forward runs once, under a dispatch
mode (`Tape`) that records the ops of each segment, and saved tensor hooks that replace each tensor which autograd
saves by a `DeferredTensor`. When backward asks for the first saved tensor of a segment, the recorded ops that lead to
its saved tensors run again (`Segment`).

1. Recording. The state that ops act on is a set of storages, since views and in-place ops let many tensors share one.
   For each op the tape records which storages it reads, creates and writes. A storage that a segment reads but did not
   create is one of its *starts*: it is kept, and copied before something overwrites it.
2. Pruning. When a segment ends, ops that lead to no saved tensor are dropped (dead code elimination), and with them
   the starts that only they read.
3. Recomputing. Ops run again on the same values, below autograd and autocast, with the state that the random number
   generator had; each value is released after its last use.

A segment can be divided into parts, so that only the saved tensors of one part are in memory at a time. A part reads
tensors that earlier parts create, so these parts have to run first. Running all earlier parts again for each of n parts
would take O(n^2) op runs; keeping the state at the start of every part would take O(n) memory. Instead, states are kept
by recursive bisection, which takes O(n log n) op runs and O(log n) states (Griewank, Achieving logarithmic growth of
temporal and spatial complexity in reverse automatic differentiation, 1992).

The gradients have the same bits as without recomputing, if the ops are deterministic. Not seen, and therefore not
recomputed: writes that do not go through the dispatcher, such as a kernel launched by hand on a tensor that already
has contents. (A tensor from `empty` that no recorded op has filled when it is read is taken to be filled by such a
kernel, and kept.) If a start is changed in place after the forward, backward raises a RuntimeError.

The classes and functions are emitted: the text that runs here is the text that is emitted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from bisect import bisect
from collections import Counter, defaultdict
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from planner.rewrite.portable.module_forward import detached
from planner.rewrite.portable.replay_ops import (
    DeferredTensor,
    KeptTensor,
    StorageView,
    TapeEntry,
    copy_of,
    device_of,
    halves,
    is_parameter,
    key_of,
    leading_to,
    map_args,
    may_overlap,
    random_numbers,
    refuse_change,
    tensors_in,
    traits_of,
    version_of,
    without_bits,
)


def replayed(forward, segments):
    """Return a forward that recomputes segments of its ops in backward, instead of keeping their saved tensors.

    A segment is (first op, op after the last, ops whose results are kept, ops before which the segment is divided).
    Ops are numbered in the order in which a call runs them; only ops that create a tensor on the module's device or
    write to one are counted. If gradients are disabled, the forward runs as before. `torch.compile` does not trace it.
    """

    @torch.compiler.disable
    @functools.wraps(forward)
    def wrapper(module, /, *args, **kwargs):
        if not torch.is_grad_enabled() and not Segment.with_norms:
            return forward(module, *args, **kwargs)
        with (
            Tape(segments if torch.is_grad_enabled() else (), device_of(module, args, kwargs)) as tape,
            torch.autograd.graph.saved_tensors_hooks(tape.pack, lambda packed: packed.tensor()),
        ):
            return forward(module, *args, **kwargs)

    return wrapper


class Tape(TorchDispatchMode):
    """Records the ops that a forward runs in its segments, so that backward can run them again."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # the wrapper that hides a mode from torch.compile keeps the arguments of its first call alive

    def __init__(self, segments, device):
        super().__init__()
        self.device, self.is_paused = device, False
        self.outer = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Tape)]
        self.upcoming = list(reversed(segments))  # the next segment is the last of the list
        self.segment, self.segments = None, []  # the segment that is being recorded, and all segments that were begun
        self.segment_stop, self.kept_ops, self.split_points = 0, (), ()  # of the segment that is being recorded
        self.count = 0  # number of ops so far
        self.sequence = None  # autograd's sequence number after the latest op
        self.statistics = set()  # storages of running statistics that a batch norm has updated
        self.known = {}  # storage number -> weak reference; while this exists, no other storage gets the number

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        only_views, only_writes, written_at, draws, statistics = traits_of(op)
        if only_views or self.is_paused:
            return op(*args, **kwargs)
        segment, targets, written, entry = self.segment_at(self.count), [], {}, None
        is_kept = self.count in self.kept_ops and not written_at
        # Before the op runs: segments copy the tensors that they will need and that the op is about to overwrite.
        if written_at:
            targets = [args[n] if n < len(args) else kwargs.get(name) for n, name in written_at]
            written = self.storages(targets)
            for key, tensor in written.items():
                for other in self.segments:
                    other.before_write(key, tensor)
        if statistics and args[statistics[-1]]:  # in training a batch norm writes to them without declaring it
            self.write_statistics([args[n] for n in statistics[:-1]])
        is_outside = only_writes and segment and segment.is_outside(written)
        if segment and not is_kept and not is_outside:
            random = random_numbers(args, kwargs, self.device) if draws else None
            entry = segment.record(op, args, kwargs, written, random)
        keys_before = set(map(key_of, tensors_in([*args, *kwargs.values()])))
        result = op(*args, **kwargs)
        # After it has run: the storages that it created are kept, or are recorded as results that it can recompute.
        created = {key: tensor for key, tensor in self.storages(result).items() if key not in keys_before}
        if created or written:
            if segment and is_kept:
                for key, tensor in created.items():
                    segment.start_from(key, detached(tensor))
            elif entry:
                segment.add(entry, result, created, written, targets, bisect(self.split_points, self.count))
            self.count += 1
            self.sequence = torch.autograd._get_sequence_nr()
        return result

    def write_statistics(self, tensors):
        """Copy running statistics that a segment has read, because a batch norm is about to update them.

        In training the output of the norm does not depend on running statistics, but other ops may read them, and the
        norm itself in an earlier call of the forward in evaluation mode.
        """
        for tensor in tensors_in(tensors):
            key = key_of(tensor)
            self.know(key, tensor)
            self.statistics.add(key)
            for segment in (*self.segments, *Segment.with_norms):
                if key in segment.starts:
                    segment.before_write(key, tensor)

    def storages(self, values):
        """Return the tensors among `values` that are on the device, by storage number."""
        on_device = (tensor for tensor in tensors_in(values) if tensor.device.type == self.device.type)
        return {key: tensor for tensor in on_device for key in [key_of(tensor)] if key is not None}

    def know(self, key, tensor):
        """Hold a weak reference to the tensor's storage, so that no other storage gets its number."""
        if key not in self.known:
            self.known[key] = StorageWeakRef(tensor.untyped_storage())

    def __exit__(self, *raised):
        super().__exit__(*raised)
        if self.segment:
            self.segment.complete()
        self.segment, self.segments = None, []  # autograd keeps `pack`, and so this tape, alive until backward is done

    def segment_at(self, number):
        """Return the segment that contains op `number`, or None. If a segment ended before this op, complete it."""
        if self.segment and number >= self.segment_stop:
            self.segment.complete()
            self.segment = None
        if not self.segment and self.upcoming and self.upcoming[-1][0] <= number:
            _, self.segment_stop, self.kept_ops, self.split_points = self.upcoming.pop()
            self.segment = Segment(self, parts=len(self.split_points) + 1)
            self.segments.append(self.segment)
            return self.segment_at(number)
        return self.segment

    @contextlib.contextmanager
    def pause(self):
        """Context for copies and replays: this tape and those of outer modules do not record or count their ops."""
        paused = [tape for tape in (self, *self.outer) if not tape.is_paused]
        for tape in paused:
            tape.is_paused = True
        try:
            yield
        finally:
            for tape in paused:
                tape.is_paused = False

    def latest_op_has_ended(self):
        """Note that tensors which are saved from now on are not results of the latest op."""
        self.sequence = None

    def pack(self, tensor):
        """Return a stand-in for a tensor that autograd saves.

        Autograd creates the node of an op and saves the inputs before the op runs, and saves the results afterwards.
        Creating a node increases autograd's sequence number. If the number has increased since the latest op, the
        tensor is an input of the next op, otherwise it is a result of the latest op.
        """
        is_of_next_op = torch.autograd._get_sequence_nr() != self.sequence
        number = self.count if is_of_next_op else self.count - 1
        segment = self.segment_at(number)
        return (segment and segment.defer(tensor, bisect(self.split_points, number))) or KeptTensor(tensor)


class Segment:
    """Recorded ops that can run again, and the tensors that they start from.

    `record` and `add` are called while the forward runs, `complete` once at its end, `value` by backward. Backward
    asks for the parts from last to first. On the way to a part, some states are kept for the earlier parts that it will
    ask for next: at the middle one of these, at the middle one of those after it, and so on.
    """

    with_norms: WeakSet = WeakSet()  # segments whose batch norms in evaluation mode depend on running statistics

    def __init__(self, tape, parts):
        self.tape, self.is_complete = tape, False
        # Recording: entries by part; numbers of the storages that the segment created, and of those not yet written.
        self.ops, self.created, self.unwritten = [[] for _ in range(parts)], set(), set()
        self.starts = {}  # storage number -> (tensor, version), for tensors that are read here but were created before
        self.writes = defaultdict(list)  # storage number -> the views that were written in place
        self.wanted = [Counter() for _ in range(parts)]  # by part: storage number -> number of saved tensors in it
        # By part: ops that lead to its saved tensors, ops that later parts need, storages needed from earlier parts.
        self.to_make, self.to_pass, self.needed_from_before = [], [], []
        # Recomputing: states at the start of parts, recomputed storages, saved tensors that were not asked for yet.
        self.states, self.results, self.pending, self.parts_run = {}, {}, Counter(), set()

    # ---- while the forward runs

    def record(self, op, args, kwargs, written, random):
        """Return the entry of an op that is about to run."""
        self.unwritten -= written.keys()
        for key in written:
            if key not in self.created and key not in self.starts:
                with self.tape.pause():
                    self.start_from(key, copy_of(written[key]))
        read, statistics = {}, traits_of(op)[-1]
        # In training, running statistics are kept without a copy: the output of the norm does not depend on them.
        trains = statistics and args[statistics[-1]]
        norm_args = {n: args[n].detach() for n in statistics[:-1] if args[n] is not None} if trains else {}
        if statistics and not trains:
            Segment.with_norms.add(self)
        args = [norm_args[n] if n in norm_args else self.views(value, read) for n, value in enumerate(args)]
        return TapeEntry(op, args, self.views(kwargs, read), [], read, {}, {}, random)

    def is_outside(self, written):
        """Return True if no op of the segment has read or created any of the storages that are about to be written.

        An op that only writes to such storages is not recorded: what the segment reads of them later are starts.
        """
        return not any(key in self.created or key in self.starts for key in written)

    def add(self, entry, result, created, written, targets, part):
        """Complete the entry of an op that has run.

        `created` and `written` hold the tensors whose storages the op created or wrote to, by storage number. `targets`
        are the arguments that it wrote to.
        """
        for key, tensor in created.items():
            self.tape.know(key, tensor)
            self.created.add(key)
        if entry.op.__name__.startswith(("empty", "new_empty")):
            self.unwritten.update(created)
        entry.outputs.extend(key_of(tensor) for tensor in tensors_in(result))
        entry.created.update(dict.fromkeys(created))
        entry.changed.update(dict.fromkeys((*created, *written)))
        self.ops[part].append(entry)
        for tensor in tensors_in(targets):
            if (key := key_of(tensor)) is not None:
                self.writes[key].append(StorageView(key, tensor))

    def views(self, values, read):
        """Replace the tensors in an op's arguments by references, and add the numbers of their storages to `read`."""
        return map_args(torch.Tensor, lambda tensor: self.view(tensor, read), values)

    def view(self, tensor, read):
        """Return a reference to a tensor, or the tensor itself if it cannot be referred to or its values may change."""
        key = key_of(tensor)
        if key is None:
            return tensor.detach() if tensor.requires_grad else tensor
        is_on_host = tensor.device.type != self.tape.device.type and tensor.dim()
        if key in self.tape.statistics or is_on_host:  # may be overwritten unseen: keep a copy of the present values
            with self.tape.pause():
                return tensor.detach().clone()
        if key in self.unwritten:  # no recorded op has filled it, so that rerunning `empty` would not: keep the tensor
            self.created.discard(key)
        if key not in self.created and key not in self.starts:
            self.start_from(key, tensor)
        read[key] = None
        return StorageView(key, tensor)

    def start_from(self, key, tensor):
        """Keep a tensor from which recomputing starts, detached, with its version."""
        self.tape.know(key, tensor)
        if tensor.requires_grad or tensor.dim():  # detaching a Python number passed as a tensor would lose its mark
            tensor = detached(tensor)
        self.starts[key] = without_bits(tensor), version_of(tensor)

    def before_write(self, key, tensor):
        """Keep a copy of a storage that an op is about to write to, if recomputing starts from it."""
        if key in self.starts:
            with self.tape.pause():
                self.start_from(key, copy_of(self.starts[key][0]))

    def defer(self, tensor, part):
        """Return a stand-in for a saved tensor, or None if the segment cannot recompute the tensor.

        A parameter is kept, although an op of the segment may have made its data (see `is_parameter`).
        """
        key = key_of(tensor)
        if key not in self.created or key in self.unwritten or is_parameter(tensor):
            return None
        self.wanted[part][key] += 1
        return DeferredTensor(self, part, tensor, StorageView(key, tensor), len(self.writes[key]))

    # ---- at its end

    def complete(self):
        """Drop the ops that lead to no saved tensor, and release the tensors that only these ops start from."""
        self.plan()
        read = set().union(*(entry.read for ops in self.to_make + self.to_pass for entry in ops))
        self.starts = {key: start for key, start in self.starts.items() if key in read}
        self.ops, self.is_complete = None, True

    def plan(self):
        """Find for each part the ops that lead to its saved tensors, the ops that later parts need, and the storages
        that it needs from earlier parts. This is a liveness analysis, from the last part to the first.
        """
        self.to_make, self.to_pass, self.needed_from_before, needed_after = [], [], [], set()
        changed = [set().union(*(entry.changed for entry in ops)) for ops in self.ops]
        before = list(itertools.accumulate(changed, set.union, initial=set()))[:-1]
        for ops, wanted, changed_before in reversed(list(zip(self.ops, self.wanted, before, strict=True))):
            make, reads = leading_to(wanted, ops)
            on_the_way, also_reads = leading_to(needed_after, ops)
            needed_after = (reads | also_reads) & changed_before
            self.to_make.insert(0, make)
            self.to_pass.insert(0, on_the_way)
            self.needed_from_before.insert(0, needed_after)

    # ---- in backward

    def value(self, deferred):
        """Return a saved tensor. The first call for a tensor of a part recomputes all saved tensors of the part."""
        key = deferred.part, deferred.view.key
        later_writes = self.writes[deferred.view.key][deferred.writes :]
        refuse_change(False, any(may_overlap(deferred.view, view) for view in later_writes))
        if key not in self.results:
            self.run(deferred.part)
        tensor = self.results[key]
        self.pending[key] -= 1
        if not self.pending[key]:
            del self.results[key]
        return deferred.view.of(tensor)

    def run(self, part):
        """Recompute the saved tensors of a part, from the nearest state that is kept before it."""
        if not self.is_complete:  # the forward itself runs a backward, in the middle of the segment
            self.plan()
        start = max((number for number in self.states if number <= part), default=0)
        values = dict(self.states.get(start, {}))
        to_keep = halves([n for n in range(start + 1, part) if self.wanted[n] and n not in self.parts_run])
        self.parts_run.add(part)
        with self.tape.pause(), torch.enable_grad(), torch.autocast(self.tape.device.type, enabled=False):
            for number in range(start, part):
                self.run_ops(self.to_pass[number], values, self.needed_from_before[number + 1])
                if number + 1 in to_keep:
                    self.states[number + 1] = dict(values)
            self.states.pop(part, None)
            self.run_ops(self.to_make[part], values, self.wanted[part].keys())
        for key, times in self.wanted[part].items():
            self.results[part, key], self.pending[part, key] = values[key], times

    def run_ops(self, ops, values, to_keep):
        """Run ops on `values` (tensors by storage number), and add their results to it.

        At the end only the storages `to_keep` are left in `values`. Others are released after their last use.
        """
        last_use = {key: entry for entry in ops for key in entry.read | entry.changed}
        for key in [key for key in values if key not in last_use and key not in to_keep]:
            del values[key]
        # Ops write to copies: a state that is kept, or a start, may be needed again.
        changed = set().union(*(entry.changed.keys() - entry.created.keys() for entry in ops))
        for key in [key for key in values if key in changed]:
            values[key] = copy_of(values[key])
        for key in [key for key in last_use if key in self.starts and key not in values]:
            tensor, version = self.starts[key]
            refuse_change(version, version_of(tensor))
            values[key] = copy_of(tensor) if key in changed else tensor
        for entry in ops:
            values |= entry.run_again(values)
            for key in entry.read | entry.changed:
                if last_use[key] is entry and key not in to_keep:
                    values.pop(key, None)
