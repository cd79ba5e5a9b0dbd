"""Steps that call functions of `torch.cuda` are rehearsed, whether or not PyTorch was built with CUDA."""

import os
import warnings

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import planner
from planner.errors import RehearsalError


class Calling(nn.Module):
    """Two linear layers, with a call of `function` between them."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 8), nn.Linear(8, 1), function

    def forward(self, x):
        y = self.first(x)
        self.function(y)
        return self.second(y).sum()


def record(function):
    return planner.plan(Calling(function), torch.randn(4, 8), vram=None, gpu="rtx-2060")


def with_everything_that_is_harmless(y):
    assert y.is_cuda and torch.cuda.is_available() and torch.cuda.device_count() == 1
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream()
    begin.record(stream)
    with torch.cuda.stream(None), torch.cuda.stream(stream), torch.cuda.device(0):
        y.record_stream(stream)
        stream.wait_stream(torch.cuda.default_stream())
    stream.wait_event(stream.record_event())
    end.record()
    torch.cuda.synchronize()
    assert end.query() and begin.elapsed_time(end) == 0 and isinstance(stream, torch.cuda.Stream)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    torch.cuda.nvtx.range_push("layer")
    torch.cuda.nvtx.range_pop()
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved(y.device) == 0
    assert torch.cuda.memory_summary(0) == "" and torch.cuda.memory_stats_as_nested_dict() == {}
    assert torch.cuda.memory_stats(y.device)["allocated_bytes.all.peak"] == 0
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 0 and not torch.cuda.is_current_stream_capturing()
    assert torch.cuda._utils._get_device_index(torch.cuda.device(0)) == 0
    assert torch.cuda.get_device_capability() == (7, 5) and not torch.cuda.is_bf16_supported(including_emulation=False)
    card = torch.cuda.get_device_properties(0)
    assert card.total_memory > 5 << 30 and card.warp_size == 32


def test_cards_events_and_the_current_stream_are_known():
    recorded, plain = record(with_everything_that_is_harmless), record(lambda y: None)
    assert recorded.baseline.total_bytes == plain.baseline.total_bytes


def test_a_plan_names_the_build_of_torch_and_its_forks_do_not_warn(monkeypatch):
    def warning_fork():  # Python 3.12 and later warn in a process with threads
        warnings.warn("This process is multi-threaded", DeprecationWarning, stacklevel=2)
        return fork()

    fork = os.fork
    monkeypatch.setattr(os, "fork", warning_fork)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cu130"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert record(len).versions["torch"] == "2.13.0+cu130"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y: torch.cuda.Stream(), r"makes a CUDA stream .*test_cuda_functions.py:\d+.*one CUDA stream"),
        (lambda y: torch.cuda.stream(torch.Stream("cpu")), r"enters a CUDA stream .*test_cuda_functions.py:\d+"),
        (lambda y: torch.cuda.CUDAGraph(), r"captures a CUDA graph .*test_cuda_functions.py:\d+.*without CUDA graphs"),
        (lambda y: torch.cuda.graph(None), r"captures a CUDA graph .*test_cuda_functions.py:\d+.*without CUDA graphs"),
        (lambda y: torch.cuda.MemPool(), r"makes a pool of memory .*test_cuda_functions.py:\d+.*PyTorch's own pool"),
        (lambda y: torch.accelerator.get_memory_info(), r"asks for the free memory .*pass a number of bytes"),
        (lambda y: torch.cuda.mem_get_info(), r"asks for the free memory .*pass a number of bytes"),
    ],
)
def test_further_streams_graphs_and_free_memory_are_refused_by_line(function, message):
    with pytest.raises(RehearsalError, match=message):
        record(function)
