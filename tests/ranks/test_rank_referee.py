"""PyTorch's own FSDPMemTracker as a referee of the recording of one rank.

It tracks a real step on the CPU in a fake process group, without our fakes, patches or recorder. At its peak each of
its kinds of memory has the bytes of our category. One tensor differs: the ranks of the device mesh (an int32 for each
card), which the recorder sees and the tracker does not. They are on the host, and here the device is the host, too.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.plan_types.categories import Category
from planner.rewrite.application import apply_decisions
from planner.virtual_gpu.forked_process import run_in_child
from planner.workload.optimizer_choice import for_copies
from tests.ranks.test_rank_truth import CASES
from tests.support.rank_truth import RankCase, alone, rehearsal

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

RANK_BYTES = 4
KINDS = {
    "parameters": ({Category.PARAMETER}, {"SHARDED_PARAM", "BUFFER"}),
    "unsharded parameters": ({Category.UNSHARDED}, {"UNSHARDED_PARAM"}),
    "gradients": ({Category.GRADIENT}, {"SHARDED_GRAD", "UNSHARDED_GRAD"}),
    "optimizer state": ({Category.OPTIMIZER_STATE}, {"OPT"}),
    "communication": ({Category.COMMUNICATION}, {"ALL_GATHER", "REDUCE_SCATTER"}),
    "inputs": ({Category.INPUT}, {"INP"}),
    "activations and temporaries": (
        {Category.ACTIVATION, Category.LOGITS, Category.AUTOCAST, Category.TEMPORARY},
        {"ACT", "TEMP"},
    ),
}


def tracked(case: RankCase) -> dict[str, int]:
    """Returns the bytes by the tracker's kinds at the peak of the second step, and their 'Total'."""
    work = case.step.workload()
    optimizers = for_copies(work.optimizer, work.model)

    def run() -> dict[str, int]:
        alone()
        dist.init_process_group("fake", rank=0, world_size=case.cards, store=FakeStore())
        with torch.autograd.set_multithreading_enabled(False):
            rewritten = apply_decisions(
                case.step.decisions,
                work.model,
                optimizer=optimizers(work.model),
                calling=work.calling,
                batch_size=work.batch_size,
                loss_fn=work.loss_fn,
            )
            rewritten.step.observers = ()
            (optimizer,) = rewritten.optimizers
            tracker = FSDPMemTracker(work.model, optimizer)
            tracker.track_inputs((work.batch,))
            with tracker:
                rewritten.step(work.batch)
                tracker.reset_mod_stats()
                rewritten.step(work.batch)
            (peak,) = tracker.get_tracker_snapshot("peak").values()
        return {getattr(kind, "name", kind): size for kind, size in peak.items()}

    return run_in_child(run)


def recorded(case: RankCase) -> dict[str, int]:
    """Returns the bytes by our categories at the peak of both steps, and their 'Total'."""
    graph = rehearsal(case, 0)
    sizes = graph.category_bytes(granularity_bytes=1)
    at_peak = sizes[:, int(sizes.sum(axis=0).argmax())]
    return {**dict(zip(Category, map(int, at_peak), strict=True)), "Total": int(at_peak.sum())}


@pytest.mark.parametrize(  # the tracker does not know steps with several micro-batches
    "name", [name for name in CASES if "accumulation" not in name and "reduced once" not in name]
)
def test_the_peak_and_its_kinds_are_those_of_pytorchs_tracker(name):
    theirs, ours = tracked(CASES[name]), recorded(CASES[name])
    mesh_bytes = RANK_BYTES * CASES[name].cards
    assert ours["Total"] - mesh_bytes == theirs["Total"]
    differing = {}
    for kind, (categories, refs) in KINDS.items():
        own = sum(ours[category] for category in categories) - mesh_bytes * (kind == "activations and temporaries")
        other = sum(theirs[ref] for ref in refs)
        if own != other:
            differing[kind] = own - other
    assert differing == {}
