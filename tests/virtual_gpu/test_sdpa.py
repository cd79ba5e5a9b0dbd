"""The kernel of attention that a rehearsal chooses is one of those that the program enables."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from planner.recording.rehearsal import rehearse_program
from planner.virtual_gpu.backend import Target

KERNELS = {
    SDPBackend.CUDNN_ATTENTION: "_scaled_dot_product_cudnn_attention",
    SDPBackend.FLASH_ATTENTION: "_scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "_scaled_dot_product_efficient_attention",
    SDPBackend.MATH: "bmm",
}


@pytest.mark.parametrize("enabled", KERNELS)
def test_a_disabled_kernel_is_not_chosen(enabled):
    def program(device: torch.device) -> None:
        query = torch.empty(2, 4, 64, 64, dtype=torch.bfloat16, device=device)
        with sdpa_kernel(enabled):
            torch.nn.functional.scaled_dot_product_attention(query, query, query)

    graph = rehearse_program(program, Target(compute_capability=(9, 0)))
    ran = {name for op in graph.ops for name in KERNELS.values() if op.name.startswith(f"aten.{name}.")}
    assert ran == {KERNELS[enabled]}


@pytest.mark.parametrize(
    ("queries", "keys", "dropout", "deterministic", "by_cudnn"),
    [(64, 64, 0.1, False, True), (64, 64, 0.0, True, False), (64, 1, 0.0, False, False), (1, 64, 0.1, False, False)],
)
def test_cudnn_does_not_run_what_pytorch_does_not_give_it(queries, keys, dropout, deterministic, by_cudnn):
    """`check_cudnn_tensor_shapes` and `check_cudnn_deterministic` in sdp_utils.cpp."""

    def program(device: torch.device) -> None:
        query, key = (torch.empty(2, 4, rows, 64, dtype=torch.bfloat16, device=device) for rows in (queries, keys))
        torch.use_deterministic_algorithms(deterministic)
        torch.nn.functional.scaled_dot_product_attention(query, key, key, dropout_p=dropout)
        torch.use_deterministic_algorithms(False)

    graph = rehearse_program(program, Target(compute_capability=(9, 0)))
    assert any(KERNELS[SDPBackend.CUDNN_ATTENTION] in op.name for op in graph.ops) == by_cudnn
