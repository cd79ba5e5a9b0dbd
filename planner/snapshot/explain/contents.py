"""The blocks that were alive at a moment: by purpose, compared with the plan, and by the place that allocated them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from planner.allocator.settings import AllocatorSettings, round_size
from planner.plan_types.categories import Category
from planner.plan_types.plan import LiveTensor, Plan
from planner.plan_types.plan_parts import LOADING, TRAINING_STEP
from planner.snapshot.explain.program import Program, RecordedBlock
from planner.snapshot.explain.steps import is_backward, is_loading, is_optimizer, is_outside, place_of, source_of

BEFORE = "from before the step, such as parameters"
"""Purpose of blocks that were alive before the step, if no stack trace says what they are."""
EARLIER = "from before the record, such as parameters"
"""Purpose of blocks that were alive before the record, if it does not show where a step begins."""
KEPT = "kept from before the step"
"""Purpose of blocks that were alive before the step, and are neither parameters nor optimizer state."""
REST = "activations and temporaries"
"""Purpose of everything that a step makes, except gradients."""
OUTSIDE = "evaluation, generation and saving"
"""Purpose of blocks that were allocated outside training steps."""
IN_STEP = "made in the step"
"""Purpose of blocks of a step in a record without stack traces."""
ALL = "of unknown purpose"
"""Purpose of blocks of which nothing is known."""
_WEIGHTS = (Category.PARAMETER, Category.OPTIMIZER_STATE)
_ROWS = (*_WEIGHTS, BEFORE, EARLIER, KEPT, OUTSIDE, Category.GRADIENT, REST, IN_STEP, ALL)
_OF_STEP = (REST, KEPT, IN_STEP, ALL)
"""Purposes of blocks that are compared with the list of the plan's largest tensors."""
_UNKNOWN = (BEFORE, EARLIER)
"""Purposes of blocks that may be parameters or optimizer state."""
_ASKED = -1
"""Number that stands for the request that failed."""
_WITH_BATCH = (Category.ACTIVATION, Category.LOGITS, Category.TEMPORARY, Category.INPUT)
"""Categories of the plan's tensors whose size grows with the batch."""
_LEAST_EXPLAINED = 0.25
"""Part of the comparable bytes for which a larger batch must account."""
_LEAST_LEAD = 1.5
"""Multiple of the bytes of any other factor for which a larger batch must account."""
_STATE = ("_init_group", "init_state", "state_init")
"""Functions in which optimizers create their state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Memory of one purpose."""

    purpose: str
    total_bytes: int
    planned_bytes: int | None
    """The most that the plan has for this purpose; None without a plan, or if the plan does not say it."""
    asked_bytes: int = 0
    """Size of the request that failed, if it has this purpose. It is not part of `total_bytes`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Blocks of one purpose that the same place in the program allocated."""

    purpose: str
    place: str
    """The place, as 'forward (model.py:12)'; empty if it is not known."""
    caller: str
    """The place in the user's own code from which it was called; empty if there is none or it is not known."""
    total_bytes: int
    blocks: int
    largest_bytes: int
    unplanned_bytes: int
    """Bytes of blocks that are larger than the smallest listed tensor of the plan, and not in its list."""
    numbers: tuple[int, ...]
    """Numbers of the blocks in the record."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """The blocks that were alive at a moment."""

    parts: tuple[Part, ...]
    groups: tuple[Group, ...]
    """Largest first."""
    scale: float | None
    """Size of the step's tensors as a multiple of the planned size; None if too few of them are in the plan."""


