"""Planted faults: the memory of whole runs."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

FAULTS = (
    Fault(
        name="run-takes-growing-lists-for-held-tensors",
        path="planner/run_memory/moments.py",
        old="        stay = {block for block, other in counterparts.items() if other not in self._dies}\n",
        new="        stay: set[int] = set()\n",
        tests=(
            "tests/run_memory/test_runs.py::"
            "test_what_a_step_keeps_for_ever_grows_with_each_step_and_what_it_holds_does_not",
        ),
        why="a step that appends to a list, and holds a tensor of the same kind, is predicted to leak the latter",
    ),
    Fault(
        name="run-matches-growing-lists-from-the-first-block",
        path="planner/run_memory/moments.py",
        old="dict(zip(reversed(blocks), reversed(first), strict=False))",
        new="dict(zip(blocks, first, strict=False))",
        tests=(
            "tests/run_memory/test_runs.py::"
            "test_what_a_step_keeps_for_ever_grows_with_each_step_and_what_it_holds_does_not",
        ),
        why="what only the first step makes is taken for an entry of a list, so that held tensors are never freed",
    ),
    Fault(
        name="run-predicts-lengths-without-checks",
        path="planner/run_memory/interpolation.py",
        old="    if any(row[-1] for row in system[count:]):\n        return None\n",
        new="",
        tests=("tests/run_memory/test_interpolation.py::test_what_no_sum_explains_is_not_predicted",),
        why="steps of other lengths are predicted from sums that disagree with the recordings",
    ),
    Fault(
        name="run-predicts-one-sample-from-several",
        path="planner/run_memory/interpolation.py",
        old="    return shape.samples < BASE_SIZES[0] * parts\n",
        new="    return False\n",
        tests=("tests/run_memory/test_interpolation.py::test_steps_with_one_sample_are_recorded_apart",),
        why="steps with one sample, for which PyTorch runs other ops, are predicted from those with several",
    ),
    Fault(
        name="run-compares-time-per-step",
        path="planner/whole_run/simulated_run.py",
        old=" / sum(shape.samples for shape in order)",
        new=" / len(order)",
        tests=("tests/whole_run/test_whole_run.py::test_the_command_plans_the_run_over_lengths_of_samples",),
        why="batches with other numbers of samples are compared by the time of a step",
    ),
    Fault(
        name="run-accepts-generators",
        path="planner/whole_run/activities.py",
        old=" or inspect.isgeneratorfunction(function)",
        new="",
        tests=("tests/whole_run/test_whole_run.py::test_what_cannot_happen_between_steps_is_refused",),
        why="a generator between steps is recorded as an activity that needs no memory",
    ),
)
