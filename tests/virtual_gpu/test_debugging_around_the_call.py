"""Debugging modes of PyTorch that are active around the call to the planner do not reach the rehearsal."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import set_checkpoint_debug_enabled

import planner
from planner.spawned.surroundings import set_aside


class WithCopies(TorchFunctionMode):
    def __torch_function__(self, function, kinds, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        return result.clone() if isinstance(result, torch.Tensor) and result.requires_grad else result


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        raise RuntimeError(f"{function} is called under a mode of the user's")


@contextlib.contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


AROUND = {
    "a device context of meta": lambda: torch.device("meta"),
    "a default device of meta, a mode in it": lambda: nested(default_device("meta"), WithCopies()),
    "a mode, a default device of meta in it": lambda: nested(WithCopies(), default_device("meta")),
    "modes for dispatch": lambda: nested(FakeTensorMode(), Refusing()),
    "autocast": lambda: nested(torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16)),
    "no hooks for saved tensors": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none allowed"),
    "debugging": lambda: nested(
        torch.autograd.set_detect_anomaly(True),
        set_checkpoint_debug_enabled(True),
        torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor),
        torch.autograd.graph.save_on_cpu(),
    ),
}


@contextlib.contextmanager
def nested(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def state():
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return (
        _get_current_function_mode_stack(),
        _get_current_dispatch_mode_stack(),
        torch.utils._device.CURRENT_DEVICE,
        getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        torch.is_autocast_enabled("cpu"),
        nesting,
        torch.is_anomaly_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch.utils.checkpoint._checkpoint_debug_enabled,
    )


@functools.cache
def workload():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.ones(64, 64)


@functools.cache
def expected():
    return facts(planned())


def planned():
    model, batch = workload()
    only = ("mixed-precision", "checkpoint", "8bit-optimizer")
    return planner.plan(model, batch, vram="120KiB", gpu="bare", only=only, loss_fn=lambda output, batch: output.sum())


def facts(plan):
    return plan.peak, plan.baseline, plan.decisions, plan.notes


@pytest.mark.parametrize("case", AROUND)
@pytest.mark.thorough_after(3)
def test_the_plan_is_the_same_as_without_and_the_contexts_are_as_before(case):
    without, before = expected(), state()
    with AROUND[case]():
        inside = state()
        plan = planned()
        assert state() == inside
    assert state() == before
    assert facts(plan) == without


def test_without_any_context_nothing_is_changed_either():
    before = state()
    with set_aside():
        pass
    assert state() == before


def test_a_default_device_on_cuda_is_part_of_the_step(monkeypatch):
    class AddsPositions(nn.Linear):
        def forward(self, vectors):
            return super().forward(vectors) + torch.arange(self.out_features)

    with torch.device("cuda"):
        for method in ("fork", "spawn"):
            monkeypatch.setenv("PLANNER_START_METHOD", method)
            model = AddsPositions(8, 8, device="cpu")
            plan = planner.plan(model, torch.ones(4, 8, device="cpu"), vram=None, gpu="bare", loss_fn=summed)
            assert plan.baseline.total_bytes > 0


def summed(output, batch):
    return output.sum()