def contents_of(
    program: Program,
    event: int,
    step: int | None,
    plan: Plan | None,
    settings: AllocatorSettings,
    asked: RecordedBlock | None = None,
) -> Contents:
    """Returns the blocks that are alive right after an event.

    Args:
        program: What the recorded program did.
        event: Index of the event; -1 for the state before the first event.
        step: Index of the event after which the last step began; None if it is not known.
        plan: The plan to compare with; None to compare with nothing.
        settings: Options of the allocator, which round sizes.
        asked: The request that failed at the event; None if none failed.
    """
    live = [
        (number, block)
        for number, block in enumerate(program.blocks)
        if block.born <= event and (block.freed is None or block.freed > event)
    ]
    everything = live if asked is None else [*live, (_ASKED, asked)]
    sizes = {number: round_size(block.requested_bytes, settings) for number, block in everything}
    purposes = _purposes(program, everything, sizes, step, plan)
    in_step = [(number, block) for number, block in everything if purposes[number] in _OF_STEP]
    scale = None if plan is None else _scale(plan, [(sizes[number], block) for number, block in in_step])
    unplanned = set() if plan is None else _unplanned(plan, in_step, sizes, scale)
    if plan is not None and _planned(plan, OUTSIDE, {}) == 0:
        unplanned |= {number for number, _ in live if purposes[number] == OUTSIDE}
    totals: collections.Counter[str] = collections.Counter()
    members: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for number, block in live:
        totals[purposes[number]] += sizes[number]
        place, caller = place_of(block.frames)
        members[purposes[number], place, caller].append(number)
    groups = [
        Group(
            purpose=purpose,
            place=place,
            caller=caller,
            total_bytes=sum(sizes[number] for number in numbers),
            blocks=len(numbers),
            largest_bytes=max(sizes[number] for number in numbers),
            unplanned_bytes=sum(sizes[number] for number in numbers if number in unplanned),
            numbers=tuple(numbers),
        )
        for (purpose, place, caller), numbers in members.items()
    ]
    return Contents(
        parts=tuple(
            Part(
                purpose=str(row),
                total_bytes=totals[row],
                planned_bytes=_planned(plan, row, totals),
                asked_bytes=sizes[_ASKED] if purposes.get(_ASKED) == row else 0,
            )
            for row in _ROWS
            if totals[row] or purposes.get(_ASKED) == row
        ),
        groups=tuple(sorted(groups, key=lambda group: -group.total_bytes)),
        scale=scale,
    )


# ---- purposes -----------------------------------------------------------------------------------------------------


def _purposes(
    program: Program,
    live: Sequence[tuple[int, RecordedBlock]],
    sizes: Mapping[int, int],
    step: int | None,
    plan: Plan | None,
) -> dict[int, str]:
    """Returns the purpose of each block that is alive, by its number."""
    has_traces = any(frame.filename for block in program.blocks for frame in block.frames)
    has_events = any(block.born >= 0 for block in program.blocks)
    found = {number: _purpose(block, step, has_traces=has_traces) for number, block in live}
    if not has_events:
        found = {number: ALL if purpose in (EARLIER, KEPT) else purpose for number, purpose in found.items()}
    weights = {sizes[number] for number, purpose in found.items() if purpose in (Category.PARAMETER, *_UNKNOWN)}
    for number, purpose in found.items():
        if purpose == Category.GRADIENT and sizes[number] not in weights:
            found[number] = REST
    if has_events and not has_traces and step is None and plan is not None:
        # The first blocks of a program are its parameters, unless the record begins after them.
        left = 0 if EARLIER in found.values() else plan.peak.breakdown.get(Category.PARAMETER, 0)
        for number in [number for number, purpose in found.items() if purpose == ALL]:
            found[number] = BEFORE if sizes[number] <= left else IN_STEP
            left -= sizes[number] if sizes[number] <= left else left
    if plan is not None:
        _name_kept(found, sizes, plan)
    for unknown in set(_UNKNOWN) & set(found.values()):
        found = {number: unknown if purpose in _WEIGHTS else purpose for number, purpose in found.items()}
    return found


def _name_kept(found: dict[int, str], sizes: Mapping[int, int], plan: Plan) -> None:
    """Counts blocks that are kept from before the step as parameters and optimizer state, as far as the plan has them.

    Stack traces do not show these if they were made by code that is not known here.

    Args:
        found: The purpose of each block, which is changed.
        sizes: Size of each block in bytes.
        plan: The plan.
    """
    for purpose in _WEIGHTS:
        left = plan.peak.breakdown.get(purpose, 0) - sum(sizes[n] for n, known in found.items() if known == purpose)
        for number in [number for number, known in found.items() if known == KEPT]:
            if sizes[number] <= left:
                found[number] = purpose
                left -= sizes[number]


def _purpose(block: RecordedBlock, step: int | None, *, has_traces: bool) -> str:
    """Returns the purpose of a block. A block that may be a gradient counts as one."""
    noted = next((category for category in Category if block.remark.startswith(category)), None)
    if noted is not None:
        return noted if noted in _ROWS else REST
    if is_outside(block.frames):
        return OUTSIDE
    is_old = block.born < 0 or (step is not None and block.born <= step)
    if is_optimizer(block.frames):
        is_state = is_old or any(frame.name in _STATE for frame in block.frames)
        return Category.OPTIMIZER_STATE if is_state else REST
    if is_loading(block.frames):
        return Category.PARAMETER
    if is_backward(block.frames) or (has_traces and not block.frames and block.born >= 0):
        return Category.GRADIENT
    if is_old:
        if step is None:
            return EARLIER
        return KEPT if has_traces and block.frames else BEFORE
    return REST if has_traces else ALL if step is None else IN_STEP


