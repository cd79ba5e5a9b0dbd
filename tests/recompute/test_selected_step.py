"""The predicted allocations of a selection have the peak that the checkpoint problem promises."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch.nn import Linear

from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.allocation_stream import allocation_stream, last_round
from planner.estimate.smallest_total import smallest_of
from planner.plan_types.decisions import Accumulation, ChunkedLoss, Optimizer, Precision, StepInBackward
from planner.recompute.selected_step import _Selected, two_selected_steps
from planner.recording.step_graph import Category
from planner.search.milp import Search
from planner.workload.workload import Workload, workload
from tests.recompute.test_programs import WORKLOADS
from tests.support.workloads import CARD, certifying_graph, example, some_units, transformer, units, what_if

pytestmark = pytest.mark.slow


class Residual(torch.nn.Module):
    """Eight blocks of linear layers on 512 features, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (torch.nn.Sequential(Linear(512, 2048), torch.nn.GELU(), Linear(2048, 512)) for _ in range(8))
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


MODELS = {**WORKLOADS, "flat": lambda: example("flat.py:build", 16), "llama": lambda: example("llama_1b", 2, 64)}
SPLIT = Accumulation(micro_batch_size=2, micro_batches=2)


@pytest.mark.parametrize(
    ("name", "decisions", "sizes"),
    [
        ("sequential", (), (4,)),
        ("sequential", (StepInBackward(),), (4,)),
        ("keeps an output", (), (8,)),
        ("roberta", (Precision(dtype="bf16"),), (8,)),
        ("roberta", (SPLIT,), (2, 2)),
        ("flat", (), (8,)),
        ("u-net", (), (2,)),
        ("llama", (), (2,)),
    ],
)
@pytest.mark.thorough_after(4)
def test_the_predicted_peak_is_the_promised_one(name, decisions, sizes):
    graph, rng = what_if(MODELS[name](), decisions, sizes=sizes), random.Random(0)
    found, exact = units(graph)
    assert found.two_steps(graph, ()).live_bytes().max() == exact.peak(())
    smallest = Search(found.problem).smallest_peak()
    assert found.two_steps(graph, smallest.units).live_bytes().max() == smallest.peak_bytes
    for _ in range(30):
        selected = some_units(found, rng, least=1, most=8)
        assert found.two_steps(graph, selected).live_bytes().max() == exact.peak(selected), [
            found.units[unit] for unit in selected
        ]


@pytest.mark.parametrize(("samples", "parts"), [(4096, 1), (6144, 2)])
def test_without_recompute_the_predicted_total_is_that_of_the_certificate(samples, parts):
    """The slack depends on the moment at which autograd's thread allocates its cuBLAS workspace."""
    work, size = workload(Residual(), torch.zeros(samples, 512)), samples // parts
    split = (Accumulation(micro_batch_size=size, micro_batches=parts),) if parts > 1 else ()
    graph = with_workspaces(what_if(work, split, sizes=(size,) * parts, card=CARD), CARD, torch.__version__)
    certificate = certifying_graph(work, split, CARD)
    predicted_bytes = smallest_of(two_selected_steps(graph, {}, ()), CARD, [()])
    assert predicted_bytes == smallest_of(certificate, CARD, [()])


def zeroing_first(model, optimizer, batch) -> None:
    """A step that keeps its gradients until the next step begins."""
    optimizer.zero_grad()
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


