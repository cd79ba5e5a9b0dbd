"""Which blocks each op takes from the allocator, in order, and what the registered formulas say about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.estimate.footprint import ALLOCATOR_GRANULARITY_BYTES
from planner.profiles.device import DeviceProfile
from planner.recording.op_schema import in_order_of_birth, kernel_call, op_traits
from planner.recording.step_graph import round_up
from planner.workspaces import formula_of, is_known

Event = tuple[str, int, int]
"""Action, address, size in bytes."""


class Events(Protocol):
    """The allocator's events so far; a test puts made-up ones in their place."""

    def __call__(self) -> list[Event]: ...


class OpBlocks(TorchDispatchMode):
    """Active around a program: one row for each op that launches a kernel, the same call only once.

    Args:
        events: None where nothing can be measured: rows then only say what the formulas say.
    """

    def __init__(self, events: Events | None, card: DeviceProfile) -> None:
        super().__init__()
        self._events, self._card = events, card
        self._seen: set[str] = set()
        self.rows: list[dict[str, Any]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = 0 if self._events is None else len(self._events())
        result = op(*args, **kwargs)
        if not op_traits(op).is_view:
            row = {"op": str(op), "arguments": _shown(args, kwargs)}
            if (key := str(row)) not in self._seen:
                self._seen.add(key)
                formula = self._formula(op, args, kwargs, result)
                if self._events is None:
                    row |= {"formula": formula}
                else:
                    row |= measured_blocks(self._events()[before:], _addresses(in_order_of_birth(op, result)))
                    row |= judged(row["scratch"], formula)
                self.rows.append(row)
        return result

    def _formula(self, op: Any, args: tuple, kwargs: dict, result: Any) -> list[int] | None:
        """Bytes of the blocks that were foreseen; None where nothing is known."""
        formula = formula_of(str(op))
        if formula is None:
            known = torch.Tag.pointwise in op.tags or is_known(str(op)) or next(_tensors((args, kwargs)), None) is None
            return [] if known else None
        return [size for size in formula(kernel_call(op, args, kwargs, result), self._card) if size > 0]


def measured_blocks(events: list[Event], outputs: list[int]) -> dict[str, Any]:
    """What an op's events say.

    Args:
        outputs: addresses of the results' storages, in the order in which the rehearsal has them born.

    Returns:
        `blocks`: in order of birth [bytes, role, event of birth, event of death or None]; roles are 'output 0' ...,
        'scratch' (freed within the op) and 'kept' (by a library). `scratch`: bytes of those alone.
        `scratch_peak_bytes`: most of it at once. `births_in_order`: whether outputs are born as rehearsed.
    """
    blocks: list[list[Any]] = []
    living: dict[int, list[Any]] = {}
    for place, (action, address, size_bytes) in enumerate(events):
        if action == "alloc":
            living[address] = [size_bytes, address, place, None]
            blocks.append(living[address])
        elif action == "free_completed" and address in living:
            living.pop(address)[3] = place
    for block in blocks:
        address, dead = block[1], block[3] is not None
        kept = f"output {outputs.index(address)}" if address in outputs else "kept"
        block[1] = "scratch" if dead else kept
    numbers = [int(role.split()[1]) for _, role, _, _ in blocks if role.startswith("output")]
    scratch = [block for block in blocks if block[1] == "scratch"]
    return {
        "blocks": blocks,
        "scratch": [block[0] for block in scratch],
        "scratch_peak_bytes": _peak(scratch),
        "births_in_order": numbers == sorted(numbers),
    }


def judged(scratch: list[int], formula: list[int] | None) -> dict[str, Any]:
    """The formula's blocks, and whether they are the measured ones, rounded: None where there is no formula."""
    if formula is None:
        return {"formula": None, "equal": None}
    return {"formula": formula, "equal": _rounded(scratch) == _rounded(formula)}


def _rounded(sizes: list[int]) -> list[int]:
    return [round_up(size, ALLOCATOR_GRANULARITY_BYTES) for size in sizes]


def _peak(blocks: list[list[Any]]) -> int:
    """Most bytes of these blocks alive at once."""
    changes = sorted(
        change
        for size_bytes, _, born, died in blocks
        for change in ((born, round_up(size_bytes, ALLOCATOR_GRANULARITY_BYTES)), (died, 0))
    )
    alive, most = 0, 0
    sizes = {died: round_up(size_bytes, ALLOCATOR_GRANULARITY_BYTES) for size_bytes, _, _, died in blocks}
    for place, taken in changes:
        alive += taken if taken else -sizes[place]
        most = max(most, alive)
    return most


def _tensors(value: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _addresses(results: object) -> list[int]:
    """Of the storages of an op's results."""
    return [tensor.untyped_storage().data_ptr() for tensor in _tensors(results)]


def _shown(args: tuple, kwargs: dict) -> list[Any]:
    """Arguments without values: [dtype, shape, stride (if not contiguous)] for a tensor."""
    return [_as_text(value) for value in (*args, *kwargs.values())]


def _as_text(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return text if value.is_contiguous() else f"{text} strides {list(value.stride())}"
    if isinstance(value, (list, tuple)):
        return [_as_text(item) for item in value]
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)


def run_program(
    program: Callable[[str], object], device: str, events: Events | None, card: DeviceProfile
) -> list[dict]:
    """Rows of a program. It is run once before, so that libraries have their handles and have chosen their kernels."""
    program(device)
    with OpBlocks(events, card) as mode:
        program(device)
    return mode.rows
