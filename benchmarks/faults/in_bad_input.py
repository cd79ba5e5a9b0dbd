"""Planted faults: what the caller has entered around a call, wrong arguments, damaged files, and processes."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_SURROUNDINGS = "planner/spawned/surroundings.py"
_TEST_AROUND = "tests/virtual_gpu/test_debugging_around_the_call.py"
_TEST_SAME = f"{_TEST_AROUND}::test_the_plan_is_the_same_as_without_and_the_contexts_are_as_before"

_COMPILES_LATER = (
    "tests/workload/test_unsupported.py"
    "::test_a_library_that_compiles_functions_when_imported_compiles_them_when_they_are_called"
)

FAULTS = (
    # ---- around the call
    Fault(
        name="a-fault-of-the-batch-is-a-bug-of-the-planner",
        path="planner/cli/command.py",
        old="    if (line := _line_outside(error)) is not None:",
        new="    if (line := None) is not None:",
        tests=(
            "tests/cli/test_command_errors.py"
            "::test_what_the_users_code_does_is_reported_on_one_line_with_exit_code_two[has_no_length]",
        ),
        why="an error that the user's own class raises is reported as a bug of the planner",
    ),
    Fault(
        name="around-default-device",
        path=_SURROUNDINGS,
        old='kept = [mode for mode in modes if isinstance(mode, _device.DeviceContext) and mode.device.type == "cuda"]',
        new="kept = [mode for mode in modes if isinstance(mode, _device.DeviceContext)]",
        tests=(f"{_TEST_SAME}[a device context of meta]",),
        why="techniques are left out because tensors of the optimizer are on the meta device",
    ),
    Fault(
        name="around-default-device-is-not-restored",
        path=_SURROUNDINGS,
        old="        torch._GLOBAL_DEVICE_CONTEXT.device_context = globally\n",
        new="        pass\n",
        tests=(f"{_TEST_SAME}[a default device of meta, a mode in it]",),
        why="the default device of the caller is lost",
    ),
    Fault(
        name="around-autocast",
        path=_SURROUNDINGS,
        old="    for _ in range(depth):\n        torch.autocast_decrement_nesting()",
        new="    for _ in range(0):\n        torch.autocast_decrement_nesting()",
        tests=(f"{_TEST_SAME}[autocast]",),
        why="autocast's copies of weights live on after each forward",
    ),
    Fault(
        name="around-prohibition-of-hooks",
        path=_SURROUNDINGS,
        old="    _HOOKS._saved_tensors_hooks_enable()\n    pairs",
        new="    pairs",
        tests=(f"{_TEST_SAME}[no hooks for saved tensors]",),
        why="no step can be rehearsed",
    ),
    # ---- arguments
    Fault(
        name="argument-types-are-not-checked",
        path="planner/arguments.py",
        old="            if not is_right(value):",
        new="            if False:",
        tests=("tests/system/test_wrong_arguments.py::test_the_message_names_the_argument_its_value_and_what_to_give",),
        why="a wrong argument ends in an error about something else",
    ),
    Fault(
        name="argument-coroutine",
        path="planner/workload/unsupported.py",
        old="    if is_coroutine_function(value):",
        new="    if False:",
        tests=("tests/system/test_wrong_arguments.py::test_the_command_refuses_a_coroutine_and_nobody_is_warned",),
        why="Python warns that a coroutine was never awaited",
    ),
    Fault(
        name="option-with-an-empty-value",
        path="planner/cli/option_checks.py",
        old="    _refuse_empty(options)\n",
        new="",
        tests=("tests/cli/test_command_errors.py::test_an_option_with_an_empty_value_is_refused[--only-]",),
        why="an option whose variable is not set counts as not given",
    ),
    Fault(
        name="time-limit-only-for-rehearsals",
        path="planner/progress/stuck.py",
        old="            if watch.overrun_seconds > _GRACE_SECONDS:",
        new="            if False:",
        tests=("tests/progress/test_stuck.py",),
        why="code that builds a model and does not return is waited for without end",
    ),
    # ---- ops
    Fault(
        name="dtype-of-results-in-place",
        path="planner/virtual_gpu/values/kernel_arguments.py",
        old="    if rule.in_place:",
        new="    if False:",
        tests=("tests/virtual_gpu/test_kernel_arguments.py::test_what_the_check_refuses_is_what_the_kernel_refuses",),
        why="a step that PyTorch refuses gets a certificate",
    ),
    # ---- the command's answer
    Fault(
        name="answer-help-is-lost",
        path="planner/cli/options.py",
        old='        print(message, end="", file=file or sys.stderr)',
        new="        super()._print_message(message, file)",
        tests=("tests/cli/test_odd_processes.py::test_help_that_cannot_be_written_is_an_error[words1]",),
        why="exit code 0 although nothing was written",
    ),
    Fault(
        name="answer-that-cannot-be-shown",
        path="planner/cli/command.py",
        old="    except Exception as error:  # the answer cannot be shown",
        new="    except ZeroDivisionError as error:  # the answer cannot be shown",
        tests=(
            "tests/cli/test_odd_processes.py"
            "::test_an_answer_that_cannot_be_shown_does_not_end_with_the_exit_code_of_one",
        ),
        why="a fault of the report counts as a plan that does not fit",
    ),
    Fault(
        name="answer-without-a-library",
        path="planner/errors.py",
        old="    for frame, _ in traceback.walk_tb(error.__traceback__):",
        new="    for frame, _ in ():",
        tests=("tests/cli/test_odd_processes.py::test_a_library_whose_installation_is_broken_is_named_in_one_line",),
        why="a broken library counts as a bug of the planner",
    ),
    Fault(
        name="answer-in-no-columns",
        path="planner/progress/terminal.py",
        old="name not in _SIZES or _is_size(text)",
        new="True",
        tests=("tests/cli/test_odd_processes.py::test_the_report_is_printed_whatever_the_number_of_columns",),
        why="rich fails at a size of the terminal that is not a number",
    ),
    # ---- batches, loaders, and what is kept
    Fault(
        name="tensor-that-holds-others",
        path="planner/workload/unsupported.py",
        old="    if _holds_others(tensor):",
        new="    if False:",
        tests=(
            "tests/workload/test_unsupported.py::test_a_parameter_whose_class_holds_other_tensors_is_refused",
            "tests/workload/test_unsupported.py::test_unusual_batches_are_refused_by_name[a wrapper]",
        ),
        why="only one of two tensors that a tensor holds is counted",
    ),
    Fault(
        name="batch-in-itself",
        path="planner/workload/unsupported.py",
        old="        if depth > _MOST_DEPTH:",
        new="        if depth > 10**5:",
        tests=("tests/workload/test_unsupported.py::test_unusual_batches_are_refused_by_name[a deep list]",),
        why="a nested batch ends in a RecursionError",
    ),
    Fault(
        name="loader-that-exits",
        path="planner/workload/batch_source.py",
        old="        except BaseException as error:  # the user's code",
        new="        except Exception as error:  # the user's code",
        tests=("tests/workload/test_batch_source.py::test_a_loader_that_raises_anything_midway_is_named",),
        why="the error has an exit code instead of the reason why the loader failed",
    ),
    Fault(
        name="loader-without-a-time-limit",
        path="planner/ask.py",
        old="worst_case=self.worst_case, watch=watch)",
        new="worst_case=self.worst_case)",
        tests=("tests/workload/test_batch_source.py::test_a_loader_that_does_not_return_ends_with_the_time_limit",),
        why="planning does not end if a data loader does not return",
    ),
    Fault(
        name="remembered-without-a-limit",
        path="planner/workspaces/cudnn/remembered.py",
        old="reading.text(folder / name, most_bytes=_MOST_BYTES)",
        new='(folder / name).read_text(encoding="utf-8")',
        tests=("tests/workspaces/test_asking_cudnn.py::test_what_is_remembered_is_read_as_data_with_limits",),
        why="a large file or a pipe in the cache folder fills the memory or hangs",
    ),
    Fault(
        name="remembered-for-others",
        path="planner/files/cache.py",
        old="    return path if is_ours and os.access",
        new="    return path if os.access",
        tests=("tests/workspaces/test_asking_cudnn.py::test_nothing_is_kept_or_loaded_where_others_can_write",),
        why="a library that somebody else wrote is loaded",
    ),
    Fault(
        name="state-that-shares-memory",
        path="rewrite/step_state/__init__.py",
        old="            if overlaps or (id(value)",
        new="            if (id(value)",
        tests=("tests/rewrite/test_damaged_state.py::test_tensors_that_share_memory_are_separate_after_loading",),
        why="moments of the optimizer change together, or with the weights",
    ),
    Fault(
        name="state-of-too-many-steps",
        path="rewrite/step_state/optimizer_check.py",
        old="        if not 0 <= value <= MOST_STEPS_OF_OPTIMIZER:",
        new="        if value < 0:",
        tests=("tests/rewrite/test_damaged_state.py::test_a_damaged_state_is_refused_in_one_line_and_nothing_changes",),
        why="a number of steps overflows in the middle of loading",
    ),
    # ---- numbers
    Fault(
        name="number-of-too-many-digits",
        path="planner/arguments.py",
        old="not -_HUGE < value < _HUGE",
        new="False",
        tests=("tests/system/test_wrong_arguments.py::test_each_argument_is_taken_or_refused_in_one_line",),
        why="a huge number ends in an OverflowError",
    ),
    Fault(
        name="number-of-samples-in-a-plan",
        path="planner/plan_types/plan_parts.py",
        old="        if sum(count for _, count in self.lengths) > MOST_SAMPLES:",
        new="        if False:",
        tests=("tests/plan_types/test_plan.py::test_a_run_that_cannot_be_simulated_is_refused",),
        why="a small plan file fills the memory",
    ),
    Fault(
        name="message-with-texts-of-others",
        path="planner/errors.py",
        old="        return plain_line(super().__str__())",
        new="        return super().__str__()",
        tests=("tests/system/test_wrong_arguments.py::test_each_argument_is_taken_or_refused_in_one_line",),
        why="the text of a file or of a library controls the terminal or fills it",
    ),
    Fault(
        name="numbers-of-numpy-get-into-plans",
        path="planner/arguments.py",
        old="        found = int(found)\n",
        new="        pass\n",
        tests=(
            "tests/system/test_wrong_arguments.py::"
            "test_numbers_of_a_library_are_taken_as_numbers_of_python[eval_batch_size]",
        ),
        why="a plan with eval_batch_size=numpy.int64(8) cannot be saved",
    ),
    Fault(
        name="numbers-that-no-plan-file-can-hold-are-taken",
        path="planner/arguments.py",
        old="        if most is not None and any(",
        new="        if False and any(",
        tests=(
            "tests/system/test_wrong_arguments.py::"
            "test_a_number_out_of_range_is_refused_before_a_rehearsal[eval_batch_size-2147483648]",
        ),
        why="a saved plan cannot be read again",
    ),
    Fault(
        name="sizes-that-no-plan-file-can-hold-are-taken",
        path="planner/plan_types/sizes.py",
        old="    if size_bytes > _MOST_BYTES:",
        new="    if False:",
        tests=(
            "tests/system/test_wrong_arguments.py::"
            "test_a_number_out_of_range_is_refused_before_a_rehearsal[vram-9999999999TiB]",
        ),
        why="a saved plan cannot be read again",
    ),
    Fault(
        name="whole-numbers-of-a-scaler-are-those-it-has-now",
        path="rewrite/step_state/values.py",
        old="        if name in _NUMBERS_OF_STEPS and not isinstance(value, int):",
        new="        if isinstance(present[name], int) and not isinstance(value, int):",
        tests=("tests/rewrite/test_damaged_state.py::test_a_factor_of_a_scaler_may_be_a_whole_number",),
        why="a step with growth_factor=2 cannot load a state with growth_factor=2.0",
    ),
    Fault(
        name="libraries-compile-when-imported",
        path="planner/workload/unsupported.py",
        old="    torch.compile = compile_later\n",
        new="",
        tests=(_COMPILES_LATER,),
        why="planning with bitsandbytes imports the compiler, which takes longer than a rehearsal",
    ),
    Fault(
        name="libraries-leave-another-torch-compile",
        path="planner/workload/unsupported.py",
        old="        torch.compile = compile_now\n",
        new="        pass\n",
        tests=(_COMPILES_LATER,),
        why="functions that the user compiles after planning are not compiled by torch.compile itself",
    ),
    Fault(
        name="libraries-lose-options-of-torch-compile",
        path="planner/workload/unsupported.py",
        old="            return functools.partial(compile_later, **options)\n",
        new="            return compile_later\n",
        tests=(_COMPILES_LATER,),
        why="a library's functions are compiled without the options that it gives to torch.compile",
    ),
    Fault(
        name="bad-input-lazy-modules",
        path="planner/workload/unsupported.py",
        old="        if torch.nn.parameter.is_lazy(tensor):\n",
        new="        if False:\n",
        tests=(
            "tests/workload/test_unsupported.py"
            "::test_a_lazy_module_that_has_not_run_is_refused_by_name_and_planned_after_its_first_call",
        ),
        why="the error neither names the lazy module nor a way out",
    ),
    Fault(
        name="bad-input-batch-size-of-the-largest-batch",
        path="planner/questions/batch_needs.py",
        old="        with _naming(samples):\n            total_bytes, choice = ",
        new="        if samples:\n            total_bytes, choice = ",
        tests=("tests/cli/test_questions.py::test_a_model_that_refuses_a_batch_size_is_refused_with_this_size",),
        why="the message does not say with which batch size the model fails",
    ),
    Fault(
        name="recording-reads-the-memory-of-wrappers",
        path="planner/recording/module_state.py",
        old="    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):\n",
        new="    while False:\n",
        tests=(
            "tests/recording/test_recompute_obstacles.py"
            "::test_a_model_that_uses_torch_func_can_be_planned_and_trains_the_same[checkpoint-maml]",
        ),
        why="a model that calls modules inside of torch.func.grad cannot be planned",
    ),
    Fault(
        name="recording-reads-tangents-without-memory",
        path="planner/virtual_gpu/values/shadow_values.py",
        old="            if real._is_zerotensor():",
        new="            if False:",
        tests=(
            "tests/recording/test_recompute_obstacles.py"
            "::test_a_model_that_uses_torch_func_can_be_planned_and_trains_the_same[checkpoint-jvp]",
        ),
        why="a model with a forward-mode derivative ends the process with a segmentation fault",
    ),
)
