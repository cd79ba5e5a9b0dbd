"""bitsandbytes' 4- and 8-bit weights on the virtual GPU: their bytes, and the ops that multiply with them.

A quantized weight is a parameter of packed values with a *quantization state*: the largest absolute value of each block
of weights, perhaps quantized itself, and tables. The state is neither a parameter nor a buffer, yet it takes memory on
the card (bitsandbytes/nn/modules.py: `Params4bit`, `Int8Params`; functional.py: `QuantState`).

On a card bitsandbytes quantizes a weight when the model is moved there. A weight that is not quantized yet is quantized
here in the same way, on fake tensors.

`bitsandbytes::gemm_4bit` runs one kernel, or dequantizes the weight and multiplies with it, which allocates the
dequantized weight. bitsandbytes chooses by the shapes and the card (backends/cuda/ops.py). This module calls the same
function to choose.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

_PARTS = ("absmax", "code", "offset")
"""The tensors of a `QuantState`. Its attribute `state2` is None or the state of `absmax`, which is quantized then."""


def fake_parameter(parameter: Any, device: str) -> torch.nn.Parameter:
    """Returns a quantized fake parameter on a device, with its quantization state. Call it in a `FakeTensorMode`.

    Args:
        parameter: a weight (`planner.plan_types.quantized`), perhaps on the meta device. It is not changed.
        device: the virtual GPU or the CPU.
    """
    attributes = dict(vars(parameter))
    empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    if type(parameter).__name__ == "Int8Params":
        scales = parameter.SCB
        if parameter.dtype != torch.int8:
            empty, scales = _quantized_to_8_bits(empty)
        elif scales is not None:
            scales = _moved(scales, device)
        fake = torch.nn.Parameter(empty, requires_grad=False)
        attributes |= {"CB": None if parameter.CB is None and scales is None else fake.data, "SCB": scales}
    else:
        if parameter.bnb_quantized:
            state = _moved_state(parameter.quant_state, device)
        else:
            empty, state = _quantized_to_4_bits(parameter, empty)
        fake = torch.nn.Parameter(empty, requires_grad=False)
        attributes |= {"quant_state": state, "bnb_quantized": True}
    vars(fake).update(attributes)
    # peft and bitsandbytes look at the name of the class to see whether a weight is quantized.
    fake.__class__ = _named(type(fake), type(parameter).__name__)
    return fake


@functools.cache
def _named(kind: type, name: str) -> type:
    """Returns a subclass of `kind` with this name."""
    return type(name, (kind,), {})


def move_module_state(module: Any, device: str) -> None:
    """Makes a module of bitsandbytes refer to the quantization state of its fake weight, in place."""
    if not type(module).__module__.startswith("bitsandbytes"):
        return
    if "quant_state" in vars(module):
        module.quant_state = getattr(module.weight, "quant_state", None)
    state = vars(module).get("state")
    for name in ("CB", "SCB") if state is not None else ():
        if getattr(state, name, None) is not None:
            setattr(state, name, module.weight.data if name == "CB" else _moved(getattr(state, name), device))


def state_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors of the quantization state of a parameter, in the order in which they are moved to a card."""
    state = vars(tensor).get("quant_state")
    while state is not None:
        yield from (part for name in _PARTS if isinstance(part := getattr(state, name, None), torch.Tensor))
        state = getattr(state, "state2", None)
    scales = vars(tensor).get("SCB")
    if isinstance(scales, torch.Tensor):
        yield scales


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _moved_state(state: Any, device: str) -> Any:
    """Returns a copy of a `QuantState` with fake tensors on a device; None for None."""
    if state is None:
        return None
    moved = copy.copy(state)
    for name in _PARTS:
        if isinstance(getattr(state, name, None), torch.Tensor):
            setattr(moved, name, _moved(getattr(state, name), device))
    moved.state2 = _moved_state(state.state2, device)
    return moved


