"""Check that backward computes with the values that the forward saved, in modules that are recomputed or offloaded.

Recomputing gives the right gradients only if it computes the same values as the forward. `torch.utils.checkpoint`
compares shapes and dtypes. If something that the forward reads changes before backward, such as an attribute, an item
of a list or a global mode, shapes agree and gradients are silently wrong. `RecomputeCheck` compares values: when
autograd saves a tensor, a run of up to 128 adjacent elements, at a random place, is copied to the host, and the same
run is copied again when backward asks for the tensor. The copies are compared once, at the end of the step.

The copies do not wait for the device and take no memory on it. Differences as small as those of kernels with atomic
additions are ignored.

The classes are emitted: the text that runs here is the text that is emitted.
"""

from __future__ import annotations

import contextlib
import functools
import random
import weakref

import torch


class RecomputeCheck:
    """Compares the tensors that backward gets in watched modules with those that their forward saved.

    Call `begin_step` before the first forward of a training step, and `refuse_difference` after its last backward.
    Only the steps in `steps`, numbered from 1, are checked. `at_once=True` compares each tensor as soon as backward
    asks for it, for a backward that updates parameters; it then waits for the device.
    """

    def __init__(self, steps=(1, 2, 4, 8, 16), at_once=False):
        self.steps, self.at_once, self.step, self.is_on = set(steps), at_once, 0, False
        self.samples, self.rows = [], {}
        self.places = random.Random(0)  # its own generator: the random numbers of the training do not change

    def begin_step(self):
        """Count a step, and start sampling if it is one of those that are checked."""
        self.step += 1
        self.is_on, self.samples = self.step in self.steps, []

    def end_step(self):
        """Stop sampling, and forget the samples."""
        self.is_on, self.samples, self.rows = False, [], {}

    def refuse_difference(self):
        """End the step. Raise RecomputeDifference if backward computed with other values than the forward."""
        samples = self.samples
        self.end_step()
        self.compare(samples)

    def compare(self, samples):
        """Raise RecomputeDifference if the two copies of one of these samples differ by more than rounding."""
        for device in {sample.device for sample in samples if sample.device.type != "cpu"}:
            torch.get_device_module(device).synchronize(device)
        # A tensor in float32 may come from an op in bfloat16: the lowest precision decides what rounding explains.
        bounds = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
        rounding = max((bounds.get(sample.before.dtype, 0.0) for sample in samples), default=0.0)
        for sample in samples:  # in the order of the forward, since one difference causes those after it
            if sample.after is not None and sample.difference() > rounding:
                raise RecomputeDifference(sample.message())

    def watched(self, forward, name):
        """Return the forward of module `name`, with its saved tensors sampled in steps that are checked.

        It has to be the innermost wrapper: the hooks that replace saved tensors are in place when it is called.
        """

        @functools.wraps(forward)
        def wrapper(module, /, *args, **kwargs):
            # A call during backward is a recompute, and not sampled again.
            samples = self.is_on and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) if samples else None
            with self.sampling(WatchedCall(name, module, args, kwargs), *hooks) if hooks else contextlib.nullcontext():
                return forward(module, *args, **kwargs)

        return wrapper

    def sampling(self, call, pack, unpack):
        """Return saved tensor hooks that sample each tensor before `pack` takes it and after `unpack` returns it."""

        def sample_and_pack(tensor):
            sample = SavedSample(self, call, tensor) if call.can_sample(tensor) else None
            return pack(tensor), sample

        def unpack_and_sample(packed):
            call.compare_state()
            tensor, sample = unpack(packed[0]), packed[1]
            if sample is not None and sample.after is None and not sample.is_same(tensor):
                sample.after = sample.copied(self, tensor)
                if self.at_once:
                    self.compare([sample])
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(sample_and_pack, unpack_and_sample)

    def host_row(self, tensor):
        """Return host memory for 128 elements, pinned for tensors on a device, so that copies do not wait."""
        rows = self.rows.setdefault((tensor.dtype, tensor.device.type), [])
        if not rows:
            block = torch.empty(256, 128, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
            rows.extend(block.unbind())
        return rows.pop()


class RecomputeDifference(RuntimeError):
    """Backward computed with values that differ from those that the forward saved."""


class WatchedCall:
    """One call of a watched module, and the attributes of the module at its beginning."""

    def __init__(self, name, module, args, kwargs):
        self.name, self.module, self.saved = name, module, 0
        held = [*args, *kwargs.values(), *(value for m in module.modules() for value in vars(m).values())]
        held = [value for value in held if type(value) is torch.Tensor and may_be_private(value)]
        is_batched = torch._C._functorch.is_functorch_wrapped_tensor
        self.held = {value.data_ptr() for value in held if not is_batched(value)}
        self.state, self.changes = attributes_of(module), None
        # A forward in training updates running statistics, and a recompute does not. No gradient depends on them.
        # Batch norm saves the buffers themselves; instance norm saves copies, repeated for each sample.
        norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.instancenorm._InstanceNorm)]
        self.repeated = {norm.num_features for norm in norms if norm.training and norm.track_running_stats}

    def can_sample(self, tensor):
        """Return False for tensors without elements in strided memory, and for the private state of kernels."""
        self.saved += 1
        is_repeated = tensor.dim() == 1 and any(len(tensor) % features == 0 for features in self.repeated)
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        is_batched = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if not is_plain or tensor.numel() == 0 or is_batched or is_repeated or tensor.is_quantized:
            return False
        return not may_be_private(tensor) or tensor.data_ptr() in self.held

    def compare_state(self):
        """Note which attributes are no longer what they were when the call began."""
        if self.changes is None:
            now, absent = attributes_of(self.module), object()
            names = [name for name in self.state if now.get(name, absent) != self.state[name]]
            self.changes = [f"{name} was {self.state[name]!r} and is {now.get(name)!r} in backward" for name in names]


