"""Replay: of stretches of a long forward only what they start from is kept; their ops run again in backward.

For what one module does in a single forward there is no part to checkpoint. A dispatch mode writes down each op of a
stretch; when backward asks for the first tensor that was saved there, those ops that lead to saved tensors run once
more, on the same values, with the same random numbers, below autograd and autocast. Nothing is traced beforehand: what
the forward does may depend on anything, and its Python runs once.

Rematerialization from a tape: Griewank, Achieving logarithmic growth of temporal and spatial complexity in reverse
automatic differentiation, 1992; by a dispatcher as in Kirisame et al., Dynamic Tensor Rematerialization, 2021. What is
written below the dispatcher, by a kernel that is launched by hand on memory with contents, is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from bisect import bisect
from collections import Counter
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from planner.decisions import Replay
from planner.plan_file import Plan
from rewrite.forwards import detached, forward_function, modules_to_run_again
from rewrite.fragment import Fragment, assignment
from rewrite.rewriting import Rewriting


def replay(rewriting: Rewriting, decision: Replay) -> None:
    """Let the forward of each named module write down its stretches, on the instance.

    Raises:
        DecisionError: for a module that does not exist or is never called.
    """
    for name, module in modules_to_run_again(rewriting, decision.by_module, decision.kind, nested=True).items():
        forward = types.MethodType(replayed(forward_function(module), decision.by_module[name]), module)
        rewriting.replace(module, "forward", forward, place=f"forward of '{name}'")


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


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
        self.known = {}  # a storage that is known here has its number for itself as long as its reference lives

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_view, written_at, draws = traits_of(op)
        if is_view or self.is_paused:
            return op(*args, **kwargs)
        stretch, written = self.stretch_at(self.count), {}
        if written_at:
            written = self.storages([args[n] if n < len(args) else kwargs.get(name) for n, name in written_at])
            for key, tensor in written.items():
                for other in self.stretches:
                    other.before_write(key, tensor)
        random = random_numbers(args, kwargs, self.device) if stretch and draws else None
        result = op(*args, **kwargs)
        given = set(map(key_of, tensors_in([*args, *kwargs.values()])))
        made = {key: tensor for key, tensor in self.storages(result).items() if key not in given}
        if made or written:
            if stretch and self.count in self.kept and not written:
                for key, tensor in made.items():
                    stretch.start_from(key, detached(tensor))
            elif stretch:
                stretch.note(op, args, kwargs, result, made, written, random, bisect(self.stops, self.count))
            self.count += 1
            self.sequence = torch.autograd._get_sequence_nr()
        return result

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
        return (stretch and stretch.saved(tensor, bisect(self.stops, number))) or Held(tensor)


class Stretch:
    """Ops that can run again, and what they read of what was there before them.

    A part of a stretch starts from tensors that parts before it make. Of these few are there at a time: on the way to a
    part, those at half of the way are held, at half of the rest, and so on.
    """

    def __init__(self, tape, parts):
        self.tape, self.ops, self.starts, self.made, self.blank = tape, [[] for _ in range(parts)], {}, set(), set()
        self.wanted, self.writes, self.is_complete = [Counter() for _ in range(parts)], Counter(), False
        self.to_make, self.to_pass, self.crossing, self.on_the_way = [], [], [], {}
        self.results, self.pending = {}, Counter()

    def note(self, op, args, kwargs, result, made, written, random, part):
        read = set()
        args, kwargs = mapped(torch.Tensor, lambda tensor: self.piece(tensor, read), [args, kwargs])
        for key, tensor in made.items():
            self.tape.know(key, tensor)
            self.made.add(key)
        if self.blank:
            self.blank -= written.keys()
        if op.__name__.startswith(("empty", "new_empty")):
            self.blank.update(made)
        outputs = [key_of(tensor) for tensor in tensors_in(result)]
        self.ops[part].append(Noted(op, args, kwargs, outputs, read, set(made), {*made, *written}, random))

    def piece(self, tensor, read):
        """Stands for an argument. One that is still blank was written by nobody seen here: it is kept as it is."""
        key = key_of(tensor)
        if key is None:
            return tensor.detach() if tensor.requires_grad else tensor
        if key in self.blank:
            self.made.discard(key)
        if key not in self.made and key not in self.starts:
            self.start_from(key, tensor)
        read.add(key)
        return Piece(key, tensor)

    def start_from(self, key, tensor):
        """Hold what was there before, apart from the graph, with the number of times that it was written to."""
        self.tape.know(key, tensor)
        tensor = detached(tensor) if tensor.requires_grad else tensor
        self.starts[key] = tensor, tensor._version

    def before_write(self, key, tensor):
        """What was there before, and is about to change, is copied."""
        if not self.is_complete:
            self.writes[key] += 1
        if not self.is_complete and key not in self.made and key not in self.starts:
            self.start_from(key, tensor)
        if key in self.starts:
            self.start_from(key, self.starts[key][0].clone())

    def saved(self, tensor, part):
        """Stands for a tensor that the stretch makes again; None for others."""
        key = key_of(tensor)
        if key not in self.made or key in self.blank:
            return None
        self.wanted[part][key] += 1
        return Later(self, part, Piece(key, tensor), self.writes[key])

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
        middle = (at + part + 1) // 2
        with self.tape.pause(), torch.enable_grad(), torch.autocast(self.tape.device.type, enabled=False):
            for number in range(at, part):
                self.again(self.to_pass[number], values, self.crossing[number + 1])
                if number + 1 == middle < part:
                    self.on_the_way[middle] = dict(values)
                    middle = (middle + part + 1) // 2
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
            values[key] = values[key].clone()
        for key in (last_use.keys() & self.starts.keys()) - values.keys():
            tensor, version = self.starts[key]
            refuse_change(version, tensor._version)
            values[key] = tensor.clone() if key in changed else tensor
        for noted in ops:
            values |= noted.again(values)
            for key in (noted.read | noted.changed) - to_keep:
                if last_use[key] is noted:
                    values.pop(key, None)


def leading_to(wanted, ops):
    """Those ops that lead to storages, and all that they and the storages need."""
    needed, found = set(wanted), []
    for noted in reversed(ops):
        if not needed.isdisjoint(noted.changed):
            needed |= noted.read
            found.append(noted)
    return found[::-1], needed


class Noted(NamedTuple):
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
        args, kwargs = mapped(Piece, lambda piece: piece.of(values[piece.key]), [self.args, self.kwargs])
        given = dict(zip((a.name for a in self.op._schema.arguments), args, strict=False)) | kwargs
        if given.get("training") and not self.op._schema.is_mutable:  # batch norms that write to them and do not say so
            for name in {"running_mean", "running_var"} & given.keys():
                given[name] = None if given[name] is None else given[name].clone()
        with contextlib.nullcontext() if self.random is None else numbers_again(*self.random):
            result = self.op(**given)
        pairs = zip(self.outputs, tensors_in(result), strict=True)
        return {key: tensor for key, tensor in pairs if key in self.changed}


@functools.cache
def traits_of(op):
    """Whether an op returns a view and writes nothing; where its arguments are that it writes; whether it draws."""
    aliases = [(n, argument.name, argument.alias_info) for n, argument in enumerate(op._schema.arguments)]
    written = tuple((n, name) for n, name, alias in aliases if alias is not None and alias.is_write)
    is_view = not written and any(result.alias_info is not None for result in op._schema.returns)
    return is_view, written, torch.Tag.nondeterministic_seeded in op.tags


def random_numbers(args, kwargs, device):
    """How to draw the same random numbers again: the generator's setter and getter, and its state."""
    leaves = tree_leaves((args, kwargs))
    for generator in leaves:
        if isinstance(generator, torch.Generator):
            return generator.set_state, generator.get_state, generator.get_state()
    if device.type == "cpu":
        return torch.set_rng_state, torch.get_rng_state, torch.get_rng_state()
    places = [leaf.device if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    place = next((p for p in places if isinstance(p, torch.device) and p.type == device.type), device)
    module = torch.get_device_module(place)
    getter = functools.partial(module.get_rng_state, place)
    return functools.partial(module.set_rng_state, device=place), getter, getter()


@contextlib.contextmanager
def numbers_again(set_state, get_state, state):
    before = get_state()
    set_state(state)
    try:
        yield
    finally:
        set_state(before)


class Piece:
    """A tensor by its place in a storage."""

    def __init__(self, key, tensor):
        self.key, self.dtype = key, tensor.dtype
        self.layout = tensor.size(), tensor.stride(), tensor.storage_offset()

    def of(self, tensor):
        """The tensor of this layout in the storage of another one."""
        if tensor.dtype != self.dtype:
            size, stride, offset = self.layout
            empty = torch.empty(0, dtype=self.dtype, device=tensor.device)
            return empty.set_(tensor.untyped_storage(), offset, size, stride)
        if self.layout == (tensor.size(), tensor.stride(), tensor.storage_offset()):
            return tensor
        return tensor.as_strided(*self.layout)


class Later:
    """Stands for a saved tensor until backward asks for it."""

    def __init__(self, stretch, part, piece, writes):
        self.stretch, self.part, self.piece, self.writes = stretch, part, piece, writes

    def tensor(self):
        return self.stretch.value(self)


class Held:
    """A saved tensor that is kept."""

    def __init__(self, tensor):
        self.held, self.version = tensor if tensor.grad_fn is None else tensor.detach(), tensor._version

    def tensor(self):
        refuse_change(self.version, self.held._version)
        return self.held


def refuse_change(before, now):
    if before != now:
        raise RuntimeError("a tensor that is needed for the gradients was changed in place after it was used")


def key_of(tensor):
    """The number of a tensor's storage; None where a layout alone does not make the tensor."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor):
        return None
    storage = tensor.untyped_storage()
    return storage._cdata if storage.nbytes() else None


def tensors_in(values):
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in tensors_in(value)] if isinstance(values, (list, tuple)) else []


def mapped(kind, function, values):
    """The same lists, tuples and dicts with a function of all that is of a kind."""
    if isinstance(values, kind):
        return function(values)
    if isinstance(values, (list, tuple)):
        return [mapped(kind, function, value) for value in values]
    if isinstance(values, dict):
        return {name: mapped(kind, function, value) for name, value in values.items()}
    return values


def replay_source(plan: Plan, decision: Replay) -> Fragment:
    parts = (
        replayed, Tape, Stretch, leading_to, Noted, traits_of, random_numbers, numbers_again, Piece, Later, Held,
        refuse_change, key_of, tensors_in, mapped, detached,
    )  # fmt: skip
    rewriting = """\
for name, stretches in REPLAYED.items():
    module = model.get_submodule(name)
    module.forward = types.MethodType(replayed(type(module).forward, stretches), module)
"""
    return Fragment(
        imports=(
            "import contextlib",
            "import functools",
            "import itertools",
            "import types",
            "from bisect import bisect",
            "from collections import Counter",
            "from typing import NamedTuple",
            "from torch.multiprocessing.reductions import StorageWeakRef",
            "from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass",
            "from torch.utils._pytree import tree_leaves",
        ),
        constants=(
            "# Ops of a forward that run again in backward: the first, the one after the last, and those that do not.\n"
            + assignment("REPLAYED", decision.by_module),
        ),
        functions=tuple(map(inspect.getsource, parts)),
        rewriting=(rewriting,),
    )
