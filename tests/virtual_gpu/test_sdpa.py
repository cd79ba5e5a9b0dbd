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
