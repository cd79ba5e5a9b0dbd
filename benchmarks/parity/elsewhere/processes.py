"""Two processes train one model with DistributedDataParallel or FSDP2, each on batches of its own."""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib
import pickle
import tempfile
import unittest.mock as mock
from collections.abc import Callable, Iterator

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.parity.case import Case, seed
from benchmarks.parity.elsewhere.sample import NAMES, Job, jobs, outcome_of
from benchmarks.parity.judge import ERROR, Outcome, never
from benchmarks.parity.plain import PlainLoop, Trained, Training
from planner import rewrite
from planner.rewrite.rules import offload

Wrap = Callable[[torch.nn.Module], torch.nn.Module]

WAYS = ("DDP", "FSDP2, then apply", "apply, then FSDP2")
PROCESSES = 2


def outcomes() -> Iterator[Outcome]:
    """Yields the outcomes of all ways. If the outcomes of the two processes differ, the outcome is an error."""
    sample = list(jobs(NAMES, 3))
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_train_all, args=(way, sample, folder), nprocs=PROCESSES)
            found = [pickle.loads(pathlib.Path(folder, str(rank)).read_bytes()) for rank in range(PROCESSES)]
        for one, other in zip(*found, strict=True):
            same = one.result == other.result
            yield one if same else dataclasses.replace(one, result=ERROR, note=f"the other process: {other}")


def _train_all(rank: int, way: str, sample: list[Job], folder: str) -> None:
    """Train in one of the processes, and write the outcomes to a file."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    found = [_outcome(job, way, rank) for job in sample]
    pathlib.Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    distributed.barrier()
    os._exit(0)  # threads that FSDP2 leaves behind may abort the process when it ends


def _outcome(job: Job, way: str, rank: int) -> Outcome:
    case = dataclasses.replace(job.case, batch=lambda step: _batch(job.case, step, rank))
    wrap: Wrap = DistributedDataParallel if way == "DDP" else _sharded
    dtype = job.technique.dtype_for(case)

    def train() -> Trained:
        training = Training(case, dtype)
        plan = job.offer.plan_with(job.technique, training.model)
        if way == "FSDP2, then apply":
            wrap(training.model)
        with mock.patch.object(offload, "is_on_host", never):
            result = rewrite.apply(
                plan, training.model, case.optimizer(training.model), loss_fn=training.loss_fn,
                max_grad_norm=None if job.technique.steps_in_backward else case.clip, scheduler=case.scheduler,
                loss_weight=case.terms if job.technique.states_weight else None,
            )  # fmt: skip
            result.step.wrap_with(result.module if way == "FSDP2, then apply" else wrap(result.module))
            training.run(result.step, training.batches)
        return _whole(training, result.optimizer)

    def truth() -> Trained:
        loop = PlainLoop(
            case, dtype, autocast=job.technique.autocast, size=None, clips=not job.technique.steps_in_backward,
            wrap=wrap,
        )  # fmt: skip
        loop.training.run(loop.step, loop.training.batches)
        return _whole(loop.training, loop.optimizer)

    return outcome_of(job, way, train, truth)


def _batch(case: Case, step: int, rank: int) -> object:
    seed(100 + step + 1000 * rank)
    return case.batch(step)


def _sharded(model: torch.nn.Module) -> torch.nn.Module:
    """Shard the model in place: its children, unless they are lists or share parameters, and then the model itself."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    shared = {id(p) for _, p in model.named_parameters(remove_duplicate=False)}
    is_tied = len(shared) < len(list(model.named_parameters(remove_duplicate=False)))
    for child in () if is_tied else model.children():
        if not isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)) and any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _whole(training: Training, optimizer: torch.optim.Optimizer) -> Trained:
    """Returns what was trained, with sharded tensors put together."""
    found = training.trained(optimizer)
    return dataclasses.replace(
        found,
        parameters={name: _full(tensor) for name, tensor in found.parameters.items()},
        others={name: _full(tensor) for name, tensor in found.others.items()},
    )


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
