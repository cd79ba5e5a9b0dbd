"""Planted faults: recordings, estimates of bytes and time, and the allocator."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_ALLOCATOR = "planner/allocator/caching_allocator.py"
_TEST_ALLOCATOR = ("tests/allocator/test_allocator.py",)

FAULTS = (
    Fault(
        name="streams-are-not-refused",
        path="planner/virtual_gpu/cuda_functions.py",
        old="        if not isinstance(stream, (CurrentStream, types.NoneType)):\n",
        new="        if False:\n",
        tests=(
            "tests/virtual_gpu/test_cuda_functions.py::test_further_streams_graphs_and_free_memory_are_refused_by_line",
        ),
        why="memory of a second stream counts as memory of the only one",
    ),
    Fault(
        name="list-of-batches-is-one-batch",
        path="planner/workload/batch_source.py",
        old="    if not isinstance(batch, list) or not batch:\n",
        new="    if True:\n",
        tests=(
            "tests/workload/test_batch_source.py"
            "::test_a_list_of_batches_is_read_as_batches_and_a_list_of_tensors_as_one",
        ),
        why="a list of batches is passed to the model as its arguments",
    ),
    # ---- allocator
    Fault(
        name="allocator-rounds-down",
        path="planner/allocator/settings.py",
        old="    return -(-(size_bytes or 1) // SMALLEST_BLOCK_BYTES) * SMALLEST_BLOCK_BYTES",
        new="    return max(size_bytes // SMALLEST_BLOCK_BYTES, 1) * SMALLEST_BLOCK_BYTES",
        tests=("tests/allocator/test_allocator.py::test_requests_are_rounded_up_to_512_bytes",),
        why="the promise counts each block with up to 511 bytes too few",
    ),
    Fault(
        name="allocator-medium-segments",
        path="planner/allocator/settings.py",
        old="    if size_bytes < OWN_SEGMENT_BYTES:",
        new="    if size_bytes <= OWN_SEGMENT_BYTES:",
        tests=(
            "tests/allocator/test_allocator.py"
            "::test_segments_are_2_mib_for_small_20_mib_for_medium_and_whole_2_mib_steps_for_large_requests",
        ),
        why="a request of 10 MiB shares a segment of 20 MiB",
    ),
    Fault(
        name="allocator-splits-every-rest",
        path=_ALLOCATOR,
        old="        return rest_bytes > LARGEST_SMALL_BYTES and",
        new="        return rest_bytes >= SMALLEST_BLOCK_BYTES and",
        tests=("tests/allocator/test_allocator.py::test_the_large_pool_splits_off_only_more_than_one_mebibyte",),
        why="the rest of a large block, which PyTorch leaves unused, serves later requests",
    ),
    Fault(
        name="allocator-small-pool-below-the-limit",
        path=_ALLOCATOR,
        old=(
            "        pool = self.pool(rounded_bytes <= LARGEST_SMALL_BYTES, stream)\n"
            "        block = self._take_free(pool, rounded_bytes) or"
        ),
        new=(
            "        pool = self.pool(rounded_bytes < LARGEST_SMALL_BYTES, stream)\n"
            "        block = self._take_free(pool, rounded_bytes) or"
        ),
        tests=("tests/allocator/test_allocator.py::test_requests_are_rounded_up_to_512_bytes",),
        why="requests of exactly 1 MiB come from the wrong pool",
    ),
    Fault(
        name="allocator-joins-pools",
        path=_ALLOCATOR,
        old="        pool = self._pools.get((is_small, stream))\n",
        new="        stream = 0\n        pool = self._pools.get((is_small, stream))\n",
        tests=("tests/allocator/test_allocator.py::test_streams_never_share_memory",),
        why="a request gets memory that another stream has freed",
    ),
    Fault(
        name="allocator-takes-the-largest-block",
        path=_ALLOCATOR,
        old="        block = pool[index]\n        most_bytes",
        new="        block = pool[len(pool) - 1]\n        most_bytes",
        tests=(
            "tests/allocator/test_allocator.py"
            "::test_the_smallest_free_block_that_fits_is_taken_and_ties_go_to_the_lowest_address",
        ),
        why="fragmentation differs from that of PyTorch's best fit",
    ),
    Fault(
        name="allocator-does-not-merge-forward",
        path=_ALLOCATOR,
        old=(
            "        if after is not None and not after.is_allocated and after.is_mapped:\n"
            "            pool.remove(after)\n"
            "            block.absorb_next()\n"
        ),
        new="",
        tests=("tests/allocator/test_allocator.py::test_freed_blocks_merge_with_free_neighbours_on_both_sides",),
        why="free neighbors stay apart, so that plans that fit are refused",
    ),
    Fault(
        name="allocator-retries-without-giving-back",
        path=_ALLOCATOR,
        old="            self.empty_cache()\n            self.retries += 1",
        new="            self.retries += 1",
        tests=("tests/allocator/test_allocator.py::test_a_full_card_gives_back_free_segments_and_tries_again",),
        why="a full card is reported although cached segments could be released",
    ),
    Fault(
        name="allocator-forgets-the-peak",
        path="planner/allocator/blocks.py",
        old="        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved_bytes)",
        new="        self.peak_reserved_bytes = reserved_bytes",
        tests=("tests/allocator/test_allocator.py::test_peaks_stay_when_memory_is_given_back",),
        why="the promise is the reserved memory at the end, not at the peak",
    ),
    Fault(
        name="allocator-capacity-off-by-one",
        path="planner/allocator/blocks.py",
        old="        if self.capacity_bytes is not None and reserved_bytes > self.capacity_bytes:",
        new="        if self.capacity_bytes is not None and reserved_bytes > self.capacity_bytes + size_bytes // 2:",
        tests=("tests/allocator/test_allocator.py::test_a_segment_with_a_live_block_cannot_be_given_back",),
        why="a segment is granted that the card does not have",
    ),
    Fault(
        name="allocator-expandable-maps-bytes",
        path="planner/allocator/expandable_segments.py",
        old="        mapped_bytes = -(-size_bytes // self._page_bytes) * self._page_bytes",
        new="        mapped_bytes = size_bytes",
        tests=("tests/allocator/test_allocator.py::test_a_refilled_hole_joins_the_free_space_behind_it",),
        why="the driver maps whole pages, so that less memory is promised than is taken",
    ),
    Fault(
        name="allocator-expandable-unmaps-used-pages",
        path="planner/allocator/expandable_segments.py",
        old="        first = start - (start - block.address) // page_bytes * page_bytes",
        new="        first = start + (block.address - start) // page_bytes * page_bytes",
        tests=("tests/allocator/test_allocator.py::test_the_memory_fraction_is_a_limit_as_well",),
        why="a page that is partly in use is given back, and the promise is too small",
    ),
    Fault(
        name="allocator-expandable-short-range",
        path="planner/allocator/expandable_segments.py",
        old="        range_bytes = max(self._range_bytes, -(-size_bytes // self._page_bytes) * self._page_bytes)",
        new="        range_bytes = self._range_bytes",
        tests=("tests/allocator/test_allocator.py::test_a_request_beyond_the_card_is_answered_if_memory_has_no_limit",),
        why="a simulation without a limit fails if one request of the run is larger than the card",
    ),
    # ---- estimate
    Fault(
        name="estimate-without-the-context",
        path="planner/estimate/footprint.py",
        old="        total_bytes=reserved + card.outside_bytes,",
        new="        total_bytes=reserved,",
        tests=(
            "tests/estimate/test_footprint.py"
            "::test_where_it_is_not_known_how_the_driver_places_segments_the_worse_order_counts",
        ),
        why="the total lacks the CUDA context",
    ),
    Fault(
        name="estimate-budget-without-the-context",
        path="planner/estimate/footprint.py",
        old="    capacity = None if vram_bytes is None else vram_bytes - card.outside_bytes",
        new="    capacity = None if vram_bytes is None else vram_bytes",
        tests=(
            "tests/estimate/test_footprint.py"
            "::test_where_it_is_not_known_how_the_driver_places_segments_the_worse_order_counts",
        ),
        why="a plan is certified for a budget that it exceeds by the CUDA context",
    ),
    Fault(
        name="estimate-one-order-of-addresses",
        path="planner/estimate/footprint.py",
        old="    for descending in SEGMENT_ADDRESSES[card.segment_addresses]:",
        new="    for descending in SEGMENT_ADDRESSES[card.segment_addresses][:1]:",
        tests=(
            "tests/estimate/test_footprint.py"
            "::test_where_it_is_not_known_how_the_driver_places_segments_the_worse_order_counts",
        ),
        why="only the better of two possible orders of segments is promised",
    ),
    Fault(
        name="estimate-best-order-of-addresses",
        path="planner/estimate/footprint.py",
        old="    return max(outcomes, key=",
        new="    return min(outcomes, key=",
        tests=(
            "tests/estimate/test_footprint.py"
            "::test_where_it_is_not_known_how_the_driver_places_segments_the_worse_order_counts",
        ),
        why="only the better of two possible orders of segments is promised",
    ),
    Fault(
        name="estimate-batch-of-one-part",
        path="planner/estimate/footprint.py",
        old="    if present >= batch_bytes:\n        return graph\n",
        new="    if present:\n        return graph\n",
        tests=(
            "tests/estimate/test_pitfalls.py::test_however_many_micro_batches_the_whole_batch_stays_on_the_card[5]",
        ),
        why="a step in micro-batches is promised without the rest of its batch",
    ),
    Fault(
        name="estimate-smallest-budget-of-tensors",
        path="planner/estimate/smallest_total.py",
        old="                return outcome.peak_reserved_bytes\n",
        new="                return outcome.peak_allocated_bytes\n",
        tests=("tests/estimate/test_footprint.py::test_a_step_fits_from_the_smallest_budget_on_and_not_below",),
        why="the smallest budget of a plan lacks the allocator's slack",
    ),
    Fault(
        name="approximate-total-above-the-budget",
        path="planner/estimate/smallest_total.py",
        old="    return search.smallest_total_bytes(0, reserved_bytes)\n",
        new="    return search.smallest_total_bytes(0)\n",
        tests=(
            "tests/estimate/test_footprint.py"
            "::test_an_approximate_total_is_within_a_budget_that_is_a_little_larger_than_the_smallest_total",
        ),
        why="a batch that fits is searched for as if it did not fit",
    ),
    Fault(
        name="approximate-total-below-the-smallest-one",
        path="planner/estimate/smallest_total.py",
        old="        return search.smallest_total_bytes(vram_bytes)\n",
        new="        return vram_bytes\n",
        tests=(
            "tests/estimate/test_footprint.py::test_an_approximate_total_is_within_a_budget_if_the_step_runs_in_it",
        ),
        why="a batch that does not fit is taken for one that fits",
    ),
    Fault(
        name="repeated-steps-are-bisected-from-above",
        path="planner/estimate/smallest_total.py",
        old="        while low + increment < high and not self._is_over:\n",
        new="        while False:\n",
        tests=("tests/estimate/test_footprint.py::test_limits_for_repeated_steps_are_tried_from_below",),
        why="a search that predicts what plans lack takes seconds longer, because replays that fit take the longest",
    ),
    Fault(
        name="estimate-scratch-in-forward-only",
        path="planner/estimate/add_workspaces.py",
        old="    for phases in _THREADS:\n        first = next(",
        new="    for phases in _THREADS[:1]:\n        first = next(",
        tests=(
            "tests/estimate/test_footprint.py"
            "::test_each_thread_that_multiplies_has_a_workspace_from_its_first_product_on",
        ),
        why="the cuBLAS workspace of autograd's thread is not promised",
    ),
    Fault(
        name="estimate-scratch-before-outputs",
        path="planner/estimate/add_workspaces.py",
        old="    return [sorted(ticks) or [op.tick] for op, ticks in zip(graph.ops, born, strict=True)]",
        new="    return [[op.tick] for op in graph.ops]",
        tests=(
            "tests/estimate/test_footprint.py"
            "::test_each_thread_that_multiplies_has_a_workspace_from_its_first_product_on",
        ),
        why="scratch memory is allocated before the outputs, and does not add up with them",
    ),
    Fault(
        name="estimate-frees-after-allocations",
        path="planner/estimate/allocation_stream.py",
        old="                events.append((stop, 0, -block, block, 0))",
        new="                events.append((stop, 2, -block, block, 0))",
        tests=(
            "tests/estimate/test_footprint.py"
            "::test_what_dies_at_a_tick_is_free_for_what_is_born_at_it_and_blocks_are_freed_in_reverse",
        ),
        why="memory that is free is counted at the tick at which it is reused",
    ),
    Fault(
        name="steps-not-repeated-in-the-allocator",
        path="planner/allocator/replay.py",
        old="    for _ in range(1 + _MOST_ROUNDS):\n",
        new="    for _ in range(1):\n",
        tests=(
            "tests/allocator/test_rounds.py::test_some_later_rounds_need_more_than_the_first_two",
            "tests/estimate/test_footprint.py::test_two_recorded_steps_count_what_later_steps_reserve",
        ),
        why="the third step of a plan that fits runs out of memory",
    ),
    Fault(
        name="addresses-in-states-of-rounds",
        path="planner/allocator/replay.py",
        old="    return tuple(segment[1:] for segment in state.segments)\n",
        new="    return tuple(state.segments)\n",
        tests=("tests/allocator/test_rounds.py::test_a_state_repeats_although_its_segments_have_other_addresses",),
        why="a step that releases the cache is repeated 16 times, although its state repeats",
    ),
    Fault(
        name="growing-steps-repeated",
        path="planner/estimate/allocation_stream.py",
        old="    if any(len(blocks) > len(before[kind]) for kind, blocks in after.items()):\n",
        new="    if not after:\n",
        tests=(
            "tests/estimate/test_footprint.py::test_a_step_that_leaves_more_than_the_one_before_it_does_not_repeat",
        ),
        why="the simulation allocates a block that is still allocated",
    ),
    Fault(
        name="queues-not-repeated",
        path="planner/estimate/allocation_stream.py",
        old="for block, earlier in each if block != earlier}",
        new="for block, earlier in [*each][:1] if block != earlier}",
        tests=("tests/estimate/test_footprint.py::test_what_several_steps_keep_is_freed_in_turn",),
        why="a step that keeps its last outputs runs out of memory in a later call",
    ),
    Fault(
        name="predicted-steps-not-repeated",
        path="planner/recompute/selected_step.py",
        old="        step_starts=tuple(number[start] for start in starts),\n",
        new="        step_starts=(),\n",
        tests=("tests/recompute/test_selected_step.py::test_predicted_steps_repeat",),
        why="the search does not predict what the third step needs, and rehearses a plan that cannot fit",
    ),
    Fault(
        name="time-of-one-micro-batch",
        path="planner/estimate/roofline.py",
        old="    return (1, micro_batches - rehearsed + 1, *([1] * (rehearsed - 2)))",
        new="    return (1,) * rehearsed",
        tests=("tests/estimate/test_roofline.py::test_a_micro_batch_stands_for_those_between",),
        why="plans with many micro-batches look as fast as plans with three",
    ),
    Fault(
        name="time-of-copies-one-way",
        path="planner/estimate/roofline.py",
        old="        return 2 * one_way_ns *",
        new="        return one_way_ns *",
        tests=("tests/estimate/test_roofline.py::test_a_copy_to_the_host_comes_back",),
        why="offloading is predicted to take half of its time",
    ),
    Fault(
        name="time-optimizer-per-micro-batch",
        path="planner/estimate/roofline.py",
        old="        else 1 if op.phase is Phase.OPTIMIZER\n",
        new="",
        tests=("tests/estimate/test_roofline.py::test_times_and_flops_of_a_step",),
        why="the update is counted once per micro-batch",
    ),
    # ---- recording
    Fault(
        name="flops-of-unwanted-gradients",
        path="planner/recording/flops.py",
        old="    return sum(output_mask[:2]) * conv_flop_count",
        new="    return 2 * conv_flop_count",
        tests=("tests/recording/test_flops.py::test_a_gradient_that_nobody_asks_for_takes_nothing",),
        why="FLOPs are counted for the gradient of an input image, which is not computed",
    ),
    Fault(
        name="flops-of-in-place-products",
        path="planner/recording/flops.py",
        old='    if name.endswith(("mm_", "mv_")):  # in place\n        packet = getattr(_aten, name[:-1])\n',
        new="",
        tests=("tests/recording/test_flops.py::test_products_that_are_added_are_counted",),
        why="in-place matrix products count no FLOPs, so that recomputing them looks free",
    ),
    Fault(
        name="recording-counts-state-of-unused-parameters",
        path="planner/recording/recorder.py",
        old=("                storage.lives = [] if index in idle else"),
        new=("                storage.lives = [] if index in () else"),
        tests=("tests/recording/test_unused.py::test_parameters_without_a_gradient_cost_no_state[force0]",),
        why="optimizer state is counted for parameters without a gradient, for which a real step creates none",
    ),
    Fault(
        name="recording-loses-state-of-the-second-step",
        path="planner/recording/gradients.py",
        old="            for key, value in optimizer.state.get(parameter, {}).items():",
        new="            for key, value in list(optimizer.state.get(parameter, {}).items())[:2]:",
        tests=(
            "tests/recording/test_recorder.py::test_parameters_gradients_and_optimizer_state_are_counted_to_the_byte",
        ),
        why="the second moment of Adam counts as a temporary",
    ),
    Fault(
        name="attention-ignores-disabled-kernels",
        path="planner/virtual_gpu/sdpa.py",
        old="    by_cudnn = enabled.cudnn_sdp_enabled() and _cudnn_takes(call, capability)\n",
        new="    by_cudnn = _cudnn_takes(call, capability)\n",
        tests=("tests/virtual_gpu/test_sdpa.py::test_a_disabled_kernel_is_not_chosen",),
        why="a model that asks for the flash kernel is rehearsed with cuDNN's, which saves other tensors",
    ),
    Fault(
        name="recording-gradients-as-temporaries",
        path="planner/recording/gradients.py",
        old="                    self._table.mark(parameter.grad, Category.GRADIENT, name=name)\n",
        new="",
        tests=("tests/system/test_own_step.py::test_gradients_that_the_step_sets_itself_count_as_gradients",),
        why="gradients that a step sets itself do not appear in the breakdown",
    ),
    Fault(
        name="recording-reads-after-update",
        path="planner/recording/gradients.py",
        old="        for storage in op.inputs if self._updated and not self.running and not op.is_view else ():",
        new="        for storage in op.inputs if self._updated and self.running and not op.is_view else ():",
        tests=("tests/rewrite/rules/test_step_in_backward.py::test_a_weight_that_is_read_after_its_update_is_refused",),
        why="step-in-backward is planned for a model that reads a weight after its update",
    ),
    Fault(
        name="recording-caches-casts-of-views",
        path="planner/virtual_gpu/autocast.py",
        old="            and not value._is_view()\n",
        new="",
        tests=("tests/recording/test_recorder.py::test_autocast_caches_casts_of_fp32_weights_only",),
        why="casts of views of weights are kept until the forward ends, which CUDA's autocast does not do",
    ),
    Fault(
        name="recording-never-caches-casts",
        path="planner/virtual_gpu/autocast.py",
        old="            and value.is_leaf\n",
        new="            and not value.is_leaf\n",
        tests=("tests/recording/test_recorder.py::test_autocast_keeps_one_cast_of_each_weight_until_the_forward_ends",),
        why="the promise lacks the casts of weights that autocast keeps",
    ),
    Fault(
        name="recording-softmax-in-half",
        path="planner/virtual_gpu/autocast.py",
        old="    if requested is None and autocast.takes(args[0]):",
        new="    if requested is None and autocast.takes(args[0]) and args[0].dtype == torch.float32:",
        tests=("tests/recording/test_recorder.py::test_a_softmax_of_the_lower_precision_is_computed_in_fp32",),
        why="softmax is promised in half precision, at half its bytes",
    ),
    Fault(
        name="graft-state-from-the-update-on",
        path="planner/derive/graft_optimizer.py",
        old="        return [(0, end + shift)] if storage.lives else []",
        new="        return [(begin + shift, end + shift)] if storage.lives else []",
        tests=(
            "tests/derive/test_graft_optimizer.py"
            "::test_the_grafted_recording_is_the_recorded_one[roberta-decisions0-whole-8 bits]",
        ),
        why="optimizer state is not counted during forward and backward",
    ),
    Fault(
        name="graft-keeps-the-old-state",
        path="planner/derive/graft_optimizer.py",
        old=(
            "    if storage.category is Category.OPTIMIZER_STATE:\n"
            "        return dataclasses.replace(storage, lives=[])\n"
        ),
        new="",
        tests=(
            "tests/derive/test_graft_optimizer.py"
            "::test_the_grafted_recording_is_the_recorded_one[roberta-decisions0-whole-8 bits]",
        ),
        why="the state of two optimizers is counted",
    ),
    Fault(
        name="cut-counts-the-update-at-its-beginning",
        path="planner/derive/cut_update.py",
        old="np.append(added_bytes[:cut], added_bytes[cut:].max())",
        new="added_bytes[: cut + 1]",
        tests=("tests/recompute/test_programs.py::test_a_shared_program_promises_what_a_program_of_its_own_promises",),
        why="the temporaries of an update are not counted",
    ),
    Fault(
        name="cut-frees-what-outlives-the-backward",
        path="planner/derive/cut_update.py",
        old="    if any(birth >= cut or cut < death < graph.ticks for birth, death in lives):\n        return None\n",
        new="",
        tests=("tests/recompute/test_programs.py::test_recordings_whose_update_is_part_of_the_step_share_nothing",),
        why="what the update frees counts to its end",
    ),
    Fault(
        name="programs-are-shared-by-all-recordings-with-a-key",
        path="planner/recompute/programs.py",
        old="if shared.op_ns == times and shared.before() == cut.before:",
        new="if shared:",
        tests=("tests/recompute/test_programs.py::test_recordings_of_other_batches_share_nothing",),
        why="a candidate is promised the bytes of another one",
    ),
    Fault(
        name="programs-lack-their-update",
        path="planner/recompute/programs.py",
        old="fixed_bytes=self.units.problem.fixed_bytes + update_bytes)",
        new="fixed_bytes=self.units.problem.fixed_bytes)",
        tests=("tests/recompute/test_programs.py::test_a_shared_program_promises_what_a_program_of_its_own_promises",),
        why="the state of the optimizer is not counted",
    ),
    Fault(
        name="extrapolate-from-the-wrong-size",
        path="planner/derive/extrapolate.py",
        old="pair[0] + (samples - BASE_SIZES[0]) * (pair[1] - pair[0])",
        new="pair[0] + (samples - BASE_SIZES[1]) * (pair[1] - pair[0])",
        tests=(
            "tests/derive/test_extrapolate.py::test_the_predicted_recording_is_the_recorded_one[roberta-decisions0]",
        ),
        why="a recording is predicted for one sample fewer than planned",
    ),
    Fault(
        name="rehearsal-without-the-smaller-part",
        path="rewrite/rehearse.py",
        old="    return (size, size, last)",
        new="    return (size, size)",
        tests=("tests/rewrite/test_application.py::test_every_size_of_a_micro_batch_is_rehearsed",),
        why="the last micro-batch, of another size, is not rehearsed",
    ),
)
