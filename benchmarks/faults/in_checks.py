"""Planted faults: checks of a running training, the Trainer, `verify`, and the house rules."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_RECOMPUTE = "rewrite/portable/recompute_check.py"
_TEST_RECOMPUTE = ("tests/rewrite/test_recompute_check.py",)
_REDUCTION = "rewrite/accumulation_check/reduction_check.py"
_TEST_REDUCTION = ("tests/rewrite/accumulation_check/test_reduction_check.py",)
_TEST_COUPLING = ("tests/rewrite/accumulation_check/test_coupling_check.py",)
_CALLBACK = "rewrite/trainer/callback.py"
_TEST_TRAINER = ("tests/rewrite/trainer/test_trainer.py",)
_TEST_WEIGHTING = ("tests/rewrite/trainer/test_loss_weighting.py",)

FAULTS = (
    # ---- recomputed values
    Fault(
        name="recompute-check-tolerates-everything",
        path=_RECOMPUTE,
        old="torch.float32: 1e-4,",
        new="torch.float32: 1.0,",
        tests=(
            "tests/rewrite/test_recompute_check.py"
            "::test_a_recompute_with_other_state_is_refused_and_nothing_is_updated",
        ),
        why="differences as large as the values count as rounding",
    ),
    Fault(
        name="recompute-check-tolerates-nothing",
        path=_RECOMPUTE,
        old="torch.float32: 1e-4,",
        new="torch.float32: 0.0,",
        tests=("tests/rewrite/test_recompute_check.py::test_rounding_is_ignored_and_more_than_rounding_is_not",),
        why="kernels with atomic additions are refused",
    ),
    Fault(
        name="recompute-check-tolerates-nan",
        path=_RECOMPUTE,
        old='        return share.item() if share.isfinite() else float("inf")',
        new="        return share.item()",
        tests=("tests/rewrite/test_recompute_check.py::test_what_is_not_finite_only_in_backward_is_refused",),
        why="a recompute that gives NaN is not refused, since comparisons with NaN are False",
    ),
    Fault(
        name="recompute-check-samples-nothing",
        path=_RECOMPUTE,
        old="        self.is_on, self.samples = self.step in self.steps, []",
        new="        self.is_on, self.samples = self.step - 1 in self.steps, []",
        tests=(
            "tests/rewrite/test_recompute_check.py"
            "::test_a_recompute_with_other_state_is_refused_and_nothing_is_updated",
        ),
        why="the first step is trained with wrong gradients",
    ),
    Fault(
        name="recompute-check-forgets-differences",
        path=_RECOMPUTE,
        old="        samples = self.samples\n        self.end_step()\n",
        new="        self.end_step()\n        samples = self.samples\n",
        tests=(
            "tests/rewrite/test_recompute_check.py"
            "::test_a_recompute_with_other_state_is_refused_and_nothing_is_updated",
        ),
        why="no sample is ever compared",
    ),
    Fault(
        name="recompute-check-samples-one-place",
        path=_RECOMPUTE,
        old="    return start + places.randrange(max(length - 128, 0) + 1), min(length, 128)",
        new="    return start, min(length, 128)",
        tests=("tests/rewrite/test_recompute_check.py::test_a_run_stays_inside_the_tensor_and_reaches_all_of_it",),
        why="elements in the middle of long rows are never compared",
    ),
    Fault(
        name="recompute-check-draws-training-numbers",
        path=_RECOMPUTE,
        old="        self.places = random.Random(0)  #",
        new="        self.places = random  #",
        tests=("tests/rewrite/test_recompute_check.py::test_the_check_draws_no_random_numbers_of_the_training",),
        why="the check changes Python's random numbers, which augmentations draw from",
    ),
    Fault(
        name="recompute-check-compares-a-tensor-with-itself",
        path=_RECOMPUTE,
        old="                sample.after = sample.copied(self, tensor)",
        new="                sample.after = sample.before",
        tests=(
            "tests/rewrite/test_recompute_check.py"
            "::test_a_recompute_with_other_state_is_refused_and_nothing_is_updated",
        ),
        why="each sample is compared with itself",
    ),
    Fault(
        name="recompute-check-too-late",
        path="rewrite/application.py",
        old="    check.at_once = rewriting.backward is not None or is_own  # an update may follow each backward\n",
        new="",
        tests=(
            "tests/rewrite/test_recompute_check.py"
            "::test_a_step_in_backward_updates_nothing_that_depends_on_the_difference",
        ),
        why="with step-in-backward the difference is reported when parameters are updated already",
    ),
    Fault(
        name="recompute-check-of-the-first-part",
        path="rewrite/recompute_observer.py",
        old="            self._is_in_step = True\n            self._check.begin_step()",
        new="            self._check.begin_step()",
        tests=("tests/rewrite/test_recompute_check.py::test_every_micro_batch_is_compared",),
        why="each micro-batch begins a step, so that only the last one is compared",
    ),
    Fault(
        name="recompute-check-goes-on-after-an-error",
        path="rewrite/recompute_observer.py",
        old="    def after_error(self) -> None:\n        self._is_in_step = False\n        self._check.end_step()",
        new="    def after_error(self) -> None:\n        self._check.end_step()",
        tests=("tests/rewrite/test_recompute_check.py::test_after_a_failed_step_the_next_one_is_checked",),
        why="after a failed step, no step is checked any more",
    ),
    # ---- micro-batches
    Fault(
        name="accumulation-check-tolerates-weights",
        path=_REDUCTION,
        old="_TOLERANCE = 1e-6",
        new="_TOLERANCE = 0.5",
        tests=(
            "tests/rewrite/accumulation_check/test_reduction_check.py"
            "::test_weights_that_make_another_loss_are_refused_before_anything_is_trained[labels that do not count]",
        ),
        why="weights that are off by half are taken for rounding",
    ),
    Fault(
        name="accumulation-check-forgets-sums",
        path=_REDUCTION,
        old="        self._refuse_weights_of_sums(weights)\n",
        new="",
        tests=(
            "tests/rewrite/accumulation_check/test_reduction_check.py"
            "::test_weights_that_make_another_loss_are_refused_before_anything_is_trained[a sum]",
        ),
        why="a loss that is a sum is trained as a mean over samples",
    ),
    Fault(
        name="accumulation-check-counts-ignored-labels",
        path=_REDUCTION,
        old='    counted = target != arguments["ignore_index"]',
        new="    counted = target == target",
        tests=(
            "tests/rewrite/accumulation_check/test_reduction_check.py"
            "::test_weights_that_make_another_loss_are_refused_before_anything_is_trained[labels that do not count]",
        ),
        why="means over padded labels are taken for means over all",
    ),
    Fault(
        name="accumulation-check-forgets-class-weights",
        path=_REDUCTION,
        old="    return counted.sum() if weight is None else weight",
        new="    return counted.sum() if weight is None or True else weight",
        tests=(
            "tests/rewrite/accumulation_check/test_reduction_check.py"
            "::test_weights_that_make_another_loss_are_refused_before_anything_is_trained[class weights]",
        ),
        why="a mean that class weights divide is trained with weights by labels",
    ),
    Fault(
        name="accumulation-check-first-step-only",
        path=_REDUCTION,
        old="        if not self._label_means_in_forward or any(",
        new="        if True or any(",
        tests=(
            "tests/rewrite/accumulation_check/test_reduction_check.py"
            "::test_labels_that_make_another_mean_of_a_later_batch_are_refused_there[padding]",
        ),
        why="padding that begins in a later batch is not noticed",
    ),
    Fault(
        name="accumulation-check-trusts-two-parts",
        path="rewrite/accumulation_check/__init__.py",
        old="            if not self._two_parts_agree(watcher, batch):\n                raise\n",
        new="",
        tests=(
            "tests/rewrite/accumulation_check/test_reduction_check.py"
            "::test_weights_that_make_another_loss_are_refused_before_anything_is_trained[labels that do not count]",
        ),
        why="wrong weights are never refused",
    ),
    Fault(
        name="coupling-check-agrees-on-nothing",
        path="rewrite/accumulation_check/coupling_check.py",
        old="    return any(result is not None for result in results)",
        new="    return True",
        tests=(
            "tests/rewrite/accumulation_check/test_coupling_check.py::test_without_gradients_to_compare_the_values_are",
        ),
        why="micro-batches of which none could be compared overrule a difference",
    ),
    Fault(
        name="coupling-check-of-the-first-batch",
        path="rewrite/accumulation_check/coupling_check.py",
        old="itertools.islice(pairs, 2 if self._batches else None)",
        new="itertools.islice(pairs, 0 if self._batches else None)",
        tests=(
            "tests/rewrite/accumulation_check/test_coupling_check.py::test_padding_that_comes_in_a_later_batch_is_seen",
        ),
        why="padding that begins in a later batch is not noticed",
    ),
    Fault(
        name="calls-check-after-the-forwards",
        path="rewrite/accumulation_check/__init__.py",
        old="    def before_step(self, batch: Any) -> None:\n        self.refuse_dependence",
        new="    def before_update(self, batch: Any) -> None:\n        self.refuse_dependence",
        tests=(
            "tests/rewrite/accumulation_check/test_coupling_check.py"
            "::test_a_counter_that_reaches_its_limit_within_the_first_step_is_refused_before_it_counts",
        ),
        why="a warm-up of the loss that ends within the first step is trained with each micro-batch's own factor",
    ),
    # ---- the Trainer
    Fault(
        name="trainer-ignores-recompute",
        path=_CALLBACK,
        old="            refuse_difference(self.rewritten.recompute_check)\n",
        new="            self.rewritten.recompute_check.end_step()\n",
        tests=(
            "tests/rewrite/trainer/test_trainer.py"
            "::test_a_recompute_on_other_values_is_refused_before_the_update[whole]",
        ),
        why="the Trainer trains with wrong recomputed values",
    ),
    Fault(
        name="trainer-ignores-larger-batches",
        path=_CALLBACK,
        old="        if larger and self._seen_steps < self.steps:",
        new="        if larger and self._seen_steps > self.steps:",
        tests=(
            "tests/rewrite/trainer/test_trainer.py"
            "::test_a_batch_that_is_larger_than_planned_is_refused_in_the_first_steps",
        ),
        why="a batch that the plan did not promise anything for is trained",
    ),
    Fault(
        name="trainer-takes-any-momentum",
        path=_CALLBACK,
        old='any(bool(group.get("momentum")) != momentum for group',
        new='all(group.get("momentum") is None for group',
        tests=(
            "tests/rewrite/trainer/test_trainer.py"
            "::test_another_momentum_is_refused_when_training_begins[sgd-0.9-plan with optimizer sgd-momentum]",
        ),
        why="SGD with momentum keeps state that the plan did not count",
    ),
    Fault(
        name="trainer-promise-of-one-peak",
        path="rewrite/memory_promise.py",
        old="            and self.reserved_bytes <= self.promised_reserved_bytes + _SEGMENT_BYTES",
        new="            or self.reserved_bytes <= self.promised_reserved_bytes + _SEGMENT_BYTES",
        tests=(
            "tests/rewrite/trainer/test_trainer.py"
            "::test_whether_the_promise_was_kept_is_logged_in_one_line"
            "[peaks2-WARNING-promise was broken: 300.1 MiB allocated of 300.0 MiB]",
        ),
        why="a broken promise is logged as kept if one of its two peaks is within the promise",
    ),
    Fault(
        name="trainer-part-of-a-batch",
        path=_CALLBACK,
        old="        if share is not None and share.pending_micro_batches and state.global_step < state.max_steps:",
        new="        if share is not None and share.pending_micro_batches and state.global_step > state.max_steps:",
        tests=("tests/rewrite/trainer/test_loss_weighting.py::test_a_stream_that_ends_within_a_batch_is_refused",),
        why="gradients of an epoch's last part are added to the first step of the next",
    ),
    Fault(
        name="trainer-unweighted-parts",
        path="rewrite/trainer/loss_weighting.py",
        old="        return _with_loss(output, weighted(loss, own_count / count))",
        new="        return output",
        tests=(
            "tests/rewrite/trainer/test_trainer.py::test_a_planned_training_is_the_trainers_own_on_the_whole_batch",
        ),
        why="the losses of micro-batches are added up without weights",
    ),
    Fault(
        name="trainer-counts-without-comparing",
        path="rewrite/trainer/loss_weighting.py",
        old="(trainers := label_counts[-1][1].item()) and not self.divides:",
        new="(trainers := label_counts[-1][1].item()) and self.divides:",
        tests=(
            "tests/rewrite/trainer/test_trainer.py::test_labels_that_are_counted_otherwise_than_averaged_are_refused",
        ),
        why="it is not noticed that the Trainer counts other labels than the model",
    ),
    Fault(
        name="trainer-undo-leaves-hooks",
        path="rewrite/rewriting.py",
        old="            for handle in handles:\n                handle.remove()",
        new="            for handle in handles[1:]:\n                handle.remove()",
        tests=("tests/rewrite/trainer/test_trainer.py::test_undo_gives_the_model_back",),
        why="after undo, a hook of the model still weights losses",
    ),
    # ---- verify
    Fault(
        name="verify-passes-without-comparisons",
        path="rewrite/parity/result.py",
        old="        return bool(self.rows) and all(row.passed for row in self.rows)",
        new="        return all(row.passed for row in self.rows)",
        tests=("tests/rewrite/parity/test_verify.py::test_nothing_compared_is_nothing_passed",),
        why="a plan of which nothing could be compared is reported to train like the baseline",
    ),
    Fault(
        name="verify-passes-if-one-passes",
        path="rewrite/parity/result.py",
        old="        return bool(self.rows) and all(row.passed for row in self.rows)",
        new="        return any(row.passed for row in self.rows)",
        tests=("tests/rewrite/parity/test_verify.py::test_one_quantity_that_differs_fails",),
        why="a plan that trains differently is reported to train like the baseline",
    ),
    # ---- house rules
    Fault(
        name="house-import-from-above",
        path="planner/search/threshold.py",
        old="from collections.abc import Callable\n",
        new="from collections.abc import Callable\n\nfrom planner.choose.choice import Choice  # noqa: F401\n",
        tests=("tests/house/test_imports.py::test_a_room_imports_only_rooms_below_it",),
        why="a room imports one above it",
    ),
    Fault(
        name="house-long-file",
        path="planner/search/threshold.py",
        old="from collections.abc import Callable\n",
        new="from collections.abc import Callable\n" + "# one more line\n" * 400,
        tests=("tests/house/test_imports.py::test_files_stay_readable_in_one_sitting",),
        why="a file has more than 400 lines",
    ),
    Fault(
        name="house-second-entry",
        path="planner/space/micro_batches.py",
        old="def batch_splits(",
        new='def lower_precision():\n    return Precision(dtype="bf16")  # noqa: F821\n\n\ndef batch_splits(',
        tests=("tests/house/test_techniques.py::test_a_decision_has_one_entry_in_the_search_space",),
        why="a technique enters the search space in two places",
    ),
    Fault(
        name="house-banned-word",
        path="planner/search/threshold.py",
        old="It takes two evaluations if the guess is right",
        new="So many as two evaluations are needed if the guess is right",
        tests=("tests/house/test_words.py::test_a_file_is_written_in_plain_words[planner/search/threshold.py]",),
        why="a docstring has a banned word",
    ),
    Fault(
        name="house-swallowed-error",
        path="planner/search/threshold.py",
        old="    if count == 0:\n        return 0\n",
        new=(
            "    try:\n"
            "        count = int(count)\n"
            "    except ValueError:\n"
            "        pass\n"
            "    if count == 0:\n"
            "        return 0\n"
        ),
        tests=("tests/house/test_imports.py::test_no_error_is_swallowed",),
        why="an error is swallowed",
    ),
)
