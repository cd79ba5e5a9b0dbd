"""Planted faults: checkpoints, replays of segments, and offloading."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_BLOCKS = "tests/recompute/test_blocks.py"

FAULTS = (
    Fault(
        name="reason-of-the-model-replaces-those-of-all-layers",
        path="planner/recompute/conditions.py",
        old="> _MOST_COVERED:",
        new="> 10**9:",
        tests=(
            "tests/recompute/test_conditions.py"
            "::test_a_reason_of_the_whole_model_in_each_layer_does_not_replace_the_reasons_of_all_layers",
        ),
        why="the time to build the checkpoint problem grows with the square of the number of layers",
    ),
    Fault(
        name="large-reason-never-ends",
        path="planner/recompute/conditions.py",
        old='        self._changes.remove(("unless", tuple(sorted(rest))))\n        if rest in self._large:\n',
        new='        if rest not in self._large:\n            self._changes.remove(("unless", tuple(sorted(rest))))\n'
        "        if rest in self._large:\n",
        tests=("tests/recompute/test_conditions.py::test_a_storage_is_held_for_any_of_its_reasons",),
        why="in deep models, a shared tensor counts as held longer than it is",
    ),
    Fault(
        name="checkpoint-draws-other-masks",
        path="rewrite/rules/checkpoint.py",
        old="            preserve_rng_state=True,",
        new="            preserve_rng_state=False,",
        tests=(
            "tests/rewrite/rules/test_checkpoint.py"
            "::test_convolutions_with_dropout_and_batch_norm_train_to_the_same_bits",
        ),
        why="dropout draws other masks in the recompute than in the forward",
    ),
    Fault(
        name="checkpoint-updates-statistics-twice",
        path="rewrite/rules/checkpoint.py",
        old='            hidden = {"momentum": 0.0, "num_batches_tracked": None}',
        new='            hidden = {"num_batches_tracked": None}',
        tests=(
            "tests/rewrite/rules/test_checkpoint.py"
            "::test_convolutions_with_dropout_and_batch_norm_train_to_the_same_bits",
        ),
        why="running statistics of normalization layers are updated twice",
    ),
    Fault(
        name="checkpoint-counts-batches-twice",
        path="rewrite/rules/checkpoint.py",
        old='            hidden = {"momentum": 0.0, "num_batches_tracked": None}',
        new='            hidden = {"momentum": 0.0}',
        tests=(
            "tests/rewrite/rules/test_checkpoint.py"
            "::test_convolutions_with_dropout_and_batch_norm_train_to_the_same_bits",
        ),
        why="num_batches_tracked counts each batch twice",
    ),
    Fault(
        name="checkpoint-takes-results-of-other-products",
        path="rewrite/rules/checkpoint.py",
        old="            if product is op and versions(kept) == before:",
        new="            if product is not None and versions(kept) == before:",
        tests=(
            "tests/rewrite/rules/test_kept_products.py"
            "::test_a_result_is_taken_once_and_only_for_the_product_that_made_it",
        ),
        why="the recompute takes the kept result of another op with the same number",
    ),
    Fault(
        name="checkpoint-takes-overwritten-results",
        path="rewrite/rules/checkpoint.py",
        old="            if product is op and versions(kept) == before:",
        new="            if product is op:",
        tests=(
            "tests/rewrite/rules/test_kept_products.py"
            "::test_where_products_are_others_than_on_the_card_training_is_the_same[changed by the caller]",
        ),
        why="the recompute takes a kept result that was overwritten in place",
    ),
    Fault(
        name="checkpoint-keeps-dropout",
        path="rewrite/rules/checkpoint.py",
        old="            if self.count in self.numbers and not drops_out(op, args, kwargs):",
        new="            if self.count in self.numbers:",
        tests=(
            "tests/rewrite/rules/test_kept_products.py"
            "::test_what_draws_random_numbers_is_run_again_whatever_its_number",
        ),
        why="the recompute skips an op that draws, so that later dropouts draw other masks",
    ),
    Fault(
        name="checkpoint-counts-only-kept-products",
        path="rewrite/rules/checkpoint.py",
        old=(
            "            product, kept, before = self.results.pop(self.count, (None, None, None))\n"
            "            self.count += 1"
        ),
        new="            product, kept, before = self.results.pop(self.count, (None, None, None))\n"
        "            self.count += product is not None",
        tests=("tests/rewrite/rules/test_kept_products.py::test_products_that_are_kept_are_not_computed_again",),
        why="kept results are assigned to the wrong products, because only some products are counted",
    ),
    Fault(
        name="checkpoint-keeps-no-products-of-experts",
        path="planner/recompute/kept_products.py",
        old='    "_grouped_mm": None,\n',
        new="",
        tests=("tests/rewrite/rules/test_kept_products.py::test_products_of_experts_are_kept_and_not_computed_again",),
        why="a mixture of experts computes all products of its experts again, although there is memory to keep them",
    ),
    Fault(
        name="checkpoint-loses-autocast",
        path="rewrite/rules/checkpoint.py",
        old="        for context in (self.statistics(self.module), *self.modes):",
        new=(
            '        for context in (self.statistics(self.module), torch.autocast("cpu", enabled=False), *self.modes):'
        ),
        tests=(
            "tests/rewrite/rules/test_mixed_precision_and_freeze.py"
            "::test_checkpointing_under_autocast_trains_to_the_same_bits_as_autocast_alone",
        ),
        why="the recompute runs without the autocast of the forward",
    ),
    Fault(
        name="replay-draws-other-numbers",
        path="rewrite/portable/replay_ops.py",
        old="    before = get_state()\n    set_state(state)\n",
        new="    before = get_state()\n",
        tests=(
            "tests/rewrite/rules/test_segment_checkpoint.py::test_segments_anywhere_train_to_the_same_bits[Perceptron]",
        ),
        why="dropout draws other masks in the replay than in the forward",
    ),
    Fault(
        name="replay-disturbs-the-generator",
        path="rewrite/portable/replay_ops.py",
        old="    finally:\n        set_state(before)",
        new="    finally:\n        get_state()",
        tests=(
            "tests/rewrite/rules/test_segment_checkpoint.py::test_segments_anywhere_train_to_the_same_bits[Perceptron]",
        ),
        why="after a replay the generator goes on from the state of the forward, and draws the same numbers again",
    ),
    Fault(
        name="replay-takes-the-default-generator",
        path="rewrite/portable/replay_ops.py",
        old="        if isinstance(generator, torch.Generator):",
        new="        if generator is torch.default_generator:",
        tests=("tests/rewrite/rules/test_segment_checkpoint.py::test_segments_anywhere_train_to_the_same_bits[Odd]",),
        why="an op that draws from a generator of its own draws other numbers in the replay",
    ),
    Fault(
        name="replay-in-reverse-order",
        path="rewrite/portable/replay_ops.py",
        old="    return chosen[::-1], needed",
        new="    return chosen, needed",
        tests=(
            "tests/rewrite/rules/test_segment_checkpoint.py::test_segments_anywhere_train_to_the_same_bits[Perceptron]",
        ),
        why="ops run in the order in which backward needs them",
    ),
    Fault(
        name="replay-in-autocast",
        path="rewrite/portable/replay_tape.py",
        old="torch.autocast(self.tape.device.type, enabled=False):",
        new="contextlib.nullcontext():",
        tests=(
            "tests/rewrite/rules/test_segment_checkpoint.py"
            "::test_a_backward_inside_of_autocast_recomputes_as_the_forward_computed",
        ),
        why="an op that ran in fp32 inside autocast is replayed in the lower precision",
    ),
    Fault(
        name="replay-writes-to-its-starts",
        path="rewrite/portable/replay_tape.py",
        old="values[key] = copy_of(tensor) if key in changed else tensor",
        new="values[key] = tensor",
        tests=(
            "tests/rewrite/rules/test_segment_checkpoint.py::test_segments_anywhere_train_to_the_same_bits[Perceptron]",
        ),
        why="an in-place op of the replay changes a tensor that the forward left",
    ),
    Fault(
        name="replay-from-changed-starts",
        path="rewrite/portable/replay_tape.py",
        old="            refuse_change(version, version_of(tensor))\n",
        new="",
        tests=(
            "tests/rewrite/rules/test_segment_checkpoint.py"
            "::test_what_a_replay_starts_from_must_not_change_after_the_forward",
        ),
        why="a replay starts from a tensor that was changed in place after the forward",
    ),
    Fault(
        name="replay-forgets-writes",
        path="rewrite/portable/replay_tape.py",
        old="        refuse_change(False, any(may_overlap(deferred.view, view) for view in later_writes))\n",
        new="",
        tests=("tests/rewrite/rules/test_segment_checkpoint.py::test_what_is_saved_must_not_change_in_the_forward",),
        why="a saved tensor that the forward overwrote is replayed with its last value",
    ),
    Fault(
        name="replay-refuses-every-write",
        path="rewrite/portable/replay_ops.py",
        old="            return False\n        outer = stride\n",
        new="            pass\n        outer = stride\n",
        tests=(
            "tests/rewrite/rules/test_segment_checkpoint.py::test_a_chunk_may_be_saved_and_another_chunk_be_written",
        ),
        why="a recurrent cell that computes its gates in place is refused",
    ),
    Fault(
        name="segments-make-again-what-was-released",
        path="planner/recompute/replay_cost.py",
        old="is None else b for _, save in made_saves}",
        new="is None else b for _, save in saves}",
        tests=("tests/recompute/test_segments.py::test_the_promise_for_every_division_is_what_its_rehearsal_takes",),
        why="planning fails if autograd releases a saved tensor before its segment ends",
    ),
    Fault(
        name="hooks-of-objects-are-not-read",
        path="planner/recording/module_state.py",
        old='    return _content_of_owner(getattr(hook, "__self__", hook), identity)',
        new='    return _content(getattr(hook, "__self__", None), _MOST_LEVELS, identity)',
        tests=("tests/recording/test_recompute_obstacles.py::test_a_module_with_a_hook_that_counts_is_not_recomputed",),
        why="a block with a hook that counts its calls is recomputed, and the hook counts twice",
    ),
    Fault(
        name="offload-one-copy-of-all-versions",
        path="rewrite/rules/offload.py",
        old="        version = key, version_of(tensor), root.storage_offset(), root.shape",
        new="        version = key, root.storage_offset(), root.shape",
        tests=("tests/rewrite/rules/test_offload.py::test_what_was_written_to_is_copied_again",),
        why="a tensor that is saved after an in-place write comes back with its old value",
    ),
    Fault(
        name="offload-one-copy-of-all-parts",
        path="rewrite/rules/offload.py",
        old="        version = key, version_of(tensor), root.storage_offset(), root.shape",
        new="        version = key, version_of(tensor)",
        tests=(
            "tests/rewrite/test_recompute_check.py::test_parts_of_a_storage_that_are_written_apart_are_offloaded_apart",
        ),
        why="parts of a storage count their writes separately, and come back with old values",
    ),
    Fault(
        name="offload-keeps-the-device-copy",
        path="rewrite/rules/offload.py",
        old="        if not self.pending:\n            self.back = None\n",
        new="",
        tests=(
            "tests/rewrite/rules/test_offload.py"
            "::test_the_copy_on_the_device_is_released_with_the_last_tensor_that_asks_for_it",
        ),
        why="what was copied back stays on the card until the graph is freed",
    ),
    Fault(
        name="offload-copies-without-waiting-for-a-key",
        path="rewrite/rules/offload.py",
        old="        self.reference = StorageWeakRef(tensor.untyped_storage())  # while",
        new="        self.reference = None  # while",
        tests=(
            "tests/rewrite/rules/test_offload.py::test_training_is_the_same_to_the_bit[convolutions, called twice]",
        ),
        why="another storage gets the number of one that was freed, and backward the copy of the first",
    ),
    Fault(
        name="offload-everything-but-inputs",
        path="rewrite/rules/offload.py",
        old="        memory = HostMemory(lambda key: (key in keys) is of_inputs, from_bytes)",
        new="        memory = HostMemory(lambda key: key not in keys, from_bytes)",
        tests=(
            "tests/rewrite/rules/test_offload.py::test_the_promise_holds_for_each_unit_and_for_many_together[widths0]",
        ),
        why="the inputs of recomputed modules stay on the card",
    ),
    Fault(
        name="offload-of-subclasses",
        path="rewrite/rules/offload.py",
        old='    return type(tensor).__module__.partition(".")[0] == "torch"',
        new="    return isinstance(tensor, torch.Tensor)",
        tests=(
            "tests/rewrite/rules/test_offload.py::test_odd_sizes_come_back_and_classes_of_somebodys_own_stay[True]",
        ),
        why="tensors of the user's classes come back as plain tensors",
    ),
    Fault(
        name="blocks-are-not-divided-behind-their-products",
        path="planner/recompute/units.py",
        old="    in_parts = [(kept, points) for kept, points in behind if 0 < len(points) < _MOST_PARTS]\n",
        new="    in_parts = []\n",
        tests=(f"{_BLOCKS}::test_blocks_in_parts_fit_where_checkpoints_would_run_products_again",),
        why="a convolutional network runs products again although the budget allows a plan that runs none again",
    ),
    Fault(
        name="blocks-are-divided-before-their-products",
        path="planner/recompute/units.py",
        old="    return tuple(number + 1 for number in products if",
        new="    return tuple(number for number in products if",
        tests=(f"{_BLOCKS}::test_a_block_is_divided_behind_the_products_that_it_keeps",),
        why="each part begins with a kept product, so that the outputs of two parts are in memory at once",
    ),
    Fault(
        name="segments-number-the-copies-of-inner-tapes",
        path="rewrite/portable/replay_tape.py",
        old="        paused = [tape for tape in (self, *self.outer) if not tape.is_paused]\n",
        new="        paused = [tape for tape in (self,) if not tape.is_paused]\n",
        tests=(f"{_BLOCKS}::test_tapes_of_inner_modules_do_not_shift_the_numbers_of_ops_of_outer_ones",),
        why="a segment keeps and recomputes other ops than the plan says if a submodule has segments, too",
    ),
    Fault(
        name="segments-cost-the-host-nothing",
        path="planner/recompute/replay_cost.py",
        old="            cost_ns=run.cost_ns + self._recording_ns(numbered),\n",
        new="            cost_ns=run.cost_ns,\n",
        tests=(f"{_BLOCKS}::test_the_host_time_of_a_tape_counts_where_kernels_are_short",),
        why="plans for small models choose segments, which make the step slower than checkpoints would",
    ),
    Fault(
        name="segments-write-to-what-they-are-given",
        path="planner/recompute/replay_cost.py",
        old="        if any(tick >= part.start for part in parts",
        new="        if any(tick < 0 for part in parts",
        tests=(f"{_BLOCKS}::test_no_segment_is_divided_where_the_next_part_writes_to_what_it_is_given",),
        why="a replay copies a tensor that the next part writes to, and the copy is not in the promise",
    ),
    Fault(
        name="segments-never-hand-on-what-was-written",
        path="planner/recompute/replay_cost.py",
        old="        if any(tick >= part.start for part in parts",
        new="        if any(tick >= 0 for part in parts",
        tests=(f"{_BLOCKS}::test_segments_span_blocks_whose_last_op_works_in_place",),
        why="ResNets whose activations work in place get no segment of several blocks, and need more memory",
    ),
    Fault(
        name="segments-without-parts-of-their-own",
        path="planner/recompute/segments.py",
        old="        if depth >= 0 or not is_cut:\n",
        new="        if depth >= 0:\n",
        tests=(f"{_BLOCKS}::test_parts_between_the_calls_of_submodules_are_segments_of_their_own",),
        why="a U-Net keeps the concatenated input of every block of the way up",
    ),
    Fault(
        name="segments-report-no-host-time",
        path="planner/estimate/footprint.py",
        old=" + tape_time.host_ns(graph, card, decisions),\n",
        new=",\n",
        tests=(f"{_BLOCKS}::test_the_step_time_of_a_plan_includes_the_host_time_that_the_search_counted",),
        why="limits on the step time refuse the plan that the search chose, or show a slow plan as fast",
    ),
    Fault(
        name="segments-recompute-the-inputs-of-checkpoints",
        path="rewrite/rules/checkpoint.py",
        old="                mode.latest_op_has_ended()\n",
        new="                pass\n",
        tests=(f"{_BLOCKS}::test_the_input_of_a_checkpointed_module_is_not_recomputed_by_the_segment_before_it",),
        why="a segment recomputes the input of the checkpointed module behind it, which needs more memory and time",
    ),
    Fault(
        name="recompute-forgets-the-copy-that-the-program-keeps",
        path="planner/recompute/holds.py",
        old="        for call, option in of_calls if any(back < died for back, _ in backs) else ():\n",
        new="        for call, option in ():\n",
        tests=(
            "tests/recompute/test_blocks.py"
            "::test_a_saved_tensor_that_the_program_keeps_exists_twice_when_it_is_made_again",
        ),
        why="the promise is too low for a model that keeps its activations, such as output_hidden_states",
    ),
    Fault(
        name="recompute-ends-with-a-technique-that-fails",
        path="planner/choose/fitting.py",
        old="        if not failed:\n",
        new="        if True:\n",
        tests=("tests/recompute/test_pitfalls.py::test_a_technique_whose_step_cannot_be_rehearsed_is_left_out",),
        why="planning ends with an error, although plans without that technique fit",
    ),
    Fault(
        name="recompute-gives-checkpoints-other-objects",
        path="planner/recording/saved_tensors.py",
        old="        let_checkpoints_get_the_same_inputs()\n        disable",
        new="        disable",
        tests=("tests/recompute/test_pitfalls.py::test_a_checkpoint_of_the_users_own_gets_the_same_object_again",),
        why="a model that checkpoints its attention itself cannot be planned",
    ),
    Fault(
        name="recompute-patches-checkpoints-twice",
        path="planner/recording/saved_tensors.py",
        old=' or hasattr(frame, "places")',
        new="",
        tests=("tests/recompute/test_pitfalls.py::test_a_second_recording_in_a_process_gives_checkpoints_all_inputs",),
        why="the second recording of a process loses inputs of a checkpoint of the user's own",
    ),
    Fault(
        name="checkpoint-recomputes-with-other-objects",
        path="rewrite/rules/checkpoint.py",
        old="        keys = [id(value) for value in values]\n",
        new="        keys = range(len(values))\n",
        tests=(
            "tests/rewrite/rules/test_checkpoint.py"
            "::test_a_tensor_that_is_passed_several_times_is_one_object_again_under_the_hooks_of_segments",
        ),
        why="attention that is recomputed inside a segment runs other ops in backward, and training ends with an error",
    ),
    Fault(
        name="replay-frees-what-the-tape-keeps",
        path="planner/recompute/replay_cost.py",
        old="save.storage is not None and save.storage not in unfilled:",
        new="save.storage is not None:",
        tests=(
            "tests/recompute/test_segments.py"
            "::test_tensors_that_are_saved_before_an_op_fills_them_are_promised_as_kept",
        ),
        why="the promise is too low for a model with rrelu in training",
    ),
    Fault(
        name="recompute-leaves-out-another-technique",
        path="planner/recompute/failing.py",
        old="    if len(used) == 1:\n        return dict([_with_one_module(used[0], error_with, error)])\n",
        new="    if used:\n        return {used[0]: error}\n",
        tests=("tests/recompute/test_left_out.py::test_the_technique_that_fails_is_left_out_and_not_another_one",),
        why="checkpoint is left out although segment-checkpoint fails, and plans that fit are not found",
    ),
    Fault(
        name="recompute-leaves-out-a-forced-technique",
        path="planner/choose/searches.py",
        old=" or constraints.force(kind))",
        new=")",
        tests=("tests/recompute/test_left_out.py::test_a_technique_that_works_may_be_forced_next_to_one_that_fails",),
        why="a plan lacks the technique that the user forces, and no error says so",
    ),
    Fault(
        name="recompute-blames-the-model",
        path="planner/recording/hook_errors.py",
        old="if the step runs without the planner, forbid segment-checkpoint",
        new="check that it runs without the planner",
        tests=("tests/recompute/test_left_out.py::test_a_technique_that_works_may_be_forced_next_to_one_that_fails",),
        why="the error of a technique points at the user's model, which runs",
    ),
    Fault(
        name="recompute-leaves-out-all-modules",
        path="planner/recompute/failing.py",
        old="    return whole if found is None else (part, found)",
        new="    return whole",
        tests=(
            "tests/recompute/test_left_out.py"
            "::test_a_technique_is_left_out_only_for_modules_of_the_class_with_which_it_fails",
        ),
        why="a module that cannot be recomputed takes the technique from all others: plans that fit are not found",
    ),
    Fault(
        name="recompute-leaves-out-one-module-of-many",
        path="planner/choose/searches.py",
        old="    return tuple(other for other, module in model.named_modules() if type(module) is kind)",
        new="    return (path,)",
        tests=(
            "tests/recompute/test_left_out.py"
            "::test_a_technique_is_left_out_only_for_modules_of_the_class_with_which_it_fails",
        ),
        why="each layer takes a search and rehearsals of its own before all are left out",
    ),
    Fault(
        name="recompute-leaves-out-in-every-precision",
        path="planner/choose/candidates.py",
        old="for under, kind, module in excluded if under == setting}",
        new="for under, kind, module in excluded}",
        tests=(
            "tests/recompute/test_left_out.py::test_a_technique_that_fails_in_one_precision_is_left_out_only_there",
        ),
        why="a smaller budget fits, and a larger one does not",
    ),
    Fault(
        name="recompute-chooses-excluded-modules",
        path="planner/recompute/units.py",
        old="        if kind not in kinds or (kind, call.module) in excluded:\n",
        new="        if kind not in kinds:\n",
        tests=(
            "tests/recompute/test_left_out.py"
            "::test_a_technique_is_left_out_only_for_modules_of_the_class_with_which_it_fails",
        ),
        why="the module that cannot be recomputed is chosen again, until the technique is left out for all modules",
    ),
)
