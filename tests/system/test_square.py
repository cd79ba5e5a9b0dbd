"""The peak that the search promises for a selection equals the peak of the rehearsed rewritten step."""

from __future__ import annotations

import random
import sys

import pytest
import torch

from planner.pipeline import plan_workload
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import Fidelity, Precision
from planner.plan_types.recompute_decisions import Checkpoint, Replay
from planner.plan_types.techniques import KINDS
from planner.workload.workload import workload
from tests.support.workloads import BARE, CARD, example, plain, transformer, units, what_if

pytestmark = pytest.mark.slow


class InPlace(torch.nn.Module):
    """In-place activations, a residual that keeps its input, a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.shared = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(inplace=True), torch.nn.Dropout(0.1))
        self.tail = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Sigmoid(), torch.nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared(self.first(x)) + x
        return self.tail(self.shared(y) * y).square().mean()


def in_place():
    with torch.device("meta"):
        return workload(InPlace(), torch.zeros(512, 64))


def small_unet(batch_size: int = 8):
    module = example("unet.py:build").model.__class__.__module__
    with torch.device("meta"):
        model, batch, loss_fn = sys.modules[module].build(
            batch_size=batch_size, image_size=32, channels=32, multipliers=(1, 2)
        )
    return workload(model, batch, loss_fn=loss_fn)


def small_llama(batch_size: int):
    return transformer(
        "llama", "LlamaForCausalLM", batch_size=batch_size, seq_len=64, num_hidden_layers=3, hidden_size=256,
        intermediate_size=688, num_attention_heads=8, num_key_value_heads=2, vocab_size=512,
    )  # fmt: skip


WORKLOADS = {
    "in-place and called twice": in_place,
    "roberta": lambda: transformer(
        "roberta", "RobertaForMaskedLM", batch_size=8, seq_len=64, num_hidden_layers=3, vocab_size=512
    ),
    "gpt2": lambda: transformer("gpt2", "GPT2LMHeadModel", batch_size=4, seq_len=64, n_layer=3, vocab_size=512),
    "llama": lambda: small_llama(4),
    "t5": lambda: transformer(
        "t5",
        "T5ForConditionalGeneration",
        batch_size=4,
        seq_len=32,
        vocab_size=512,
        num_layers=2,
        decoder_start_token_id=0,
    ),
    "vit": lambda: transformer("vit", "ViTForImageClassification", batch_size=4, seq_len=1, num_hidden_layers=3),
    "u-net": small_unet,
    "sequential": lambda: example("sequential.py:build", 512),
    "convolutions with batch norm": lambda: example("convnet.py:build", 4),
}


@pytest.fixture(scope="module", params=WORKLOADS)
def work(request):
    return WORKLOADS[request.param]()


@pytest.mark.parametrize("precision", [(), (Precision(dtype="bf16"),)], ids=["fp32", "bf16"])
@pytest.mark.thorough_after(2)
def test_a_what_if_recording_without_checkpoints_has_the_curve_of_the_plain_one(work, precision):
    assert units(what_if(work, precision))[1].peak(()) == plain(work, precision).live_bytes().max()


@pytest.mark.parametrize("precision", [(), (Precision(dtype="bf16"),)], ids=["fp32", "bf16"])
@pytest.mark.thorough_after(1)
def test_the_promised_peak_of_any_selection_is_that_of_the_rehearsed_rewritten_step(work, precision):
    found, problem = units(what_if(work, precision))
    generator = random.Random(0)
    for share in (0.2, 0.5, 1.0):
        chosen: list[int] = []
        for unit in generator.sample(range(len(found.units)), len(found.units)):
            nested = any({unit, other} <= set(path) for other in chosen for path in found.problem.paths)
            if not nested and generator.random() < share:
                chosen.append(unit)
        if not chosen:
            continue
        decisions = found.decisions(chosen)
        rehearsed = plain(work, (*precision, *decisions)).live_bytes().max()
        assert problem.peak(chosen) == rehearsed, decisions[0].describe()


@pytest.mark.parametrize("share", [0.6])
@pytest.mark.thorough
def test_a_plan_that_only_recomputes_keeps_its_budget_and_its_promise(work, share):
    others = tuple(kind for kind in KINDS if kind not in (Checkpoint.kind, Replay.kind))
    baseline = plan_workload(work, BARE, vram_bytes=None, constraints=_rules())
    budget = int(share * baseline.baseline.total_bytes)
    plan = plan_workload(work, BARE, vram_bytes=budget, constraints=_rules(*others))
    assert plan.certified
    assert abs(plan.solver.promised_bytes - plan.solver.certified_bytes) <= 0.01 * plan.solver.certified_bytes
    if plan.fits:
        assert plan.peak.total_bytes <= budget
    else:
        assert plan.shortfall.missing_bytes > 0
        assert plan.peak.total_bytes > budget


@pytest.mark.parametrize(
    ("make", "share"),
    [(in_place, 0.6), (lambda: small_unet(64), 0.6), (lambda: small_llama(32), 0.4)],
    ids=["in-place and called twice", "u-net", "llama"],
)
@pytest.mark.thorough
def test_a_plan_with_every_lever_keeps_its_budget_and_its_promise_on_a_real_card(make, share):
    work, fixed = make(), CARD.context_bytes
    baseline = plan_workload(work, CARD, vram_bytes=None, constraints=_rules())
    budget = fixed + int(share * (baseline.baseline.total_bytes - fixed))
    plan = plan_workload(work, CARD, vram_bytes=budget, constraints=_rules(fidelity=Fidelity.ROUNDED))
    assert plan.certified
    assert abs(plan.solver.promised_bytes - plan.solver.certified_bytes) <= 0.01 * plan.solver.certified_bytes
    if plan.fits:
        assert plan.peak.total_bytes <= budget


def _rules(*forbidden: str, fidelity: Fidelity = Fidelity.EXACT) -> Constraints:
    return Constraints(fidelity=fidelity, forced=(), forbidden=forbidden)
