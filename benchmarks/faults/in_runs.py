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
        path="planner/whole_run/planning.py",
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
    Fault(
        name="run-takes-composite-ops-for-kernels",
        path="planner/recording/recorder.py",
        old="if torch.is_inference_mode_enabled() and (kernel",
        new="if False and (kernel",
        tests=("tests/virtual_gpu/test_inference_mode.py::test_composite_ops_are_taken_apart[composites]",),
        why="what a composite op makes and frees under inference mode is not counted",
    ),
    Fault(
        name="run-forgets-routes-in-inference-mode",
        path="planner/virtual_gpu/backend.py",
        old="    inference_mode.note_route(name, function)\n",
        new="",
        tests=("tests/virtual_gpu/test_inference_mode.py::test_recurrent_layers_run_cudnn",),
        why="recurrent layers run other kernels under inference mode than on a card",
    ),
    Fault(
        name="run-ends-generated-texts-early",
        path="planner/virtual_gpu/values/transformers_patches.py",
        old="        known.assume(is_done, False, ASSUMED_FULL_LENGTH)\n",
        new="",
        tests=("tests/whole_run/test_generation.py::test_texts_are_generated_to_their_largest_length[sampling]",),
        why="a generation is predicted to end after its first token",
    ),
    Fault(
        name="run-stops-watching-calls-that-count",
        path="planner/recording/repetition.py",
        old="            and self._calls[number].state == self._calls[last].state\n",
        new="",
        tests=("tests/system/test_calls_that_differ.py::test_calls_are_recorded_until_they_repeat[in every 12th]",),
        why="a step that updates in every n-th call is promised the memory of calls without an update",
    ),
    Fault(
        name="run-ignores-memory-that-calls-hold",
        path="planner/recording/repetition.py",
        old="            self._calls[number].held_bytes == self._calls[last].held_bytes\n            and ",
        new="            ",
        tests=("tests/system/test_calls_that_differ.py::test_memory_that_no_number_shows_is_seen",),
        why="a step that keeps its last outputs where no attribute shows them is promised too few bytes",
    ),
    Fault(
        name="run-certifies-two-calls-of-a-step-that-repeats-later",
        path="rewrite/rehearse.py",
        old="        steps=None if schedule is None else schedule.calls,\n",
        new="        steps=None if schedule is None else 2,\n",
        tests=("tests/system/test_calls_that_differ.py::test_the_certificates_of_a_plan_cover_the_same_calls",),
        why="a rewritten step is certified for fewer calls than the baseline",
    ),
    Fault(
        name="run-repeats-the-last-call-only",
        path="planner/run_memory/moments.py",
        old="starts[steps - graph.schedule.period]",
        new="starts[steps - 1]",
        tests=(
            "tests/run_memory/test_runs.py::test_a_run_of_calls_that_differ_reserves_what_one_recording_of_all_calls_reserves",
        ),
        why="a run repeats the call with the update, or the one without, for ever",
    ),
)
