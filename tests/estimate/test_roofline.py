"""What an op is taken to last, and how often an op of a rehearsed micro-batch stands for one of the step."""

from __future__ import annotations

import dataclasses

import pytest

from planner import profiles
from planner.estimate.roofline import (
    CONVOLUTION_PASSES,
    SCRATCH_PASSES,
    HostCopies,
    op_ns,
    op_times_ns,
    repetitions,
    step_flops,
)
from planner.recording.step_graph import Op, Phase, StepGraph
from planner.workspaces.registry import CudnnSettings, KernelCall, Layout

pytestmark = pytest.mark.no_torch

CARD = dataclasses.replace(
    profiles.bare(),
    flops_per_s={"fp32": 10**12, "tf32": 10**13, "fp16": 2 * 10**12, "bf16": 2 * 10**12, "fp64": 10**10},
    memory_bandwidth_bytes_per_s=10**11,
    host_link_bytes_per_s=10**10,
    launch_ns=7,
)


def op(name: str = "aten.mm.default", **changes: object) -> Op:
    given = {
        "tick": 0, "phase": Phase.FORWARD, "module": "", "call": None, "source": "", "flops": 0, "moved_bytes": 0,
        "host_bytes": 0, "dtype": "fp32", "is_view": False, "step": 0, "micro_batch": 0,
    }  # fmt: skip
    return Op(name=name, **{**given, **changes})


def graph_of(ops: list[Op], sizes: tuple[int, ...], steps: int = 1) -> StepGraph:
    return StepGraph(
        ops=ops, storages=[], saves=[], calls=[], ticks=len(ops), steps=steps, primed=False, micro_batch_sizes=sizes,
        module_types={}, batch_statistics=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "nanoseconds"),
    [
        (op(flops=10**6, moved_bytes=10**3), 1_007),
        (op(flops=10**6, moved_bytes=10**3, dtype="bf16"), 507),
        (op(flops=10**3, moved_bytes=10**6), 10_007),
        (op("aten.add.Tensor", moved_bytes=10**6, dtype="int64"), 10_007),
        (op("aten.convolution.default", flops=10**6, moved_bytes=10**3), 1_007 + CONVOLUTION_PASSES * 10),
        (op("aten.convolution_backward.default", moved_bytes=10**3), 7 + CONVOLUTION_PASSES * 10),
        (op("aten.convolution.default", flops=10**6, scratch_bytes=10**4), 1_007 + SCRATCH_PASSES * 100),
        (op("aten.copy_.default", moved_bytes=10**4, host_bytes=10**4), 1_007),
        (op("aten.view.default", moved_bytes=10**6, is_view=True), 0),
    ],
)
def test_time_of_an_op(made, nanoseconds):
    assert op_ns(made, CARD) == nanoseconds


def convolution_of(dtype: str, groups: int, **settings: bool) -> Op:
    name, itemsize = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4), "fp64": ("float64", 8)}[dtype]
    image = Layout((2, 8, 9, 9), (648, 81, 9, 1), itemsize, name)
    weight = Layout((8, 8 // groups, 3, 3), (72 // groups, 9, 3, 1), itemsize, name)
    options = {name: (1, 1) for name in ("stride", "padding", "dilation")} | {"output_padding": (0, 0)}
    arguments = {"input": image, "weight": weight, **options, "groups": groups, "transposed": False}
    call = KernelCall(arguments, (image,), CudnnSettings(**settings))
    return op("aten.convolution.default", flops=10**6, dtype=dtype, kernel=call)


@pytest.mark.parametrize(
    ("dtype", "groups", "nanoseconds"), [("bf16", 1, 507), ("bf16", 8, 1_007), ("fp32", 8, 1_007), ("fp64", 8, 100_007)]
)
def test_depthwise_kernels_run_without_tensor_cores(dtype, groups, nanoseconds):
    """With a group for each channel, a convolution runs on PyTorch's own kernels."""
    assert op_ns(convolution_of(dtype, groups), CARD) == nanoseconds


def test_convolutions_in_fp32_have_the_rate_of_tf32_if_pytorch_allows_it():
    """PyTorch allows TF32 for cuDNN by default, and not for matrix products (aten/src/ATen/Context.h)."""
    assert op_ns(convolution_of("fp32", 1), CARD) == 107
    assert op_ns(convolution_of("fp32", 1, allow_tf32=False), CARD) == 1_007
    assert op_ns(convolution_of("fp32", 1, enabled=False), CARD) == 1_007
    product = Layout((8, 8), (8, 1), 4, "float32")
    assert op_ns(op(flops=10**6, kernel=KernelCall({"self": product, "mat2": product}, (product,))), CARD) == 1_007


@pytest.mark.parametrize(
    ("rehearsed", "micro_batches", "repeats"),
    [((4,), 1, (1,)), ((4, 4), 2, (1, 1)), ((4, 4), 9, (1, 8)), ((4, 4, 3), 9, (1, 7, 1)), ((4, 4, 3), 3, (1, 1, 1))],
)
def test_a_micro_batch_stands_for_those_between(rehearsed, micro_batches, repeats):
    assert repetitions(graph_of([], rehearsed), micro_batches) == repeats
    assert sum(repeats) == micro_batches


def test_times_and_flops_of_a_step():
    """Of the last one; its update is made once."""
    ops = [
        op(flops=10**6, phase=Phase.SETUP, step=1),
        op(flops=10**6),
        op(flops=10**6, step=1),
        op(flops=10**6, step=1, micro_batch=1, phase=Phase.BACKWARD),
        op(flops=10**6, step=1, micro_batch=1, phase=Phase.OPTIMIZER),
    ]
    graph = graph_of(ops, (2, 2), steps=2)
    assert op_times_ns(graph, CARD, 5) == [0, 0, 1_007, 4 * 1_007, 1_007]
    assert step_flops(graph, 5) == 6 * 10**6


def test_a_copy_to_the_host_comes_back():
    copies = HostCopies(card=CARD, repeats=(1, 3))
    assert [copies.ns(10**4, number) for number in (0, 1, 2)] == [2 * 1_007, 6 * 1_007, 6 * 1_007]