def _planned(plan: Plan | None, row: str, totals: Mapping[str, int]) -> int | None:
    """Returns the most bytes that the plan has for a purpose; None without a plan.

    Args:
        plan: The plan.
        row: The purpose.
        totals: Bytes that are alive, by purpose.
    """
    if plan is None:
        return None
    at_peak, most = plan.peak.breakdown, plan.peak.most or plan.peak.breakdown
    lasting = at_peak.get(Category.PARAMETER, 0) + at_peak.get(Category.OPTIMIZER_STATE, 0)
    if row in _UNKNOWN:
        return most.get(Category.PARAMETER, 0) + most.get(Category.OPTIMIZER_STATE, 0)
    if row == REST:
        return max(plan.peak.allocated_bytes - lasting, 0)
    if row in (IN_STEP, ALL):
        return max(plan.peak.allocated_bytes - min(lasting, totals[BEFORE] + totals[EARLIER]), 0)
    if row == OUTSIDE:
        moments = () if plan.run is None else plan.run.moments
        activities = [moment for moment in moments if moment.name not in (LOADING, TRAINING_STEP)]
        return max((moment.tensor_bytes - lasting for moment in activities), default=0)
    return 0 if row == KEPT else most.get(row, 0)


# ---- tensors of the plan ------------------------------------------------------------------------------------------


def _scale(plan: Plan, blocks: Iterable[tuple[int, RecordedBlock]]) -> float | None:
    """Returns the factor by which the tensors of the plan that are found among the blocks of the step are larger.

    A tensor of the plan is found if a block comes from its line of code. Without stack traces, any block may be that
    tensor. Several tensors of the plan must agree on the factor, and it must explain much of what is found.

    Args:
        plan: The plan, whose largest tensors are compared.
        blocks: Sizes in bytes of the blocks of the step, and the blocks.
    """
    planned = [tensor for tensor in plan.tensors if tensor.category in _WITH_BATCH and tensor.size_bytes]
    if not planned:
        return None
    counts = collections.Counter((size_bytes, frozenset(source_of(block.frames))) for size_bytes, block in blocks)
    has_sources = any(sources for _, sources in counts)
    found: dict[str, dict[tuple[int, str], tuple[int, float]]] = collections.defaultdict(dict)
    for (size_bytes, sources), count in counts.items():
        for tensor in planned:
            source = tensor.source.rpartition("/")[2] if has_sources else ""
            if has_sources and source not in sources:
                continue
            factor = size_bytes / tensor.size_bytes
            agreeing = found[f"{factor:.2g}"]
            explained = min(count, tensor.count) * size_bytes, factor
            agreeing[tensor.size_bytes, source] = max(explained, agreeing.get((tensor.size_bytes, source), (0, 0.0)))
    totals = {rounded: sum(size for size, _ in agreeing.values()) for rounded, agreeing in found.items()}
    likely = [rounded for rounded, agreeing in found.items() if len(agreeing) >= (2 if has_sources else 3)]
    likely.sort(key=lambda rounded: totals[rounded], reverse=True)
    comparable = sum(
        size * count for (size, sources), count in counts.items() if _is_comparable(size, sources, planned)
    )
    if not likely or totals[likely[0]] < _LEAST_EXPLAINED * comparable:
        return None
    if len(likely) > 1 and totals[likely[0]] < _LEAST_LEAD * totals[likely[1]]:
        return None
    return max(found[likely[0]].values())[1]


def _is_comparable(size_bytes: int, sources: Collection[str], planned: Sequence[LiveTensor]) -> bool:
    """True if a block should be a tensor of the plan: it comes from a line of one, or is as large as one."""
    if sources:
        return any(tensor.source.rpartition("/")[2] in sources for tensor in planned)
    return size_bytes >= min(tensor.size_bytes for tensor in planned)


def _unplanned(
    plan: Plan, live: Sequence[tuple[int, RecordedBlock]], sizes: Mapping[int, int], scale: float | None
) -> set[int]:
    """Returns the numbers of the blocks that the plan would list at its peak if it had them, and does not list.

    Args:
        plan: The plan.
        live: Numbers and blocks of what the step made, or what was kept from before it.
        sizes: Sizes of all blocks in bytes, by number.
        scale: Size of the step's tensors as a multiple of the planned size; None if it is not known.
    """
    if not plan.tensors:
        return set()
    left: collections.Counter[int] = collections.Counter()
    for tensor in plan.tensors:
        left[tensor.size_bytes] += tensor.count
    factor = scale or 1.0
    smallest = min(left) * max(factor, 1.0)
    found = set()
    for number, _ in sorted(live, key=lambda item: -item[1].born):
        size_bytes = sizes[number]
        match = next(
            (size for size in left if left[size] and abs(size_bytes - size * factor) <= size_bytes / 150), None
        )
        if match is None:
            match = size_bytes if left[size_bytes] else None
        if match is not None:
            left[match] -= 1
        elif size_bytes > smallest:
            found.add(number)
    return found
