"""Real processes that accelerate prepares by the emitted config, compared with the planned step of one rank."""

from __future__ import annotations

import ast
import dataclasses

import accelerate
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from planner import pipeline, profiles
from planner.checkpointed_ways import with_checkpointed
from planner.cli.training_lines import training_lines
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decision_base import micro_batches_of
from planner.plan_types.decisions import Accumulation, Decision, ShardedPrecision
from planner.plan_types.plan import Plan
from planner.recompute.units import whole_modules
from planner.recording.recorder import Recorder
from planner.recording.rehearsal import record_steps
from planner.recording.step_graph import StepGraph
from planner.rewrite.trainer.on_cards import accelerate_config
from planner.space.accelerate_units import blocks_of
from planner.space.sharding import Cards, shardings
from planner.workload.optimizer_choice import for_copies
from tests.support.accelerate_ranks import in_processes, launcher_environment
from tests.support.rank_truth import RankCase, events, rehearsal, until_gloo_lets_go
from tests.support.truth import LANGUAGE, STEPS, Case, foreach, hugging_face
from tests.support.truth import rehearsal as one_process

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

LLAMA = hugging_face(
    "llama", "LlamaForCausalLM", **{**LANGUAGE, "hidden_size": 64, "num_hidden_layers": 3}, num_key_value_heads=2
)
TIED = hugging_face(
    "llama", "LlamaForCausalLM", **{**LANGUAGE, "hidden_size": 64, "num_hidden_layers": 2}, num_key_value_heads=2,
    tie_word_embeddings=True,
)  # fmt: skip
LAYERS = ("model.layers.0", "model.layers.1", "model.layers.2")
IN_TWO = Accumulation(micro_batch_size=1, micro_batches=2)
BF16 = ShardedPrecision(reduce_dtype="bf16", without_autocast=True)


