"""One rank of several that train together: really, among processes that talk by gloo, and rehearsed."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import gc
import os
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from planner.recording.recorder import Recorder
from planner.recording.rehearsal import make_virtual, record_steps
from planner.recording.step_graph import StepGraph
from planner.recording.virtual_batch import learn_batch, virtual_batch
from planner.rewrite.application import apply_decisions
from planner.virtual_gpu import backend, ranks
from planner.virtual_gpu.backend import VirtualGpuMode
from planner.virtual_gpu.forked_process import run_in_child
from planner.virtual_gpu.library_patches import let_libraries_take_fakes_for_real
from planner.workload.call_convention import Parallelize
from planner.workload.optimizer_choice import Optimizers, for_copies
from planner.workload.workload import Workload, tensors_of
from tests.support.ranks import in_group
from tests.support.truth import STEPS, Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankCase:
    """A step that several ranks take together."""

    step: Case
    cards: int
    """Number of processes."""
    parallelize: Parallelize | None = None
    """The function that divides the model; None if the planner does it."""


def truth(case: RankCase) -> list[StepGraph]:
    """Returns the record of two steps of each rank, which really run in processes of their own."""
    work = case.step.workload()
    optimizers = for_copies(work.optimizer, work.model)

    def run(rank: int) -> StepGraph:
        alone()
        with torch.autograd.set_multithreading_enabled(False), until_gloo_lets_go():
            graph = _recorded(case, work, work.batch, optimizers)
        dist.barrier()
        return graph

    return in_group(case.cards, run)


def rehearsal(case: RankCase, rank: int, device: str = "cpu") -> StepGraph:
    """Returns the record of the same two steps of one rank, rehearsed on fake tensors.

    Args:
        device: 'cpu', where PyTorch chooses the same kernels as in `truth`; or the virtual GPU.
    """
    work = case.step.workload()
    optimizers = for_copies(work.optimizer, work.model)

    def run() -> StepGraph:
        alone()
        mode = VirtualGpuMode()
        if device != "cpu":
            backend.install(backend.Target(compute_capability=(8, 0)))
        let_libraries_take_fakes_for_real(device)
        ranks.join(device, cards=case.cards, rank=rank)
        with torch.autograd.set_multithreading_enabled(False), mode:
            make_virtual(work.model, device)
            batch = virtual_batch(work.batch, work.batch_size, work.batch_size, device)
            return _recorded(case, work, batch, optimizers, device=device)

    return run_in_child(run)


@contextlib.contextmanager
def until_gloo_lets_go() -> Iterator[None]:
    """Context in which a collective that blocks also waits until gloo's thread no longer holds its tensors.

    The thread lets go of them a moment after it has woken the waiting process, at a time that differs from run to run.

    Raises:
        TimeoutError: gloo's thread did not let go of a tensor. Collectives with `async_op=True` are not supported.
    """

    def longer(call: Callable) -> Callable:
        def collective(*arguments: object, **options: object) -> object:
            given = [value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor)]
            holders = [_holders(tensor) for tensor in given]
            result = call(*arguments, **options)
            if not _has_let_go(given, holders, seconds=20.0):
                raise TimeoutError(f"gloo still holds one of {[tuple(tensor.shape) for tensor in given]}")
            return result

        return collective

    def longer_wait(tensor: torch.Tensor) -> torch.Tensor:
        result = wait_tensor(tensor)
        _has_let_go([tensor], [1], seconds=0.2)  # a tensor that the model holds elsewhere has more holders
        return result

    wait_tensor = _functional_collectives.wait_tensor
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(_functional_collectives, "wait_tensor", longer_wait))
        for name in ("all_reduce", "all_gather_single", "reduce_scatter_single"):  # those that FSDP2 calls
            stack.enter_context(mock.patch.object(dist, name, longer(getattr(dist, name))))
        yield


def _has_let_go(tensors: list[torch.Tensor], holders: list[int], seconds: float) -> bool:
    """Waits until each tensor has no more than this number of holders, and returns whether that happened in time."""
    end = time.monotonic() + seconds
    while any(_holders(tensor) > count for tensor, count in zip(tensors, holders, strict=True)):
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def _holders(tensor: torch.Tensor) -> int:
    """Returns how often a tensor and its storage are referred to; gloo has references, and gathers into views."""
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # one is the storage object of Python
    return max(tensor._use_count(), storage)


def alone() -> None:
    """Makes a child process of a test deterministic: one thread, no garbage collection."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    gc.freeze()
    gc.disable()


def _recorded(
    case: RankCase,
    work: Workload,
    batch: object,
    optimizers: Callable[[torch.nn.Module], Optimizers],
    *,
    device: str | None = None,
) -> StepGraph:
    """Records two steps: rehearsed ones on the fake tensors of a device; real ones on the CPU if it is None."""

    def prepare(model: torch.nn.Module):
        rewritten = apply_decisions(
            case.step.decisions,
            model,
            optimizer=optimizers(model),
            calling=work.calling,
            batch_size=work.batch_size,
            loss_fn=work.loss_fn,
            max_grad_norm=case.step.max_grad_norm,
            parallelize=case.parallelize,
        )
        rewritten.step.observers = ()
        return rewritten.step, rewritten.optimizers

    recorder = Recorder(device or "cpu", virtual=device is not None, what_if=False, in_place=None)
    if device is not None:
        recorder.data_dependence.install("AutogradCPU" if device == "cpu" else "AutogradPrivateUse1")
        for (path, fake), (_, given) in zip(tensors_of(batch), tensors_of(work.batch), strict=True):
            learn_batch(recorder.data_dependence.known, path, fake, given)
    return record_steps(
        recorder, work.model, batch, prepare, steps=STEPS, primed=False, micro_batch_sizes=(work.batch_size,)
    )


def events(graph: StepGraph) -> list[tuple[int, str]]:
    """Returns the births and deaths of storages in the steps, in order: bytes (negative for a death) and phase.

    A view of memory that no op has made is left out: gloo copies the input of a reduce-scatter to memory of its own.
    """
    found = []
    for index, storage in enumerate(graph.storages):
        first = None if storage.op is None else graph.ops[storage.op]
        if first is not None and first.is_view and index in first.inputs and "lift_fresh" not in first.name:
            continue
        for birth, death in storage.lives:
            found.append((birth, storage.size_bytes))
            if death < graph.ticks:
                found.append((death, -storage.size_bytes))
    ticks = [op.tick for op in graph.ops]
    return [
        (change, str(graph.ops[max(bisect.bisect_right(ticks, tick) - 1, 0)].phase))
        for tick, change in sorted(found)
        if tick > graph.step_starts[0]
    ]
