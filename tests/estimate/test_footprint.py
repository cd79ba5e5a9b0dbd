"""From a recording to reserved memory, where the card's driver has a say."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from planner import profiles
from planner.estimate.footprint import measure, smallest_capacity_bytes
from planner.plan_types.sizes import MIB
from planner.recording.program import rehearse_program
from planner.virtual_gpu.backend import Target

CARD = profiles.load("rtx-3090")


def holes_in_two_segments(device: torch.device) -> None:
    """A hole in either of two segments is filled by one block; what then needs the first segment may find it whole."""

    def take(size_mib: int) -> torch.Tensor:
        return torch.empty(size_mib * MIB, dtype=torch.uint8, device=device)

    blocks = [take(5) for _ in range(8)]
    blocks[0] = blocks[4] = None
    filling = take(5)
    blocks[1] = blocks[2] = blocks[3] = None
    large = take(18)
    del filling, large


@pytest.mark.parametrize(("order", "reserved_mib"), [("ascending", 58), ("descending", 40), ("unknown", 58)])
def test_where_it_is_not_known_how_the_driver_places_segments_the_worse_order_counts(order, reserved_mib):
    graph = rehearse_program(holes_in_two_segments, Target(compute_capability=CARD.compute_capability))
    card = dataclasses.replace(CARD, segment_addresses=order)
    measured = measure(graph, card, vram_bytes=None, micro_batches=1)
    assert measured.footprint.reserved_bytes == reserved_mib * MIB
    budget_bytes = card.context_bytes + 50 * MIB
    assert measure(graph, card, vram_bytes=budget_bytes, micro_batches=1).fits == (order == "descending")
    assert (smallest_capacity_bytes(graph, card) <= budget_bytes) == (order == "descending")