class SavedSample:
    """Adjacent elements of a tensor, copied when autograd saved it and again when backward asked for it."""

    def __init__(self, check, call, tensor):
        self.call, self.number = call, call.saved
        self.shape, self.device = tuple(tensor.shape), tensor.device
        self.strides, self.original = tensor.stride(), weakref.ref(tensor)
        self.start, self.length = random_run(tensor, check.places)
        self.before, self.after = self.copied(check, tensor), None
        check.samples.append(self)

    def copied(self, check, tensor):
        """Start a copy of the elements to the host. Returns None if the tensor is laid out in another way."""
        if tensor.stride() != self.strides:
            return None
        start = tensor.storage_offset() + self.start
        with torch._C._DisableTorchDispatch():  # a mode that counts or records ops does not see the copy
            run = tensor.detach().as_strided((self.length,), (1,), start)
            return check.host_row(tensor)[: self.length].copy_(run, non_blocking=True)

    def is_same(self, tensor):
        """Return True for a tensor that was not replaced, such as a parameter: autograd itself checks its version."""
        original = self.original()
        return original is not None and original.data_ptr() == tensor.data_ptr()

    def difference(self):
        """Return the norm of the difference divided by the norm of what was saved; 0.0 for equal values."""
        if torch.equal(self.before.view(torch.uint8), self.after.view(torch.uint8)):
            return 0.0
        before, after = (values.to(torch.complex128) for values in (self.before, self.after))
        differs = (before != after) & ~(before.isnan() & after.isnan())
        if not differs.any():
            return 0.0
        share = (before - after)[differs].norm() / before[before.isfinite()].norm()
        return share.item() if share.isfinite() else float("inf")

    def message(self):
        """Describe the difference and its likely cause."""
        cause = "; ".join(self.call.changes or ()) or (
            "nothing changed in its numbers and flags, so look for lists, dicts, arguments, globals or generators that "
            "change between forward and backward"
        )
        return (
            f"backward computed with other values than the forward in module '{self.call.name}': saved tensor "
            f"{self.number} of {self.call.saved}, {list(self.shape)} of {self.before.dtype}, differs by "
            f"{self.difference():.1%} in the elements that were compared. A likely cause: {cause}. Nothing was updated"
        )


def may_be_private(tensor):
    """Return True for bytes and up to two integers: reserve space of a kernel, or seeds that no kernel has written to.

    They are compared if they are arguments or attributes of the module.
    """
    return tensor.dtype is torch.uint8 or (not tensor.is_floating_point() and tensor.numel() <= 2)


def random_run(tensor, places):
    """Return the start, relative to the tensor's first element, and length of up to 128 elements adjacent in memory."""
    dims = sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and stride
    )
    length = 1
    while dims and dims[0][0] == length:  # innermost dimensions without gaps
        length *= dims.pop(0)[1]
    start = sum(stride * places.randrange(size) for stride, size in dims)
    return start + places.randrange(max(length - 128, 0) + 1), min(length, 128)


def attributes_of(module):
    """Return the numbers, strings and flags among the attributes of a module and its submodules."""
    plain = (int, float, complex, str, type(None))
    return {
        f"'{f'{name}.{key}' if name else key}'": value
        for name, submodule in module.named_modules()
        for key, value in vars(submodule).items()
        if isinstance(value, plain)
    }
