"""The best plan that holds on the card, and what to say when there is none.

The search promises bytes of tensors; the allocator needs some more. So choose, certify, and where the certificate does
not fit, choose again with less. A frozen prefix is the last resort: only if nothing else fits, as short as possible.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from planner.allocator.settings import SMALL_SEGMENT_BYTES
from planner.choose.budget_search import Descent, settle
from planner.choose.chooser import TIE, Choice
from planner.choose.planning_session import Certified, Trials
from planner.plan_types.constraints import Rules
from planner.plan_types.decisions import ChunkedLoss, Freeze, Optimizer, OptimizerKernel, Precision, StepInBackward
from planner.plan_types.plan import Relaxation, Shortfall
from planner.recording.step_graph import Category
from planner.search.threshold import first_true
from planner.space.frozen_prefixes import prefixes
from planner.space.outer_choices import Offer, finest_offer, frozen_offer, only

_ATTEMPTS, _FEW_ATTEMPTS = 10, 4
"""Plans that are certified until the allocator's slack is paid for: the few where any that fits will do."""
_HOPELESS = 6
"""So many that do not fit, and none is taken to."""
_FINEST_STEP = 512
"""The budget for tensors goes down by at least its share of one in this, and by twice as much each round."""
_LARGE_SLACK = 0.05
"""Share of the total from which on the allocator's slack is worth another look for the smallest plan."""
_DESCENTS = 2
"""So many times something smaller is looked for, by one segment of small blocks each."""


def best(trials: Trials, offered: Offer, rules: Rules) -> Certified | None:
    """The fastest certified plan among what is offered; None if nothing fits."""
    if not rules.force(Freeze):
        found = fastest_in_chunks(trials, offered, rules)
        if found is not None or not rules.allow(Freeze):
            return found
    return with_prefix(trials, offered, rules)


def with_prefix(trials: Trials, offered: Offer, rules: Rules, *, roughly: bool = False) -> Certified | None:
    """The fastest certified plan with the shortest frozen prefix for which anything fits; None if nothing does.

    Args:
        roughly: the plan need not be the fastest, only one that fits.
    """
    offered = finest_offer(offered) or offered
    candidates = frozen_prefixes(trials)
    smallest_choice = trials.chooser(offered, rules).smallest()
    narrow = only(offered, smallest_choice.outer)  # how short a prefix may be is asked of the smallest way alone

    def promises(number: int) -> bool:
        chooser = trials.chooser(frozen_offer(narrow, candidates[number]), rules)
        return chooser.fastest(trials.budget_bytes) is not None

    def holds(number: int) -> bool:
        return fastest(trials, frozen_offer(narrow, candidates[number]), rules) is not None

    guess = _guessed_prefix(trials, candidates, smallest_choice)
    guess = first_true(len(candidates), promises, guess=guess)
    shortest = first_true(len(candidates), holds, guess=guess)  # the same, unless the allocator's slack asks for more
    if shortest == len(candidates):
        return None
    return fastest(trials, frozen_offer(narrow if roughly else offered, candidates[shortest]), rules)


def fastest_in_chunks(trials: Trials, offered: Offer, rules: Rules, *, attempts: int = _ATTEMPTS) -> Certified | None:
    """The fastest, with the loss in as many chunks as the budget asks for; where nothing fits so, as many as can be."""
    found = fastest(trials, offered, rules, attempts=attempts)
    if found is None and (finer := finest_offer(offered)) is not None:
        return fastest(trials, finer, rules, attempts=_FEW_ATTEMPTS)
    return found


def roughly_fastest(trials: Trials, offered: Offer, rules: Rules) -> Certified | None:
    """One that fits, and a fast one among the first of those; None if nothing fits."""
    return fastest_in_chunks(trials, offered, rules, attempts=_FEW_ATTEMPTS)


def fastest(
    trials: Trials, offered: Offer, rules: Rules, *, attempts: int = _ATTEMPTS, until: float = math.inf
) -> Certified | None:
    """Choose, certify, and choose again with less where the allocator's slack did not fit (`choose.budget_search`).

    Args:
        attempts: so many plans are certified at most.
        until: when to stop at what is found by then (`time.perf_counter`).
    """
    return _settled(trials, offered, rules, attempts=attempts, until=until)[0]


