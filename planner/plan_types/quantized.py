"""Layout of the 4- and 8-bit weights of bitsandbytes, before and after they are quantized.

On a card bitsandbytes stores such a weight packed. On the CPU or the meta device it may not be quantized yet, and then
has its original shape and dtype. The functions here describe the packed weight in both cases.
"""

from __future__ import annotations

import math
from typing import Any


def is_quantized(parameter: Any) -> bool:
    """Returns True for a parameter that bitsandbytes has quantized, or would quantize on a card."""
    kind = type(parameter)
    if not kind.__module__.startswith("bitsandbytes"):
        return False
    return kind.__name__ == "Params4bit" or (kind.__name__ == "Int8Params" and not parameter.has_fp16_weights)


def shape_and_dtype(parameter: Any) -> tuple[tuple[int, ...], str]:
    """Returns the shape and dtype (such as 'torch.uint8') of a parameter or buffer on a card."""
    shape, dtype, _ = _layout(parameter)
    return shape, dtype


def stored_bytes(parameter: Any) -> int:
    """Returns the bytes of a parameter on a card, without its quantization state."""
    shape, _, item_bytes = _layout(parameter)
    return math.prod(shape) * item_bytes


def element_count(parameter: Any) -> int:
    """Returns the number of weights in a parameter; each packed weight counts as one."""
    state = getattr(parameter, "quant_state", None)
    return math.prod(parameter.shape if state is None else state.shape)


def _layout(parameter: Any) -> tuple[tuple[int, ...], str, int]:
    """Returns shape, dtype and bytes per element on a card."""
    shape, dtype = tuple(parameter.shape), parameter.dtype
    if is_quantized(parameter):
        if type(parameter).__name__ == "Int8Params":
            return shape, "torch.int8", 1
        if not parameter.bnb_quantized:
            dtype = parameter.quant_storage
            shape = ((math.prod(shape) + 1) // (2 * dtype.itemsize), 1)
    return shape, str(dtype), dtype.itemsize
