"""Inference mode: rehearsed on fake tensors and really run on the CPU, the same storages live equally long."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from planner.recording.step_graph import StepGraph, Storage
from tests.support.truth import CASES, LANGUAGE, Case, hugging_face, rehearsal, truth

pytestmark = pytest.mark.slow

GENERATIONS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 10, "top_p": 0.9},
    "beam search": {"num_beams": 3},
    "beam search that samples": {"num_beams": 2, "do_sample": True},
    "without a cache": {"use_cache": False},
    "a cache of fixed size": {"cache_implementation": "static"},
}
GPT2 = hugging_face("gpt2", "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, vocab_size=60)
LLAMA = hugging_face("llama", "LlamaForCausalLM", **LANGUAGE, num_key_value_heads=2)


def assert_equal(real: StepGraph, rehearsed: StepGraph) -> None:
    assert [(op.name, op.shapes) for op in real.ops] == [(op.name, op.shapes) for op in rehearsed.ops]
    assert [_without_ticks(storage) for storage in real.storages] == [
        _without_ticks(storage) for storage in rehearsed.storages
    ]
    assert _order(real) == _order(rehearsed)
    assert real.live_bytes().max() == rehearsed.live_bytes().max()


def _without_ticks(storage: Storage) -> Storage:
    return dataclasses.replace(storage, lives=[])


def _order(graph: StepGraph) -> list[tuple[str, int]]:
    """Returns the ops, births and deaths in their order. A question for a number takes a tick in rehearsals only."""
    events = [(op.tick, "op", number) for number, op in enumerate(graph.ops)]
    for number, storage in enumerate(graph.storages):
        for birth, death in storage.lives:
            events += [(birth, "birth", number), (death, "death", number)]
    return [(kind, number) for _, kind, number in sorted(events)]


def generating(options: dict) -> object:
    def generate(model: nn.Module) -> None:
        model.eval()
        with torch.inference_mode():
            prompt = torch.arange(12).view(2, 6) + 3
            made = model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, pad_token_id=0,
                eos_token_id=None, **{"do_sample": False, **options},
            )  # fmt: skip
            assert made.shape == (2, 11)
        model.train()

    return generate


@pytest.mark.parametrize("build", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.thorough_after(1)
def test_a_generation_between_the_steps_is_what_really_happens_byte_by_byte(build, name):
    case = Case(build=build, between=(generating(GENERATIONS[name]),))
    assert_equal(truth(case), rehearsal(case))


@pytest.mark.parametrize("name", ["lstm", "gru", "convolutions with batch norm", "u-net"])
@pytest.mark.thorough_after(3)
def test_an_evaluation_is_what_really_happens_byte_by_byte(name):
    case = CASES[name]
    given = case.build()[1]

    def evaluate(model: nn.Module) -> None:
        batch = pytree.tree_map(lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype), given)
        model.eval()
        with torch.inference_mode():
            model(**batch) if isinstance(batch, dict) else model(*batch[:-1])
        model.train()

    case = dataclasses.replace(case, between=(evaluate,))
    assert_equal(truth(case), rehearsal(case))


class Pair(nn.Module):
    """A student and a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        self.teacher = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))


def distilled(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    with torch.inference_mode():
        wanted = torch.einsum("ij,jk->ik", model.teacher(batch), torch.eye(8, device=batch.device)).softmax(-1)
    wanted = wanted.clone()
    F.kl_div(model.student(batch).log_softmax(-1), wanted, reduction="batchmean").backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_teacher_in_inference_mode_is_what_really_happens_byte_by_byte():
    torch.manual_seed(0)
    model = Pair()
    case = Case(build=lambda: (model, torch.randn(6, 16), None), step=distilled)
    assert_equal(truth(case), rehearsal(case))
