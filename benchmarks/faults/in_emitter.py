"""Planted faults: the text of `rewrite`, `make_optimizer` and `training_step` in emitted files."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_EMIT = "rewrite/emitter/emit.py"
_TEST = "tests/rewrite/emitter/test_emit.py"
_CHECK = "tests/rewrite/emitter/test_emitted_check.py"
_COMPARISON = "rewrite/portable/plain_comparison.py"
_SAME_BITS = f"{_TEST}::test_a_file_trains_to_the_same_bits_as_the_live_objects"

FAULTS = (
    Fault(
        name="absolute-path-of-the-model",
        path="rewrite/emitter/emit.py",
        old="folder=path.resolve().parent))",
        new="folder=None))",
        tests=(
            "tests/rewrite/emitter/test_emit.py::"
            "test_a_model_file_may_have_the_name_of_another_module_and_import_its_neighbours",
        ),
        why="an emitted file that is moved together with the user's file does not find it",
    ),
    Fault(
        name="check-refuses-4-bit-layers",
        path="rewrite/emitter/check_source.py",
        old='"in_single(planned)\\nin_single(plain)\\n" if is_quantized else ""',
        new='""',
        tests=("tests/workload/test_adapters.py::test_the_command_plans_and_the_files_it_writes_build_the_same_model",),
        why="--check of an emitted file with 4-bit weights refuses every step",
    ),
    Fault(
        name="emitter-loses-the-environment",
        path="rewrite/emitter/emit.py",
        old='        if environment and "import os" in block:\n',
        new='        if environment and "import torch" in block:\n',
        tests=("tests/rewrite/emitter/test_emitted_fixtures.py::test_a_plan_is_emitted_as_this_text[allocator]",),
        why="an emitted file sets the options of the allocator after torch is imported",
    ),
    Fault(
        name="emitter-label-shift",
        path="rewrite/loss_terms.py",
        old='        constants.append(assignment("LABELS_SHIFTED", own.shifted) + _SHIFTED_COMMENT)',
        new='        constants.append(assignment("LABELS_SHIFTED", False) + _SHIFTED_COMMENT)',
        tests=("tests/rewrite/emitter/test_emit.py::test_a_causal_model_is_counted_without_its_first_labels",),
        why="the file weights next-token losses by labels that they leave out",
    ),
    Fault(
        name="emitter-ignored-label",
        path="rewrite/loss_terms.py",
        old='assignment("IGNORED_LABEL", own.ignored)',
        new='assignment("IGNORED_LABEL", -100)',
        tests=(
            "tests/rewrite/emitter/test_emit.py"
            "::test_how_the_loss_of_a_model_of_ones_own_counts_is_in_the_emitted_file[padding is 0]",
        ),
        why="the file counts labels that a model with another ignore_index ignores",
    ),
    Fault(
        name="emitter-loss-divides",
        path="rewrite/loss_terms.py",
        old='assignment("LOSS_DIVIDES", own.divides)',
        new='assignment("LOSS_DIVIDES", False)',
        tests=(
            "tests/rewrite/emitter/test_emit.py"
            "::test_how_the_loss_of_a_model_of_ones_own_counts_is_in_the_emitted_file[divided by a count]",
        ),
        why="the file weights losses that num_items_in_batch has divided already",
    ),
    Fault(
        name="emitter-clips-scaled-gradients",
        path=_EMIT,
        old='    unscale = "    scaler.unscale_(optimizer)\\n" if scaled else ""',
        new='    unscale = ""',
        tests=("tests/rewrite/emitter/test_emit.py::test_a_file_trains_to_the_same_bits_as_the_live_objects[fp16]",),
        why="the file clips scaled gradients",
    ),
    Fault(
        name="emitter-schedules-skipped-steps",
        path=_EMIT,
        old='    skipped = " and scaler.get_scale() >= scale" if scaled else ""',
        new='    skipped = ""',
        tests=("tests/rewrite/test_order.py::test_a_step_whose_gradients_are_not_finite_trains_and_schedules_nothing",),
        why="the file advances the schedule although the scaler skipped the update",
    ),
    Fault(
        name="emitter-keeps-gradients",
        path=_EMIT,
        old='        + "optimizer.zero_grad(set_to_none=True)\\n"',
        new='        + ("" if stepping else "optimizer.zero_grad(set_to_none=True)\\n" if split else "")',
        tests=("tests/rewrite/emitter/test_emit.py::test_a_file_trains_to_the_same_bits_as_the_live_objects[plain]",),
        why="the file adds the gradients of each batch to those of the batches before",
    ),
    Fault(
        name="emitter-unscaled-backward",
        path=_EMIT,
        old='    backward = "scaler.scale(loss).backward()\\n" if scaled else "loss.backward()\\n"',
        new='    backward = "loss.backward()\\n"',
        tests=("tests/rewrite/emitter/test_emit.py::test_a_file_trains_to_the_same_bits_as_the_live_objects[fp16]",),
        why="the file divides gradients by a scale that they were not multiplied with",
    ),
    Fault(
        name="emitter-unweighted-parts",
        path=_EMIT,
        old='weigh = "if weight is not None:\\n    loss = weighted(loss, weight)\\n"',
        new='weigh = "if weight is not None:\\n    loss = loss / 2\\n"',
        tests=(
            "tests/rewrite/emitter/test_emit.py::test_a_file_trains_to_the_same_bits_as_the_live_objects[accumulation]",
        ),
        why="the file weights all micro-batches alike",
    ),
    Fault(
        name="emitter-checks-nothing",
        path=_EMIT,
        old='compute = f"RECOMPUTE_CHECK.begin_step()\\n{compute}RECOMPUTE_CHECK.refuse_difference()\\n"',
        new='compute = f"RECOMPUTE_CHECK.begin_step()\\n{compute}RECOMPUTE_CHECK.end_step()\\n"',
        tests=("tests/rewrite/test_recompute_check.py::test_the_emitted_file_refuses_it_too",),
        why="the file never compares recomputed values",
    ),
    Fault(
        name="emitter-ignores-forward-of-the-instance",
        path="rewrite/portable/module_forward.py",
        old="    if own is None:\n        return type(module).forward",
        new="    if own is None or True:\n        return type(module).forward",
        tests=("tests/rewrite/test_recompute_check.py::test_a_forward_on_the_instance_is_kept_in_the_emitted_file",),
        why="a forward that was replaced on the module is silently dropped",
    ),
    Fault(
        name="emitter-forward-of-the-original",
        path="rewrite/portable/module_forward.py",
        old="        return own.__func__",
        new="        return functools.wraps(own)(lambda _module, /, *args, **kwargs: own(*args, **kwargs))",
        tests=("tests/rewrite/rules/test_offload.py::test_a_deep_copy_trains_its_own_weights",),
        why="a deep copy of a rewritten model runs with the weights of the original",
    ),
    Fault(
        name="emitter-trains-frozen-modules",
        path="rewrite/rules/freeze.py",
        old="    model.get_submodule(name).requires_grad_(False)\n",
        new="    model.get_submodule(name).eval()\n",
        tests=("tests/rewrite/emitter/test_emit.py::test_a_file_trains_to_the_same_bits_as_the_live_objects[freeze]",),
        why="the file trains what the plan freezes",
    ),
    Fault(
        name="emitter-default-hyperparameters",
        path="rewrite/emitter/optimizer_source.py",
        old='    hyperparameters = [f"{key}={literal(value)}" for key, value in choice.hyperparameters.items()]',
        new="    hyperparameters = [f\"lr={literal(choice.hyperparameters['lr'])}\"]",
        tests=("tests/rewrite/emitter/test_emitted_fixtures.py::test_a_plan_is_emitted_as_this_text",),
        why="the file trains with torch's defaults, for example without momentum",
    ),
    Fault(
        name="emitter-eight-bit-embeddings",
        path="rewrite/rules/eight_bit_optimizer.py",
        old="    keep_embeddings_in_32_bits(optimizer, model)\n    return optimizer\n",
        new="    return optimizer\n",
        tests=("tests/rewrite/emitter/test_emit.py::test_the_8_bit_optimizer_of_a_file_is_set_up_as_the_live_one",),
        why="the file keeps the state of embeddings in 8 bits",
    ),
    Fault(
        name="emitter-key-value-cache",
        path=_EMIT,
        old="    if turns_cache_off(plan):\n        statements += _CACHE_OFF\n",
        new="",
        tests=("tests/rewrite/emitter/test_emit.py::test_a_causal_model_is_counted_without_its_first_labels",),
        why="the file fills a key-value cache that the plan did not count",
    ),
    Fault(
        name="emitter-step-in-backward-updates-by-position",
        path="rewrite/rules/step_in_backward.py",
        old='", by_position=True" if any(other.eight_bit_state for other in plan.decisions) else ""',
        new='""',
        tests=(
            "tests/rewrite/emitter/test_emit.py"
            "::test_a_file_with_8_bit_state_and_a_step_in_backward_keeps_embeddings_by_their_position",
        ),
        why="bitsandbytes finds its exceptions by position, and keeps 32-bit state for all parameters",
    ),
    Fault(
        name="emitter-total-of-the-last-part",
        path=_EMIT,
        old='running = "total = loss.detach() if total is None else total + loss.detach()\\ndel loss\\n"',
        new='running = "total = loss.detach()\\ndel loss\\n"',
        tests=(
            "tests/rewrite/emitter/test_emit.py::test_a_file_trains_to_the_same_bits_as_the_live_objects[accumulation]",
        ),
        why="the file reports the loss of the last micro-batch",
    ),
    Fault(
        name="emitted-check-compares-the-plan-with-itself",
        path="rewrite/emitter/check_source.py",
        old='        _REFUSAL if replaces_forwards else "",\n',
        new="",
        tests=(f"{_CHECK}::test_a_model_that_is_rewritten_already_is_not_compared_with_itself",),
        why="--check passes for any rewritten model, because both copies run the rewritten forwards",
    ),
    Fault(
        name="emitted-check-accepts-nan",
        path=_COMPARISON,
        old="            if not relative <= worst:  # also if it is not a number",
        new="            if relative > worst:",
        tests=(f"{_CHECK}::test_results_that_are_nan_or_missing_on_one_side_differ",),
        why="--check passes if the gradients by the plan are NaN",
    ),
    Fault(
        name="emitted-check-bound",
        path=_COMPARISON,
        old="        if not worst <= 4096 * eps:",
        new="        if not worst <= 4096:",
        tests=(f"{_CHECK}::test_results_that_are_nan_or_missing_on_one_side_differ",),
        why="--check passes whatever the steps compute",
    ),
    Fault(
        name="emitted-check-follows-the-dropped-parameters",
        path="rewrite/emitter/check_source.py",
        old="expected = result_of(plain_step, plain, torch.optim.SGD(trained))",
        new="expected = result_of(plain_step, plain, make_optimizer(plain))",
        tests=(f"{_CHECK}::test_a_fault_in_the_text_is_found[biases are not trained]",),
        why="--check does not see that make_optimizer leaves parameters out",
    ),
    # ---- texts of others
    Fault(
        name="emit-writes-any-text-as-a-name",
        path="rewrite/emitter/quoted.py",
        old="    if not all(part.isidentifier()",
        new="    if not any(part.isidentifier()",
        tests=("tests/rewrite/emitter/test_quoting.py::test_a_planted_text_is_refused_or_stays_a_literal",),
        why="a plan file can add code to the file that is emitted from it",
    ),
    Fault(
        name="emit-lets-a-path-end-the-docstring",
        path="rewrite/emitter/quoted.py",
        old=""".replace('\"\"\"', "'''")""",
        new="",
        tests=("tests/rewrite/emitter/test_quoting.py::test_a_file_in_a_folder_of_any_name_can_be_emitted_and_read",),
        why="the name of a folder can add code to the emitted file",
    ),
)
