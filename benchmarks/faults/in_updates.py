"""Planted faults: mixed precision, frozen modules, optimizers, and step-in-backward."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

FAULTS = (
    # ---- mixed precision, freeze, optimizer
    Fault(
        name="precision-takes-half-weights",
        path="rewrite/rules/mixed_precision.py",
        old="        if parameter.requires_grad and parameter.dtype != torch.float32:\n            dtype",
        new="        if parameter.requires_grad and not parameter.is_floating_point():\n            dtype",
        tests=(
            "tests/rewrite/rules/test_mixed_precision_and_freeze.py::test_half_precision_weights_are_refused_by_name",
        ),
        why="bf16 weights are trained without fp32 master weights, so that small updates are lost",
    ),
    Fault(
        name="precision-fp16-without-scaler",
        path="rewrite/rules/mixed_precision.py",
        old='    if decision.dtype == "fp16":\n',
        new='    if decision.dtype == "float16":\n',
        tests=(
            "tests/rewrite/rules/test_mixed_precision_and_freeze.py"
            "::test_an_overflow_skips_the_step_and_lowers_the_scale",
        ),
        why="small gradients underflow in fp16",
    ),
    Fault(
        name="freeze-undo-trains-nothing",
        path="rewrite/rules/freeze.py",
        old="    parameter.requires_grad_(True)",
        new="    parameter.requires_grad_(parameter.requires_grad)",
        tests=(
            "tests/rewrite/rules/test_mixed_precision_and_freeze.py"
            "::test_flags_that_were_off_before_stay_off_after_undo",
        ),
        why="undo leaves parameters frozen",
    ),
    Fault(
        name="freeze-undo-trains-what-was-frozen-before",
        path="rewrite/rules/freeze.py",
        old="            if not parameter.requires_grad:\n                continue\n",
        new="",
        tests=(
            "tests/rewrite/rules/test_mixed_precision_and_freeze.py"
            "::test_flags_that_were_off_before_stay_off_after_undo",
        ),
        why="undo makes parameters trainable that the user had frozen",
    ),
    Fault(
        name="eight-bit-one-group",
        path="rewrite/rules/eight_bit_optimizer.py",
        old="    groups = [_group(group, replaced.defaults) for group in replaced.param_groups]",
        new="    groups = [\n"
        '        {**_group(group, replaced.defaults), "weight_decay": replaced.defaults["weight_decay"]}\n'
        "        for group in replaced.param_groups\n    ]",
        tests=("tests/rewrite/rules/test_eight_bit_optimizer.py::test_groups_and_hyperparameters_are_taken_over",),
        why="parameters that are excluded from weight decay get it",
    ),
    Fault(
        name="eight-bit-embeddings",
        path="rewrite/rules/eight_bit_optimizer.py",
        old="        keep_embeddings_in_32_bits(replacement, rewriting.model)\n",
        new="",
        tests=("tests/rewrite/rules/test_eight_bit_optimizer.py::test_the_loss_falls_and_state_is_in_eight_bits",),
        why="embeddings are trained with 8-bit state, which is unstable",
    ),
    Fault(
        name="eight-bit-drops-state",
        path="rewrite/rules/eight_bit_optimizer.py",
        old="    if optimizer.state:\n",
        new="    if optimizer.state is None:\n",
        tests=("tests/rewrite/rules/test_eight_bit_optimizer.py::test_an_optimizer_with_state_is_refused",),
        why="the moments of an optimizer that has trained are silently lost",
    ),
    Fault(
        name="eight-bit-adam-with-decay",
        path="rewrite/rules/eight_bit_optimizer.py",
        old='        if group["weight_decay"] and not decoupled:',
        new='        if group["weight_decay"] < 0 and not decoupled:',
        tests=(
            "tests/rewrite/rules/test_eight_bit_optimizer.py"
            "::test_optimizers_that_would_become_another_one_are_refused",
        ),
        why="Adam's coupled weight decay silently becomes AdamW's",
    ),
    Fault(
        name="kernel-lost-on-load",
        path="rewrite/rules/optimizer_kernel.py",
        old="    hook = optimizer.register_load_state_dict_post_hook(choose)",
        new="    hook = optimizer.register_load_state_dict_post_hook(lambda _: None)",
        tests=("tests/rewrite/rules/test_optimizer_kernel.py::test_state_goes_from_one_kernel_to_the_other_and_back",),
        why="after load_state_dict the optimizer uses the kernel that needs more memory",
    ),
    Fault(
        name="kernel-steps-stay-on-the-card",
        path="rewrite/rules/optimizer_kernel.py",
        old="            _move_step_numbers(optimizer, group)\n",
        new="            pass\n",
        tests=(
            "tests/rewrite/rules/test_optimizer_kernel.py::test_step_counters_have_the_dtype_that_each_kernel_reads",
        ),
        why="step counters are of a dtype or device that the next kernel does not read",
    ),
    Fault(
        name="optimizer-trains-frozen-parameters",
        path="rewrite/optimizers.py",
        old="    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]",
        new="    trainable = list(model.parameters())",
        tests=("tests/rewrite/rules/test_mixed_precision_and_freeze.py::test_freezing_everything_is_refused",),
        why="the optimizer holds frozen parameters, and a plan that freezes all of them is not refused",
    ),
    # ---- step in backward
    Fault(
        name="in-backward-updates-all-parameters",
        path="rewrite/rules/step_in_backward.py",
        old='group["params"] = [parameter] if group is group_of[parameter] else []',
        new='group["params"] = [parameter]',
        tests=("tests/rewrite/rules/test_step_in_backward.py::test_training_is_the_same_to_the_bit[two groups]",),
        why="a parameter is updated once per group, with the hyperparameters of each",
    ),
    Fault(
        name="in-backward-second-gradient",
        path="rewrite/rules/step_in_backward.py",
        old="        updated.add(parameter)\n",
        new="",
        tests=("tests/rewrite/rules/test_step_in_backward.py::test_a_second_gradient_of_one_parameter_is_refused",),
        why="a parameter with two partial gradients is updated twice",
    ),
    Fault(
        name="in-backward-keeps-gradients",
        path="rewrite/rules/step_in_backward.py",
        old="        optimizer.step()\n        parameter.grad = None\n",
        new="        optimizer.step()\n",
        tests=("tests/rewrite/rules/test_step_in_backward.py::test_with_state_in_8_bits",),
        why="all gradients are alive at the end of backward, which the plan promised to avoid",
    ),
    Fault(
        name="in-backward-narrow-groups-stay",
        path="rewrite/rules/step_in_backward.py",
        old='        for group, parameters in groups:\n            group["params"] = parameters\n',
        new="",
        tests=("tests/rewrite/rules/test_step_in_backward.py::test_training_is_the_same_to_the_bit[adamw]",),
        why="the optimizer has lost all parameters but the last one that was updated",
    ),
    Fault(
        name="in-backward-hooks-stay",
        path="rewrite/rules/step_in_backward.py",
        old="        for hook in hooks:\n            hook.remove()\n",
        new="",
        tests=("tests/rewrite/rules/test_step_in_backward.py::test_training_is_the_same_to_the_bit[adamw]",),
        why="the hooks of the first step update parameters in every later backward",
    ),
    Fault(
        name="in-backward-gradients-from-before",
        path="rewrite/rules/step_in_backward.py",
        old="    if any(parameter.grad is not None for parameter in group_of):",
        new="    if all(parameter.grad is not None for parameter in group_of):",
        tests=("tests/rewrite/rules/test_step_in_backward.py::test_a_gradient_from_before_is_refused[False]",),
        why="gradients from before the step are added to those of the batch",
    ),
    Fault(
        name="kernel-fused-for-momentum",
        path="planner/workload/torch_optimizers.py",
        old='        return "for-loop" if kind is torch.optim.SGD and _keeps_momentum(optimizer) else "fused"',
        new='        return "fused"',
        tests=(
            "tests/rewrite/rules/test_optimizer_kernel.py"
            "::test_a_parameter_whose_first_gradient_comes_late_is_trained_by_the_kernel_that_is_offered"
            "[sgd, nesterov]",
        ),
        why="training stops with a TypeError in the step in which a branch has its first gradient",
    ),
    Fault(
        name="paged-state-counts-on-the-card",
        path="planner/virtual_gpu/library_patches.py",
        old='        state = torch.empty(shape, dtype=dtype, device="cpu")',
        new="        state = torch.empty(shape, dtype=dtype, device=device)",
        tests=("tests/workload/test_optimizer_steps.py::test_paged_state_of_large_matrices_is_not_counted",),
        why="paged optimizer state, which is not in the memory of the allocator, is counted there",
    ),
    Fault(
        name="saved-adapters-are-not-trained",
        path="planner/workload/adapters.py",
        old="            config.inference_mode = False",
        new="            config.inference_mode = True",
        tests=("tests/workload/test_adapters.py::test_saved_adapters_are_planned_as_peft_loads_them",),
        why="a folder of adapters is planned with frozen adapters",
    ),
    Fault(
        name="adapters-although-not-allowed",
        path="planner/adapted.py",
        old="    if constraints.fidelity < Fidelity.ADAPTED:",
        new="    if constraints.fidelity < Fidelity.EXACT:",
        tests=("tests/workload/test_adapters.py::test_adapters_are_trained_if_nothing_else_fits",),
        why="LoRA adapters replace the training of the weights although the fidelity does not allow it",
    ),
)
