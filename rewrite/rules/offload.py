"""Offload: what autograd keeps of a module call lies in the host's memory from forward to backward.

As `torch.autograd.graph.save_on_cpu(pin_memory=True)` does, but for what frees nothing (weights, what is small, what
the caller holds), and once for each storage, however many ops save a part of it. Copies run on the stream of the step,
where nothing else runs meanwhile: so memory can be used again at once, and what is copied is what was computed.

Of a module that runs again in backward it is the inputs: they are all that is kept of it.
"""

from __future__ import annotations

import functools
import inspect
import types

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from planner.plan_types.decisions import Offload
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.portable import replay_ops
from planner.rewrite.portable.module_forward import forward_function
from planner.rewrite.portable.replay_ops import KeptTensor, StorageView, key_of, version_of, without_bits
from planner.rewrite.recomputed_modules import modules_to_run_again
from planner.rewrite.rewriting import Rewriting


def offload(rewriting: Rewriting, decision: Offload) -> None:
    """Wrap the forward of each named module, on the instance, outside of what runs it again.

    Raises:
        DecisionError: for a module that does not exist or is never called.
    """
    for name, module in modules_to_run_again(rewriting, decision.modules, decision.kind, nested=True).items():
        wrapped = in_host_memory(forward_function(module), name in decision.inputs_of, decision.from_bytes)
        rewriting.replace(module, "forward", types.MethodType(wrapped, module), place=f"forward of '{name}'")


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def in_host_memory(forward, of_inputs, from_bytes):
    """A forward that leaves what autograd keeps to the host: its inputs, or all that is saved but those."""

    @functools.wraps(forward)
    def wrapper(module, /, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if of_inputs and len(set(map(id, given))) < len(given):
            return forward(module, *args, **kwargs)  # what comes back is never the same object twice
        if of_inputs:
            keys = {key_of(tensor) for tensor in given if tensor.grad_fn is not None}
        else:
            keys = {key_of(tensor) for tensor in (*given, *module.parameters(), *module.buffers())}
        memory = HostMemory(lambda key: (key in keys) is of_inputs, from_bytes)
        with torch.autograd.graph.saved_tensors_hooks(memory.pack, lambda packed: packed.tensor()):
            output = forward(module, *args, **kwargs)
        memory.copies.clear()  # autograd holds on to `pack` as long as it keeps anything
        return output

    return wrapper


class HostMemory:
    """Of one call."""

    def __init__(self, is_wanted, from_bytes):
        self.is_wanted, self.from_bytes, self.copies = is_wanted, from_bytes, {}

    def pack(self, tensor):
        key = key_of(tensor)
        if key is None or is_on_host(tensor) or not self.is_wanted(key) or not is_plain(tensor):
            return KeptTensor(tensor)
        if tensor.untyped_storage().nbytes() < self.from_bytes:
            return KeptTensor(tensor)
        version = key, version_of(tensor)
        if version not in self.copies:
            self.copies[version] = Copy(tensor)
        return Part(self.copies[version], StorageView(key, tensor))


class Copy:
    """Of a storage. On the device there is one from the first to the last time that backward asks for a part of it."""

    def __init__(self, tensor):
        self.known = StorageWeakRef(tensor.untyped_storage())  # no other storage has its number as long as this lives
        self.device, self.parts, self.pending, self.back = tensor.device, 0, 0, None
        size = tensor.untyped_storage().nbytes()
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        with torch.no_grad():  # views alone: a tape around this one counts what makes or changes tensors
            whole = without_bits(tensor).as_strided((1,), (1,), 0).view(torch.uint8).as_strided((size,), (1,), 0)
            self.host.copy_(whole, non_blocking=True)

    def tensor(self):
        if self.back is None:
            empty = torch.empty_like(self.host, device=self.device)
            self.back, self.pending = empty.copy_(self.host, non_blocking=True), self.parts
        back = self.back
        self.pending -= 1
        if not self.pending:
            self.back = None
        return back


class Part:
    """Stands for a saved tensor until backward asks for it."""

    def __init__(self, copy, piece):
        self.copy, self.piece = copy, piece
        copy.parts += 1

    def tensor(self):
        return self.piece.of(self.copy.tensor())

    def __del__(self):
        self.copy.parts -= 1


def is_on_host(tensor):
    return tensor.device.type == "cpu"


def is_plain(tensor):
    """Not of a class of somebody's own, which a part of a storage could not be made again as."""
    return type(tensor).__module__.partition(".")[0] == "torch"


def offload_source(plan: Plan, decision: Offload) -> EmittedCode:
    parts = (
        in_host_memory,
        HostMemory,
        Copy,
        Part,
        is_on_host,
        is_plain,
        replay_ops.StorageView,
        replay_ops.KeptTensor,
        replay_ops.refuse_change,
        replay_ops.key_of,
        replay_ops.version_of,
        replay_ops.without_bits,
        forward_as_it_is,
    )
    rewriting = """\
for name, of_inputs in OFFLOADED.items():
    module = model.get_submodule(name)
    forward = in_host_memory(forward_as_it_is(module), of_inputs, OFFLOADED_FROM_BYTES)
    module.forward = types.MethodType(forward, module)
"""
    return EmittedCode(
        imports=(
            "import functools",
            "import types",
            "from torch.multiprocessing.reductions import StorageWeakRef",
            "from torch.utils._python_dispatch import is_traceable_wrapper_subclass",
            "from torch.utils._pytree import tree_leaves",
        ),
        constants=(
            "# Modules of which what is saved for backward lies in the host's memory; True: their inputs alone.\n"
            + assignment("OFFLOADED", {name: name in decision.inputs_of for name in decision.modules}),
            assignment("OFFLOADED_FROM_BYTES", decision.from_bytes),
        ),
        functions=tuple(map(inspect.getsource, parts)),
        rewriting=(rewriting,),
    )


def forward_as_it_is(module):
    """The module's forward, which may be one that runs again in backward by now."""
    return vars(module)["forward"].__func__ if "forward" in vars(module) else type(module).forward
