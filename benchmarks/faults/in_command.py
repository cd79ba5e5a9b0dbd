"""Planted faults: plan files, cards and the `plan` command."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

FAULTS = (
    Fault(
        name="plan-with-fields-of-any-type",
        path="planner/plan_types/plan.py",
        old="    check_field_types(plan)\n",
        new="",
        tests=("tests/plan_types/test_plan.py::test_values_of_another_kind_are_refused_on_one_line",),
        why="a plan file with a text instead of a number ends in a traceback later",
    ),
    Fault(
        name="notes-as-a-text",
        path="planner/plan_types/plan.py",
        old='notes=as_tuple(data["notes"])',
        new='notes=tuple(data["notes"])',
        tests=("tests/plan_types/test_plan.py::test_values_of_another_kind_are_refused_on_one_line",),
        why="a text instead of the list of notes is read letter by letter",
    ),
    Fault(
        name="budget-of-six-bytes",
        path="planner/workload/budget.py",
        old="    if size_bytes < SMALLEST_PLAIN_BYTES and type(vram) is int and card.allocator:\n",
        new="    if False:\n",
        tests=("tests/workload/test_budget.py::test_a_bare_number_that_no_card_could_have_in_bytes_is_refused",),
        why="vram=6 is planned for 6 bytes",
    ),
    Fault(
        name="no-time-for-adapters",
        path="planner/adapted.py",
        old="watch.until_found(_WEIGHTS_SHARE):",
        new="contextlib.nullcontext():",
        tests=(
            "tests/workload/test_adapters.py::"
            "test_a_search_that_finds_nothing_for_the_weights_leaves_time_for_both_adapters",
        ),
        why="under a time limit, the search for a plan that trains the weights takes all of the time",
    ),
    Fault(
        name="head-of-a-classifier-in-4-bits",
        path="planner/plan_types/adapter.py",
        old='    return options | ({} if heads is None else {"llm_int8_skip_modules": heads})\n',
        new="    return options\n",
        tests=("tests/workload/test_adapters.py::test_the_head_that_adapters_train_is_not_quantized",),
        why="the head of a classifier, which peft trains, is quantized",
    ),
    Fault(
        name="loader-workers-pickle-functions",
        path="planner/virtual_gpu/forked_process.py",
        old='        multiprocessing.set_start_method("fork", force=True)\n',
        new="",
        tests=("tests/workload/test_batch_source.py::test_workers_of_a_data_loader_need_not_import_its_functions",),
        why="on Python 3.14 the workers of a data loader cannot import the functions of the user's file",
    ),
    # ---- plan files
    Fault(
        name="plan-loses-the-slowdown",
        path="planner/plan_types/plan.py",
        old=' versions max_slowdown".split()',
        new=' versions".split()',
        tests=("tests/plan_types/test_plan.py::test_every_kind_of_decision_and_every_optional_field_is_read_back",),
        why="a plan that is read back has no limit on the slowdown",
    ),
    Fault(
        name="plan-loses-a-decision",
        path="planner/plan_types/plan.py",
        old='decisions=tuple(decision_from_json(d) for d in data["decisions"]),\n                solver',
        new='decisions=tuple(decision_from_json(d) for d in data["decisions"][1:]),\n                solver',
        tests=("tests/plan_types/test_plan.py::test_every_kind_of_decision_and_every_optional_field_is_read_back",),
        why="a plan that is read back lacks its first decision",
    ),
    Fault(
        name="plan-loses-own-loss",
        path="planner/plan_types/plan.py",
        old="own_loss = None if own_loss is None else OwnLoss(**own_loss)",
        new="own_loss = None",
        tests=("tests/plan_types/test_plan.py::test_every_kind_of_decision_and_every_optional_field_is_read_back",),
        why="a file that is emitted from a saved plan does not count labels as the model's loss does",
    ),
    Fault(
        name="plan-loses-nested-fields",
        path="planner/plan_types/decision_base.py",
        old="        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}",
        new=(
            "        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if "
            "getattr(self, f.name) != f.default}"
        ),
        tests=("tests/plan_types/test_plan.py::test_the_file_says_what_scripts_look_for",),
        why="a saved plan lacks fields with default values, and changes with the defaults",
    ),
    Fault(
        name="plan-written-in-place",
        path="planner/plan_types/plan.py",
        old="        neighbour.write_bytes(",
        new="        neighbour = path\n        neighbour.write_bytes(",
        tests=("tests/plan_types/test_plan.py::test_a_failed_write_leaves_the_old_file_whole_and_nothing_else",),
        why="an interrupted save destroys the plan that was there",
    ),
    Fault(
        name="fingerprint-ignores-dtypes",
        path="planner/plan_types/fingerprint.py",
        old="{kind} {name} {shape} {dtype}",
        new="{kind} {name} {shape}",
        tests=("tests/rewrite/test_application.py::test_a_plan_for_another_model_is_refused",),
        why="a plan for fp32 weights is applied to a model in bf16",
    ),
    Fault(
        name="fingerprint-ignores-buffers",
        path="planner/plan_types/fingerprint.py",
        old='(("parameter", model.named_parameters()), ("buffer", model.named_buffers())):',
        new='(("parameter", model.named_parameters()),):',
        tests=(
            "tests/rewrite/test_application.py"
            "::test_the_fingerprint_sees_names_shapes_dtypes_buffers_and_ties_but_not_values",
        ),
        why="a plan is applied to a model with other buffers",
    ),
    Fault(
        name="fingerprint-of-kinds-alone",
        path="planner/plan_types/fingerprint.py",
        old='[decision.to_json() | {"kind": decision.former_kind or decision.kind} for decision in decisions]',
        new='[{"kind": decision.former_kind or decision.kind} for decision in decisions]',
        tests=(
            "tests/rewrite/test_step_state.py"
            "::test_the_fingerprint_of_a_plan_sees_every_field_and_the_model_but_no_order",
        ),
        why="state of a plan with other parameters of the same techniques is loaded",
    ),
    # ---- cards and the command
    Fault(
        name="card-small-workspace-on-hopper",
        path="profiles/device.py",
        old="{9: (2, 4), 10:",
        new="{8: (2, 4), 10:",
        tests=("tests/profiles/test_profiles.py::test_the_cublas_workspace_follows_capability_and_torch_version",),
        why="the cuBLAS workspaces of a Hopper card are promised at a quarter of their size",
    ),
    Fault(
        name="card-bf16-before-ampere",
        path="profiles/device.py",
        old="self.compute_capability < (8, 0):",
        new="self.compute_capability < (7, 0):",
        tests=("tests/profiles/test_profiles.py::test_a_profile_that_claims_bf16_before_8_is_refused",),
        why="bf16 is planned on cards that emulate it",
    ),
    Fault(
        name="command-succeeds-without-a-plan",
        path="planner/cli/command.py",
        old="    return FITS if answer.fits and (verification is None or verification.kept) else DOES_NOT_FIT",
        new="    return FITS if verification is None or verification.kept else DOES_NOT_FIT",
        tests=(
            "tests/cli/test_cli.py"
            "::test_when_nothing_fits_the_shortfall_and_the_binding_term_are_reported_and_the_exit_code_is_one",
        ),
        why="scripts take a plan that does not fit for one that does",
    ),
    Fault(
        name="command-succeeds-with-a-broken-promise",
        path="planner/cli/command.py",
        old="    return FITS if answer.fits and (verification is None or verification.kept) else DOES_NOT_FIT",
        new="    return FITS if answer.fits else DOES_NOT_FIT",
        tests=("tests/rewrite/on_gpu/test_verification.py::test_the_command_says_whether_the_promise_is_kept",),
        why="--verify finds a broken promise and the exit code says success",
    ),
    Fault(
        name="command-fails-with-one",
        path="planner/cli/command.py",
        old="    return COULD_NOT_RUN\n",
        new="    return DOES_NOT_FIT\n",
        tests=(
            "tests/cli/test_cli.py"
            "::test_bad_input_gets_one_clear_line_exit_code_two_and_nothing_written[unknown model]",
        ),
        why="an error looks like a plan that does not fit",
    ),
    Fault(
        name="command-prints-into-json",
        path="planner/cli/command.py",
        old="    os.dup2(2, 1)\n",
        new="",
        tests=("tests/cli/test_command_errors.py::test_with_json_standard_output_is_one_object_whoever_else_prints",),
        why="what the model's code prints is mixed with the JSON object",
    ),
    Fault(
        name="largest-batch-accumulates",
        path="planner/questions.py",
        old="        if constraints.allow(kind):\n            constraints =",
        new="        if constraints.force(kind):\n            constraints =",
        tests=("tests/cli/test_questions.py::test_the_largest_batch_fits_and_one_sample_more_does_not",),
        why="the largest batch is one that accumulation splits",
    ),
    Fault(
        name="largest-batch-one-more",
        path="planner/questions.py",
        old="        if high - low <= max(1, low // _EXACT_TO):\n            return low, high",
        new="        if high - low <= max(2, low // _EXACT_TO):\n            return low, high",
        tests=("tests/cli/test_questions.py::test_below_64_samples_not_one_more_would_fit_however_the_bytes_grow",),
        why="a batch of one sample more would fit",
    ),
    Fault(
        name="smallest-card-largest-first",
        path="planner/questions.py",
        old="key=lambda card: (card.vram_bytes, card.name))",
        new="key=lambda card: card.name)",
        tests=("tests/cli/test_questions.py::test_the_smallest_card_is_one_of_the_known_cards_with_the_least_memory",),
        why="a card is named as the smallest that has more memory than another that fits",
    ),
    Fault(
        name="loader-leaves-out-a-larger-batch",
        path="planner/workload/batch_source.py",
        old="    return all(size >= other ",
        new="    return any(size >= other ",
        tests=("tests/workload/test_batch_source.py::test_a_batch_with_a_smaller_and_a_larger_tensor_is_kept",),
        why="a batch whose step needs more memory is left out, so that training runs out of memory",
    ),
    Fault(
        name="stated-size-above-the-bound",
        path="planner/virtual_gpu/values/data_dependent_ops.py",
        old="    return most if stated is None else min(stated, most)",
        new="    return most if stated is None else stated",
        tests=("tests/recording/test_batch_values.py::test_a_selection_by_activations_is_rehearsed_at_its_bound",),
        why="a selection has more elements than there are",
    ),
    Fault(
        name="accumulation-with-statistics-of-evaluation",
        path="planner/space/carried_state.py",
        old="        storage = _updated_further(graph, left)",
        new="        pass",
        tests=("tests/space/test_carried_state.py::test_state_that_the_next_forward_uses_is_found[RunningStatistics]",),
        why="statistics that only evaluation reads are updated once for each micro-batch",
    ),
    Fault(
        name="lengths-that-cut-a-tensor-are-replaced",
        path="planner/recording/virtual_batch.py",
        old=" not in sizes:",
        new=" is not None:",
        tests=("tests/recording/test_batch_values.py::test_lengths_that_cut_another_tensor_keep_their_values",),
        why="a batch whose lengths cut another tensor is refused",
    ),
    Fault(
        name="unused-stated-value-without-note",
        path="planner/plan_types/answers.py",
        old="        return tuple(stated for stated in self.values if not any(",
        new="        return tuple(stated for stated in self.values if any(",
        tests=("tests/recording/test_batch_values.py::test_a_note_names_a_stated_value_that_is_not_used",),
        why="a number for a wrong line changes nothing, and nobody sees it",
    ),
)
