"""The budget: how much memory the user allows, how much of it the card has, and what is left for tensors."""

from __future__ import annotations

import dataclasses

from planner.errors import SizeError
from planner.plan_types.sizes import format_size, parse_size
from planner.profiles.device import DeviceProfile
from planner.workload.cards import GENERIC, resolve_card

_FIRST_SLACK = 0.01
"""Initial estimate of the allocator's slack, as a fraction of the allocator's memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory that one process may take on a card, in bytes."""

    asked_bytes: int
    """Limit of the total, as the user stated it."""
    usable_bytes: int
    """Limit of the total: the smaller of `asked_bytes` and the memory of the card."""
    allocator_bytes: int
    """Limit of the bytes that the caching allocator reserves: `usable_bytes` minus the size of the CUDA context."""
    tensor_bytes: int
    """Initial limit of the bytes that tensors hold: `allocator_bytes` minus an estimate of the allocator's slack."""

    @classmethod
    def on(cls, card: DeviceProfile, asked_bytes: int) -> Budget:
        """Return the budget that a user stated, on a card."""
        has_a_size = card.allocator and card.name != GENERIC
        usable_bytes = min(asked_bytes, card.vram_bytes) if has_a_size else asked_bytes
        return dataclasses.replace(cls.of_total(card, usable_bytes), asked_bytes=asked_bytes)

    @classmethod
    def of_total(cls, card: DeviceProfile, total_bytes: int) -> Budget:
        """Return the budget whose limit of the total is `total_bytes`, even if the card has less."""
        allocator_bytes = total_bytes - card.context_bytes
        slack_bytes = round(allocator_bytes * _FIRST_SLACK) if card.allocator else 0
        return cls(
            asked_bytes=total_bytes,
            usable_bytes=total_bytes,
            allocator_bytes=allocator_bytes,
            tensor_bytes=allocator_bytes - slack_bytes,
        )

    def notes(self, card: DeviceProfile) -> tuple[str, ...]:
        """Return a note for the plan if the card has less memory than the user stated."""
        if self.usable_bytes == self.asked_bytes:
            return ()
        offered = format_size(self.usable_bytes)
        return (f"{card.title} offers {offered} to torch: planned for that, not for the larger budget",)


def card_and_budget(gpu: str | None, vram: str | int | None) -> tuple[DeviceProfile, int | None]:
    """Return the card, and the budget in bytes; '80%' is a share of the named or present card.

    Raises:
        SizeError: the budget is zero or negative, cannot be read, or is a share of a card that has no size.
        DeviceProfileError: the card is unknown.
    """
    if vram is None:
        return resolve_card(gpu, None), None
    if isinstance(vram, str) and vram.strip().endswith("%"):
        card = resolve_card(gpu, None)
        has_a_size = card.allocator and card.name != GENERIC
        return card, parse_size(vram, device_bytes=card.vram_bytes if has_a_size else None)
    if type(vram) is int and vram <= 0:
        raise SizeError(
            f"budget of {vram} bytes is not above zero: give a number of bytes above zero, or a text such as 6GiB"
        )
    size_bytes = vram if type(vram) is int else parse_size(vram, device_bytes=None)
    return resolve_card(gpu, size_bytes), size_bytes
