"""The card at hand: its own calibrated profile, the one that is known, or one like it."""

from __future__ import annotations

import pytest

from planner import profiles
from planner.errors import DeviceProfileError
from planner.workload import cards
from planner.workload.budget import card_and_budget


@pytest.fixture
def at_hand(monkeypatch):
    def put(name: str, vram_bytes: int = 12 << 30) -> None:
        facts = profiles.CardFacts(
            cuda_name=name, compute_capability=(8, 9), sm_count=46, max_threads_per_sm=1536, vram_bytes=vram_bytes
        )
        monkeypatch.setattr(cards, "_present_card_facts", lambda: facts)

    return put


def test_a_known_card_has_the_memory_that_the_driver_says(at_hand):
    at_hand("NVIDIA GeForce RTX 4090", 20 << 30)
    card = cards.resolve_card(None, None)
    assert (card.name, card.vram_bytes) == ("rtx-4090", 20 << 30)


def test_an_unknown_card_is_planned_as_one_like_it_and_has_shares(at_hand):
    at_hand("NVIDIA GeForce RTX 4070 Ti")
    card, vram_bytes = card_and_budget(None, "50%")
    assert card.title == "NVIDIA GeForce RTX 4070 Ti" and "scaled" in card.source
    assert vram_bytes == 6 << 30


def test_a_named_card_is_that_one_whatever_is_at_hand(at_hand):
    at_hand("NVIDIA GeForce RTX 4070 Ti")
    assert cards.resolve_card("t4", None).name == "t4"
    assert cards.resolve_card("generic", 6 << 30) == profiles.generic(6 << 30)


def test_an_own_profile_that_cannot_be_read_is_reported_with_its_file(at_hand, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANNER_DEVICES", str(tmp_path))
    (tmp_path / "mine.toml").write_text("title = 3\n")
    at_hand("NVIDIA GeForce RTX 4090")
    with pytest.raises(DeviceProfileError, match=r"mine\.toml"):
        cards.resolve_card(None, None)


def test_a_plan_for_an_unlisted_card_is_made_again_on_it_alone(at_hand, monkeypatch):
    at_hand("NVIDIA GeForce RTX 4070 Ti")
    card = cards.resolve_card(None, None)
    assert cards.resolve_card(card.name, None) == card
    monkeypatch.setattr(cards, "_present_card_facts", lambda: None)
    with pytest.raises(DeviceProfileError, match="this machine has none: name another card"):
        cards.resolve_card(card.name, None)
