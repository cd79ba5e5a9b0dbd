"""Formulas for the scratch memory of attention by cuDNN, and the note of a plan that says where they come from.

PyTorch builds the graph of an attention with cuDNN's frontend, and allocates one workspace for the frontend and cuDNN
together (native/cudnn/MHA.cpp, `run_cudnn_SDP_fprop` and `run_cudnn_SDP_bprop`). The frontend's share is public: in
backward, the gradient of the query in fp32, and one number for each query (node/scaled_dot_product_flash_attention.h,
`get_fe_workspace_size_node`). The share of cuDNN's kernels is not public. Its formula was fitted to answers of cuDNN
9.19.1 and 9.20.0 for described cards (`python -m benchmarks.cudnn_attention`), and equals all answers in
tests/workspaces/cudnn_attention.txt.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.profiles.device import DeviceProfile
from planner.workspaces.cudnn.versions import expected
from planner.workspaces.registry import KernelCall, takes_scratch

FORWARD_OP = "aten._scaled_dot_product_cudnn_attention.default"
BACKWARD_OP = "aten._scaled_dot_product_cudnn_attention_backward.default"
OPS = (FORWARD_OP, BACKWARD_OP)

_ASKED_RELEASES = ((9, 19), (9, 20))
"""Releases of cuDNN whose answers the formulas were compared with."""
_ASKED_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities on which PyTorch prefers cuDNN, and for which it was asked."""
_HOPPER, _BLACKWELL = 9, 10
_HOPPER_BYTES = 256
"""Bytes that every call takes on Hopper."""
_ALIGNMENT_BYTES = 128
"""Bytes that a workspace has on other cards in addition to its contents."""
_TILE = 128
"""Rows and columns of the tiles in which data center Blackwell processes attention scores."""


@takes_scratch(FORWARD_OP)
def forward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the size in bytes of the workspace of a forward: the mask of dropout on data center Blackwell.

    Source: native/cudnn/MHA.cpp, `run_cudnn_SDP_fprop`, and cuDNN's answers.
    """
    major = card.compute_capability[0]
    if major == _HOPPER:
        return [_HOPPER_BYTES]
    return [_aligned(_mask_bytes(call) if major == _BLACKWELL else 0)]


@takes_scratch(BACKWARD_OP)
def backward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of a backward: a copy, if it is needed, and the workspace.

    The gradient of the output is copied if its innermost stride is not 1. With grouped-query attention, the workspace
    has the gradients of keys and values for each query head, before they are summed over each group. On data center
    Blackwell the kernel for few queries or keys has a second gradient of the query in fp32 (except with one query in
    each of several samples). On cards on which PyTorch does not prefer cuDNN, all kernels have it.

    Source: native/cudnn/MHA.cpp, `run_cudnn_SDP_bprop`, node/scaled_dot_product_flash_attention.h of cuDNN's frontend
    1.22, and cuDNN's answers.
    """
    query, key, value, grad = (call.tensor(name) for name in ("query", "key", "value", "grad_out"))
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    of_frontend = 4 * batch * heads * queries * (width + 1)
    of_heads = 0 if key_heads == heads else batch * heads * keys * (width + value.shape[3]) * key.itemsize
    of_second_gradient = 4 * batch * heads * _rounded(queries, 8) * width
    copies = [] if grad.stride[-1] == 1 else [grad.nbytes]
    major = card.compute_capability[0]
    if major == _HOPPER:
        return [*copies, of_frontend + of_heads + _HOPPER_BYTES]
    of_kernel = of_heads + of_second_gradient
    if major == _BLACKWELL and call.arguments["dropout_p"]:
        of_kernel = of_heads + _mask_bytes(call)
    elif major == _BLACKWELL and keys > _TILE and (queries > _TILE or (queries == 1 and batch > 1)):
        of_kernel = of_heads
    return [*copies, of_frontend + _aligned(of_kernel)]


def notes(calls: int, card: DeviceProfile, torch_version: str) -> Iterator[str]:
    """Yields a note on the workspaces of attention by cuDNN; none if there are no calls.

    Args:
        calls: number of calls in a step, forward and backward.
        torch_version: a version as in `torch.__version__`.
    """
    if not calls:
        return
    version = expected(torch_version, card.compute_capability)
    asked = version.version[:2] in _ASKED_RELEASES and card.compute_capability in _ASKED_CAPABILITIES
    start = f"{calls:,} workspaces of attention by cuDNN"
    if version.is_pinned and asked:
        yield (
            f"{start} are computed by a formula, which equals the answers of cuDNN 9.19.1 and 9.20.0 for this kind of "
            "card"
        )
    else:
        yield (
            f"{start} are estimates: their formula was compared with cuDNN 9.19.1 and 9.20.0 on Hopper and data center "
            "Blackwell, and the step runs another version or card"
        )


def _mask_bytes(call: KernelCall) -> int:
    """Returns the bytes of a mask with one bit for each attention score, in whole tiles; 0 without dropout."""
    if not call.arguments["dropout_p"]:
        return 0
    batch, heads, queries, _ = call.tensor("query").shape
    return batch * heads * _rounded(queries, _TILE) * _rounded(call.tensor("key").shape[2], _TILE) // 8


def _aligned(size_bytes: int) -> int:
    return size_bytes + _ALIGNMENT_BYTES if size_bytes else 0


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
