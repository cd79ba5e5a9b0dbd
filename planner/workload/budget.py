"""The budget: how much memory the user allows, and how much of it the card can give."""

from __future__ import annotations

from planner.errors import SizeError
from planner.plan_types.sizes import format_size, parse_size
from planner.profiles.device import DeviceProfile
from planner.workload.cards import GENERIC, resolve_card


def card_and_budget(gpu: str | None, vram: str | int | None) -> tuple[DeviceProfile, int | None]:
    """Return the card, and the budget in bytes; '80%' is a share of the named or present card.

    Raises:
        SizeError: the budget is zero or negative, cannot be read, or is a share of a card that has no size.
        DeviceProfileError: the card is unknown.
    """
    if type(vram) is int:
        if vram <= 0:
            raise SizeError(
                f"budget of {vram} bytes is nothing: give a number of bytes above zero, or a text such as 6GiB"
            )
        return resolve_card(gpu, vram), vram
    relative = isinstance(vram, str) and vram.strip().endswith("%")
    size = None if vram is None or relative else parse_size(vram, device_bytes=None)
    card = resolve_card(gpu, size)
    if not relative:
        return card, size
    has_a_size = card.allocator and card.name != GENERIC
    return card, parse_size(vram, device_bytes=card.vram_bytes if has_a_size else None)


def within_card(card: DeviceProfile, vram_bytes: int | None) -> tuple[int | None, tuple[str, ...]]:
    """Return the usable budget, at most what a named card has, and a note if that is less than the user stated."""
    if vram_bytes is None or vram_bytes <= card.vram_bytes or card.name == GENERIC or not card.allocator:
        return vram_bytes, ()
    note = f"{card.title} offers {format_size(card.vram_bytes)} to torch: planned for that, not for the larger budget"
    return card.vram_bytes, (note,)