def _quantized_to_4_bits(parameter: Any, weight: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Quantizes a weight as `Params4bit._quantize` does. Returns the packed values and their state."""
    functional = importlib.import_module("bitsandbytes.functional")
    if "dynamic" not in functional.name2qmap:
        with unset_fake_temporarily():
            functional.name2qmap["dynamic"] = functional.create_dynamic_map()
    return functional.quantize_4bit(
        weight.contiguous(),
        blocksize=parameter.blocksize,
        compress_statistics=parameter.compress_statistics,
        quant_type=parameter.quant_type,
        quant_storage=parameter.quant_storage,
    )


def _quantized_to_8_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a weight as `Int8Params._quantize` does. Returns the values and the scale of each row."""
    functional = importlib.import_module("bitsandbytes.functional")
    values, scales, _ = functional.int8_vectorwise_quant(weight.contiguous().to(torch.float16))
    return values, scales


def register(capability: tuple[int, int], sm_count: int, route: Callable[[str, Callable], None]) -> None:
    """Makes products with quantized weights run the ops that they run on a card, until this process ends.

    Does nothing if bitsandbytes is not imported, or if its version has no such ops.

    Args:
        capability, sm_count: compute capability and number of multiprocessors of the card.
        route: registers a function that runs instead of an op (`backend.route`).
    """
    if "bitsandbytes.functional" not in sys.modules:
        return
    ops = torch.ops.bitsandbytes
    if hasattr(ops, "gemm_4bit"):
        chosen = functools.partial(_gemm_4bit, _runs_one_kernel(capability, sm_count))
        route("bitsandbytes::gemm_4bit", chosen)
    if hasattr(ops, "int8_scaled_mm") and hasattr(ops, "int8_linear_matmul"):
        route("bitsandbytes::int8_scaled_mm", _int8_scaled_mm)
        route("bitsandbytes::int8_mixed_scaled_mm", _int8_mixed_scaled_mm)


def _runs_one_kernel(capability: tuple[int, int], sm_count: int) -> Callable[..., bool]:
    """Returns bitsandbytes' function that chooses between its kernel and a product with the dequantized weight.

    The module that defines it imports a function of torch that exists only with CUDA. The function is not called here,
    so None takes its place.
    """
    torch_c: Any = torch._C
    name = "_cuda_getCurrentRawStream"
    if not hasattr(torch_c, name):
        setattr(torch_c, name, None)
    cuda: Any = importlib.import_module("bitsandbytes.backends.cuda.ops")
    cuda._gpu_dispatch_props = lambda device_index: (sm_count, *capability)

    def runs_one_kernel(dtype: torch.dtype, rows: int, outputs: int, inputs: int, blocksize: int) -> bool:
        if rows > cuda._gemm_4bit_custom_max_m or inputs % blocksize:
            return False
        return cuda._gemm_4bit_use_custom_fn(0, dtype, rows, outputs, inputs)

    return runs_one_kernel


def _gemm_4bit(
    runs_one_kernel: Callable[..., bool],
    A,
    B,
    shapeB,
    absmax,
    blocksize,
    quant_type,
    bias=None,
    absmax_8bit=None,
    absmax_code=None,
    absmax_offset=None,
):
    """Runs the ops of `gemm_4bit` on CUDA (backends/cuda/ops.py, `_dequant_linear_fallback`)."""
    ops = torch.ops.bitsandbytes
    inputs = A.shape[-1]
    if runs_one_kernel(A.dtype, A.numel() // inputs, shapeB[0], inputs, blocksize):
        with torch._C._AutoDispatchBelowAutograd():
            return ops.gemm_4bit.default(
                A, B, shapeB, absmax, blocksize, quant_type, bias, absmax_8bit, absmax_code, absmax_offset
            )
    if absmax_8bit is not None:
        # The variable stays, because bitsandbytes also keeps this tensor until the product has run.
        dequantized = ops.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = dequantized + absmax_offset
    weight = ops.dequantize_4bit.default(B, absmax, blocksize, quant_type, shapeB, A.dtype)
    return torch.nn.functional.linear(A, weight, bias)


def _int8_mixed_scaled_mm(A, CA, CB, SCA, SCB, outlier_cols=None, bias=None):
    """Runs the ops of `int8_mixed_scaled_mm` (backends/default/ops.py): columns with outliers are not quantized."""
    if outlier_cols is None or not outlier_cols.numel():
        return _int8_scaled_mm(CA, CB, SCA, SCB, bias, A.dtype), A.new_empty(0)
    outliers = A[:, outlier_cols].contiguous()
    dequantized = torch.ops.bitsandbytes.int8_vectorwise_dequant.default(CB[:, outlier_cols].contiguous(), SCB)
    weight = dequantized.to(A.dtype).t()
    return _int8_scaled_mm(CA, CB, SCA, SCB, bias, A.dtype).addmm(outliers, weight), outliers


def _int8_scaled_mm(A, B, row_stats, col_stats, bias=None, dtype=None):
    """Runs the ops of `int8_scaled_mm` (backends/default/ops.py), which allocates the product in 32-bit integers."""
    ops = torch.ops.bitsandbytes
    product = ops.int8_linear_matmul.default(A, B)
    return ops.int8_mm_dequant.default(product, row_stats, col_stats, dtype=dtype or torch.float16, bias=bias)
