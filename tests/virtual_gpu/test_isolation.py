"""Planning leaves the caller's process as it was: after success, after every kind of failure, after an interrupt."""

from __future__ import annotations

import gc
import logging
import os
import pathlib
import random
import signal
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import planner
from planner.errors import MachineError, PlannerError, RehearsalProcessError, WorkloadError

pytestmark = pytest.mark.slow

CALLER = os.getpid()


class Model(torch.nn.Module):
    """Has all that could be disturbed: buffers, dropout, a tied weight, a frozen one, hooks, a mixed training flag."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(16, 8)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.GELU(), torch.nn.Linear(32, 8)
            )
            for _ in range(2)
        )
        self.out = torch.nn.Linear(8, 16, bias=False)
        self.out.weight = self.words.weight
        self.blocks[0][0].bias.requires_grad_(False)
        self.blocks[1][1].eval()
        self.calls = 0
        self.register_forward_hook(lambda module, args, output: None)

    def forward(self, tokens):
        self.calls += 1
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = hidden + block(torch.nn.functional.dropout(hidden, 0.1))
        return self.out(hidden)


def cross_entropy(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[-1])


def batch():
    return torch.arange(64) % 16, torch.arange(64) % 16


def process_state() -> dict[str, object]:
    """What a library could leave behind in a process."""
    module, optimizer = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    transformers = sys.modules.get("transformers.utils.import_utils")
    return {
        "backend": torch._C._get_privateuse1_backend_name(),
        "accelerator": (torch.accelerator.is_available(), torch.accelerator.current_accelerator()),
        "torch's names": {name for name in vars(torch) if not name.startswith("_")},
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": (torch.is_autocast_cache_enabled(), torch.clear_autocast_cache),
        "default device and dtype": (torch.get_default_device(), torch.get_default_dtype()),
        "modes": [type(mode) for mode in _get_current_dispatch_mode_stack()],
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "threads": (torch.get_num_threads(), threading.active_count()),
        "module hooks": {name: dict(value) for name, value in vars(module).items() if name.endswith("_hooks")},
        "optimizer hooks": {name: dict(value) for name, value in vars(optimizer).items() if name.endswith("_hooks")},
        "foreach types": list(optimizer._foreach_supported_types),
        "fake tensors": transformers and transformers.is_fake_tensor,
        "python random": random.getstate(),
        "numpy random": [str(part) for part in np.random.get_state()],
        "torch random": torch.get_rng_state().tolist(),
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "folder": pathlib.Path.cwd(),
        "collector": (gc.isenabled(), gc.get_freeze_count()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "warnings": list(warnings.filters),
        "log level": logging.getLogger("torch._subclasses.fake_tensor").level,
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "open files": len(os.listdir("/proc/self/fd")),
        "children": {  # zombies too
            child
            for task in pathlib.Path("/proc/self/task").iterdir()
            for child in (task / "children").read_text().split()
        },
    }


def object_state(model, data, optimizer) -> dict[str, object]:
    """Identity, version and value of everything that was given."""
    tensors = [*model.parameters(), *model.buffers(), *data]
    return {
        "tensors": [(id(t), type(t), t.data_ptr(), t._version, t.requires_grad, t.tolist()) for t in tensors],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.tolist()) for p in model.parameters()],
        "tensor hooks": [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()],
        "names": [name for name, _ in model.named_parameters(remove_duplicate=False)],
        "modules": [
            (id(m), type(m), m.training, sorted(vars(m)), list(m._forward_hooks), list(m._forward_pre_hooks))
            for m in model.modules()
        ],
        "calls": model.calls,
        "optimizer": repr(optimizer) + repr(optimizer.state_dict()),
        "optimizer's parameters": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
    }


@pytest.fixture
def given():
    torch.manual_seed(0)
    model, data = Model(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cross_entropy(model(data[0]), data).backward()
    optimizer.step()
    return model, data, optimizer


@pytest.fixture(scope="module", autouse=True)
def everything_is_imported():
    """What planning imports (and what that changes) is not what is examined here."""
    torch.manual_seed(0)
    planner.plan(Model(), batch(), vram=None, loss_fn=cross_entropy, gpu="bare")


@pytest.fixture
def unchanged(given):
    before, objects = process_state(), object_state(*given)
    modules = dict(sys.modules)
    yield
    assert {name: sys.modules.get(name) for name in modules} == modules
    after, objects_after = process_state(), object_state(*given)
    assert {key: value for key, value in after.items() if value != before[key]} == {}
    assert {key: value for key, value in objects_after.items() if value != objects[key]} == {}


def plan(given, **settings):
    model, data, optimizer = given
    return planner.plan(
        model, data, optimizer=optimizer, **{"vram": "40kB", "loss_fn": cross_entropy, "gpu": "bare", **settings}
    )


@pytest.mark.parametrize("vram", [None, "30kB", "1GiB", "1kB"])
@pytest.mark.thorough_after(2)
def test_after_a_plan(given, unchanged, vram):
    assert plan(given, vram=vram).certified


def test_after_an_exception_inside_the_model(given, unchanged, monkeypatch):
    def broken(self, tokens):
        raise ArithmeticError("broken model")

    monkeypatch.setattr(Model, "forward", broken)
    with pytest.raises(WorkloadError, match="ArithmeticError: broken model") as failure:
        plan(given)
    assert "\n" not in str(failure.value)


def test_after_an_exception_inside_the_loss_function(given, unchanged):
    def broken(output, batch):
        raise KeyError("broken loss")

    with pytest.raises(WorkloadError, match=r"KeyError.*broken loss"):
        plan(given, loss_fn=broken)


def test_after_an_exception_inside_backward(given, unchanged):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("broken backward")

    with pytest.raises(WorkloadError, match="ArithmeticError: broken backward"):
        plan(given, loss_fn=lambda output, batch: Broken.apply(cross_entropy(output, batch)))


@pytest.mark.parametrize(
    ("end", "error", "cause"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), MachineError, "SIGKILL, perhaps because host memory ran out"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), MachineError, "it got the signal SIGTERM"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), RehearsalProcessError, "killed by signal 11"),
        (lambda: os._exit(3), RehearsalProcessError, "exit code 3"),
    ],
    ids=["killed", "ended", "crashed", "left"],
)
def test_after_the_child_died_under_the_model(given, unchanged, end, error, cause):
    def fatal(output, batch):
        assert os.getpid() != CALLER
        end()

    with pytest.raises(error, match=cause) as failure:
        plan(given, loss_fn=fatal)
    assert "\n" not in str(failure.value)


def test_after_an_interrupt_of_this_process_alone(given, unchanged):
    reader, writer = os.pipe()

    def slow(output, batch):
        os.write(writer, b"x")
        time.sleep(60)

    def interrupt_when_a_child_is_in_the_loss() -> None:
        os.read(reader, 1)
        os.kill(CALLER, signal.SIGINT)

    interrupt = threading.Thread(target=interrupt_when_a_child_is_in_the_loss)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of parallel tests ignore interrupts
    interrupt.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            plan(given, loss_fn=slow)
    finally:
        signal.signal(signal.SIGINT, handler)
    interrupt.join()
    os.close(reader)
    os.close(writer)
    assert time.monotonic() - began < 30


def test_states_of_the_caller_do_not_reach_the_rehearsal(given, unchanged):
    peak = plan(given, vram=None).baseline.allocated_bytes
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert plan(given, vram=None).baseline.allocated_bytes == peak
    with torch.inference_mode():
        assert plan(given, vram=None).baseline.allocated_bytes == peak
    with torch.device("meta"):
        assert plan(given, vram=None).baseline.allocated_bytes == peak


def test_a_process_with_cuda_running_gets_one_line_of_explanation(given, unchanged, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        RehearsalProcessError, match=r"cannot be forked.*CUDA is initialized.*`plan` command"
    ) as failure:
        plan(given)
    assert "\n" not in str(failure.value)


def test_a_backward_that_pytorch_refuses_in_a_fork_gets_one_line_of_explanation(given, unchanged, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing. See https://github"
        )

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    with pytest.raises(PlannerError, match="plan before the first backward, or in a separate process") as failure:
        plan(given)
    assert isinstance(failure.value, RehearsalProcessError)
    assert "\n" not in str(failure.value)
