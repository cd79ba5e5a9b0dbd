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
    Fault(
        name="run-forgets-the-users-allocator-options",
        path="planner/estimate/footprint.py",
        old="allocator_conf(decisions, card.alloc_conf)",
        new="allocator_conf(decisions)",
        tests=("tests/choose/test_allocator.py::test_the_step_is_simulated_with_the_options_of_the_user",),
        why="the step is simulated with PyTorch's defaults although the user trains with other options",
    ),
    Fault(
        name="run-reads-the-other-variable-first",
        path="planner/plan_types/decision_base.py",
        old='(FORMER_ALLOCATOR_VARIABLE, "PYTORCH_HIP_ALLOC_CONF", ALLOCATOR_VARIABLE)',
        new='(ALLOCATOR_VARIABLE, "PYTORCH_HIP_ALLOC_CONF", FORMER_ALLOCATOR_VARIABLE)',
        tests=(
            "tests/allocator/test_allocator_options.py::"
            "test_the_variable_with_the_former_name_counts_even_if_it_is_empty",
        ),
        why="options that PyTorch ignores are simulated",
    ),
    Fault(
        name="run-changes-what-the-user-has-set-first",
        path="planner/space/search_space.py",
        old="    kinds.sort(key=lambda option: bool(changed_options([option], card.alloc_conf)))\n",
        new="",
        tests=("tests/choose/test_allocator.py::test_only_options_that_the_user_has_not_set_are_proposed",),
        why="a plan changes an option that the user has set although another option is enough",
    ),
    Fault(
        name="run-verifies-a-saved-step-only",
        path="planner/replan.py",
        old="    if saved.run is None:\n",
        new="    if True:\n",
        tests=("tests/whole_run/test_whole_run.py::test_a_saved_run_is_simulated_again",),
        why="a saved run that no longer fits is reported as fitting, because only its longest step is rehearsed",
    ),
    Fault(
        name="run-emits-only-the-plans-allocator-options",
        path="rewrite/rules/allocator.py",
        old="    conf = allocator_conf(plan.decisions, plan.alloc_conf)\n",
        new="    conf = allocator_conf(plan.decisions)\n",
        tests=("tests/cli/test_training_lines.py::test_the_lines_set_all_options_whatever_the_process_has",),
        why="the emitted value replaces the options with which the plan was simulated",
    ),
    Fault(
        name="run-evaluates-with-the-trainers-batch-size",
        path="rewrite/trainer/arguments.py",
        old='        arguments["per_device_eval_batch_size"] = source.eval_batch_size\n',
        new="",
        tests=("tests/cli/test_training_lines.py::test_the_lines_of_a_run_train_as_it_was_planned",),
        why="the Trainer evaluates with batches of another size than planned",
    ),
)
