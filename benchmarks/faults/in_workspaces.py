"""Planted faults: the workspaces of cuDNN."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_CALLS = "tests/workspaces/test_convolution_calls.py"
_ATTENTION = "tests/workspaces/test_cudnn_attention.py"
_RECURRENT = "tests/workspaces/test_cudnn_recurrent.py"

FAULTS = (
    Fault(
        name="workspaces-depthwise-on-tensor-cores",
        path="planner/estimate/roofline.py",
        old="kernels is Kernels.DEPTHWISE and dtype in AUTOCAST_DTYPES",
        new="kernels is Kernels.DEPTHWISE and dtype in ()",
        tests=("tests/estimate/test_roofline.py::test_depthwise_kernels_run_without_tensor_cores",),
        why="PyTorch's kernels for depthwise convolutions are predicted to run at the rate of tensor cores",
    ),
    Fault(
        name="workspaces-time-of-convolutions-without-tf32",
        path="planner/estimate/roofline.py",
        old="and op.kernel.settings.allow_tf32",
        new="and not op.kernel.settings.allow_tf32",
        tests=(
            "tests/estimate/test_roofline.py::test_convolutions_in_fp32_have_the_rate_of_tf32_if_pytorch_allows_it",
        ),
        why="convolutions in fp32 are predicted without TF32, which PyTorch allows by default",
    ),
    Fault(
        name="workspaces-copies-between-layers-in-channels-last",
        path="planner/virtual_gpu/kernels.py",
        old="    if not results_in_channels_last(",
        new="    if results_in_channels_last(",
        tests=(
            "tests/estimate/test_convolution_workspaces.py"
            "::test_layers_in_channels_last_hand_on_their_format_and_copy_nothing",
        ),
        why="a network in channels_last is recorded with copies between its layers that PyTorch does not make",
    ),
    Fault(
        name="workspaces-in-the-time-of-convolutions",
        path="planner/estimate/add_workspaces.py",
        old="            sizes[storage.op] = sizes.get(storage.op, 0) + size\n",
        new="            sizes[storage.op] = size\n",
        tests=(
            "tests/estimate/test_convolution_workspaces.py"
            "::test_the_time_of_a_convolution_counts_its_copies_and_workspaces",
        ),
        why="the time of a convolution leaves out the copies of its tensors",
    ),
    Fault(
        name="workspaces-search-keeps-the-cache",
        path="planner/allocator/trials.py",
        old="        allocator.empty_cache()\n",
        new="",
        tests=("tests/allocator/test_searches.py::test_the_block_of_a_search_is_released_before_the_algorithm_runs",),
        why="the memory after the first step with cudnn.benchmark includes the block in which algorithms were tried",
    ),
    Fault(
        name="workspaces-search-compares-all",
        path="planner/workspaces/registry.py",
        old="        return tuple(fitting[: self.most or None])\n",
        new="        return tuple(fitting)\n",
        tests=("tests/allocator/test_searches.py::test_only_the_first_algorithms_that_fit_are_compared",),
        why="a convolution with cudnn.benchmark is promised the workspace of an algorithm that PyTorch never compares",
    ),
    Fault(
        name="workspaces-deterministic-dilated-in-cudnn",
        path="planner/workspaces/cudnn/dispatch.py",
        old="    return not (options.is_dilated and options.settings.deterministic) or convolves_channels_last(x, w)\n",
        new="    return True\n",
        tests=(f"{_CALLS}::test_deterministic_convolutions_with_dilation_run_in_cudnn_in_channels_last_only",),
        why="a deterministic convolution with dilation is counted with a workspace of cuDNN, which does not run it",
    ),
    Fault(
        name="workspaces-columns-of-all-samples",
        path="planner/workspaces/cudnn/dispatch.py",
        old="math.prod((*w.shape[1:], *output.shape[2:]))",
        new="math.prod((*w.shape[1:], output.shape[0], *output.shape[2:]))",
        tests=(f"{_CALLS}::test_kernels_without_cudnn_take_a_matrix_of_columns_for_one_sample",),
        why="PyTorch's own kernels are promised the columns of a whole batch, although they compute sample by sample",
    ),
    Fault(
        name="workspaces-bf16-in-cudnn-on-old-cards",
        path="planner/workspaces/cudnn/dispatch.py",
        old='x.dtype == "bfloat16" and capability is not None and capability < _CONVOLVES_BF16',
        new='x.dtype == "bfloat16" and capability is None',
        tests=(f"{_CALLS}::test_bf16_is_convolved_by_cudnn_from_compute_capability_8_on",),
        why="bf16 convolutions on old cards are counted with workspaces of cuDNN, which does not run them",
    ),
    Fault(
        name="workspaces-depthwise-without-copies",
        path="planner/workspaces/cudnn/dispatch.py",
        old="        Kernels.DEPTHWISE: (_depthwise_forward, _depthwise_backward),\n",
        new="        Kernels.DEPTHWISE: (lambda call: [], lambda call: []),\n",
        tests=(f"{_CALLS}::test_depthwise_kernels_of_pytorch_read_contiguous_copies",),
        why="the contiguous copies that PyTorch makes for its depthwise kernels are not counted",
    ),
    Fault(
        name="workspaces-group-norm-in-channels-last",
        path="planner/virtual_gpu/kernels.py",
        old="        input = input.contiguous()\n",
        new="",
        tests=(
            "tests/virtual_gpu/test_memory_formats.py"
            "::test_group_norm_keeps_a_contiguous_copy_of_its_input_for_the_backward",
        ),
        why="the copy that a group normalization in channels_last saves for the backward is not counted",
    ),
    Fault(
        name="workspaces-of-the-fastest-algorithms-only",
        path="planner/estimate/kernel_notes.py",
        old="        least_bytes = smallest_total_bytes(graph, card, decisions, ",
        new="        least_bytes = smallest_total_bytes(graph, card, decisions, fastest=True, ",
        tests=(
            "tests/estimate/test_convolution_workspaces.py"
            "::test_a_plan_below_the_fastest_algorithms_names_the_convolutions_that_run_slower_ones",
        ),
        why="a plan does not say that the same step runs in less memory with slower algorithms of convolutions",
    ),
    Fault(
        name="workspaces-searched-for-in-the-smallest-free-block",
        path="planner/allocator/caching_allocator.py",
        old="max((pool[-1].size_bytes for pool",
        new="max((pool[0].size_bytes for pool",
        tests=("tests/allocator/test_searches.py::test_the_largest_free_block_decides_which_algorithms_are_tried",),
        why="the search for the fastest algorithm leaves out algorithms that the real allocator has memory for",
    ),
    Fault(
        name="workspaces-algorithm-is-not-remembered",
        path="planner/allocator/trials.py",
        old="        self._remembered[trials.remembered_as] = size_bytes\n",
        new="",
        tests=(
            "tests/allocator/test_trials.py::test_the_size_that_fitted_last_is_tried_first_by_the_same_convolution",
        ),
        why="a convolution is promised to run its fastest algorithm again, although PyTorch keeps the slower one",
    ),
    Fault(
        name="workspaces-curve-of-the-fastest",
        path="planner/estimate/footprint.py",
        old="            curve_bytes = least_bytes\n",
        new="",
        tests=(
            "tests/estimate/test_convolution_workspaces.py"
            "::test_near_the_budget_convolutions_take_the_algorithm_that_fits",
        ),
        why="the certificate counts workspaces that the step does not take, so that it is above the promise",
    ),
    Fault(
        name="workspaces-of-both-gradients-together",
        path="planner/estimate/add_workspaces.py",
        old="    return start, births[block.last] if block.last < len(births) else births[-1] + 1",
        new="    return start, births[-1] + 1",
        tests=(
            "tests/estimate/test_convolution_workspaces.py"
            "::test_each_workspace_is_born_after_its_output_and_dies_before_the_next",
        ),
        why="the workspaces of both gradients of a convolution are promised at the same time",
    ),
    Fault(
        name="workspaces-tf32-is-not-asked",
        path="planner/workspaces/cudnn/dispatch.py",
        old='            tf32=x.dtype == "float32" and self.settings.allow_tf32,',
        new="            tf32=False,",
        tests=(f"{_CALLS}::test_a_forward_takes_its_workspace_after_the_output",),
        why="the workspaces are those of algorithms that nobody uses in fp32",
    ),
    Fault(
        name="workspaces-copies-are-forgotten",
        path="planner/workspaces/cudnn/dispatch.py",
        old="    if not is_contiguous(layout, channels_last=channels_last):\n        yield",
        new="    if False:\n        yield",
        tests=(f"{_CALLS}::test_an_image_in_channels_last_needs_a_weight_and_a_gradient_in_it",),
        why="the copies of tensors in another memory format are not promised",
    ),
    Fault(
        name="workspaces-old-cards-ask-new-versions",
        path="planner/workspaces/cudnn/versions.py",
        old="    return capability >= _FIRST_OF_NEW_CARDS or version <= _LAST_FOR_OLD_CARDS",
        new="    return True",
        tests=("tests/workspaces/test_asking_cudnn.py::test_a_library_is_not_asked_about_cards_that_it_does_not_know",),
        why="a V100's workspaces are promised as nothing, because a newer cuDNN does not know the card",
    ),
    Fault(
        name="workspaces-estimates-are-called-exact",
        path="planner/workspaces/cudnn/sources.py",
        old="    is_exact = expected(torch_version, capability).is_pinned and capability in table.capabilities",
        new="    is_exact = True",
        tests=(
            "tests/workspaces/test_cudnn_tables.py::test_a_card_without_a_column_has_that_of_the_capability_below_it",
        ),
        why="a note says that workspaces are cuDNN's, and they are those of another version or card",
    ),
    Fault(
        name="workspaces-attention-second-gradient",
        path="planner/workspaces/cudnn_attention.py",
        old="    of_kernel = of_heads + of_second_gradient\n",
        new="    of_kernel = of_heads\n",
        tests=(f"{_ATTENTION}::test_the_formula_equals_every_answer_of_cudnn",),
        why="attention over few queries or keys on data center Blackwell is promised half of its workspace",
    ),
    Fault(
        name="workspaces-attention-grouped-heads",
        path="planner/workspaces/cudnn_attention.py",
        old="0 if key_heads == heads else batch * heads",
        new="0 if key_heads == heads else batch * key_heads",
        tests=(f"{_ATTENTION}::test_the_formula_equals_every_answer_of_cudnn",),
        why="grouped-query attention sums the gradients of all query heads, which are not counted",
    ),
    Fault(
        name="workspaces-attention-copied-gradient",
        path="planner/workspaces/cudnn_attention.py",
        old="    copies = [] if grad.stride[-1] == 1 else [grad.nbytes]\n",
        new="    copies: list[int] = []\n",
        tests=(f"{_ATTENTION}::test_an_expanded_gradient_is_copied_before_the_workspace",),
        why="the gradient of a sum is copied before cuDNN gets it, and the copy is not counted",
    ),
    Fault(
        name="workspaces-attention-of-another-version",
        path="planner/workspaces/cudnn_attention.py",
        old="    if version.is_pinned and asked:\n",
        new="    if version.is_pinned:\n",
        tests=(f"{_ATTENTION}::test_the_note_says_whether_the_formula_was_compared_with_this_version_and_card",),
        why="an estimate for another version of cuDNN or another card is presented as compared with cuDNN",
    ),
    Fault(
        name="workspaces-attention-unknown-to-the-plan",
        path="planner/estimate/kernel_notes.py",
        old="        *cudnn_attention.notes(_calls(graph, cudnn_attention.OPS), card, version),\n",
        new="",
        tests=(f"{_ATTENTION}::test_a_plan_names_the_workspaces_of_attention",),
        why="a plan does not say where the workspaces of attention come from",
    ),
    Fault(
        name="workspaces-recurrent-outputs-between-layers",
        path="planner/virtual_gpu/rnn.py",
        old="(layers * of_layer + (layers - 1) * hidden_size)",
        new="(layers * of_layer)",
        tests=(f"{_RECURRENT}::test_the_reserve_equals_what_cudnn_named_on_a_card",),
        why="the outputs between the layers of a recurrent net are saved for backward, and not counted",
    ),
    Fault(
        name="workspaces-recurrent-none",
        path="planner/workspaces/cudnn_recurrent.py",
        old="    return [net.workspace_bytes(",
        new="    return [0 * net.workspace_bytes(",
        tests=(f"{_RECURRENT}::test_a_step_takes_the_workspace_in_forward_and_backward",),
        why="the workspaces of recurrent nets, as large as their reserve, are not counted",
    ),
    Fault(
        name="workspaces-batch-without-its-format",
        path="planner/recording/virtual_batch.py",
        old="        order = _order_in_memory(leaf)\n",
        new="        order = range(leaf.dim())\n",
        tests=(
            "tests/recording/test_virtual_batch.py::test_the_strides_are_those_of_a_copy_on_another_device[channels_last]",
            "tests/recording/test_virtual_batch.py::test_a_step_with_a_batch_in_channels_last_is_rehearsed_as_it_runs",
        ),
        why="a batch in channels_last is recorded as a contiguous one, with other copies and workspaces",
    ),
)