class Convolutions(torch.nn.Module):
    """A stem and five blocks of two convolutions, each followed by a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7, 2, 3), torch.nn.BatchNorm2d(64), torch.nn.ReLU())
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Conv2d(before, width, 3, padding=1, bias=False), torch.nn.BatchNorm2d(width), torch.nn.ReLU(),
                torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU(inplace=True),
            )
            for before, width in itertools.pairwise([64, 64, 64, 128, 128, 128])
        )  # fmt: skip
        self.classify = torch.nn.Linear(128, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.classify(x.mean((2, 3))).square().mean()


def missed_bytes(work: Workload, decisions, selected: Callable[..., tuple[int, ...]]) -> int:
    """Returns by how many bytes the predicted total of a plan exceeds that of its certificate.

    Args:
        selected: function of the units and of the exact peaks; returns the numbers of the selected units.
    """
    graph = with_workspaces(what_if(work, decisions, card=CARD), CARD, torch.__version__)
    found, exact = units(graph)
    numbers = selected(found, exact)
    certificate = certifying_graph(work, (*decisions, *found.decisions(numbers)), CARD)
    return smallest_of(found.two_steps(graph, numbers), CARD, [()]) - smallest_of(certificate, CARD, [()])


def test_the_first_call_of_an_own_step_is_predicted_without_gradients_of_an_earlier_one():
    small = {"n_embd": 320, "n_head": 4, "n_layer": 6, "n_positions": 133, "vocab_size": 3001}
    model = transformer("gpt2", "GPT2LMHeadModel", batch_size=13, seq_len=133, **small).model
    batch = {"input_ids": torch.zeros(13, 133, dtype=torch.long), "labels": torch.zeros(13, 133, dtype=torch.long)}
    work = workload(model, batch, step=zeroing_first, optimizer="adamw")
    predicted = two_selected_steps(what_if(work), {}, ())

    def alive(category: Category) -> list[list[tuple[int, int]]]:
        return [storage.lives for storage in predicted.storages if storage.category is category and storage.lives]

    gradients, activations = alive(Category.GRADIENT), alive(Category.ACTIVATION)
    assert min(lives[0][0] for lives in gradients) > min(lives[0][0] for lives in activations)
    assert missed_bytes(work, (), lambda found, exact: Search(found.problem).solve(exact.peak(()) * 4 // 5).units) == 0


@pytest.mark.parametrize("decisions", [(), (StepInBackward(),)], ids=["update at the end", "step in backward"])
def test_the_replay_of_a_segment_is_predicted_with_several_blocks(decisions):
    """One block as large as the peak of a replay would fit into fewer holes, so that plans would seem to fail."""
    work = workload(Convolutions(), torch.zeros(16, 3, 128, 128), optimizer="adam")

    def smallest_segment(found, exact) -> tuple[int, ...]:
        segments = [(number,) for number, unit in enumerate(found.units) if unit.segment is not None]
        return min(segments, key=exact.peak)

    assert missed_bytes(work, decisions, smallest_segment) == 0


def smallest(found, exact) -> tuple[int, ...]:
    return Search(found.problem).smallest_peak().units


def with_split_points(found, exact) -> tuple[int, ...]:
    parts = [(number,) for number, unit in enumerate(found.units) if len(unit.split_points) > 1]
    return min(parts, key=exact.peak)


def keeps_convolutions(found, exact) -> tuple[int, ...]:
    """Selects a block that runs again except for its convolutions."""
    blocks = {unit.module: number for number, unit in enumerate(found.units) if len(unit.kept) > 1 and not unit.segment}
    return tuple(blocks[module] for module in ("up.0.2", "up.3.2"))


def test_a_recompute_takes_the_bytes_that_its_unit_promises():
    """Nothing is allocated for a convolution that is kept, and what is kept is freed after its last use."""
    graph = with_workspaces(what_if(example("unet.py:build", 8), card=CARD), CARD, torch.__version__)
    found, _ = units(graph)
    saved, compared = {save.storage for save in graph.saves}, 0
    for number in (number for number, unit in enumerate(found.units) if unit.kept and unit.segment is None):
        step = _Selected(graph, found.options, (number,))
        fine, storages = step.fine, step.storages
        [rerun] = [option.rerun for of_call in found.options.values() for option in of_call if option.unit == number]
        for at, peak_bytes in rerun.peaks:
            changes = []
            for index, start, stop in ((index, *span) for index, of_one in enumerate(step.spans) for span in of_one):
                is_kept = index in rerun.kept and index not in saved and start <= at * fine < stop
                if is_kept or at * fine < start < (at + 1) * fine:
                    size_bytes = storages[index].size_bytes
                    changes += [(max(start, at * fine), size_bytes), (stop, -size_bytes)]
            assert peak_bytes == max(itertools.accumulate(change for _, change in sorted(changes)))
            compared += 1
    assert compared > 20


CHUNKED = (Precision(dtype="fp16"), ChunkedLoss(module="lm_head.decoder", chunks=8), Optimizer(name="adamw8bit"))


@pytest.mark.parametrize(
    ("build", "decisions", "selected"),
    [
        (lambda: example("flat.py:build", 16), (), smallest),
        (lambda: example("flat.py:build", 16), (), with_split_points),
        (lambda: example("unet.py:build", 8), (), keeps_convolutions),
        (lambda: example("roberta_84m", 16, 128), (Precision(dtype="fp16"),), smallest),
        (lambda: example("roberta_84m", 64, 128), CHUNKED, smallest),
    ],
    ids=["segments", "parts of a segment", "kept convolutions", "offloaded inputs", "first product in a recompute"],
)
def test_the_predicted_total_is_certified(build, decisions, selected):
    assert missed_bytes(build(), decisions, selected) == 0


@pytest.mark.parametrize("part", ["mlp", "attn", "mlp.act"])
@pytest.mark.thorough
def test_the_slack_after_the_first_update_is_predicted(part):
    """The slack is large, because the update of the first step splits free blocks for the optimizer state."""
    work = example("gpt2", 8, 1024)
    graph = with_workspaces(what_if(work, card=CARD), CARD, torch.__version__)
    found, exact = units(graph)
    wanted = {f"transformer.h.{layer}.{part}" for layer in range(12)}
    selected = tuple(
        number
        for number, unit in enumerate(found.units)
        if unit.module in wanted and unit.segment is None and unit.runs_again and not unit.kept and not unit.on_host
    )
    certificate = certifying_graph(work, found.decisions(selected), CARD)
    total_bytes = smallest_of(certificate, CARD, [()])
    slack_bytes = total_bytes - CARD.outside_bytes - exact.peak(selected)
    assert len(selected) == 12 and slack_bytes > 0.04 * total_bytes
    assert smallest_of(found.two_steps(graph, selected), CARD, [()]) == total_bytes


@pytest.mark.parametrize(("decisions", "sizes"), [((), (4,)), ((StepInBackward(),), (4,)), ((SPLIT,), (2, 2))])
def test_predicted_steps_repeat(decisions, sizes):
    graph, rng = what_if(example("sequential.py:build", 4), decisions, sizes=sizes), random.Random(0)
    found, _ = units(graph)
    for selected in ((), some_units(found, rng, least=1, most=8)):
        steps = found.two_steps(graph, selected)
        assert last_round(steps, allocation_stream(steps)) is not None
