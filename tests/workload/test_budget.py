"""Budgets as they are given: text, bytes, a share of a card, more than the card has."""

from __future__ import annotations

import warnings

import pytest
import torch

import planner
from planner import profiles
from planner.errors import SizeError
from planner.plan_types.sizes import GIB
from planner.rewrite import apply
from planner.workload import cards
from planner.workload.budget import Budget, card_and_budget
from tests.support.training import Perceptron, cross_entropy, plan_for, seeded, vectors

pytestmark = pytest.mark.slow

SMALL_CARD = profiles.load("rtx-2060")


@pytest.fixture(autouse=True)
def no_card_at_hand(monkeypatch):
    monkeypatch.setattr(cards, "_present_card", lambda: None)


def mean_square(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])


def planned(vram, gpu="bare", **options):
    batch = (torch.zeros(4, 8), torch.zeros(4, 1))
    return planner.plan(torch.nn.Linear(8, 1), batch, vram=vram, loss_fn=mean_square, gpu=gpu, **options)


# ---- as given ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vram", [6 * GIB, "6GiB", str(6 * GIB)])
def test_whole_bytes_are_a_budget_as_text_is(vram):
    assert card_and_budget("rtx-3090", vram) == (profiles.load("rtx-3090"), 6 * GIB)


def test_few_bytes_in_python_are_meant_as_bytes():
    plan = planned(4000, fidelity="exact")
    assert (plan.vram_bytes, plan.fits) == (4000, True)


@pytest.mark.parametrize("vram", [0, -1])
def test_no_bytes_are_no_budget(vram):
    with pytest.raises(SizeError, match=f"budget of {vram} bytes is not above zero"):
        planned(vram)


@pytest.mark.parametrize("gpu", ["rtx-2060", None])
def test_a_bare_number_that_no_card_could_have_in_bytes_is_refused(gpu):
    with pytest.raises(SizeError, match=r'a whole number counts bytes, .* such as vram="6GiB"'):
        card_and_budget(gpu, 6)


@pytest.mark.parametrize("vram", [True, 6e9, [6]])
def test_what_is_neither_text_nor_whole_bytes_is_refused(vram):
    with pytest.raises(SizeError, match=f"is a {type(vram).__name__}"):
        planned(vram)


# ---- a share of the card -----------------------------------------------------------------------------------------


def test_a_share_is_of_the_named_card():
    assert card_and_budget("rtx-2060", "50%") == (SMALL_CARD, SMALL_CARD.vram_bytes // 2)


def test_a_share_is_of_the_card_at_hand(monkeypatch):
    monkeypatch.setattr(cards, "_present_card", lambda: SMALL_CARD)
    assert card_and_budget(None, " 50% ") == (SMALL_CARD, SMALL_CARD.vram_bytes // 2)


@pytest.mark.parametrize("gpu", [None, "generic", "bare"])
def test_a_share_of_a_card_that_is_not_there_is_refused(gpu):
    with pytest.raises(SizeError, match="percentage of the card's memory, which is not known: name a real card"):
        card_and_budget(gpu, "80%")


# ---- more than the card has --------------------------------------------------------------------------------------


def deep() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Takes about 9 GiB as it is, on the meta device."""
    with torch.device("meta"):
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8)),
            torch.nn.Linear(512, 1),
        )
        return model, (torch.zeros(1 << 18, 512), torch.zeros(1 << 18, 1))


def test_a_budget_above_the_named_card_is_planned_for_the_card_and_a_note_says_so():
    model, batch = deep()
    settings = {"loss_fn": mean_square, "gpu": "rtx-2060", "fidelity": "exact", "forbid": "accumulation"}
    plan = planner.plan(model, batch, vram="16GiB", **settings)
    assert SMALL_CARD.vram_bytes < plan.baseline.total_bytes < plan.vram_bytes == 16 * GIB
    assert plan.fits
    assert plan.peak.total_bytes <= plan.usable_bytes == SMALL_CARD.vram_bytes - SMALL_CARD.vram_bytes * 3 // 100
    assert plan.room_bytes == SMALL_CARD.vram_bytes - plan.peak.total_bytes >= plan.margin_bytes
    assert "offers 5.79 GiB to torch, of which 177.8 MiB stay free (--margin): planned for 5.61 GiB" in plan.notes[0]
    assert "a desktop on the same card" in plan.notes[1]


@pytest.mark.parametrize(("gpu", "vram"), [("bare", "1TiB"), ("generic", "1TiB"), (None, "1TiB"), ("rtx-2060", "5GiB")])
@pytest.mark.thorough_after(1)
def test_a_budget_that_the_card_has_is_left_as_it_is(gpu, vram):
    plan = planned(vram, gpu, fidelity="exact")
    assert plan.fits
    assert not any("to torch" in note or "desktop" in note for note in plan.notes)
    assert plan.usable_bytes == plan.vram_bytes


@pytest.mark.parametrize(
    ("gpu", "asked", "margin", "usable"),
    [
        ("rtx-2060", 5 * GIB, None, 5 * GIB),  # the rest of the card is more than the margin
        ("rtx-2060", 5 * GIB, "1GiB", SMALL_CARD.vram_bytes - GIB),
        ("rtx-2060", 9 * GIB, "0", SMALL_CARD.vram_bytes),
        ("rtx-2060", 9 * GIB, "0 %", SMALL_CARD.vram_bytes),
        ("rtx-2060", 9 * GIB, 5, SMALL_CARD.vram_bytes - 5),
        ("generic", 5 * GIB, None, 5 * GIB),
        ("generic", 5 * GIB, "10%", 5 * GIB - GIB // 2),
        ("bare", 5 * GIB, "1GiB", 4 * GIB),
    ],
)
def test_the_margin_stays_free_on_the_card(gpu, asked, margin, usable):
    budget = Budget.on(cards.resolve_card(gpu, asked), asked, margin=margin)
    assert (budget.asked_bytes, budget.usable_bytes) == (asked, usable)


@pytest.mark.parametrize("margin", ["100%", "6GiB", "little", -1])
def test_a_margin_that_cannot_be_read_or_leaves_nothing_is_refused(margin):
    with pytest.raises(SizeError, match=r"leaves nothing|cannot be read"):
        planned("6GiB", "rtx-2060", margin=margin)


# ---- a plan that does not fit ------------------------------------------------------------------------------------


def test_applying_a_plan_that_does_not_fit_warns_and_trains_all_the_same():
    model = seeded(Perceptron)
    plan = plan_for(model, vectors(), loss_fn=cross_entropy, fits=False)
    with pytest.warns(UserWarning, match="does not fit its budget") as caught:
        result = apply(plan, model, loss_fn=cross_entropy)
    assert caught[0].filename == __file__
    assert torch.isfinite(result.step(vectors()))


def test_applying_a_plan_that_fits_is_quiet():
    model = seeded(Perceptron)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(plan_for(model, vectors(), loss_fn=cross_entropy), model, loss_fn=cross_entropy)