class Layers(torch.nn.Module):
    """Layers whose kernels are the same on each device, with a loss in the output as transformers' models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layers(values)
        return {"loss": torch.nn.functional.mse_loss(output, labels), "output": output}


def layers():
    values = torch.randn(4, 64)
    return Layers(), {"values": values, "labels": values}, None


ANYTHING = parse_constraints(fidelity="rounded", force=(), forbid=(), only=None, max_slowdown=None, margin=None)
SMALLEST_BYTES = 256
"""Smaller storages are not compared. Our step weighs losses by numbers of labels, which accelerate does not do."""


def planned(build, way: str, *extra: Decision, is_checkpointed: bool = False) -> tuple[RankCase, Plan]:
    """Returns the step of two ranks, and the plan of it."""
    case = Case(build=build, optimizer=foreach)
    work = case.workload()
    (shard,) = shardings(work.model, Cards(count=2, way=way, prepared_by="accelerate"))
    recomputed = (whole_modules(blocks_of(work.model, shard.classes)),) if is_checkpointed else ()
    decisions = (*extra, shard, *recomputed)
    divided = dataclasses.replace(work, sharding=(shard,))
    plan = pipeline.plan_workload(divided, profiles.bare(), vram_bytes=None, constraints=ANYTHING)
    step = dataclasses.replace(case, decisions=decisions)
    return RankCase(step=step, cards=2), dataclasses.replace(plan, decisions=decisions)


CASES = {
    "FSDP2": lambda: planned(LLAMA, "fsdp"),
    "FSDP2, bf16": lambda: planned(LLAMA, "fsdp", BF16),
    "FSDP2, bf16, kept": lambda: planned(LLAMA, "zero2", BF16),
    "FSDP2, bf16, checkpointed": lambda: planned(LLAMA, "fsdp", BF16, is_checkpointed=True),
    "FSDP2, bf16, kept, checkpointed": lambda: planned(LLAMA, "zero2", BF16, is_checkpointed=True),
    "FSDP2, bf16, tied": lambda: planned(TIED, "fsdp", BF16),
    "FSDP2, bf16, accumulation": lambda: planned(LLAMA, "fsdp", BF16, IN_TWO),
}
COPIES = {
    "DDP": lambda: planned(layers, "ddp"),
    "DDP, accumulation": lambda: planned(layers, "ddp", Accumulation(micro_batch_size=2, micro_batches=2)),
}


def prepared(case: RankCase, plan: Plan) -> list[tuple[StepGraph, list[str], list[str]]]:
    """Returns for each rank: the record of two steps, the modules with FSDP's parameters, and those checkpointed."""
    work = case.step.workload()
    optimizers = for_copies(work.optimizer, work.model)

    def run(accelerator) -> tuple[StepGraph, list[str], list[str]]:
        found: list[list[str]] = []

        def prepare(model: torch.nn.Module):
            model, optimizer = accelerator.prepare(model, optimizers(model)(model.parameters()))
            modules = dict(model.named_modules())
            sharded = [name for name, module in modules.items() if isinstance(module, FSDPModule)]
            with_parameters = [name for name in sharded if modules[name]._get_fsdp_state()._fsdp_param_group]
            inner = "._checkpoint_wrapped_module"
            found.append([name.removesuffix(inner) for name in with_parameters])
            found.append([name.removesuffix(inner) for name in modules if name.endswith(inner)])

            def step(batch):
                for part in split_batch(batch, work.batch_size // micro_batches_of(plan.decisions)):
                    with accelerator.accumulate(model):
                        accelerator.backward(model(**part)["loss"])
                        optimizer.step()
                        optimizer.zero_grad()

            return step, (optimizer.optimizer,)

        with torch.autograd.set_multithreading_enabled(False), until_gloo_lets_go():
            recorder = Recorder("cpu", virtual=False, what_if=False, in_place=None)
            graph = record_steps(
                recorder, work.model, work.batch, prepare, steps=STEPS, primed=False,
                micro_batch_sizes=(work.batch_size,),
            )  # fmt: skip
        return graph, *found

    environment, arguments = launcher_environment(accelerate_config(plan)), accelerator_arguments(plan)
    return in_processes(environment, case.cards, run, **arguments)


def split_batch(batch: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    parts = zip(*(tensor.split(size) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def accelerator_arguments(plan: Plan) -> dict[str, object]:
    """Returns the arguments of `Accelerator` in the lines that the user pastes."""
    named = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, optimizer="adamw"))
    (call,) = (
        node
        for node in ast.walk(ast.parse(training_lines(named, "accelerate", None)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "accelerate.Accelerator"
    )
    return {argument.arg: eval(ast.unparse(argument.value), {"accelerate": accelerate}) for argument in call.keywords}


def large(graph: StepGraph) -> list[tuple[int, str]]:
    return [event for event in events(graph) if abs(event[0]) >= SMALLEST_BYTES]


@pytest.mark.parametrize("name", CASES)
def test_accelerate_trains_the_planned_step(name):
    case, plan = CASES[name]()
    shard = next(decision for decision in plan.decisions if decision.cards > 1)
    recomputed = [path for d in plan.decisions if d.disables_kv_cache for path in d.modules]
    for rank, (graph, sharded, checkpointed) in enumerate(prepared(case, plan)):
        assert sorted(sharded) == sorted((*shard.units, *shard.tail))
        assert sorted(checkpointed) == sorted(recomputed)
        assert large(graph) == large(rehearsal(case, rank))


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_model_take_the_planned_memory(name):
    """Here the device of the real processes is the host, where the reducer's indices are: they are not compared."""
    case, plan = COPIES[name]()
    for rank, (graph, *_) in enumerate(prepared(case, plan)):
        assert of_floats(graph) == of_floats(rehearsal(case, rank, "vgpu"))


def of_floats(graph: StepGraph) -> list[tuple[int, str]]:
    return large(dataclasses.replace(graph, storages=[s for s in graph.storages if s.dtype == "float32"]))


def test_layers_that_transformers_recomputes_take_the_memory_of_checkpointed_modules():
    def by_transformers():
        model, *others = LLAMA()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model, *others

    theirs = Case(build=by_transformers, optimizer=foreach)
    work = theirs.workload()
    divided = dataclasses.replace(
        work, sharding=shardings(work.model, Cards(count=2, way="ddp", prepared_by="accelerate"))
    )
    _, checkpointed = with_checkpointed([divided], profiles.bare(), None)
    ours = Case(build=LLAMA, optimizer=foreach, decisions=checkpointed.sharding[1:])
    assert ours.decisions[0].modules == LAYERS
    assert large(one_process(theirs)) == large(one_process(ours))


def test_another_plan_would_be_noticed():
    case, plan = CASES["FSDP2, bf16, checkpointed"]()
    graph, *_ = prepared(case, plan)[0]
    for other in ("FSDP2, bf16, kept, checkpointed", "FSDP2, bf16"):
        assert large(graph) != large(rehearsal(CASES[other]()[0], 0))
