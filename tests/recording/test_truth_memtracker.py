"""The rehearsal against PyTorch's own tracker of fake memory, on the same virtual GPU: the peak of every category."""

from __future__ import annotations

import gc
from collections import Counter
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools.mem_tracker import MemTracker

from planner.errors import PlannerError
from planner.plan_types.decisions import Precision
from planner.plan_types.recompute_decisions import Checkpoint
from planner.recording.rehearsal import make_virtual, on_virtual_gpu, record_steps
from planner.recording.step_graph import Category, Phase, StepGraph, Storage
from planner.recording.virtual_batch import virtual_batch
from planner.rewrite.application import apply_decisions
from planner.virtual_gpu import backend, library_patches
from planner.virtual_gpu.forked_process import run_in_child
from planner.workload.workload import Workload, tensors_of
from tests.support.truth import (
    LANGUAGE,
    Case,
    Checkpointed,
    convolutions_with_batch_norm,
    deep,
    hugging_face,
    unet,
    with_loss,
)
from tests.support.workloads import CARD

pytestmark = pytest.mark.slow

STEPS = 2


def squares(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    """The mean square by hand: the tracker does not know where the one number of `mse_loss` lies (see below)."""
    return (output - batch[-1]).square().mean()


def by_hand(build):
    """The same model and batch, with `squares` as the loss."""
    return lambda: (*build()[:2], squares)


LONG = {"batch_size": 8, "seq_len": 32}
BERT = hugging_face("bert", "BertForMaskedLM", **LONG, **LANGUAGE)
CASES = {
    "bert": Case(build=BERT),
    "bert, bf16": Case(build=BERT, decisions=(Precision(dtype="bf16"),)),
    "gpt2": Case(build=hugging_face("gpt2", "GPT2LMHeadModel", **LONG, n_embd=32, n_layer=2, n_head=4, vocab_size=60)),
    "llama": Case(build=hugging_face("llama", "LlamaForCausalLM", **LONG, **LANGUAGE, num_key_value_heads=2)),
    "u-net": Case(build=by_hand(unet)),
    "convolutions with batch norm": Case(
        build=by_hand(with_loss(convolutions_with_batch_norm, 4, 3, 16, 16)), optimizer="sgd"
    ),
    "multilayer perceptron": Case(build=by_hand(with_loss(deep, 256, 24))),
    "checkpointed": Case(build=by_hand(with_loss(deep, 256, 24)), decisions=(Checkpoint(modules=("0", "1")),)),
    "checkpoint, not reentrant": Case(build=by_hand(with_loss(lambda: Checkpointed(use_reentrant=False), 256, 24))),
}

HELD_BY_THE_TRACKER = {"bert": 8 * 32 * 32 * 4, "bert, bf16": 8 * 32 * 32 * 2, "u-net": 258_944}
"""Bytes of gradients that the tracker's own hooks keep until all gradients of a module's inputs are there."""


class Peaks(MemTracker):
    """Keeps the largest value of every category, not only those at the largest total."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: Counter[str] = Counter()

    def _update_peak_stats(self, peak_state) -> None:
        super()._update_peak_stats(peak_state)
        for device, snapshot in self._curr_mem_snap.items():
            if device.type == backend.NAME:
                now = {getattr(key, "name", key): value for key, value in snapshot.items()}
                self.largest |= Counter(_grouped(now))


def _grouped(now: dict[str, int]) -> dict[str, int]:
    """A gradient is a temporary to the one until a hook sees it, a gradient to the other from birth: also their sum."""
    return {
        "parameters": now.get("PARAM", 0) + now.get("BUFFER", 0),
        "gradients": now.get("GRAD", 0),
        "gradients and temporaries": now.get("GRAD", 0) + now.get("TEMP", 0),
        "activations": now.get("ACT", 0),
        "optimizer": now.get("OPT", 0),
        "inputs": now.get("OTH", 0),
        "total": now["Total"],
    }


def tracked(case: Case, work: Workload) -> Counter[str]:
    """Two steps on the virtual GPU under PyTorch's tracker."""

    def run() -> Counter[str]:
        gc.freeze()
        gc.disable()
        backend.install(backend.Target(compute_capability=CARD.compute_capability))
        mode = backend.VirtualGpuMode()
        library_patches.let_libraries_take_fakes_for_real()
        with torch.autograd.set_multithreading_enabled(False), mode:
            make_virtual(work.model, backend.NAME)
            batch = virtual_batch(work.batch, work.batch_size, work.batch_size, backend.NAME)
            rewritten = apply_decisions(
                case.decisions,
                work.model,
                optimizer=work.optimizer,
                calling=work.calling,
                batch_size=work.batch_size,
                loss_fn=work.loss_fn,
            )
            tracker = Peaks()
            tracker.track_external(work.model, *(tensor for _, tensor in tensors_of(batch)))
            with tracker:
                for _ in range(STEPS):
                    rewritten.step(batch)
                    tracker.reset_mod_stats()
                    gc.collect()
        return tracker.largest

    return run_in_child(run)


def let_transformers_build_masks_in_full() -> None:
    """As it does for fake tensors, under the tracker too; a rehearsal keeps it from that. In a child."""
    import transformers.utils.import_utils as utils

    utils.is_fake_tensor = lambda tensor: isinstance(tensor, FakeTensor)


def rehearsed(case: Case, work: Workload) -> StepGraph:
    """Two steps, with gradients added out of place: so it is under the tracker, as under any dispatch mode."""

    def prepare(model: torch.nn.Module):
        rewritten = apply_decisions(
            case.decisions,
            model,
            optimizer=work.optimizer,
            calling=work.calling,
            batch_size=work.batch_size,
            loss_fn=work.loss_fn,
        )
        return rewritten.step, (rewritten.optimizer,)

    def refuse(error: PlannerError) -> NoReturn:
        raise error

    def run() -> StepGraph:
        target = backend.Target(compute_capability=CARD.compute_capability)
        with on_virtual_gpu(target, refuse, what_if=False) as recorder:
            recorder.in_place = None
            let_transformers_build_masks_in_full()
            make_virtual(work.model, backend.NAME, recorder.data_dependence.known)
            batch = virtual_batch(work.batch, work.batch_size, work.batch_size, backend.NAME)
            sizes = (work.batch_size,)
            return record_steps(
                recorder, work.model, batch, prepare, steps=STEPS, primed=False, micro_batch_sizes=sizes
            )

    return run_in_child(run)


def recorded(case: Case, work: Workload) -> Counter[str]:
    graph = rehearsed(case, work)
    curves: dict[str, np.ndarray] = {}
    for storage, spans in zip(graph.storages, graph.spans(), strict=True):
        for key in (_their_name(graph, storage), "Total"):
            curve = curves.setdefault(key, np.zeros(graph.ticks, dtype=np.int64))
            for start, stop in spans:
                curve[start:stop] += storage.size_bytes
    largest: Counter[str] = Counter()
    for tick in range(graph.ops[0].tick, graph.ticks):
        largest |= Counter(_grouped({key: int(curve[tick]) for key, curve in curves.items()}))
    return largest


def _their_name(graph: StepGraph, storage: Storage) -> str:
    """Their category of a storage of ours: by what it is, else by the phase that it was born in."""
    by_category = {
        Category.PARAMETER: "PARAM",
        Category.INPUT: "OTH",
        Category.GRADIENT: "GRAD",
        Category.OPTIMIZER_STATE: "OPT",
    }
    by_phase = {Phase.FORWARD: "ACT", Phase.RECOMPUTE: "ACT", Phase.BACKWARD: "TEMP", Phase.OPTIMIZER: "OPT"}
    return by_category.get(storage.category) or by_phase[graph.ops[storage.op].phase]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thorough_after(2)
def test_the_peak_of_every_category_is_that_of_pytorchs_tracker_to_the_byte(name):
    case = CASES[name]
    work = case.workload()
    theirs = tracked(case, work)
    theirs["gradients and temporaries"] -= HELD_BY_THE_TRACKER.get(name, 0)
    assert recorded(case, work) == theirs


def test_the_tracker_counts_the_mean_of_mse_loss_as_one_number_which_lies_in_the_storage_of_all():
    case = Case(build=with_loss(deep, 256, 24))
    work = case.workload()
    missing = recorded(case, work)["total"] - tracked(case, work)["total"]
    assert missing == 256 * 8 * 4 - 4
