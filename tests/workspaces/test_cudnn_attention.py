"""The workspaces of attention by cuDNN: the formula against cuDNN's own answers, and the note of a plan."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import planner
from benchmarks.cudnn_attention import Attention, known
from planner import profiles
from planner.estimate.add_workspaces import unknown_ops, with_workspaces
from planner.recording.rehearsal import rehearse_program
from planner.recording.step_graph import Category
from planner.virtual_gpu.backend import Target
from planner.workspaces import cudnn_attention

H100 = profiles.load("h100")
MIB = 1 << 20


def test_the_formula_equals_every_answer_of_cudnn():
    wrong = {call.text: (call.formula_bytes, answer) for call, answer in known() if call.formula_bytes != answer}
    assert not wrong


def test_cudnn_was_asked_about_all_kinds_of_calls_on_the_cards_that_prefer_it():
    kinds = collections.Counter(
        (call.capability[0], call.is_backward, bool(call.dropout), call.sizes[1] != call.sizes[2])
        for call, _ in known()
    )
    wanted = {(major, back, drop, group) for major in (9, 10) for back in (0, 1) for drop in (0, 1) for group in (0, 1)}
    assert wanted <= set(kinds)


def test_a_call_in_text_is_the_same_call():
    for call, _ in known():
        assert Attention.of(call.text) == call


def recorded(queries: int, expanded: bool = False):
    """Returns the recording of an attention with its backward on an H100: 2 x 4 heads, width 64, bf16."""

    def program(device: torch.device) -> None:
        query, key = (
            torch.empty(2, 4, queries, 64, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2)
        )
        output = torch.nn.functional.scaled_dot_product_attention(query, key, key)
        output.sum().backward() if expanded else output.backward(torch.empty_like(output))

    return rehearse_program(program, Target(compute_capability=(9, 0)))


def scratch(graph, name: str) -> list[int]:
    return [
        storage.size_bytes
        for storage in with_workspaces(graph, H100, "2.13.0").storages
        if storage.category is Category.WORKSPACE and graph.ops[storage.op].name == name
    ]


def test_the_workspace_is_in_the_recording_of_a_step():
    graph = recorded(1024)
    assert scratch(graph, cudnn_attention.FORWARD_OP) == [256]
    assert scratch(graph, cudnn_attention.BACKWARD_OP) == [4 * 2 * 4 * 1024 * 65 + 256]
    assert not unknown_ops(graph)


def test_an_expanded_gradient_is_copied_before_the_workspace():
    """`run_cudnn_SDP_bprop` copies a gradient whose innermost stride is not 1, such as that of a sum."""
    copy, workspace = scratch(recorded(1024, expanded=True), cudnn_attention.BACKWARD_OP)
    assert copy == 2 * 2 * 4 * 1024 * 64 and workspace == 4 * 2 * 4 * 1024 * 65 + 256


def test_the_note_says_whether_the_formula_was_compared_with_this_version_and_card():
    def note(card, version):
        return next(iter(cudnn_attention.notes(24, card, version)), "")

    assert "equals the answers of cuDNN" in note(H100, "2.13.0") and note(H100, "2.13.0").startswith("24 workspaces")
    assert "are estimates" in note(H100, "2.8.0")
    assert "are estimates" in note(dataclasses.replace(H100, compute_capability=(8, 0)), "2.13.0")
    assert not list(cudnn_attention.notes(0, H100, "2.13.0"))


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_cudnn_runs_on_other_cards_if_nothing_else_is_enabled(capability):
    def program(device: torch.device) -> None:
        query = torch.empty(2, 4, 64, 64, dtype=torch.bfloat16, device=device)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(query, query, query)

    graph = rehearse_program(program, Target(compute_capability=capability))
    assert cudnn_attention.FORWARD_OP in {op.name for op in graph.ops}


def test_a_plan_names_the_workspaces_of_attention():
    class Attends(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of = torch.nn.Linear(64, 3 * 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.of(x).view(2, 256, 3, 4, 16).permute(2, 0, 3, 1, 4)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().mean()

    batch = torch.randn(2, 256, 64, dtype=torch.bfloat16)
    plan = planner.plan(Attends().bfloat16(), batch, vram=None, gpu="h100", loss_fn=lambda output, _: output)
    (note,) = (note for note in plan.notes if "attention by cuDNN" in note)
    assert note.startswith("2 workspaces of attention by cuDNN are computed by a formula")