def _settled(
    trials: Trials, offered: Offer, rules: Rules, *, attempts: int, until: float
) -> tuple[Certified | None, tuple[Certified, ...]]:
    """The fastest, and everything that was certified on the way."""
    chooser, budget_bytes = trials.chooser(offered, rules), trials.budget_bytes
    if chooser.fastest(budget_bytes) is None:
        budget_bytes = trials.capacity_bytes  # the slack may be less than the first guess of it
    tried: dict[Choice, Certified] = {}

    def short_bytes_of(choice: Choice) -> int:
        tried[choice] = certified = trials.certify(choice)
        return 0 if certified.measured.fits else max(trials.needed_bytes(certified) - trials.vram_bytes, 1)

    found = settle(
        lambda budget, below_ns: chooser.fastest(budget, below_ns=below_ns),
        short_bytes_of,
        descent=Descent(budget_bytes, finest_bytes=trials.budget_bytes // _FINEST_STEP, tie=TIE),
        tie=TIE,
        attempts=attempts,
        hopeless=_HOPELESS,
        is_over=lambda: time.perf_counter() > until,
    )
    return None if found is None else tried[found], tuple(tried.values())


def smallest(trials: Trials, offered: Offer, rules: Rules, *, until: float = math.inf) -> Certified:
    """The plan that gets through in the smallest total that was found, and a fast one among those.

    It begins with the smallest promise. Where the allocator's slack is a large part of it, quicker plans may need no
    more, or even less: these are looked for `until` then (`time.perf_counter`). What comes back may fit after all.
    """
    found = trials.tightly(trials.certify(_smallest_promise(trials, offered, rules)))
    for less_bytes in (0, *[SMALL_SEGMENT_BYTES] * _DESCENTS):
        slack_bytes = found.measured.footprint.reserved_bytes - found.choice.peak_bytes
        total_bytes = found.measured.footprint.total_bytes
        if found.measured.fits or slack_bytes <= _LARGE_SLACK * total_bytes or time.perf_counter() > until:
            return found
        under = trials.under(total_bytes - less_bytes)
        again, tried = _settled(under, offered, rules, attempts=_FEW_ATTEMPTS, until=until)
        if again is None and less_bytes:
            break
        if tried:
            least = min(tried, key=lambda one: (one.measured.footprint.total_bytes, one.choice.step_ns))
            found = min((trials.tightly(least), found), key=lambda one: one.measured.footprint.total_bytes)
    return found


def _smallest_promise(trials: Trials, offered: Offer, rules: Rules) -> Choice:
    """Among equals the one whose loss is in no more chunks than the budget asks for."""
    choice, finer = trials.chooser(offered, rules).smallest(), finest_offer(offered)
    if finer is None or not any(isinstance(decision, ChunkedLoss) for decision in choice.decisions):
        return choice
    narrow = dataclasses.replace(
        only(offered, choice.outer), losses=tuple(filter(None, finer.losses)), chunks=finer.chunks
    )
    return min(choice, trials.chooser(narrow, rules).smallest(), key=lambda choice: choice.peak_bytes)


def nearest(trials: Trials, offered: Offer, rules: Rules) -> Certified:
    """Where nothing fits as fast as is allowed: the fastest plan that is too slow, or else the smallest plan."""
    if rules.max_slowdown is not None:
        slower = dataclasses.replace(rules, max_slowdown=None)
        if (found := best(trials, offered, slower)) is not None:
            return found
    return smallest(trials, offered, rules)


def shortfall(trials: Trials, smallest: Certified, relaxations: Sequence[Relaxation]) -> Shortfall:
    """By how much the smallest plan misses the budget, and what binds there.

    Its footprint is measured under the smallest budget in which it gets through, where the allocator frees its cache.
    """
    parts = {
        category: size for category, size in smallest.measured.footprint.breakdown.items() if category != Category.SLACK
    }
    binding = max(parts, key=lambda category: parts[category])
    open_steps = [relaxation.next_step for relaxation in relaxations if relaxation.next_step is not None]
    return Shortfall(
        missing_bytes=max(smallest.measured.footprint.total_bytes - trials.vram_bytes, 0),
        binding=str(binding),
        binding_bytes=parts[binding],
        next_step=min(open_steps, key=lambda step: step.slowdown, default=None),
        relaxations=tuple(relaxations),
    )


def frozen_prefixes(trials: Trials) -> tuple[Freeze, ...]:
    """Prefixes of the model that may be frozen, short to long."""
    starts = [(call.module, call.start) for call in trials.baseline_graph.calls]
    modules = trials.work.model.named_modules()
    owners = [name for name, module in modules if any(True for _ in module.parameters(recurse=False))]
    return prefixes(starts, owners)


def _guessed_prefix(trials: Trials, candidates: tuple[Freeze, ...], chosen: Choice) -> int:
    """The prefix that suffices if freezing spared nothing but gradients and optimizer state."""
    kinds = (Precision, Optimizer, OptimizerKernel, StepInBackward)
    outer = tuple(decision for decision in chosen.decisions if isinstance(decision, kinds))
    missing = chosen.peak_bytes - trials.budget_bytes
    spared = [trials.floor_bytes(outer) - trials.floor_bytes((frozen, *outer)) for frozen in candidates]
    return next((number for number, size in enumerate(spared) if size >= missing), len(candidates))
