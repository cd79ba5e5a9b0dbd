"""Offload: keep what autograd saves in a module call in host memory between forward and backward.

`torch.autograd.graph.save_on_cpu(pin_memory=True)` does the same with two saved tensor hooks. This rule differs in
three points:

- It skips tensors whose copy would free nothing on the device: parameters, buffers, small tensors, and the inputs,
  which the caller holds.
- It copies each version of a storage once, however many ops save a view of it, and backward copies it back once.
- For a module that is recomputed in backward (`checkpoint`, `segment_checkpoint`), it offloads the inputs only:
  nothing else is kept of it.

Copies run on the stream of the step, so they do not overlap with computation. In return, no synchronisation is needed:
memory can be reused at once, and what is copied is what was computed. The numbers come back bit for bit. Tensors of
user-defined classes stay on the device, since they cannot be rebuilt from the bytes of a storage.
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
from planner.rewrite.portable.replay_ops import KeptTensor, StorageView, key_of, version_of, without_bits
from planner.rewrite.recompute_observer import CHECK_IMPORTS, check_source
from planner.rewrite.recomputed_modules import modules_to_run_again
from planner.rewrite.rewriting import Rewriting


def offload(rewriting: Rewriting, decision: Offload) -> None:
    """Wrap the forward of each named module, on the instance, around the wrapper that recomputes it, if any.

    Raises:
        DecisionError: if a module does not exist or is never called.
    """
    for name, module in modules_to_run_again(rewriting, decision.modules, decision.kind, nested=True).items():
        wrapped = in_host_memory(rewriting.watched_forward(module, name), name in decision.inputs_of, decision.from_bytes)
        rewriting.replace(module, "forward", types.MethodType(wrapped, module), place=f"forward of '{name}'")


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def in_host_memory(forward, of_inputs, from_bytes):
    """Return a forward whose saved tensors are kept in host memory, if their storage has at least `from_bytes`.

    `of_inputs=True`: only its inputs, for a forward that is recomputed from them. `of_inputs=False`: everything that
    autograd saves except inputs, parameters and buffers.
    """

    @functools.wraps(forward)
    def wrapper(module, /, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if of_inputs and len(set(map(id, inputs))) < len(inputs):
            # One tensor is passed twice. It would come back as two, and the forward may ask whether they are one.
            return forward(module, *args, **kwargs)
        if of_inputs:
            # Inputs without a grad_fn are leaves, such as the batch: the caller holds them in any case.
            keys = {key_of(tensor) for tensor in inputs if tensor.grad_fn is not None}
        else:
            keys = {key_of(tensor) for tensor in (*inputs, *module.parameters(), *module.buffers())}
        memory = HostMemory(lambda key: (key in keys) is of_inputs, from_bytes)
        with torch.autograd.graph.saved_tensors_hooks(memory.pack, lambda packed: packed.tensor()):
            output = forward(module, *args, **kwargs)
        memory.copies.clear()  # autograd keeps `pack` alive until backward: let each copy go with its last user
        return output

    return wrapper


class HostMemory:
    """The tensors of one module call that are kept in host memory."""

    def __init__(self, is_wanted, from_bytes):
        self.is_wanted, self.from_bytes, self.copies = is_wanted, from_bytes, {}

    def pack(self, tensor):
        """Stand in for a tensor that autograd saves: a view of a copy on the host, or the tensor itself."""
        key = key_of(tensor)
        if key is None or is_on_host(tensor) or not self.is_wanted(key) or not is_plain(tensor):
            return KeptTensor(tensor)
        if tensor.untyped_storage().nbytes() < self.from_bytes:
            return KeptTensor(tensor)
        version = key, version_of(tensor)  # an op that writes to the storage in between makes another copy necessary
        if version not in self.copies:
            self.copies[version] = HostCopy(tensor)
        return OffloadedTensor(self.copies[version], StorageView(key, tensor))


class HostCopy:
    """A copy of a storage in host memory.

    The storage is back on the device from the first to the last time that backward asks for a view of it.
    """

    def __init__(self, tensor):
        self.reference = StorageWeakRef(tensor.untyped_storage())  # while it lives, no other storage gets this number
        self.device, self.back = tensor.device, None
        self.views, self.pending = 0, 0  # saved tensors in this storage, and those that backward has yet to ask for
        size = tensor.untyped_storage().nbytes()
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        with torch.no_grad():  # only views on the device: a `Tape` around this counts ops that create or change tensors
            whole = without_bits(tensor).as_strided((1,), (1,), 0).view(torch.uint8).as_strided((size,), (1,), 0)
            self.host.copy_(whole, non_blocking=True)

    def tensor(self):
        """Return the storage on the device, as bytes; the last view that asks for it lets it go."""
        if self.back is None:
            empty = torch.empty_like(self.host, device=self.device)
            self.back, self.pending = empty.copy_(self.host, non_blocking=True), self.views
        back = self.back
        self.pending -= 1
        if not self.pending:
            self.back = None
        return back


class OffloadedTensor:
    """Stands in for a saved tensor until backward asks for it."""

    def __init__(self, copy, view):
        self.copy, self.view = copy, view
        copy.views += 1

    def tensor(self):
        return self.view.of(self.copy.tensor())

    def __del__(self):
        self.copy.views -= 1


def is_on_host(tensor):
    return tensor.device.type == "cpu"


def is_plain(tensor):
    """Return True for torch's own tensor classes. Others could not be rebuilt from the bytes of a storage."""
    return type(tensor).__module__.partition(".")[0] == "torch"


def offload_source(plan: Plan, decision: Offload) -> EmittedCode:
    """Return the emitted counterpart of `offload`."""
    parts = (
        in_host_memory,
        HostMemory,
        HostCopy,
        OffloadedTensor,
        is_on_host,
        is_plain,
        replay_ops.StorageView,
        replay_ops.KeptTensor,
        replay_ops.refuse_change,
        replay_ops.key_of,
        replay_ops.version_of,
        replay_ops.without_bits,
    )
    rewriting = """\
for name, of_inputs in OFFLOADED.items():
    module = model.get_submodule(name)
    forward = RECOMPUTE_CHECK.watched(forward_function(module), name)
    module.forward = types.MethodType(in_host_memory(forward, of_inputs, OFFLOADED_FROM_BYTES), module)
"""
    return EmittedCode(
        imports=(
            "import functools",
            "import types",
            "from torch.multiprocessing.reductions import StorageWeakRef",
            "from torch.utils._python_dispatch import is_traceable_wrapper_subclass",
            "from torch.utils._pytree import tree_leaves",
            *CHECK_IMPORTS,
        ),
        constants=(
            "# Modules whose saved tensors are kept in host memory until backward. True: only their inputs, since the\n"
            "# module is recomputed.\n"
            + assignment("OFFLOADED", {name: name in decision.inputs_of for name in decision.modules}),
            assignment("OFFLOADED_FROM_BYTES", decision.from_bytes),
        ),
        functions=(*map(inspect.getsource, parts), *check_source(plan)),
        rewriting=(rewriting,),
        is_watched=True,
    )
