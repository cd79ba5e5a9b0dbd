"""Offload: keep the tensors that autograd saves in a module call in host memory between forward and backward.

`torch.autograd.graph.save_on_cpu(pin_memory=True)` does the same with two saved tensor hooks. This rule differs in
three points:

- It does not offload tensors that stay on the device anyway: parameters, buffers, and the inputs, which the caller
  holds. It does not offload small tensors either, as that frees little.
- It copies each version of a storage once, even if several ops save views of it, and backward copies it back once.
- For a module that is recomputed in backward (`checkpoint`, `segment_checkpoint`), it offloads only the inputs, because
  nothing else is saved.

Copies run on the same CUDA stream as the training step. So they do not overlap with computation, but no synchronization
is needed, and the allocator can reuse the memory at once. The copies have the same bits as the tensors. Tensors of
user-defined classes stay on the device, since they cannot be rebuilt from the bytes of a storage.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from planner.plan_types.plan import Plan
from planner.plan_types.recompute_decisions import Offload
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.portable import replay_ops
from planner.rewrite.portable.replay_ops import (
    KeptTensor,
    StorageView,
    is_parameter,
    key_of,
    present_data,
    version_of,
    without_bits,
)
from planner.rewrite.recompute_observer import CHECK_IMPORTS, check_source
from planner.rewrite.recomputed_modules import modules_to_run_again
from planner.rewrite.rewriting import Rewriting


def offload(rewriting: Rewriting, decision: Offload) -> None:
    """Replace the forward of each planned module by one that offloads its saved tensors.

    If another rule has already replaced the forward by one that is recomputed, the new forward calls that one.

    Raises:
        DecisionError: if a module does not exist or has no forward.
    """
    for name, module in modules_to_run_again(rewriting, decision.modules, decision.kind, nested=True).items():
        forward = rewriting.watched_forward(module, name)
        wrapped = in_host_memory(forward, name in decision.inputs_of, decision.from_bytes)
        rewriting.replace(module, "forward", types.MethodType(wrapped, module), place=f"forward of '{name}'")


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def in_host_memory(forward, of_inputs, from_bytes):
    """Return a forward that offloads the tensors that autograd saves to host memory.

    Only tensors whose storage has at least `from_bytes` bytes are offloaded. With `of_inputs=True`, for a forward that
    is recomputed from its inputs, these are the inputs only. With `of_inputs=False` they are all saved tensors except
    inputs, parameters and buffers.
    """

    @functools.wraps(forward)
    def wrapper(module, /, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if of_inputs and len(set(map(id, inputs))) < len(inputs):
            # One tensor is passed twice. The recompute would get two tensors, but the forward may compare with `is`.
            return forward(module, *args, **kwargs)
        if of_inputs:
            # Inputs without a grad_fn are leaves, such as the batch: the caller holds them in any case.
            keys = {key_of(tensor) for tensor in inputs if tensor.grad_fn is not None}
        else:
            keys = {key_of(tensor) for tensor in (*inputs, *module.parameters(), *module.buffers())}
        memory = HostMemory(lambda key: (key in keys) is of_inputs, from_bytes)
        with torch.autograd.graph.saved_tensors_hooks(memory.pack, lambda packed: packed.tensor()):
            output = forward(module, *args, **kwargs)
        memory.copies.clear()  # autograd keeps `pack` alive until backward: it must not keep the copies alive as well
        return output

    return wrapper


class HostMemory:
    """Offloads the tensors that autograd saves in one module call. `pack` is the hook that autograd calls.

    `is_wanted(key)` returns True if tensors in the storage with this key are offloaded.
    """

    def __init__(self, is_wanted, from_bytes):
        self.is_wanted, self.from_bytes, self.copies = is_wanted, from_bytes, {}

    def pack(self, tensor):
        """Return the object that autograd saves instead of a tensor; its method `tensor()` returns the tensor.

        The object holds a copy in host memory, or the tensor itself if it is not offloaded.
        """
        key = key_of(tensor)
        if key is None or is_on_host(tensor) or not self.is_wanted(key) or not is_plain(tensor):
            return KeptTensor(tensor)
        if is_parameter(tensor) or tensor.untyped_storage().nbytes() < self.from_bytes:
            return KeptTensor(tensor)
        # After an in-place write to the storage, another copy is needed. Parts of a storage that are not views of one
        # tensor (`torch.unsafe_split`) count their writes separately, so each part has copies of its own.
        root = tensor if tensor._base is None else tensor._base
        version = key, version_of(tensor), root.storage_offset(), root.shape
        if version not in self.copies:
            self.copies[version] = HostCopy(tensor)
        return OffloadedTensor(self.copies[version], tensor, StorageView(key, tensor))


class HostCopy:
    """A copy of a storage in host memory.

    Several saved tensors may be views of it. When backward asks for the first of them, the storage is copied back to
    the device. After the last of them was asked for, the device copy is released.
    """

    def __init__(self, tensor):
        self.reference = StorageWeakRef(tensor.untyped_storage())  # while it exists, no other storage gets the same key
        self.device, self.back = tensor.device, None
        self.views, self.pending = 0, 0  # saved tensors in this storage, and those that backward has yet to ask for
        size = tensor.untyped_storage().nbytes()
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        with torch.no_grad():  # only views on the device: a `Tape` around this counts ops that create or change tensors
            whole = without_bits(tensor).as_strided((1,), (1,), 0).view(torch.uint8).as_strided((size,), (1,), 0)
            self.host.copy_(whole, non_blocking=True)

    def tensor(self):
        """Return the storage on the device, as a tensor of bytes.

        When the last saved tensor has asked for it, this object no longer keeps it alive.
        """
        if self.back is None:
            empty = torch.empty_like(self.host, device=self.device)
            self.back, self.pending = empty.copy_(self.host, non_blocking=True), self.views
        back = self.back
        self.pending -= 1
        if not self.pending:
            self.back = None
        return back


class OffloadedTensor:
    """Replaces a saved tensor until backward asks for it. It holds a `HostCopy` and the tensor's layout in it."""

    def __init__(self, copy, tensor, view):
        self.copy, self.view = copy, view
        self.leaf = weakref.ref(tensor) if tensor.is_leaf else None
        copy.views += 1

    def tensor(self):
        return present_data(self.leaf, self.view.key, self.view.of(self.copy.tensor()))

    def __del__(self):
        self.copy.views -= 1


def is_on_host(tensor):
    return tensor.device.type == "cpu"


def is_plain(tensor):
    """Return True for tensors of torch's own classes. Others could not be rebuilt from the bytes of a storage."""
    return type(tensor).__module__.partition(".")[0] == "torch"


def offload_source(plan: Plan, decision: Offload) -> EmittedCode:
    """Return the code that does the same as `offload` in an emitted file."""
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
        replay_ops.is_parameter,
        replay_ops.present_data,
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
            "import weakref",
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
        functions=(*(inspect.getsource(part) for part in parts), *check_source(plan)),
        rewriting=(rewriting,),
        is_watched=True,
    )
