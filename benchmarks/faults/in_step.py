"""Planted faults: the training step, its state, and applying and undoing plans."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

FAULTS = (
    # ---- the training step
    Fault(
        name="step-keeps-gradients-after-an-error",
        path="rewrite/step.py",
        old=(
            "            self.optimizer.zero_grad(set_to_none=True)  # the next step must not add to "
            "gradients of this one\n"
        ),
        new="",
        tests=("tests/rewrite/test_application.py::test_a_failed_step_leaves_no_gradients_behind",),
        why="the step after a failed one adds its gradients to those of the micro-batches that had run",
    ),
    Fault(
        name="step-clears-gradients-only-after-observer-errors",
        path="rewrite/step.py",
        old="""        try:
            for observer in self.observers:
                observer.before_step(batch)
            total = self._accumulate_gradients(batch)
""",
        new="""        for observer in self.observers:
            observer.before_step(batch)
        total = self._accumulate_gradients(batch)
        try:
""",
        tests=("tests/rewrite/test_step_observer.py::test_an_error_in_a_hook_trains_nothing",),
        why="gradients of a micro-batch stay if a later micro-batch fails",
    ),
    Fault(
        name="step-clips-before-unscaling",
        path="rewrite/step.py",
        old="""            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            (clip_divided_gradients if self._is_divided else clip_gradients)(self.module, self.max_grad_norm)
