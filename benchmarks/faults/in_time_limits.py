"""Planted faults: time limits."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_TESTS = "tests/choose/test_time_limits.py"
_PROBLEM = f"{_TESTS}::test_the_checkpoint_problem_is_the_same_with_a_watch_and_ends_at_each_of_its_checks"
_TRADE_OFF = f"{_TESTS}::test_a_trade_off_leaves_the_time_to_measure_its_smallest_known_plan"
_NOTES = f"{_TESTS}::test_notes_on_convolutions_leave_out_what_would_be_computed_after_the_end"
_LATE = "planning takes seconds longer than its time limit"

FAULTS = (
    Fault(
        name="reserves-replace-each-other",
        path="planner/progress/__init__.py",
        old="        self._reserved = lambda: previous() + seconds()\n",
        new="        self._reserved = seconds\n",
        tests=("tests/progress/test_progress.py::test_a_part_may_have_less_time_than_the_whole_but_not_more",),
        why=_LATE,
    ),
    Fault(
        name="units-are-built-without-checks",
        path="planner/recompute/units.py",
        old="in watch.checking(_candidates(graph, windows, kinds, excluded).items()):",
        new="in _candidates(graph, windows, kinds, excluded).items():",
        tests=(_PROBLEM,),
        why=_LATE,
    ),
    Fault(
        name="holds-of-saves-are-built-without-checks",
        path="planner/recompute/holds.py",
        old="for save in watch.checking(graph.saves, every=_BETWEEN_CHECKS):",
        new="for save in graph.saves:",
        tests=(_PROBLEM,),
        why=_LATE,
    ),
    Fault(
        name="predictions-do-not-check-the-time",
        path="planner/estimate/smallest_total.py",
        old="AllocatingStep(graph, card, fastest=fastest, watch=watch or Watch())\n    enough_bytes",
        new="AllocatingStep(graph, card, fastest=fastest)\n    enough_bytes",
        tests=(f"{_TESTS}::test_a_prediction_checks_the_time_before_each_replay_and_is_made_again_after_it_was_ended",),
        why=_LATE,
    ),
    Fault(
        name="no-time-to-measure-the-smallest-plan-of-a-trade-off",
        path="planner/choose/pareto_front.py",
        old="lambda: session.seconds_to_measure_smallest",
        new="lambda: 0.0",
        tests=(_TRADE_OFF,),
        why=_LATE,
    ),
    Fault(
        name="ctrl-c-ends-the-measurement-of-the-smallest-plan-of-a-trade-off",
        path="planner/choose/pareto_front.py",
        old="        with session.watch.after_end():\n",
        new="        with contextlib.nullcontext():\n",
        tests=(_TRADE_OFF,),
        why="after Ctrl-C, the smallest plan of a trade-off is shown with more memory than it needs",
    ),
    Fault(
        name="ctrl-c-ends-the-measurement-of-the-smallest-plan",
        path="planner/pipeline.py",
        old="        with session.watch.after_end():\n",
        new="        with contextlib.nullcontext():\n",
        tests=(f"{_TESTS}::test_after_ctrl_c_the_smallest_known_plan_is_still_measured",),
        why="after Ctrl-C, the smallest plan is shown with more memory than it needs",
    ),
    Fault(
        name="kernel-notes-are-searched-for-after-the-end",
        path="planner/estimate/smallest_total.py",
        old="AllocatingStep(graph, card, fastest=fastest, watch=watch or Watch())\n    search",
        new="AllocatingStep(graph, card, fastest=fastest)\n    search",
        tests=(_NOTES,),
        why=_LATE,
    ),
    Fault(
        name="searches-of-algorithms-are-measured-after-the-end",
        path="planner/estimate/kernel_notes.py",
        old="in watch.checking(steps)",
        new="in steps",
        tests=(_NOTES,),
        why=_LATE,
    ),
    Fault(
        name="no-time-to-measure-the-smallest-plan",
        path="planner/pipeline.py",
        old="min(session.seconds_to_measure_smallest, most_seconds)",
        new="0.0",
        tests=(f"{_TESTS}::test_the_search_for_the_smallest_plan_leaves_the_time_to_measure_the_smallest_known_one",),
        why=_LATE,
    ),
    Fault(
        name="relaxations-are-prepared-when-the-time-is-up",
        path="planner/choose/relaxations.py",
        old="        session.watch.check()\n",
        new="",
        tests=(f"{_TESTS}::test_no_relaxation_is_prepared_when_the_time_is_up",),
        why=_LATE,
    ),
    Fault(
        name="no-time-to-assemble-a-trade-off",
        path="planner/choose/pareto_front.py",
        old="            return assembly_seconds * plans\n",
        new="            return 0.0\n",
        tests=(f"{_TESTS}::test_the_front_ends_when_only_the_time_to_assemble_it_is_left",),
        why=_LATE,
    ),
    Fault(
        name="a-plan-of-a-trade-off-takes-no-time",
        path="planner/pipeline.py",
        old="assembly_seconds=time.perf_counter() - before_assembly,",
        new="assembly_seconds=0.0,",
        tests=(f"{_TESTS}::test_a_trade_off_leaves_the_time_to_assemble_its_plans",),
        why=_LATE,
    ),
    Fault(
        name="a-slow-plan-is-forgotten-when-the-time-is-up",
        path="planner/pipeline.py",
        old="        slower = session.best_known(dataclasses.replace(constraints, max_slowdown=None))\n",
        new="        slower = None\n",
        tests=(f"{_TESTS}::test_a_plan_that_fits_but_is_too_slow_is_reported_when_the_time_is_up_after_it_was_found",),
        why="the smallest plan is reported as if no plan fitted, although one was found that is slower than allowed",
    ),
    Fault(
        name="the-smallest-total-is-searched-to-the-end",
        path="planner/estimate/smallest_total.py",
        old="        return self._until.left_seconds <= 0\n",
        new="        return False\n",
        tests=(f"{_TESTS}::test_a_search_for_the_smallest_total_that_is_ended_returns_a_total_in_which_the_step_runs",),
        why="a search for the smallest total takes up to a minute after the time limit",
    ),
    Fault(
        name="imports-are-searched-for-cycles-at-exit",
        path="planner/cli/command.py",
        old="        keep_imports()\n",
        new="",
        tests=(
            "tests/cli/test_odd_processes.py"
            "::test_the_objects_of_imported_libraries_are_not_searched_for_cycles_when_the_command_exits",
        ),
        why="for a model in a Python file, the command takes a second longer to exit",
    ),
    Fault(
        name="ctrl-c-after-planning-loses-the-answer",
        path="planner/cli/command.py",
        old="        if not _was_interrupted(error, watch):\n            raise\n    return outputs",
        new="        if error:\n            raise\n    return outputs",
        tests=(
            "tests/progress/test_progress.py::test_ctrl_c_after_planning_loses_neither_the_answer_nor_what_was_written",
        ),
        why="Ctrl-C while a snapshot is written loses the plan, which may have taken minutes",
    ),
    Fault(
        name="the-gap-of-a-plan-that-ended-early",
        path="planner/assemble.py",
        old="gap=1.0 if is_open else certified.choice.gap",
        new="gap=certified.choice.gap",
        tests=(
            "tests/progress/test_progress.py::test_an_end_before_the_first_certificate_still_certifies_the_best_choice",
        ),
        why="the report says that no plan is faster, although some were not tried",
    ),
    Fault(
        name="progress-of-another-question-has-a-best-plan",
        path="planner/progress/__init__.py",
        old="        if self._prefix is not None:\n            return\n",
        new="",
        tests=("tests/progress/test_progress.py::test_plans_of_searches_apart_are_not_the_best_plan",),
        why="progress shows a plan of another batch size as the best one, inside a budget that no plan fits",
    ),
    Fault(
        name="undecided-programs-of-a-slower-plan-do-not-count",
        path="planner/choose/searches.py",
        old="for used, chooser in self._made if used in used_for",
        new="for used, chooser in self._made if used == constraints",
        tests=(
            "tests/choose/test_time_limits.py"
            "::test_programs_without_an_answer_count_for_the_constraints_of_their_plans",
        ),
        why="a plan that is slower than allowed has a proven gap, although an integer program had no answer",
    ),
    Fault(
        name="the-cause-names-the-present-second",
        path="planner/progress/__init__.py",
        old="by Ctrl-C after {self._ended_seconds or self.elapsed_seconds:.0f} s",
        new="by Ctrl-C after {self.elapsed_seconds:.0f} s",
        tests=("tests/progress/test_progress.py::test_the_cause_names_the_second_of_ctrl_c",),
        why="a note says that Ctrl-C came later than it did",
    ),
)
