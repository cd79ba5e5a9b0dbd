"""Planted faults: gradients of a second step that are copied from the first one."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_PATH = "planner/recording/repeats/second_step.py"
_TEST = "tests/recording/test_second_step.py"
_SAME = f"{_TEST}::test_repeated_gradients_leave_the_recording_that_computed_ones_leave"
_OTHERWISE = f"{_TEST}::test_a_step_that_begins_otherwise_computes_its_gradients"


def _fault(name: str, old: str, new: str, why: str, *tests: str, path: str = _PATH) -> Fault:
    return Fault(name=f"second-step-{name}", path=path, old=old, new=new, tests=tests, why=why)


FAULTS = (
    _fault(
        "with-other-numbers-in-the-model",
        "            and state == self._state\n",
        "",
        "a model that counts its calls runs its second forward as the first one",
        f"{_OTHERWISE}[a number]",
        f"{_OTHERWISE}[a list]",
    ),
    _fault(
        "with-other-random-numbers",
        "        return plain_state(self._model), host_random_state(), values\n",
        "        return plain_state(self._model), values\n",
        "a forward that draws random numbers on the host is taken for one that does not",
        f"{_OTHERWISE}[random numbers of the host]",
    ),
    _fault(
        "with-code-of-the-users",
        "        if steps == 2 and is_plain and not runs_own_code and isinstance(step, StepInParts):\n",
        "        if steps == 2 and is_plain and isinstance(step, StepInParts):\n",
        "the user's own code runs only once, although it may behave differently in the second step",
        f"{_TEST}::test_a_step_with_code_of_the_users_computes_its_gradients",
        path="planner/recording/rehearsal.py",
    ),
    _fault(
        "with-other-values-in-a-buffer",
        "        return None if value is None or _is_counter(name, module) else value.tolist()\n",
        "        return None\n",
        "a model that counts in a buffer runs its second forward as the first one",
        f"{_OTHERWISE}[a buffer]",
    ),
    _fault(
        "with-a-counter-that-is-read",
        "        if not reads_counter and None not in made",
        "        if None not in made",
        "a model that reads a norm's number of batches is taken for one that does not",
        f"{_OTHERWISE}[the counter of a norm]",
    ),
    _fault(
        "with-a-counter-that-is-asked-for",
        "    return not counters.isdisjoint(recorder.numbers_asked) or any(\n",
        "    return any(\n",
        "a model that asks for a norm's number of batches is taken for one that does not",
        f"{_OTHERWISE}[the counter of a norm, asked for]",
    ),
    _fault(
        "with-tensors-that-are-left",
        "            and not any(self._begin.storages <= index < self._end.storages for index in new)\n",
        "",
        "a step repeats the gradients of another one that has left a gradient",
        f"{_TEST}::test_a_step_that_leaves_a_gradient_is_not_repeated",
    ),
    _fault(
        "without-its-loss",
        "        self._step.update()\n        del loss  # here, as the user's loop frees it after the update\n",
        "        del loss\n        self._step.update()\n",
        "the loss is freed before the update",
        "tests/recording/test_truth_cpu.py::test_a_rehearsal_is_what_really_happens_op_by_op_and_byte_by_byte[dropout]",
    ),
    _fault(
        "with-storages-of-the-first",
        "            inputs=tuple(map(storage, op.inputs)),\n            outputs=tuple(map(storage, op.outputs)),\n",
        "            inputs=op.inputs,\n            outputs=tuple(map(storage, op.outputs)),\n",
        "ops of the second step read storages of the first one",
        f"{_SAME}[adamw]",
    ),
    _fault(
        "with-calls-in-calls-of-the-first",
        "            parent=_plus(call.parent, now.calls - self._begin.calls),\n",
        "",
        "calls of modules in the second step belong to calls of the first one",
        "tests/zoo/test_second_steps.py::test_copied_gradients_leave_the_recording_that_computed_ones_leave[bert]",
    ),
    _fault(
        "as-the-first-micro-batch",
        "        recorder.micro_batch, recorder.seen_backward = self._micro_batch, True\n",
        "        recorder.seen_backward = True\n",
        "the update of the second step belongs to its first micro-batch",
        f"{_SAME}[micro-batches]",
    ),
    _fault(
        "with-hooks-in-backward",
        "        elif not self._has_hooks and self._first",
        "        elif self._first",
        "a hook that counts its calls does not run in the second backward",
        f"{_TEST}::test_a_hook_in_backward_runs_in_both_steps",
    ),
    Fault(
        name="second-step-with-smaller-storages",
        path="planner/virtual_gpu/backend.py",
        old="        self.cache_enabled = False\n",
        new="",
        tests=(
            "tests/virtual_gpu/test_fake_tensor_cache.py"
            "::test_the_storage_of_a_result_keeps_the_bytes_that_its_kernel_allocates",
        ),
        why="the padded gradient of a mask has fewer bytes in the second step than in the first one",
    ),
    Fault(
        name="recordings-sent-item-by-item",
        path="planner/recording/step_graph.py",
        old="Columns.of(value) if isinstance(value, list) and value else value",
        new="value",
        tests=(
            "tests/recording/test_pickled.py::test_reading_a_recording_takes_little_more_memory_than_the_recording",
        ),
        why="a process that reads a recording takes twice its memory, and does not give it back to the system",
    ),
    Fault(
        name="recordings-sent-with-equal-shapes-twice",
        path="planner/spawned/columns.py",
        old="[known.setdefault(value, value) for value in values]",
        new="[*values]",
        tests=("tests/recording/test_pickled.py::test_equal_texts_and_shapes_are_one_object",),
        why="a recording takes a quarter more memory",
    ),
    Fault(
        name="phases-and-names-of-modules-are-sent-as-one-object",
        path="planner/spawned/columns.py",
        old="                known: dict[Any, Any] = {}\n",
        new="                known: dict[Any, Any] = cls.of.__func__.__dict__  # one for all fields\n",
        tests=(
            "tests/recording/test_pickled.py"
            "::test_names_of_modules_are_texts_also_if_a_phase_or_a_category_has_this_name",
        ),
        why="a module with the name 'backward' gets a phase as its name",
    ),
)
