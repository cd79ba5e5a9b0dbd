"""Describes a call of an op as plain data: shapes and strides of its tensors, its other arguments, and settings."""

from __future__ import annotations

import torch

from planner.workspaces.registry import BENCHMARK_LIMIT, CudnnSettings, KernelCall, Layout


def kernel_call(op: torch._ops.OpOverload, args: tuple, kwargs: dict, out: object) -> KernelCall:
    """Returns the arguments and outputs of a call as plain data, for the formula that computes its scratch memory."""
    arguments = {
        argument.name: args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        for position, argument in enumerate(op._schema.arguments)
    }
    results = out if isinstance(out, (tuple, list)) else (out,)
    return KernelCall(
        arguments={name: _as_data(value) for name, value in arguments.items()},
        outputs=tuple(_layout(result) for result in results if isinstance(result, torch.Tensor)),
        settings=cudnn_settings() if "convolution" in op._schema.name else CudnnSettings(),
    )


def cudnn_settings() -> CudnnSettings:
    """Returns the settings of cuDNN that hold now. `fp32_precision` of convolutions includes the older `allow_tf32`."""
    limit: int | None = torch.backends.cudnn.benchmark_limit  # None in a build without CUDA
    return CudnnSettings(
        enabled=torch.backends.cudnn.enabled,
        allow_tf32=torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
        deterministic=torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        benchmark=torch.backends.cudnn.benchmark,
        benchmark_limit=BENCHMARK_LIMIT if limit is None else limit,
    )


def _layout(tensor: torch.Tensor) -> Layout:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Layout(shape=tuple(tensor.shape), stride=tuple(tensor.stride()), itemsize=tensor.itemsize, dtype=dtype)


def _as_data(value: object) -> object:
    """Converts an argument to plain data: tensors to `Layout`, lists to tuples, other objects to None."""
    if isinstance(value, torch.Tensor):
        return _layout(value)
    if isinstance(value, (list, tuple)):
        return tuple(_as_data(item) for item in value)
    return value if isinstance(value, (int, float, bool, str)) else None
