"""A remembered result is the one that the call would have given, and a recording is the same with and without it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle

import pytest
import torch

from planner.plan_types.decisions import Accumulation, Decision, Precision
from planner.plan_types.recompute_decisions import Checkpoint
from planner.virtual_gpu import fake_tensor_cache
from planner.virtual_gpu.backend import Target, VirtualGpuMode, install
from planner.virtual_gpu.fake_tensor_cache import FakeTensorCache
from planner.virtual_gpu.forked_process import run_in_child
from planner.workload.workload import Workload
from tests.support.workloads import CARD, certifying_graph, example, transformer

pytestmark = pytest.mark.slow


def tensors() -> list[torch.Tensor]:
    """Of one shape, with strides, offsets, dtypes and devices that differ."""
    base = torch.empty(2, 4, 6, device="vgpu")
    return [
        base,
        torch.empty(6, 4, 2, device="vgpu").permute(2, 1, 0),
        torch.empty(2, 4, 12, device="vgpu")[..., 6:],
        base.bfloat16(),
        base.long(),
        base.bool(),
        torch.empty(2, 4, 6),
        torch.empty(2, 1, 6, device="vgpu").expand(2, 4, 6),
        torch.empty(2, 4, 6, device="vgpu", dtype=torch.complex64),
    ]


CALLS = {
    "times an integer": lambda x: x * 2,
    "times a float": lambda x: x * 2.0,
    "times a boolean": lambda x: x * True,
    "in place": lambda x: x.mul_(2),
    "with itself": lambda x: x + x,
    "a transposed view": lambda x: x.transpose(0, 2),
    "a slice": lambda x: x[:, 1:3],
    "another slice": lambda x: x[:, 2:4],
    "reshaped": lambda x: x.reshape(8, 6),
    "flattened": lambda x: x.transpose(0, 1).flatten(),
    "contiguous": lambda x: x.contiguous(),
    "detached": lambda x: x.detach(),
    "two results": lambda x: torch.max(x, dim=-1),
    "like it": lambda x: torch.empty_like(x),
    "like it in another dtype": lambda x: torch.zeros_like(x, dtype=torch.float16),
    "as a double": lambda x: x.double(),
    "as it is": lambda x: x.to(x.dtype),
    "joined": lambda x: torch.cat([x, x.transpose(0, 2).transpose(0, 2)]),
    "joined in another order": lambda x: torch.cat([x.transpose(0, 2).transpose(0, 2), x], dim=1),
    "in pieces": lambda x: x.split(2, dim=1),
    "normalized": lambda x: torch.ops.aten.native_layer_norm(x, [6], None, None, 1e-5),
    "strided by hand": lambda x: x.as_strided((2, 2), (1, 1)),
    "made on the side": lambda x: torch.arange(6, device=x.device),
    "made on the default device": lambda x: torch.arange(6),
    "a new scalar": lambda x: torch.full((), 3.0, device=x.device) + x,
    "to the host": lambda x: x.cpu() if x.device.type != "cpu" else x.to("vgpu"),
    "two alike, but for where they begin": lambda x: (x[:, :2].transpose(1, 2), x[:, 2:].transpose(1, 2)),
    "pieces of a half": lambda x: [half.transpose(0, 1) for half in (x[..., :3], x[..., 3:])],
    "into another": lambda x: torch.add(x, x, out=torch.empty_like(x)),
    "picked": lambda x: x[torch.zeros(3, dtype=torch.long, device=x.device)],
}


def looks(out: object, x: torch.Tensor) -> object:
    if isinstance(out, (tuple, list)):
        return type(out).__name__, [looks(each, x) for each in out]
    shared = out.untyped_storage()._cdata == x.untyped_storage()._cdata
    return (
        str(out.device),
        str(out.dtype),
        tuple(out.shape),
        out.stride(),
        out.storage_offset(),
        out.untyped_storage().nbytes(),
        "the argument" if out is x else "a view" if shared else "new",
    )


def called(times: int) -> dict[str, object]:
    """What each call on each tensor returns at last, with one memory for all of them."""

    def run() -> dict[str, object]:
        install(Target(compute_capability=(8, 0)))
        with torch.no_grad(), VirtualGpuMode():
            found = {}
            for name, (at, x) in itertools.product(CALLS, enumerate(tensors())):
                try:
                    for _ in range(times):
                        out = CALLS[name](x)
                    found[f"{name}, tensor {at}"] = looks(out, x)
                except (RuntimeError, NotImplementedError, TypeError) as error:
                    found[f"{name}, tensor {at}"] = type(error).__name__
            return found

    return run_in_child(run)


@pytest.fixture
def without_memory(monkeypatch):
    def switch() -> None:
        monkeypatch.setattr(FakeTensorCache, "__call__", lambda self, func, args, kwargs, run: run())

    return switch


def test_a_remembered_result_looks_like_the_first(without_memory):
    remembered = called(times=3)
    without_memory()
    assert remembered == called(times=3)


def test_calls_are_remembered(monkeypatch):
    monkeypatch.setattr(fake_tensor_cache, "_results", {})

    def run() -> tuple[int, int]:
        install(Target(compute_capability=(8, 0)))
        runs = 0
        with torch.no_grad(), VirtualGpuMode() as mode:
            x = torch.empty(4, 4, device="vgpu")
            impl = mode.dispatch

            def counting(*arguments):
                nonlocal runs
                runs += 1
                return impl(*arguments)

            mode.dispatch = counting
            results = [x.add(1) for _ in range(5)]
        return runs, len({result.untyped_storage()._cdata for result in results})

    assert run_in_child(run) == (1, 5)


def test_children_begin_with_what_those_before_them_found_out(monkeypatch):
    monkeypatch.setattr(fake_tensor_cache, "_results", {})

    def run() -> tuple[bytes, int, object]:
        install(Target(compute_capability=(8, 0)))
        since = fake_tensor_cache.known()
        with torch.no_grad(), VirtualGpuMode():
            x = torch.empty(4, 4, device="vgpu")
            found = [looks(out, x) for out in (x.add(1), x.t(), *x.bfloat16().split(2), x.sum(1, keepdim=True).cpu())]
        return fake_tensor_cache.fresh(since=since), fake_tensor_cache.known() - since, found

    calls, count, found = run_in_child(run)
    assert count > 5
    assert fake_tensor_cache.known() == 0  # what a child knows is its own until it is handed over
    fake_tensor_cache.remember(calls)
    assert fake_tensor_cache.known() == count
    assert run_in_child(run)[1:] == (0, found)


def test_what_is_remembered_has_a_limit(monkeypatch):
    monkeypatch.setattr(fake_tensor_cache, "_results", {})
    monkeypatch.setattr(fake_tensor_cache, "_MOST_VALUES", 3)
    fake_tensor_cache.remember(pickle.dumps([((1, 2, 3), None)]))
    assert fake_tensor_cache.known() == 1
    fake_tensor_cache.remember(pickle.dumps([((4,), None)]))
    assert fake_tensor_cache.known() == 0


def test_inference_tensors_stay_what_they_are():
    """Autograd refuses to save them; a remembered view that is none would be saved."""

    def run() -> list[bool]:
        install(Target(compute_capability=(8, 0)))
        with VirtualGpuMode(), torch.no_grad():
            plain = torch.empty(4, 4, device="vgpu")
            found = [plain.t().is_inference(), plain.add(1).is_inference()]
            with torch.inference_mode():
                made = torch.empty(4, 4, device="vgpu")
                found += [plain.add(1).is_inference(), made.t().is_inference()]
            return [*found, made.t().is_inference()]

    assert run_in_child(run) == [False, False, True, True, True]


def test_the_default_dtype_is_part_of_the_call():
    def run() -> list[torch.dtype]:
        install(Target(compute_capability=(8, 0)))
        with torch.no_grad(), VirtualGpuMode():
            x = torch.empty(4, device="vgpu", dtype=torch.long)
            before = (x / 2).dtype
            torch.set_default_dtype(torch.float64)
            return [before, (x / 2).dtype]

    assert run_in_child(run) == [torch.float32, torch.float64]


def written_down(work: Workload, decisions: tuple[Decision, ...]) -> list[object]:
    graph = certifying_graph(work, decisions, CARD)
    return [graph.ticks, *([dataclasses.asdict(each) for each in part] for part in (graph.ops, graph.storages))]


def gqa():
    return transformer(
        "llama",
        "LlamaForCausalLM",
        batch_size=4,
        seq_len=32,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        vocab_size=512,
    )


@pytest.mark.parametrize(
    ("make", "decisions"),
    [
        pytest.param(gqa, (), id="as it is"),
        pytest.param(
            gqa,
            (
                Precision(dtype="bf16"),
                Accumulation(micro_batch_size=2, micro_batches=2),
                Checkpoint(modules=("model.layers.0", "model.layers.2")),
            ),
            id="autocast, accumulated, checkpointed",
        ),
        pytest.param(lambda: example("unet.py:build", 4), (), id="a U-Net"),
        pytest.param(lambda: example("convnet.py:build", 4), (Precision(dtype="bf16"),), id="BatchNorm, autocast"),
    ],
)
@pytest.mark.thorough_after(1)
def test_a_recording_is_the_same_without_memory(make, decisions, without_memory):
    work = make()
    remembered = [written_down(work, decisions) for _ in range(2)]  # the second child knows what the first found out
    without_memory()
    assert [written_down(work, decisions)] * 2 == remembered


def test_a_view_of_a_deep_copy_has_its_storage():
    with VirtualGpuMode() as mode:
        copied = copy.deepcopy(torch.empty(4, 8))
        assert copied.fake_mode is mode
        assert copied.t().untyped_storage()._cdata == copied.untyped_storage()._cdata


def test_the_storage_of_a_result_keeps_the_bytes_that_its_kernel_allocates():
    """The gradient of a mask is a part of a larger tensor, whose rows are padded."""

    def run() -> list[int]:
        install(Target.of(CARD))
        with VirtualGpuMode():
            tensors = [torch.empty(2, 2, 4, 8, device="vgpu") for _ in range(5)]
            query, key, value, gradient, output = tensors
            mask, sums = torch.empty(2, 2, 4, 4, device="vgpu"), torch.empty(2, 2, 32, device="vgpu")
            seed = torch.empty((), dtype=torch.int64)
            backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
            wanted = [True, True, True, True]
            masks = [
                backward(gradient, query, key, value, mask, output, sums, seed, seed, 0.0, wanted)[3] for _ in range(2)
            ]
            return [each.untyped_storage().nbytes() for each in masks]

    first, second = run_in_child(run)
    assert first == second > 2 * 2 * 4 * 4 * 4


def test_a_view_of_freed_memory_does_not_allocate_it_again():
    def run() -> list[int]:
        install(Target.of(CARD))
        with VirtualGpuMode():
            tensors = [torch.empty(4, 8, device="vgpu") for _ in range(2)]
            for tensor in tensors:  # the view of the second one is remembered
                tensor.untyped_storage().resize_(0)
                assert tensor.t().shape == (8, 4)
            return [tensor.untyped_storage().nbytes() for tensor in tensors]

    assert run_in_child(run) == [0, 0]
