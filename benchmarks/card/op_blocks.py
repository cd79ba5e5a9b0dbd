"""Records the blocks that each op takes from the allocator, and compares them with the registered formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.estimate.footprint import ALLOCATOR_GRANULARITY_BYTES
from planner.profiles.device import DeviceProfile
from planner.recording.op_schema import in_order_of_birth, op_traits
from planner.recording.step_graph import round_up
from planner.virtual_gpu.values.kernel_calls import kernel_call
from planner.workspaces import blocks_of, has_formula, is_known

Event = tuple[str, int, int]
"""Action, address, size in bytes."""


class Events(Protocol):
    """Returns the allocator's events so far. Tests pass invented ones."""

    def __call__(self) -> list[Event]: ...


class OpBlocks(TorchDispatchMode):
    """Makes a row for each op that launches a kernel in a program that runs inside it, one for equal calls.

    Args:
        events: None if nothing can be measured; rows then have only the formulas' blocks.
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
        """Returns the bytes of the predicted blocks; None if the op has no formula."""
        if not has_formula(str(op)):
            known = torch.Tag.pointwise in op.tags or is_known(str(op)) or next(_tensors((args, kwargs)), None) is None
            return [] if known else None
        call = kernel_call(op, args, kwargs, result)
        return [block.size_bytes for block in blocks_of(str(op), call, self._card, torch.__version__)]


def measured_blocks(events: list[Event], outputs: list[int]) -> dict[str, Any]:
    """Read an op's blocks from its events.

    Args:
        outputs: addresses of the results' storages, in the order in which the rehearsal has them born.

    Returns:
        `blocks`: in order of birth [bytes, role, event of birth, event of death or None]; roles are 'output 0' ...,
        'scratch' (freed within the op) and 'kept' (by a library). `scratch`: bytes of the scratch blocks.
        `scratch_peak_bytes`: their peak. `births_in_order`: True if outputs are born in the rehearsed order.
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
    """Returns the formula's blocks, and whether they equal the measured ones after rounding. None without a formula."""
    if formula is None:
        return {"formula": None, "equal": None}
    return {"formula": formula, "equal": _rounded(scratch) == _rounded(formula)}


def _rounded(sizes: list[int]) -> list[int]:
    return [round_up(size, ALLOCATOR_GRANULARITY_BYTES) for size in sizes]


def _peak(blocks: list[list[Any]]) -> int:
    """Returns the peak of the bytes of these blocks."""
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
    """Returns the addresses of the storages of an op's results."""
    return [tensor.untyped_storage().data_ptr() for tensor in _tensors(results)]


def _shown(args: tuple, kwargs: dict) -> list[Any]:
    """Returns the arguments as text, tensors by dtype, shape and (if not contiguous) strides."""
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
    """Returns the rows of a program. It runs once before, so that libraries create handles and choose kernels first."""
    program(device)
    with OpBlocks(events, card) as mode:
        program(device)
    return mode.rows
