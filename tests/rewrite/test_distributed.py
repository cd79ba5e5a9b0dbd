"""Two processes train one model by DDP or FSDP2: gradients are the mean of both, or the step is refused."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import planner
import planner.space.search_space
from planner import rewrite
from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation, ChunkedLoss, OptimizerKernel, StepInBackward
from planner.plan_types.recompute_decisions import Checkpoint
from tests.support.training import plan_for, seeded

pytestmark = pytest.mark.slow

UNEVEN = Accumulation(micro_batch_size=4, micro_batches=2)
"""Splits batches of 6 samples into 4 and 2."""
BLOCKS = Checkpoint(modules=("first", "second"))
CHUNKS = ChunkedLoss(module="head", chunks=3)


class Language(nn.Module):
    """A language model in double with a block that is called twice, and optionally a weight that is never used."""

    def __init__(self, sparse: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8, sparse=sparse)
        self.first, self.second = nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12)
        if unused:
            self.unused = nn.Linear(2, 2)
        self.double()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.second(self.first(self.second(self.embedding(ids)))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def batch_of(rank: int, samples: int = 6) -> dict[str, torch.Tensor]:
    """The batch of a process. Its samples have different numbers of labels that are not ignored."""
    ids = torch.arange(5 * samples).view(samples, 5) * (rank + 3) % 12
    skipped = torch.arange(5) > (torch.arange(samples) + rank).unsqueeze(1) % 5
    return {"ids": ids, "labels": ids.masked_fill(skipped, -100)}


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def expected(sizes: tuple[int, int] = (6, 6), **options) -> dict[str, torch.Tensor]:
    """Mean over the processes of the gradient of the whole batch, by the original model."""
    found: dict[str, torch.Tensor] = {}
    for rank, samples in enumerate(sizes):
        model = seeded(Language, **options)
        model(**batch_of(rank, samples))["loss"].backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, 0.0) + parameter.grad.to_dense() / 2
    return found


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.to_dense().clone()


def off_by(step: Callable[[], Any], model: nn.Module, optimizer, wanted: dict[str, torch.Tensor]) -> float:
    """Largest relative error of the gradients that the optimizer gets."""
    shown: dict[str, torch.Tensor] = {}

    def note(*_: object) -> None:
        shown.update({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})

    handle = optimizer.register_step_pre_hook(note)
    step()
    handle.remove()
    assert shown.keys() == wanted.keys()
    return max(((shown[name] - value).abs().max() / value.abs().max()).item() for name, value in wanted.items())


def applied(*decisions, **options):
    model = seeded(Language, **options)
    return rewrite.apply(plan_for(model, batch_of(0), *decisions), model, sgd)


def through(rank: int, *decisions, sizes: tuple[int, int] = (6, 6), ddp: dict | None = None, **options) -> float:
    """The rewritten step with the wrapper must reduce gradients once."""
    result = applied(*decisions, **options)
    wrapper, asked = DistributedDataParallel(result.module, **(ddp or {})), []
    if not options.get("sparse"):

        def count(_, bucket):
            asked.append(bucket.is_last())
            work = distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        wrapper.register_comm_hook(None, count)
    result.step.wrap_with(wrapper)
    batch = batch_of(rank, sizes[rank])
    wanted = expected(sizes, **options)
    found = off_by(lambda: result.step(batch), result.module, result.optimizer, wanted)
    assert options.get("sparse") or asked == [True]
    return found


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for part in (model.first, model.head, model):
        fully_shard(part, mesh=mesh)


def sharded(rank: int, *decisions) -> float:
    """The plan is applied to a model that FSDP2 has sharded."""
    model = seeded(Language)
    plan = plan_for(model, batch_of(0), *decisions)
    shard(model)
    result = rewrite.apply(plan, model, sgd)
    result.step.wrap_with(model)
    return off_by(lambda: result.step(batch_of(rank)), model, result.optimizer, expected())


def sharded_afterwards(rank: int) -> None:
    result = applied(BLOCKS)
    shard(result.module)
    result.step.wrap_with(result.module)
    result.step(batch_of(rank))


def own_loop(rank: int, *decisions) -> float:
    """A training loop of the user around the rewritten module."""
    result = applied(*decisions)
    wrapper = DistributedDataParallel(result.module)

    def step() -> None:
        wrapper(**batch_of(rank))["loss"].backward()
        result.optimizer.step()

    return off_by(step, result.module, result.optimizer, expected())


def emitted(rank: int, *decisions) -> float:
    """An emitted file gets the wrapper as its model, and reduces gradients with each micro-batch."""
    file: dict[str, Any] = {}
    plan = plan_for(seeded(Language), batch_of(0), *decisions, optimizer="sgd")
    exec(compile(rewrite.source(plan), "train_step.py", "exec"), file)
    model = file["rewrite"](seeded(Language))
    wrapper, optimizer = DistributedDataParallel(model), sgd(model.parameters())
    return off_by(lambda: file["training_step"](wrapper, optimizer, batch_of(rank)), model, optimizer, expected())


CASES: dict[str, Callable[[int], float]] = {
    "without decisions": lambda rank: through(rank),
    "checkpoints": lambda rank: through(rank, BLOCKS),
    "loss in chunks": lambda rank: through(rank, CHUNKS),
    "micro-batches": lambda rank: through(rank, UNEVEN),
    "all of them": lambda rank: through(rank, UNEVEN, BLOCKS, CHUNKS),
    "a smaller batch in one process, in fewer parts": lambda rank: through(rank, UNEVEN, sizes=(6, 3)),
    "an unused weight": lambda rank: through(
        rank, UNEVEN, BLOCKS, CHUNKS, unused=True, ddp={"find_unused_parameters": True}
    ),
    "sparse": lambda rank: through(rank, UNEVEN, sparse=True),
    "a loop of one's own": lambda rank: own_loop(rank, BLOCKS, CHUNKS),
    "FSDP2": lambda rank: sharded(rank),
    "FSDP2 with checkpoints": lambda rank: sharded(rank, BLOCKS),
    "FSDP2 with micro-batches and checkpoints": lambda rank: sharded(rank, UNEVEN, BLOCKS),
    "an emitted file": lambda rank: emitted(rank, UNEVEN, BLOCKS, CHUNKS),
}

REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "a step through no wrapper": (
        lambda rank: applied(UNEVEN).step(batch_of(rank)),
        "DecisionError: several processes train here, and this step would train the model of each by its own gradients",
    ),
    "a wrapper of another model": (
        lambda rank: applied().step.wrap_with(DistributedDataParallel(seeded(Language))),
        "DecisionError: this DistributedDataParallel does not wrap the rewritten Language",
    ),
    "a step in backward": (
        lambda rank: (result := applied(StepInBackward())).step.wrap_with(DistributedDataParallel(result.module)),
        "DecisionError: step-in-backward uses each gradient before DistributedDataParallel has added up those of all",
    ),
    "a step in backward of a sharded model": (
        lambda rank: sharded(rank, StepInBackward()),
        "DecisionError: step-in-backward would update parameters before their gradients are summed over the processes",
    ),
    "a fused kernel of SGD for a sharded model": (
        lambda rank: sharded(rank, OptimizerKernel(kernel="fused")),
        "DecisionError: optimizer-kernel fused cannot be set: the fused kernel of SGD does not take sharded parameters",
    ),
    "FSDP2 after the plan": (
        sharded_afterwards,
        "DecisionError: 7 parameters of FSDPLanguage were replaced after the plan was applied, 'embedding.weight'",
    ),
    "a step in backward from a file": (
        lambda rank: emitted(rank, StepInBackward()),
        "RuntimeError: step-in-backward would update parameters before their gradients are summed over the processes",
    ),
}


def outcome_on(case: Callable[[int], Any], rank: int) -> Any:
    try:
        return case(rank)
    except Exception as error:  # compared by the test that asks for it
        return f"{type(error).__name__}: {error}"


def train(rank: int, folder: str) -> None:
    """Runs one of two processes, and writes the result of each case to a file."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=100),
    )  # fmt: skip
    cases = CASES | {name: case for name, (case, _) in REFUSED.items()}
    found = {name: outcome_on(case, rank) for name, case in cases.items()}
    alone = applied()
    alone.step.wrap_with(alone.module)
    alone.step(batch_of(rank))
    weights = [torch.empty_like(alone.module.head.weight) for _ in range(2)]
    distributed.all_gather(weights, alone.module.head.weight.detach())
    found["by itself"] = not torch.equal(*weights)
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # threads that FSDP2 leaves behind may abort the process when it ends


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(train, args=(str(folder),), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thorough_after(1)
def test_gradients_are_the_mean_of_those_of_the_whole_batches(case, found):
    for one in found:
        assert isinstance(one[case], float), one[case]
        assert one[case] < 1e-12


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_train_apart_is_refused_by_name(case, found):
    for one in found:
        assert str(one[case]).startswith(REFUSED[case][1])


def test_each_may_train_alone_where_that_is_said(found):
    assert [one["by itself"] for one in found] == [True, True]


def test_among_several_processes_no_step_in_backward_is_planned(monkeypatch):
    monkeypatch.setattr(planner.space.search_space, "several_processes", lambda: True)
    with pytest.raises(DecisionError, match="step-in-backward is forced, but gradients of several processes are added"):
        planner.plan(seeded(Language), batch_of(0), vram="1GiB", gpu="bare", force=("step-in-backward",))
