"""Planted faults: what the caller has entered around a call, wrong arguments, damaged files, and processes."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_SURROUNDINGS = "planner/spawned/surroundings.py"
_TEST_AROUND = "tests/virtual_gpu/test_debugging_around_the_call.py"
_TEST_SAME = f"{_TEST_AROUND}::test_the_plan_is_the_same_as_without_and_the_contexts_are_as_before"

FAULTS = (
    # ---- around the call
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
        tests=("tests/cli/test_odd_processes.py::test_help_that_cannot_be_written_is_no_answer[words1]",),
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
        why="rich fails at a size of the terminal that is no number",
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
        why="a text of others controls the terminal or fills it",
    ),
)
