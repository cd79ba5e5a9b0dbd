"""The search for the fastest algorithm of a convolution, with `torch.backends.cudnn.benchmark = True`."""

from __future__ import annotations

from planner.allocator.replay import replay
from planner.allocator.settings import AllocatorSettings
from planner.plan_types.sizes import MIB
from planner.snapshot.history import Action
from planner.snapshot.simulate import simulate
from planner.workspaces.registry import Search, Trials

NATIVE = AllocatorSettings()


def trials(*plans: int, most: int = 10, card: int = 1000, name: str = "a convolution") -> Trials:
    search = Search(tuple(size * MIB for size in plans), most, card_bytes=card * MIB, heuristic_bytes=(0,))
    largest = max(search.compared(card * MIB), default=0)
    smaller = sorted({size for size in search.plans_bytes if size < largest}, reverse=True)
    return Trials((largest, *smaller), name, search)


def one_block(tried: Trials, capacity: int | None = None, *, before: int = 0):
    """Replays a convolution, after `before` MiB were allocated and stay."""
    stream = [(0, before * MIB)] * bool(before) + [(1, max(tried.sizes_bytes[0], 1)), (1, 0)]
    return replay(stream, NATIVE, None if capacity is None else capacity * MIB, trials={1: tried})


def test_the_largest_workspace_that_fits_on_the_card_is_allocated_for_the_search():
    several = trials(40, 300, 0, 600)
    outcome = one_block(several)
    assert outcome.searched == {1: 600 * MIB} and not outcome.taken
    assert outcome.peak_allocated_bytes == outcome.peak_reserved_bytes == 600 * MIB
    outcome = one_block(several, before=500)
    assert outcome.searched == {1: 300 * MIB} and outcome.taken == {1: 300 * MIB}
    assert outcome.peak_allocated_event == 1 and outcome.retries == 0


def test_the_block_of_a_search_is_released_before_the_algorithm_runs():
    outcome = one_block(trials(40, 0, 300, most=2))
    assert outcome.peak_reserved_bytes == 300 * MIB and outcome.final_reserved_bytes == 40 * MIB


def test_only_the_first_algorithms_that_fit_are_compared():
    several = trials(40, 300, 80, 0, most=2)
    assert several.sizes_bytes[0] == 300 * MIB and not one_block(several).taken
    assert one_block(several, 200).taken == {1: 80 * MIB}  # the second one is left out, so the third one is compared
    assert trials(40, 80, 300, most=2).sizes_bytes[0] == 80 * MIB
    assert trials(40, 300, 80, 900, most=0).sizes_bytes[0] == 900 * MIB


def test_a_search_that_gets_no_block_tries_half_of_it():
    """A cached block may be larger than the free memory, and yet not serve the request."""
    cached = AllocatorSettings(max_split_size_bytes=100 * MIB)
    tried = trials(90, 30, 0, card=300)
    stream = [(0, 150 * MIB), (2, 120 * MIB), (0, 0), (3, 149 * MIB), (1, 90 * MIB), (1, 0)]
    outcome = replay(stream, cached, 300 * MIB, trials={1: tried})
    assert outcome.out_of_memory_event is None and outcome.taken == {1: 30 * MIB}


def test_the_largest_free_block_decides_which_algorithms_are_tried():
    stream = [(0, 150 * MIB), (2, 30 * MIB), (3, 110 * MIB), (0, 0), (2, 0), (1, 140 * MIB), (1, 0)]
    outcome = replay(stream, NATIVE, 300 * MIB, trials={1: trials(140, 20, 0, card=300)})
    assert outcome.searched == {1: 140 * MIB} and not outcome.taken


def test_an_algorithm_is_remembered_and_searched_again_only_if_it_does_not_fit():
    tried = trials(100, 40, 0)
    stream = [(1, 100 * MIB), (1, 0), (2, 100 * MIB), (2, 0), (0, 150 * MIB), (3, 100 * MIB), (3, 0)]
    outcome = replay(stream, NATIVE, 200 * MIB, trials=dict.fromkeys((1, 2, 3), tried))
    assert outcome.searched == {1: 100 * MIB, 3: 40 * MIB} and outcome.taken == {3: 40 * MIB}
    other = {1: tried, 2: trials(100, 40, 0, name="another convolution")}
    assert list(replay(stream[:4], NATIVE, None, trials=other).searched) == [1, 2]


def test_an_algorithm_without_a_workspace_takes_no_block_after_the_search():
    outcome = one_block(trials(0, 0, 300, most=2))
    assert outcome.searched == {1: 300 * MIB} and outcome.final_reserved_bytes == 0 and not outcome.taken


def test_a_step_without_room_for_any_algorithm_runs_out_of_memory():
    assert one_block(trials(100, 40), 120, before=100).out_of_memory_event == 1


def test_the_block_of_a_search_is_in_the_memory_history():
    history = simulate([(1, 40 * MIB), (1, 0)], None, trials={1: trials(40, 0, 300, most=2)}).history
    story = [(event.action, event.size_bytes // MIB) for event in history.events]
    assert story[:5] == [
        *((Action.SEGMENT_ALLOC, 300), (Action.ALLOC, 300)),
        *((Action.FREE_REQUESTED, 300), (Action.FREE_COMPLETED, 300), (Action.SEGMENT_FREE, 300)),
    ]
    assert story[5:7] == [(Action.SEGMENT_ALLOC, 40), (Action.ALLOC, 40)]
