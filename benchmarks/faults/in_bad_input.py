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
)
