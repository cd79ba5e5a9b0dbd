"""Planted faults: the page of `--report`, memory snapshots, and their explanation."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

FAULTS = (
    Fault(
        name="page-loses-the-peak",
        path="planner/cli/page/timeline.py",
        old="        kept.add(int(group[live[group].argmax()]))\n",
        new="        kept.add(int(group[0]))\n",
        tests=("tests/cli/test_page.py::test_fewer_moments_keep_the_largest_of_each_group",),
        why="the page of a long step shows lower peaks between the largest ones",
    ),
    Fault(
        name="page-storages-live-too-long",
        path="planner/cli/page/timeline.py",
        old='        "life": [death - birth for birth, death, _ in rows],',
        new='        "life": [death - birth + 1 for birth, death, _ in rows],',
        tests=("tests/cli/test_page.py::test_the_pages_bytes_are_those_of_the_recording_in_every_moment",),
        why="the page counts tensors that were already freed",
    ),
    Fault(
        name="page-forgets-reserved-memory",
        path="planner/estimate/memory_history.py",
        old="            most[tick] = max(most[tick], reserved)\n",
        new="",
        tests=("tests/estimate/test_memory_history.py::test_the_history_has_the_peaks_of_the_footprint",),
        why="the page shows too little slack in the moments in which the allocator takes memory",
    ),
    Fault(
        name="page-stretches-no-micro-batch",
        path="planner/estimate/memory_history.py",
        old="repeats[min(op.micro_batch, len(repeats) - 1)])",
        new="1)",
        tests=("tests/estimate/test_memory_history.py::test_the_time_of_the_last_step_is_that_of_the_footprint",),
        why="the page draws a step with many micro-batches as shorter than it is",
    ),
    Fault(
        name="page-prices-of-another-step",
        path="planner/cli/page/recorded.py",
        old="if decision.kind in kinds[:number])",
        new="if decision.kind in kinds)",
        tests=("tests/cli/test_page.py::test_each_stage_adds_a_technique_and_the_last_is_the_plan",),
        why="the first technique gets the price of the whole plan",
    ),
    Fault(
        name="snapshot-without-released-segments",
        path="planner/snapshot/simulate.py",
        old="abs(size), stream) for address, size in exchanges)\n",
        new="abs(size), stream) for address, size in exchanges if size > 0)\n",
        tests=(
            "tests/snapshot/test_write.py::"
            "test_segments_that_a_full_card_releases_are_events_of_the_request_that_needs_them",
        ),
        why="a snapshot of a full card reserves more memory than the card has",
    ),
    Fault(
        name="recording-names-of-tied-weights",
        path="planner/recording/storage_table.py",
        old="storage.name or name",
        new="name or storage.name",
        tests=("tests/estimate/test_memory_history.py::test_tied_weights_have_their_first_name",),
        why="a tied weight has another name than in named_parameters",
    ),
    Fault(
        name="explain-ignores-the-order-of-segments",
        path="planner/snapshot/explain/trials.py",
        old="for order in [Order.RECORDED] if settings.expandable_segments else orders:",
        new="for order in [Order.RISING]:",
        tests=(
            "tests/snapshot/test_explain.py::test_a_replay_with_the_recorded_settings_fails_where_the_record_failed",
        ),
        why="the replay runs where the real card failed, because segments have other addresses, and nothing is advised",
    ),
    Fault(
        name="explain-adopts-impossible-states",
        path="planner/snapshot/explain/trials.py",
        old="start = self._start if can_adopt else ()",
        new="start = self._start",
        tests=(
            "tests/snapshot/test_explain.py::"
            "test_a_record_that_starts_in_the_middle_is_replayed_under_other_limits_of_splitting",
        ),
        why="a part of a segment is released as if it were a segment, and the advice is wrong or an error",
    ),
    Fault(
        name="explain-batch-without-the-failed-request",
        path="planner/snapshot/explain/contents.py",
        old="    everything = live if asked is None else [*live, (_ASKED, asked)]\n",
        new="    everything = live\n",
        tests=("tests/snapshot/test_explain.py::test_a_batch_that_is_longer_than_planned_is_found",),
        why="a longer batch is not recognized if its largest tensor is the one that did not fit",
    ),
    Fault(
        name="explain-only-updates-end-a-step",
        path="planner/snapshot/explain/steps.py",
        old="return not frames or is_optimizer(frames) or is_backward(frames)",
        new="return is_optimizer(frames)",
        tests=(
            "tests/snapshot/test_explain.py::"
            "test_what_each_step_leaves_behind_is_found_although_only_the_first_update_allocates",
        ),
        why="tensors that every step leaves behind count as activations, if the update allocates nothing",
    ),
    Fault(
        name="explain-step-begins-before-the-update",
        path="planner/snapshot/explain/steps.py",
        old="max((freed for freed, born in meanwhile if born <= low[0]), default=low[0])",
        new="low[0]",
        tests=("tests/snapshot/test_explain.py::test_a_batch_that_is_longer_than_planned_is_found",),
        why="without stack traces, optimizer state that the first update makes counts as made in the next step",
    ),
)
