"""Planted faults: gradients of a second step that are copied from the first one."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_PATH = "planner/recording/repeats/second_step.py"
_TEST = "tests/recording/test_second_step.py"
_SAME = f"{_TEST}::test_repeated_gradients_leave_the_recording_that_computed_ones_leave"
_OTHERWISE = f"{_TEST}::test_a_step_that_begins_otherwise_computes_its_gradients"


def _fault(name: str, old: str, new: str, why: str, *tests: str) -> Fault:
    return Fault(name=f"second-step-{name}", path=_PATH, old=old, new=new, tests=tests, why=why)


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
        "with-other-values-in-a-buffer",
        "        return [*map(attributes_of, modules), values, function, host_random_state()]\n",
        "        return [*map(attributes_of, modules), function, host_random_state()]\n",
        "a model that counts in a buffer runs its second forward as the first one",
        f"{_OTHERWISE}[a buffer]",
    ),
    _fault(
        "with-another-state-of-the-loss",
        "        return [*map(attributes_of, modules), values, function, host_random_state()]\n",
        "        return [*map(attributes_of, modules), values, host_random_state()]\n",
        "a loss function that counts its calls is taken for one that does not",
        f"{_OTHERWISE}[a number of the loss]",
    ),
    _fault(
        "with-other-random-numbers",
        "        return [*map(attributes_of, modules), values, function, host_random_state()]\n",
        "        return [*map(attributes_of, modules), values, function]\n",
        "a forward that draws random numbers on the host is taken for one that does not",
        f"{_OTHERWISE}[random numbers of the host]",
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
)
