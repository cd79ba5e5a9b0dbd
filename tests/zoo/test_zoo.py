"""Every model of the table is in the state that the table says, in fp32 and under bf16 autocast."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from planner.errors import PlannerError
from planner.plan_types.decisions import Precision
from planner.recording.step_graph import Category, Phase, StepGraph
from planner.rewrite.rehearse import start_rehearsal
from planner.virtual_gpu.forked_process import Child
from planner.workload.workload import Workload, workload
from tests.support.workloads import BARE
from tests.zoo.table import TORCH, TRANSFORMERS, Entry

pytestmark = pytest.mark.slow

ENTRIES = (*TRANSFORMERS, *TORCH)
_SIMILAR = {
    "roberta": "bert camembert electra distilbert mpnet layoutlm mobilebert squeezebert roformer esm nystromformer",
    "deberta-v2": "deberta",
    "xlnet": "funnel",
    "gpt2": "gpt_bigcode gpt_neo gpt_neox gptj codegen opt ctrl biogpt xglm",
    "bloom": "mpt falcon",
    "llama": "mistral qwen2 phi phi3 stablelm olmo cohere starcoder2 granite glm smollm3 nemotron",
    "qwen3": "olmo2",
    "gemma2": "gemma gemma3_text",
    "t5": "umt5 longt5",
    "bart": "mbart pegasus marian blenderbot led",
    "vit": "deit dinov2 vit_mae beit audio-spectrogram-transformer",
    "swin": "swinv2",
    "convnext": "convnextv2",
    "resnet": "mobilenet_v2 efficientnet poolformer",
    "segformer": "pvt_v2",
    "clip": "siglip altclip",
    "blip": "git",
    "wav2vec2": "hubert sew unispeech-sat",
    "switch_transformers": "nllb-moe",
    "mixtral": "qwen2_moe qwen3_moe olmoe granitemoe",
    "mamba": "mamba2 falcon_mamba",
}
"""By name of an architecture, others with the same kinds of blocks, which only the lane `thorough` rehearses."""
_STAYS = (Category.PARAMETER, Category.OPTIMIZER_STATE, Category.INPUT)


def work_of(entry: Entry) -> Workload:
    model, batch, *loss_fn = entry.build()
    return workload(model, batch, loss_fn=loss_fn[0] if loss_fn else None, optimizer=entry.optimizer)


def begin(work: Workload, *decisions: Precision, steps: int) -> Child:
    sizes = (work.batch_size,)
    return start_rehearsal(work, decisions, BARE, sizes=sizes, steps=steps, primed=False, what_if=False)


def outcome(child: Child, refused: str | None) -> StepGraph | None:
    """The recording, or None for a model that is refused in the one line that the table says."""
    if refused is None:
        return child.result()
    with pytest.raises(PlannerError) as error:
        child.result()
    assert re.search(refused, str(error.value))
    assert "\n" not in str(error.value)
    return None


def check_assumptions(entry: Entry, graph: StepGraph) -> None:
    reported = "\n".join(graph.assumptions)
    if entry.assumes is None:
        assert reported == ""
    else:
        assert re.search(entry.assumes, reported)
        assert all(
            re.search(r"assumed that .*: (in module '.+'|outside of the model) at .+", a) for a in graph.assumptions
        )


def check_that_nothing_leaks(graph: StepGraph, *, caches: bool) -> None:
    live = graph.live_bytes()
    second = next(op for op in graph.ops if op.step == 1)
    after_one, after_two = live[second.tick], live[-1]
    assert after_one == after_two
    lives = [any(start < graph.ticks - 1 < stop for start, stop in spans) for spans in graph.spans()]
    kept = Counter()
    for storage, alive in zip(graph.storages, lives, strict=True):
        kept[storage.category in _STAYS] += storage.size_bytes * alive
    assert bool(kept[False]) == caches, "something is kept that is neither a parameter nor optimizer state nor an input"
    assert after_two == kept[True] + kept[False]


def check_that_backward_knows_its_modules(graph: StepGraph) -> None:
    """All products do; the engine's own sums, and what it wraps for an in-place op on a view, are of no module."""
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD and not op.is_view]
    lost = [op for op in backward if op.forward_op is None]
    assert backward
    assert not [op.name for op in lost if op.flops]
    assert len(lost) <= 0.5 * len(backward)


def check_sanity(graph: StepGraph) -> None:
    live = graph.live_bytes()
    assert np.all(live >= 0)
    assert any(storage.category is Category.GRADIENT for storage in graph.storages)
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= {op.phase for op in graph.ops}


def cases() -> list[Any]:
    similar = {name for names in _SIMILAR.values() for name in names.split()}
    return [
        pytest.param(entry, id=entry.name, marks=[pytest.mark.thorough] if entry.name in similar else [])
        for entry in ENTRIES
    ]


@pytest.mark.parametrize("entry", cases())
def test_a_model_is_rehearsed_or_refused_as_the_table_says(entry):
    work = work_of(entry)
    full = begin(work, steps=2)
    half = begin(work, Precision(dtype="bf16"), steps=1)
    graph = outcome(full, entry.refused)
    halved = outcome(half, entry.refused_bf16 or entry.refused)
    if graph is not None:
        check_assumptions(entry, graph)
        check_that_backward_knows_its_modules(graph)
        check_sanity(graph)
        check_that_nothing_leaks(graph, caches=entry.caches)
    if halved is not None:
        check_sanity(halved)
        check_that_backward_knows_its_modules(halved)


def test_the_table_names_every_model_once():
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
    assert len(TRANSFORMERS) >= 60
    similar = [name for of in _SIMILAR.values() for name in of.split()]
    assert {*_SIMILAR, *similar} <= set(names) and len(similar) == len(set(similar) - set(_SIMILAR))
