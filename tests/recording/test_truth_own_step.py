"""Steps of the user's own, rehearsed and really run on the CPU: the same ops, storages, births and deaths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from planner.recording.step_graph import Category
from tests.support.loops import LOOPS, Loop
from tests.support.truth import Case, rehearsal, truth

pytestmark = pytest.mark.slow


def case_of(loop: Loop) -> Case:
    torch.manual_seed(0)
    model = loop.model()
    return Case(build=lambda: (model, loop.batch(8), None), optimizer=loop.optimizer_of(model), step=loop.step)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.thorough_after(3)
def test_a_rehearsed_loop_is_what_really_happens_byte_by_byte(name):
    real, rehearsed = truth(case_of(LOOPS[name])), rehearsal(case_of(LOOPS[name]))
    assert [(op.name, op.phase, op.module, op.shapes) for op in real.ops] == [
        (op.name, op.phase, op.module, op.shapes) for op in rehearsed.ops
    ]
    assert real.storages == rehearsed.storages
    assert real.calls == rehearsed.calls
    assert np.array_equal(real.live_bytes(), rehearsed.live_bytes())
    model = LOOPS[name].model()
    assert rehearsed.bytes_of(Category.PARAMETER) == sum(parameter.nbytes for parameter in model.parameters())