""",
        new="""            clip_gradients(self.module, self.max_grad_norm)
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
""",
        tests=(
            "tests/rewrite/rules/test_mixed_precision_and_freeze.py"
            "::test_gradients_are_clipped_after_unscaling_and_not_before",
        ),
        why="scaled gradients are clipped, so that the update is smaller by the scale",
    ),
    Fault(
        name="step-schedules-skipped-updates",
        path="rewrite/step.py",
        old="has_stepped = scale is not None and self.scaler.get_scale() >= scale",
        new="has_stepped = scale is not None",
        tests=("tests/rewrite/test_order.py::test_a_step_whose_gradients_are_not_finite_trains_and_schedules_nothing",),
        why="the learning rate falls although the gradient scaler skipped the update",
    ),
    Fault(
        name="step-never-lowers-the-scale",
        path="rewrite/step.py",
        old="            self.scaler.update()\n",
        new="",
        tests=("tests/rewrite/test_order.py::test_everything_is_done_once_and_in_order",),
        why="after one overflow all further updates are skipped",
    ),
    Fault(
        name="step-returns-the-last-loss",
        path="rewrite/step.py",
        old="total = loss.detach() if total is None else total + loss.detach()",
        new="total = loss.detach()",
        tests=("tests/rewrite/rules/test_accumulation.py::test_sample_means_equal_the_full_batch[batch of 8]",),
        why="the reported loss is the share of the last micro-batch",
    ),
    Fault(
        name="step-runs-backward-in-autocast",
        path="rewrite/step.py",
        old="            with no_sync:\n                loss = self._loss(part, weight)",
        new="            with no_sync, self.autocast():\n                loss = self._loss(part, weight)",
        tests=(
            "tests/rewrite/rules/test_mixed_precision_and_freeze.py::test_backward_and_update_run_outside_of_autocast",
        ),
        why="autocast stays on in backward, and its cache of weights lives until the update",
    ),
    Fault(
        name="step-keeps-autocast-over-micro-batches",
        path="rewrite/step.py",
        old="        for part, weight, no_sync in self._micro_batches(batch):",
        new="        self.autocast().__enter__()\n        for part, weight, no_sync in self._micro_batches(batch):",
        tests=("tests/rewrite/rules/test_mixed_precision_and_freeze.py::test_the_loss_falls_and_weights_stay_fp32",),
        why="casts of the weights stay in autocast's cache and are used by the next step",
    ),
    Fault(
        name="step-syncs-after-each-micro-batch",
        path="rewrite/step.py",
        old="contextlib.nullcontext() if is_last else self._no_sync()",
        new="contextlib.nullcontext()",
        tests=(
            "tests/rewrite/test_distributed.py"
            "::test_gradients_are_the_mean_of_those_of_the_whole_batches[without decisions]",
        ),
        why="processes exchange gradients after each micro-batch, which costs time and may average twice",
    ),
    Fault(
        name="step-trains-replaced-parameters",
        path="rewrite/step.py",
        old="        self._refuse_replaced_parameters()\n        try:",
        new="        try:",
        tests=(
            "tests/rewrite/test_application.py"
            "::test_parameters_that_were_replaced_after_apply_are_refused_and_nothing_is_trained",
        ),
        why="the optimizer updates tensors that the model no longer uses, and the model is not trained",
    ),
    Fault(
        name="step-compares-replaced-parameters-by-value",
        path="rewrite/step.py",
        old=(
            "present = {id(parameter) for parameter in self.module.parameters()}\n"
            "        missing = [path for path, (_, _, parameter) in self._trained.items() if id(parameter) "
            "not in present]"
        ),
        new=(
            "present = {tuple(parameter.shape) for parameter in self.module.parameters()}\n"
            "        missing = [p for p, (_, _, parameter) in self._trained.items() if "
            "tuple(parameter.shape) not in present]"
        ),
        tests=(
            "tests/rewrite/test_application.py"
            "::test_parameters_that_were_replaced_after_apply_are_refused_and_nothing_is_trained",
        ),
        why="a parameter that was replaced by one of the same shape is not noticed",
    ),
    Fault(
        name="step-works-after-undo",
        path="rewrite/step.py",
        old="        self._closed = True\n",
        new="        self._closed = False\n",
        tests=("tests/rewrite/test_application.py::test_applying_keeps_the_model_and_undo_restores_it",),
        why="a step that was undone trains the unmodified model, which does not fit",
    ),
    Fault(
        name="step-ignores-error-in-observers",
        path="rewrite/step.py",
        old="            for observer in self.observers:\n                observer.after_error()\n",
        new="",
        tests=("tests/rewrite/test_step_observer.py::test_an_error_in_a_hook_trains_nothing",),
        why="a check that watched a failed step goes on with the numbers of that step",
    ),
    # ---- saved state
    Fault(
        name="state-forgets-the-schedule",
        path="rewrite/step_state/__init__.py",
        old="        scheduler.load_state_dict(schedule)\n\n\n@contextlib",
        new="        scheduler.state_dict()\n\n\n@contextlib",
        tests=("tests/rewrite/test_order.py::test_a_schedule_goes_on_where_it_stopped_and_is_not_forgotten",),
        why="a resumed training starts its learning-rate schedule from the beginning",
    ),
    Fault(
        name="state-forgets-the-scale",
        path="rewrite/step_state/__init__.py",
        old='        scaler.load_state_dict(state["scaler"])',
        new="        scaler.state_dict()",
        tests=("tests/rewrite/test_step_state.py::test_going_on_gives_the_same_bits_as_not_stopping",),
        why="a resumed training starts from the initial scale of the gradient scaler",
    ),
    Fault(
        name="state-shares-tensors-with-the-saved-one",
        path="rewrite/step_state/__init__.py",
        old="    _copy_shared_tensors(optimizer_state, optimizer)\n",
        new="",
        tests=("tests/rewrite/test_step_state.py::test_going_on_gives_the_same_bits_as_not_stopping",),
        why="training changes the state that it was resumed from, so that a second resume starts elsewhere",
    ),
    Fault(
        name="state-of-another-plan-is-loaded",
        path="rewrite/step_state/__init__.py",
        old='    if not isinstance(state["plan"], str) or state["plan"] != plan_fingerprint(decisions, module):',
        new='    if len(state["plan"]) != len(plan_fingerprint(decisions, module)):',
        tests=("tests/rewrite/test_step_state.py::test_a_state_of_another_plan_is_refused_and_nothing_changes",),
        why="state of another plan is loaded, for example of another optimizer precision",
    ),
    Fault(
        name="state-is-held-twice",
        path="rewrite/step_state/__init__.py",
        old="    optimizer.state.clear()\n    optimizer.load_state_dict(optimizer_state)",
        new="    optimizer.load_state_dict(optimizer_state)",
        tests=("tests/rewrite/test_step_state.py::test_the_state_that_was_there_is_gone_before_the_new_one_comes",),
        why="the card holds the optimizer state twice while a state is loaded",
    ),
    Fault(
        name="state-is-not-restored-after-an-error",
        path="rewrite/step_state/__init__.py",
        old="        optimizer.param_groups[:] = groups\n",
        new="        groups.clear()\n",
        tests=("tests/rewrite/test_damaged_state.py::test_an_error_in_the_middle_of_loading_restores_everything",),
        why="after an error in the middle of loading, the optimizer has hyperparameters of the state that was refused",
    ),
    Fault(
        name="state-of-another-shape-is-loaded",
        path="rewrite/step_state/optimizer_check.py",
        old=" or value.shape != wanted.shape or",
        new=" or",
        tests=("tests/rewrite/test_damaged_state.py::test_a_damaged_state_is_refused_in_one_line_and_nothing_changes",),
        why="a moment of another shape is loaded, and the next step fails",
    ),
    # ---- applying and undoing
    Fault(
        name="undo-leaves-the-forward",
        path="rewrite/rewriting.py",
        old="            if before is missing:\n                delattr(owner, name)\n            else:\n"
        "                setattr(owner, name, before)",
        new="            if before is not missing:\n                setattr(owner, name, before)",
        tests=("tests/rewrite/test_application.py::test_applying_keeps_the_model_and_undo_restores_it",),
        why="undo leaves rewritten forwards on the modules",
    ),
    Fault(
        name="undo-restores-the-oldest-first",
        path="rewrite/rewriting.py",
        old="            self.changes.pop().restore()",
        new="            self.changes.pop(0).restore()",
        tests=("tests/rewrite/rules/test_offload.py::test_without_gradients_nothing_is_copied_and_undo_restores",),
        why="a forward that two rules wrapped is restored to the wrapper of the first",
    ),
    Fault(
        name="undo-after-a-failure-is-left-out",
        path="rewrite/application.py",
        old="        rewriting.restore()\n        raise",
        new="        raise",
        tests=("tests/rewrite/test_application.py::test_a_failure_midway_leaves_the_model_as_it_was",),
        why="a decision that cannot be applied leaves those before it on the model",
    ),
    Fault(
        name="apply-takes-any-model",
        path="planner/plan_types/fingerprint.py",
        old="    if fingerprint(model) == plan.model.fingerprint:\n",
        new="    if len(fingerprint(model)) == len(plan.model.fingerprint):\n",
        tests=("tests/rewrite/test_application.py::test_a_plan_for_another_model_is_refused",),
        why="a plan is applied to another model than it was made for",
    ),
    Fault(
        name="apply-clips-in-step-in-backward",
        path="rewrite/application.py",
        old="    if any(kind.steps_in_backward for kind in by_kind) and max_grad_norm is not None:",
        new=(
            "    if all(kind.steps_in_backward for kind in by_kind) and max_grad_norm is not None and "
            "by_kind and not loss_fn:"
        ),
        tests=("tests/rewrite/rules/test_step_in_backward.py::test_what_looks_at_all_gradients_is_refused",),
        why="clipping is silently left out, since no gradient exists after backward",
    ),
    # ---- clipping
    Fault(
        name="clipping-of-uncoalesced-gradients",
        path="rewrite/portable/loss_and_clipping.py",
        old="            parameter.grad = parameter.grad.coalesce()  #",
        new="            parameter.grad = parameter.grad  #",
        tests=("tests/rewrite/test_application.py::test_sparse_gradients_accumulate_and_are_clipped",),
        why="the norm of a sparse gradient with duplicate rows is wrong",
    ),
    Fault(
        name="clipping-raises-small-gradients",
        path="rewrite/portable/loss_and_clipping.py",
        old="factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)",
        new="factor = max_norm / (norm + 1e-6)",
        tests=("tests/rewrite/test_application.py::test_sparse_gradients_below_the_maximum_norm_are_left_alone",),
        why="gradients below the maximum norm are multiplied up to it",
    ),
    # ---- a step of the user's own
    Fault(
        name="copied-tensor-has-a-mode-of-its-own",
        path="planner/virtual_gpu/backend.py",
        old="    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualGpuMode:\n        return self\n",
        new="",
        tests=("tests/virtual_gpu/test_fake_tensor_cache.py::test_a_view_of_a_deep_copy_has_its_storage",),
        why="each view of a copied weight counts as new memory",
    ),
    Fault(
        name="module-in-evaluation-before-its-backward-is-recomputed",
        path="planner/recording/recorder.py",
        old="            self.calls.backward_begins()\n",
        new="            pass\n",
        tests=(
            "tests/system/test_own_step.py::test_modules_that_the_step_changes_before_their_backward_are_not_recomputed",
        ),
        why="the recomputed forward runs in another mode than the first one",
    ),
    Fault(
        name="state-of-the-step-is-shared-by-both-trainings",
        path="planner/rewrite/parity/own_step.py",
        old="    step = copy_of_function(step, memo)\n",
        new="",
        tests=("tests/rewrite/test_own_step.py::test_verify_trains_copies_with_copies_of_what_the_step_keeps",),
        why="verify changes the user's learning rate, and finds a difference where there is none",
    ),
    Fault(
        name="8-bit-state-with-a-scheduler-of-the-old-optimizer",
        path="planner/rewrite/rules/eight_bit_optimizer.py",
        old="        if rewriting.calling is Calling.STEP and has_scheduler(replaced):",
        new="        if False:",
        tests=(
            "tests/rewrite/test_own_step.py::test_8_bit_state_does_not_replace_an_optimizer_whose_scheduler_the_step_calls",
        ),
        why="the scheduler changes the learning rate of an optimizer that no longer trains",
    ),
    Fault(
        name="rewritten-steps-are-copied",
        path="rewrite/rewriting.py",
        old="    def __reduce_ex__(self, protocol: Any) -> Any:\n",
        new="    def _reduce(self, protocol: Any) -> Any:\n",
        tests=(
            "tests/rewrite/test_application.py"
            "::test_a_rewritten_model_and_its_step_refuse_to_be_copied_and_the_module_does_not",
        ),
        why="the first step of a copy undoes the changes to the original model, which then exceeds its promised memory",
    ),
)
