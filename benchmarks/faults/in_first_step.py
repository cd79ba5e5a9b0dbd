"""Planted faults: how a batch is split, the comparison of the first step, and what may be recomputed."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_BY_SAMPLE = "planner/space/by_sample.py"
_TEST_BY_SAMPLE = "tests/space/test_by_sample.py"
_FIRST_STEP = "rewrite/first_step_check.py"
_TEST_FIRST_STEP = "tests/rewrite/test_first_step_check.py"
_PROBE = "rewrite/accumulation_check/gradient_probe.py"
_COUPLING = "rewrite/accumulation_check/coupling_check.py"
_TEST_COUPLING = "tests/rewrite/accumulation_check/test_coupling_check.py"
_CALLS = "planner/recording/module_calls.py"
_TEST_OBSTACLES = "tests/recording/test_recompute_obstacles.py"

FAULTS = (
    Fault(
        name="by-sample-is-never-checked",
        path=_BY_SAMPLE,
        old="needed = not workload.is_by_sample_stated and workload.batch_size > 1",
        new="needed = False",
        tests=(f"{_TEST_BY_SAMPLE}::test_a_tensor_that_has_the_size_of_the_batch_by_chance_is_asked_for",),
        why="a mask [T, T] is cut to one row, which broadcasts",
    ),
    Fault(
        name="by-sample-needs-twice-the-samples",
        path=_BY_SAMPLE,
        old="if half > 1 and _error(",
        new="if half > 9999 and _error(",
        tests=(f"{_TEST_BY_SAMPLE}::test_a_model_that_takes_half_of_the_batch_need_not_take_twice_as_much",),
        why="models with a largest batch are never split",
    ),
    Fault(
        name="stated-names-are-forgotten",
        path="rewrite/rules/accumulation.py",
        old="        not_by_sample=rewriting.not_by_sample,\n",
        new="",
        tests=(f"{_TEST_BY_SAMPLE}::test_with_the_names_stated_a_batch_trains_the_same_in_parts",),
        why="tensors that the user excluded are cut nevertheless",
    ),
    Fault(
        name="plan-file-loses-stated-names",
        path="planner/plan_types/plan.py",
        old='"not_by_sample": as_tuples(data.get("not_by_sample", ()))',
        new='"not_by_sample": ()',
        tests=(f"{_TEST_BY_SAMPLE}::test_with_the_names_stated_a_batch_trains_the_same_in_parts",),
        why="a saved plan cuts tensors that the user excluded",
    ),
    Fault(
        name="first-step-is-not-compared",
        path=_FIRST_STEP,
        old="        if result.is_off:\n",
        new="        if result.is_off and result.samples > 99:\n",
        tests=(f"{_TEST_FIRST_STEP}::test_a_wrong_forward_of_any_rule_is_refused_before_anything_is_trained",),
        why="a rewritten model that computes something else trains",
    ),
    Fault(
        name="first-step-compares-with-itself",
        path="rewrite/rewriting.py",
        old="        for change in reversed(forwards):\n            change.restore()\n",
        new="",
        tests=(f"{_TEST_FIRST_STEP}::test_a_wrong_forward_of_any_rule_is_refused_before_anything_is_trained",),
        why="the rewritten model is compared with itself",
    ),
    Fault(
        name="first-step-is-only-tried-once",
        path=_FIRST_STEP,
        old="        self.is_due = bool(self._kinds)  # the next step is the first that trains\n",
        new="        self.is_due = False\n",
        tests=(
            f"{_TEST_FIRST_STEP}::test_a_model_that_takes_another_branch_when_it_is_rewritten_is_refused_before_the_update",
        ),
        why="a training loop that catches the error trains wrongly in its next step",
    ),
    Fault(
        name="first-step-takes-any-memory",
        path=_FIRST_STEP,
        old="samples = min(total, _MAX_SAMPLES, int(free_bytes // sample_bytes))",
        new="samples = min(total, _MAX_SAMPLES)",
        tests=(f"{_TEST_FIRST_STEP}::test_where_no_sample_fits_the_planned_memory_it_says_so_in_one_line",),
        why="the comparison runs out of memory that the plan did not promise",
    ),
    Fault(
        name="calls-are-not-counted",
        path=_PROBE,
        old="return change if change > _BOUNDS[self.precision][not with_gradients] else None",
        new="return None",
        tests=(f"{_TEST_COUPLING}::test_a_loss_that_counts_its_calls_is_refused",),
        why="a warm-up by calls counts micro-batches",
    ),
    Fault(
        name="an-unchecked-split-trains",
        path=_COUPLING,
        old="            if why_not is not None and not agrees:\n",
        new="            if why_not is not None and agrees:\n",
        tests=(f"{_TEST_COUPLING}::test_what_cannot_be_checked_is_refused_unless_weights_are_stated",),
        why="a split is trained with although nothing could be compared",
    ),
    Fault(
        name="small-errors-of-weights-agree",
        path="rewrite/accumulation_check/__init__.py",
        old="_SMALL_ERROR = 0.05",
        new="_SMALL_ERROR = 0.0",
        tests=(
            "tests/rewrite/rules/test_accumulation.py"
            "::test_a_small_error_of_the_weights_is_refused_although_gradients_nearly_agree",
        ),
        why="weights that are off by a few labels pass, because gradients agree within the bound",
    ),
    Fault(
        name="chunked-loss-is-not-probed",
        path="rewrite/application.py",
        old="    if micro_batches_of(plan.decisions) > 1:\n",
        new="    if micro_batches_of(plan.decisions) > 1 and rewriting.chunked_head is None:\n",
        tests=(
            "tests/rewrite/accumulation_check/test_reduction_check.py"
            "::test_a_sum_over_a_constant_in_chunks_is_refused_and_uses_no_whole_logits",
        ),
        why="a sum divided by a constant trains with gradients that are too small",
    ),
    Fault(
        name="attributes-may-change-after-a-call",
        path=_CALLS,
        old='                self.note_obstacle(call, f"{changed} changes after it has run")',
        new="                pass",
        tests=(f"{_TEST_OBSTACLES}::test_a_module_whose_attributes_change_after_its_call_is_not_recomputed",),
        why="a module is recomputed with another state than in its forward",
    ),
    Fault(
        name="transforms-are-recomputed",
        path=_CALLS,
        old="        if torch._C._functorch.peek_interpreter_stack() is not None:\n            return TRANSFORMED\n",
        new="",
        tests=(f"{_TEST_OBSTACLES}::test_a_model_that_uses_torch_func_can_be_planned_and_trains_the_same",),
        why="the recompute of a module inside of torch.func.vmap raises in the first step",
    ),
    Fault(
        name="emitted-terms-are-guessed",
        path="rewrite/loss_terms.py",
        old="and own is not None and own.certain\n",
        new="and own is not None\n",
        tests=(
            "tests/rewrite/rules/test_accumulation.py"
            "::test_an_emitted_file_asks_for_terms_that_the_source_of_the_model_leaves_open",
        ),
        why="an emitted file weights micro-batches by labels that the loss does not count",
    ),
    Fault(
        name="coupling-check-weights-gradients-instead-of-losses",
        path=_PROBE,
        old="            return sampled_gradient(loss * share, self._trained)",
        new="            return sampled_gradient(loss, self._trained) * share",
        tests=(
            "tests/rewrite/accumulation_check/test_backward_coupling.py"
            "::test_a_gradient_that_depends_on_its_sample_only_is_accepted_even_if_it_is_not_linear[clamped-8]",
        ),
        why="training is refused although it is right, if a backward clamps gradients",
    ),
)
