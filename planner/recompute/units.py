"""Builds the checkpoint problem of a what-if recording: the memory curve as a function of what is recomputed.

A unit is a module, or a segment of a module's forward, together with the outputs that it keeps (none or some). If the
search selects a unit, the unit applies to all calls of the module. `torch.utils.checkpoint` (non-reentrant) then has
these effects on each call:

- The tensors saved in the call are not kept from the forward until `back`, the tick at which backward first reads one
  of them.
- At `back` the forward of the call runs again, up to the last tensor that it saves (early stop). These tensors are kept
  until backward unpacks them, and then only while the backward function uses them. Without checkpointing, autograd
  keeps a saved tensor until its node is released.
- The tensor arguments of the call are kept until the last tensor saved in the call is released.
- Outputs of kept products (selective checkpointing) stay alive until the recompute, which takes them instead of running
  the products.

A segment is recomputed by a replay. Its effects are the same, but a replay runs fewer ops and holds other tensors
(`replay_cost`), and a tensor that the segment saves but did not make stays saved. An offload recomputes nothing: the
tensors saved in the call, or the inputs of a call that is recomputed, are in host memory until backward needs them
(`offload_cost`).

Two ideas are from the literature. Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174):
recomputing a segment frees the tensors that it saved and costs one more forward of it. Jain et al. 2020, "Checkmate"
(arXiv:1910.02653): an integer program over the memory curve chooses what is recomputed. Checkmate decides for each
tensor and time step, and can recompute a tensor several times. Here a unit is recomputed once and as a whole, which
makes the problem thousands of times smaller.

Source: torch/utils/checkpoint.py, `_CheckpointFrame`, `_recomputation_hook`, `_CachingTorchDispatchMode`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set

from planner.estimate.roofline import HostCopies
from planner.plan_types.decisions import Decision
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.progress import Watch
from planner.recompute.holds import Option, Options, holds_of, units_in
from planner.recompute.kept_products import NOTHING, Keepable, Kept
from planner.recompute.offload_cost import FROM_BYTES, Offloads
from planner.recompute.recompute_cost import Rerun, Reruns
from planner.recompute.repeated_gathers import RepeatedGathers
from planner.recompute.replay_cost import Replays
from planner.recompute.segments import with_segments
from planner.recompute.selected_step import two_selected_steps
from planner.recompute.windows import Window, windows_of
from planner.recording.module_calls import NO_REPLAY, WITHOUT_GRADIENTS
from planner.recording.step_graph import Call, StepGraph, round_up
from planner.search.problem import CheckpointProblem, Recompute, exclusive_units, longest_paths

Excluded = Set[tuple[type[Decision], str]]
"""Types of decision, each with the path of a module that it must not be applied to."""
_MOST_PARTS = 100
"""Maximum number of parts of a segment that is divided after each product that it keeps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """A module, or a segment of its forward, that may be recomputed or offloaded, and the outputs that it keeps."""

    module: str
    """Path of the module."""
    segment: tuple[int, int] | None
    """Number of the segment's first op, and of the op after its last; None for the whole module."""
    kept: tuple[int, ...]
    """Numbers of the products whose outputs are kept (`Kept.numbers`)."""
    split_points: tuple[int, ...] = ()
    """Numbers of the ops at which the segment is divided into parts; empty if it is recomputed as a whole."""
    runs_again: bool = True
    """True if the unit is recomputed, False if it is only offloaded."""
    on_host: bool = False
    """True if tensors are offloaded to the host: the inputs if `runs_again` is true, else the saved tensors."""
    is_gathered: bool = False
    """True if the unit is not recomputed: FSDP2 frees its parameters after forward, and gathers them again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Units:
    """The checkpoint problem, and its units."""

    units: tuple[Unit, ...]
    """The units in the order of their numbers in `problem`."""
    problem: CheckpointProblem
    options: Options = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """For each call, the units that recompute or offload it. The calls are those of `with_segments(graph)`."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that may be checkpointed as a whole, without duplicates."""
        plain = (unit for unit in self.units if unit.segment is None and unit.runs_again and not unit.on_host)
        return tuple(unit.module for unit in plain if not unit.kept)

    def two_steps(self, graph: StepGraph, selected: Collection[int]) -> StepGraph:
        """Returns the predicted allocations of two steps with the selected units (`two_selected_steps`).

        Args:
            graph: the recording from which the units were built. Its optimizer update may be a different one.
        """
        has_segments = any(unit.segment is not None for unit in self.units)
        return two_selected_steps(with_segments(graph) if has_segments else graph, self.options, selected)

    def gathered(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Returns the paths of the selected units whose parameters are gathered again."""
        return tuple(self.units[number].module for number in sorted(numbers) if self.units[number].is_gathered)

    def decisions(self, numbers: Iterable[int]) -> tuple[Checkpoint | Replay | Offload, ...]:
        """Returns the decisions of a plan that selects the units with these numbers; empty if there are none."""
        chosen = [self.units[number] for number in sorted(numbers) if not self.units[number].is_gathered]
        modules = [unit for unit in chosen if unit.segment is None and unit.runs_again]
        in_segments = ((unit.module, unit.segment, unit) for unit in chosen if unit.segment is not None)
        segments = sorted(in_segments, key=lambda entry: entry[:2])
        on_host = [unit for unit in chosen if unit.on_host]
        decisions: list[Checkpoint | Replay | Offload] = []
        if modules:
            kept = tuple(unit.kept for unit in modules)
            names = tuple(unit.module for unit in modules)
            decisions.append(Checkpoint(modules=names, kept=kept if any(kept) else ()))
        if segments:
            split_points = tuple(unit.split_points for *_, unit in segments)
            decisions.append(
                Replay(
                    modules=tuple(module for module, *_ in segments),
                    stretches=tuple(segment for _, segment, _ in segments),
                    kept=tuple(unit.kept for *_, unit in segments),
                    stops=split_points if any(split_points) else (),
                )
            )
        if on_host:
            inputs_of = tuple(unit.module for unit in on_host if unit.runs_again)
            names = tuple(unit.module for unit in on_host)
            decisions.append(Offload(modules=names, inputs_of=inputs_of, from_bytes=FROM_BYTES))
        return tuple(decisions)


CHECKPOINT = Checkpoint.kind
"""The technique of `whole_modules`."""


def whole_modules(paths: Sequence[str]) -> Checkpoint:
    """Returns the decision that recomputes each of these modules as a whole.

    It is for modules that the search does not choose: a library chooses them, or they are all layers of a model.
    """
    return Checkpoint(modules=tuple(paths))


def units_of(
    graph: StepGraph,
    op_ns: list[int],
    *,
    granularity_bytes: int,
    launch_ns: int = 0,
    kinds: Container[type[Decision]] = (Checkpoint, Replay),
    host_copies: HostCopies | None = None,
    gathers: Sequence[tuple[RepeatedGathers, int]] = (),
    excluded: Excluded = frozenset(),
    watch: Watch | None = None,
) -> Units:
    """Builds the checkpoint problem of a what-if recording.

    Args:
        graph: a what-if recording.
        op_ns: time of each op in ns, as `planner.estimate.roofline.op_times_ns` gives it.
        granularity_bytes: storage sizes are rounded up to a multiple of it (512 for CUDA's allocator, 1 for no
            rounding).
        launch_ns: time in ns that the host takes to launch an op. The host takes longer to record and replay the ops
            of a segment (`replay_cost`).
        kinds: types of decision that units may become: `Checkpoint` and `Offload` for modules, `Replay` for segments.
        host_copies: gives the time of copies to the host and back; None if no unit may be offloaded.
        gathers: gathers that the recording repeats, each with the time in ns that leaving it out would save.
        excluded: techniques that must not be applied to some modules.
        watch: is checked before each module or segment; None for no time limit.

    Raises:
        TimeIsUp: the time of the watch is up.
    """
    watch = watch or Watch()
    # 1. Long forwards are cut into segments, which become calls: then every unit is a set of calls.
    if Replay in kinds:
        graph = with_segments(graph)
    windows = windows_of(graph)
    sizes = [round_up(storage.size_bytes, granularity_bytes) for storage in graph.storages]
    # 2. The units, each with its cost in every call of its module.
    offloads = None if host_copies is None or Offload not in kinds else Offloads(graph, host_copies, sizes)
    replays = Replays(graph, op_ns, sizes, launch_ns)
    units, options = _choices(graph, windows, op_ns, sizes, kinds, offloads, replays, excluded, watch)
    again = {len(units) + number: repeated for number, (repeated, _) in enumerate(gathers)}
    gathered = tuple(
        Unit(module=repeated.unit, segment=None, kept=(), runs_again=False, is_gathered=True)
        for repeated in again.values()
    )
    # 3. The memory curve as a function of the selected units: bytes that are always alive, and bytes on a condition.
    paths = _paths(graph, options)
    exclusive = exclusive_units(paths, len(units) + len(gathered))
    fixed, holds, shared = holds_of(graph, options, sizes, again, exclusive, watch)
    problem = CheckpointProblem(
        fixed_bytes=fixed,
        holds=holds,
        recomputes=tuple(
            Recompute(unit=option.unit, at=tick, extra_bytes=extra_bytes)
            for option in itertools.chain.from_iterable(options.values())
            for tick, extra_bytes in option.rerun.peaks
        ),
        cost_ns=(*_costs(options, len(units)), *(cost_ns for _, cost_ns in gathers)),
        # 4. One level of checkpointing: of nested calls, at most one is selected.
        paths=paths,
        shared=shared,
    )
    return Units(units=(*units, *gathered), problem=problem, options=options)


def checkpointable(graph: StepGraph, kinds: Container[type[Decision]], excluded: Excluded) -> tuple[str, ...]:
    """Returns the paths of the modules that may be checkpointed as a whole, without duplicates.

    The result equals `Units.modules` and takes much less time, because no unit is built. The arguments are those of
    `units_of`.
    """
    found = _candidates(graph, windows_of(graph), kinds, excluded)
    return tuple(module for module, segment in found if segment is None)


def outermost(graph: StepGraph, modules: Collection[str]) -> tuple[str, ...]:
    """Returns those of the modules whose calls are not nested in calls of these modules, in the same order."""
    chosen = set(modules)
    nested = {
        graph.calls[index].module
        for index, call in enumerate(graph.calls)
        if call.module in chosen
        and any(outer != index and graph.calls[outer].module in chosen for outer in graph.enclosing(index))
    }
    return tuple(module for module in modules if module not in nested)


def _candidates(
    graph: StepGraph, windows: dict[int, Window], kinds: Container[type[Decision]], excluded: Excluded
) -> dict[tuple[str, tuple[int, int] | None], list[int]]:
    """Returns the modules and segments that may be recomputed, each with its calls.

    A module or segment may be recomputed if its type of decision is in `kinds` and not excluded for the module, if all
    its calls may run twice, and if backward reads what at least one of them saved. Calls without gradients do not
    count: they save nothing, and run as without the decision.

    Returns:
        Indices of the calls, by (module path, op numbers of the segment or None).
    """
    calls_of: dict[tuple[str, tuple[int, int] | None], list[int]] = defaultdict(list)
    unusable, read = set(), set()
    for index, call in enumerate(graph.calls):
        key = call.module, call.segment
        if call.obstacle == WITHOUT_GRADIENTS:
            continue
        calls_of[key].append(index)
        if index in windows and windows[index].is_read:
            read.add(key)
        if call.segment is None and not (call.module and call.obstacle is None and index in windows):
            unusable.add(key)
        kind = Checkpoint if call.segment is None else Replay
        if kind not in kinds or (kind, call.module) in excluded:
            unusable.add(key)
    ordered = sorted(calls_of, key=lambda key: (key[0], key[1] or ()))
    return {key: calls_of[key] for key in ordered if key in read and key not in unusable}


def _offloadable(graph: StepGraph) -> dict[str, list[int]]:
    """Returns the modules whose saved tensors can be offloaded, by path, each with the indices of its calls.

    Offloading sets hooks for saved tensors around the forward of a module, which some obstacles forbid (`NO_REPLAY`).
    """
    calls_of: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(graph.calls):
        if call.segment is None and call.obstacle != WITHOUT_GRADIENTS:
            calls_of[call.module].append(index)
    return {
        module: calls
        for module, calls in sorted(calls_of.items())
        if module and not any(graph.calls[call].obstacle in NO_REPLAY for call in calls)
    }


def _choices(
    graph: StepGraph,
    windows: dict[int, Window],
    op_ns: list[int],
    sizes: list[int],
    kinds: Container[type[Decision]],
    offloads: Offloads | None,
    replays: Replays,
    excluded: Excluded,
    watch: Watch,
) -> tuple[tuple[Unit, ...], Options]:
    """Returns all units, and for each call the units that apply to it with their costs."""
    keepable, reruns = Keepable(graph, op_ns, sizes), Reruns(graph, op_ns, sizes)
    units: list[Unit] = []
    options: Options = {}
    recompute_ns: dict[str, int] = {}  # by module: time of its recompute; offloading must not take longer

    def add(unit: Unit, costs: Mapping[int, Rerun | None]) -> None:
        """Adds a unit, but only if it is possible in every call of its module (no cost is None)."""
        possible = {call: rerun for call, rerun in costs.items() if rerun is not None}
        if len(possible) == len(costs):
            for call, rerun in possible.items():
                options[call] = (*options.get(call, ()), Option(unit=len(units), rerun=rerun))
            units.append(unit)

    # Recompute: each module or segment with nothing kept, with some products kept, and divided into parts.
    for (module, segment), calls in watch.checking(_candidates(graph, windows, kinds, excluded).items()):
        nothing = dict.fromkeys(calls, NOTHING)
        choices: list[tuple[dict[int, Kept], tuple[int, ...]]] = [(nothing, ())]
        if segment is None:
            choices += [(kept, ()) for kept in keepable.choices({call: windows[call].last_pack for call in calls})]
        else:
            choices = _of_segment(graph.calls[calls[0]], segment, calls, keepable, replays)
        for kept, split_points in choices:
            unit = Unit(module=module, segment=segment, kept=kept[calls[0]].numbers, split_points=split_points)
            if segment is not None:
                add(unit, {call: replays.of_segment(call, kept[call], split_points) for call in calls})
                continue
            costs = {call: reruns.of_module(call, windows[call], kept[call]) for call in calls}
            add(unit, costs)
            if offloads is not None and kept is nothing:
                recompute_ns[module] = sum(rerun.cost_ns for rerun in costs.values())
                if (Offload, module) not in excluded:
                    on_host = {call: offloads.of_inputs(call, rerun) for call, rerun in costs.items()}
                    add(Unit(module=module, segment=None, kept=(), on_host=True), on_host)
    # Offload: modules whose saved tensors are copied faster than they are recomputed.
    if offloads is not None:
        for module, calls in _offloadable(graph).items():
            saved = {call: offloads.of_saved(call) for call in calls}
            if (Offload, module) not in excluded and _cost_ns(saved) <= recompute_ns.get(module, math.inf):
                add(Unit(module=module, segment=None, kept=(), runs_again=False, on_host=True), saved)
    return tuple(units), options


def _of_segment(
    call: Call, segment: tuple[int, int], calls: Sequence[int], keepable: Keepable, replays: Replays
) -> list[tuple[dict[int, Kept], tuple[int, ...]]]:
    """Returns the alternatives for a segment: what every call keeps, and where it is divided into parts.

    The segment keeps nothing, or some of its products. It is recomputed as a whole if that is allowed, and in parts:
    between the calls of submodules, or behind the products that it keeps.
    """
    nothing = dict.fromkeys(calls, NOTHING)
    products = keepable.choices_among({index: replays.ops_of(index) for index in calls}, first=segment[0])
    behind = [(kept, _behind(kept[calls[0]].numbers, segment)) for kept in products]
    in_parts = [(kept, points) for kept, points in behind if 0 < len(points) < _MOST_PARTS]
    if call.split_points:
        in_parts.append((nothing, call.split_points))
    return in_parts if call.only_divided else [*((kept, ()) for kept in (nothing, *products)), *in_parts]


def _behind(products: Sequence[int], segment: tuple[int, int]) -> tuple[int, ...]:
    """Returns the split points of a segment that keeps these products: the numbers of the ops that follow them."""
    return tuple(number + 1 for number in products if number + 1 < segment[1])


def _cost_ns(costs: Mapping[int, Rerun | None]) -> float:
    """Returns the sum of the costs of a unit's calls in ns; infinite if the unit is not possible in one of them."""
    return sum(math.inf if rerun is None else rerun.cost_ns for rerun in costs.values())


def _costs(options: Options, n_units: int) -> tuple[int, ...]:
    """Returns the cost of each unit in ns, summed over its calls."""
    costs = [0] * n_units
    for option in itertools.chain.from_iterable(options.values()):
        costs[option.unit] += option.rerun.cost_ns
    return tuple(costs)


def _paths(graph: StepGraph, options: Options) -> tuple[tuple[int, ...], ...]:
    """Returns sets of units of which at most one may be selected, because their calls are nested.

    Sets that are contained in another set are left out.
    """
    paths = {
        units_in(option for outer in graph.enclosing(index) for option in options.get(outer, ())) for index in options
    }
    return tuple(longest_paths(paths))
