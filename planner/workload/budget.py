"""The budget: the memory that the user allows, limited by the memory of the card, and how much of it tensors get."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from planner.allocator.options import settings_of
from planner.errors import BudgetError, SizeError
from planner.plan_types.decision_base import Decision
from planner.plan_types.quantized import is_quantized, stored_bytes
from planner.plan_types.sizes import GIB, SMALLEST_PLAIN_BYTES, format_size, margin_bytes, parse_size
from planner.profiles.device import DeviceProfile
from planner.workload.cards import GENERIC, resolve_card

_FIRST_SLACK = 0.01
"""Initial estimate of the slack (reserved memory that no tensor uses), as a fraction of the reserved memory."""

_CONSUMER = "GeForce"
"""A word in the titles of cards that people use with a screen."""
_DESKTOP_BYTES = GIB
"""Memory that a desktop with a browser takes at most on such a card, as a rule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Maximum memory of one process on a card, in bytes, and what this leaves for the allocator and for tensors."""

    asked_bytes: int
    """Maximum total memory of the process, as the user stated it."""
    card_bytes: int | None
    """Memory of the card; None for a card without a fixed size."""
    margin_bytes: int
    """Memory of the card that has to stay free."""
    usable_bytes: int
    """Maximum total memory of the process: `asked_bytes`, but at most the memory of the card without the margin."""
    allocator_bytes: int
    """Maximum memory that the caching allocator may reserve: `usable_bytes` minus the CUDA context and NCCL."""
    tensor_bytes: int
    """Maximum memory of tensors at the start of the search: `allocator_bytes` minus an estimate of the slack."""

    @classmethod
    def on(cls, card: DeviceProfile, asked_bytes: int, *, margin: str | int | None) -> Budget:
        """Return the budget of a user who allows `asked_bytes` on `card`.

        Args:
            margin: the part of the card that has to stay free, as for `margin_bytes`. None means the default, which is
                0 for a card without a fixed size. For such a card a percentage is one of `asked_bytes`.

        Raises:
            SizeError: the margin cannot be read, or leaves nothing.
        """
        card_bytes = card.vram_bytes if card.allocator and card.name != GENERIC else None
        allowed_bytes = (
            settings_of(card.alloc_conf, card_bytes=card.vram_bytes).allowed_bytes if card.allocator else None
        )
        if margin is None and card_bytes is None:
            margin = 0
        free_bytes = margin_bytes(margin, card_bytes=card_bytes or asked_bytes)
        usable_bytes = min(asked_bytes, (card_bytes or asked_bytes) - free_bytes)
        if allowed_bytes is not None and allowed_bytes + card.outside_bytes < usable_bytes:
            # As if the card were smaller, so that the plan and its file say so.
            usable_bytes = allowed_bytes + card.outside_bytes
            card_bytes, free_bytes = usable_bytes, 0
        return dataclasses.replace(
            cls.of_total(card, usable_bytes), asked_bytes=asked_bytes, card_bytes=card_bytes, margin_bytes=free_bytes
        )

    @classmethod
    def of_total(cls, card: DeviceProfile, total_bytes: int) -> Budget:
        """Return the budget for a total of `total_bytes`, even if the card has less memory."""
        allocator_bytes = total_bytes - card.outside_bytes
        slack_bytes = round(allocator_bytes * _FIRST_SLACK) if card.allocator else 0
        return cls(
            asked_bytes=total_bytes,
            card_bytes=None,
            margin_bytes=0,
            usable_bytes=total_bytes,
            allocator_bytes=allocator_bytes,
            tensor_bytes=allocator_bytes - slack_bytes,
        )

    def refuse_if_hopeless(
        self, model: torch.nn.Module, card: DeviceProfile, *, sharding: Sequence[Decision] = ()
    ) -> None:
        """Refuse a budget that the CUDA context and the model's parameters and buffers alone exceed.

        No technique makes them smaller, so that no rehearsal is needed to know this. If several cards train together,
        the gradients count, too: all of them are alive before the optimizer steps. If they are reduced once in a step,
        each card has whole gradients before the last micro-batch. More cards are advised only if they would help: the
        context, NCCL's memory and the buffers are on each card.

        Args:
            sharding: how several cards train together; empty for one card.

        Raises:
            BudgetError: the budget cannot hold them; the message has their sizes.
        """
        if any(decision.keeps_parameters_on_host for decision in sharding):
            return
        shards = max((decision.divides_parameters_by for decision in sharding), default=1)
        parameters = {tensor.untyped_storage()._cdata: tensor for tensor in model.parameters()}
        buffers = {tensor.untyped_storage()._cdata: tensor for tensor in model.buffers()}
        kept = [tensor for key, tensor in buffers.items() if key not in parameters]
        whole_bytes = sum(map(stored_bytes, kept))
        model_bytes = sum(map(stored_bytes, parameters.values())) // shards + whole_bytes
        what = "parameters and buffers take"
        if sharding:
            trained = (tensor for tensor in parameters.values() if tensor.requires_grad)
            gradient_bytes = sum(tensor.numel() * tensor.itemsize for tensor in trained)
            if any(way.keeps_whole_gradients for way in sharding):
                whole_bytes += gradient_bytes
                model_bytes += gradient_bytes
            else:
                model_bytes += gradient_bytes // shards
            of_one_card = "one card's part of the " if shards > 1 else ""
            what = f"{of_one_card}parameters, gradients and buffers take{'s' if shards > 1 else ''}"
        needed_bytes = model_bytes + card.outside_bytes
        if needed_bytes <= self.usable_bytes:
            return
        sizes = f"{what} {format_size(model_bytes)}"
        context = f", the CUDA context {format_size(card.context_bytes)}" if card.context_bytes else ""
        if card.nccl_bytes and card.links is not None:
            context += (
                f", NCCL's buffers for the link {card.links.within.name} {format_size(card.nccl_bytes)} (reported by "
                "others or assumed: profiles/links.toml)"
            )
        can_be_divided = bool(sharding) and not any(map(is_quantized, parameters.values()))
        if card.outside_bytes >= self.usable_bytes:
            way_out = ": the CUDA context alone takes the whole budget"
            if sharding:
                outside = format_size(card.outside_bytes)
                way_out = f": more cards would not help, because the CUDA context and NCCL take {outside} on each"
        elif not can_be_divided or whole_bytes + card.outside_bytes >= self.usable_bytes:
            way_out = ", or a smaller model"
        else:
            way_out = ", or more cards" if shards > 1 else ", or divide the parameters, too (--sharding fsdp)"
        raise BudgetError(
            f"does not fit: a budget of {format_size(self.usable_bytes)} cannot hold the model, whatever the plan: "
            f"{sizes}{context}; training needs even more. Give a budget well above {format_size(needed_bytes)}{way_out}"
        )

    def notes(self, card: DeviceProfile) -> tuple[str, ...]:
        """Return notes for the plan if the memory of the card or the margin limits the budget; empty if not."""
        if self.usable_bytes == self.asked_bytes:
            return ()
        offered = format_size(self.card_bytes or self.asked_bytes)
        name = card.title if self.card_bytes else "the budget"
        free = f", of which {format_size(self.margin_bytes)} stay free (--margin)" if self.margin_bytes else ""
        notes = [f"{name} offers {offered} to torch{free}: planned for {format_size(self.usable_bytes)}"]
        if _CONSUMER in card.title and self.margin_bytes < _DESKTOP_BYTES:
            notes.append(
                "a desktop on the same card takes another 0.3 to 1 GiB: if the card drives a screen, plan with "
                "--margin 1GiB"
            )
        return tuple(notes)


def card_and_budget(gpu: str | None, vram: str | int | None) -> tuple[DeviceProfile, int | None]:
    """Return the profile of the card, and the budget in bytes; None if `vram` is None.

    Args:
        gpu: the name of a card as for `resolve_card`; None for the card of this machine or a generic card.
        vram: the budget: a size such as '6GiB', a percentage of the card's memory such as '80%', or a number of bytes.

    Raises:
        SizeError: the budget is zero or negative, cannot be read, is a number of less than 1 MiB for a card with an
            allocator, or is a percentage and the card has no fixed memory.
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
    card = resolve_card(gpu, size_bytes)
    if size_bytes < SMALLEST_PLAIN_BYTES and type(vram) is int and card.allocator:
        raise SizeError(
            f"budget of {vram} bytes is too small for any card: a whole number counts bytes, so give the size as a "
            f'text, such as vram="{vram}GiB"'
        )
    return card, size_bytes
