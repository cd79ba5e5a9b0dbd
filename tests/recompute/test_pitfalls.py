"""Modules that must not be run twice are not offered for recompute; their siblings and submodules are."""

from __future__ import annotations

import contextvars
import io
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from rich.console import Console

import planner
from planner import rewrite
from planner.cli.tradeoff_report import render_tradeoff
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.recompute.units import checkpointable, outermost
from planner.recording.saved_tensors import let_checkpoints_get_the_same_inputs
from planner.virtual_gpu.forked_process import run_in_child
from planner.workload.workload import workload
from tests.support.training import differences
from tests.support.workloads import plain, units, what_if

pytestmark = pytest.mark.slow

WIDTH = 16


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).sigmoid()


class FunctionalNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x):
        y = torch.nn.functional.batch_norm(self.linear(x), self.mean, self.variance, training=self.training)
        return y.sigmoid()


class ReassignedBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        y = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y.sigmoid()


class BufferInPlace(ReassignedBuffer):
    def forward(self, x):
        y = self.linear(x)
        self.average.lerp_(y.detach().mean(0), 0.1)
        return y.sigmoid()


class ReassignedAttribute(Plain):
    latest = None

    def forward(self, x):
        y = self.linear(x)
        self.latest = y.detach().mean(0)
        return y.sigmoid()


class Counter(Plain):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class GrowingList(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        return super().forward(x)


class RandomNumber(Plain):
    def forward(self, x):
        return super().forward(x) * random.random()


class NumpyNumber(Plain):
    def forward(self, x):
        return super().forward(x) * float(numpy.random.rand())


class OwnGenerator(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return super().forward(x) * torch.rand(WIDTH, generator=self.generator).to(x.device)


class Around(torch.nn.Module):
    """Changes nothing itself, but holds a module that does."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()
        self.plain = Plain()

    def forward(self, x):
        return self.plain(self.counter(x))


class Dropout(Plain):
    """Draws from torch's own generator, whose state a recompute restores."""

    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.1)


class Normalised(Plain):
    """Has a norm whose statistics a recompute leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(super().forward(x))


STATEFUL = {
    FunctionalNorm: "overwrites a buffer",
    ReassignedBuffer: "changes its buffer 'average'",
    BufferInPlace: "overwrites a buffer",
    ReassignedAttribute: "changes its attribute 'latest'",
    Counter: "changes its attribute 'calls'",
    GrowingList: "changes its attribute 'seen'",
    RandomNumber: "changes Python's random state",
    NumpyNumber: "changes numpy's random state",
    OwnGenerator: "draws from its own random generator",
    Around: "changes its attribute 'calls'",
}
REPEATABLE = (Plain, Dropout, Normalised)


class Net(torch.nn.Module):
    def __init__(self, *kinds: type[torch.nn.Module]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleDict({kind.__name__: kind() for kind in kinds})
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return self.head(x).mean()


@pytest.fixture(scope="module")
def graph():
    return what_if(workload(Net(*STATEFUL, *REPEATABLE), torch.zeros(64, WIDTH)))


@pytest.fixture(scope="module")
def offered(graph):
    return set(units(graph)[0].modules)


@pytest.mark.parametrize("kinds", [(Checkpoint, Replay, Offload), (Checkpoint,), (Replay,)])
def test_modules_that_may_be_checkpointed_are_known_without_the_units(graph, kinds):
    known = checkpointable(graph, kinds, frozenset())
    assert known == units(graph, kinds=kinds)[0].modules and bool(known) == (Checkpoint in kinds)
    if known:
        excluded = {(Checkpoint, known[0]), (Offload, known[-1])}
        assert checkpointable(graph, kinds, excluded) == known[1:]


class Sharing(torch.nn.Module):
    """The second module calls the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH)])
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.ReLU(), self.shared[0]) for _ in range(2))
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x).mean()


def test_modules_that_are_called_by_other_ones_are_not_checkpointed_together_with_them():
    graph = what_if(workload(Sharing(), torch.zeros(64, WIDTH)))
    modules = ("shared.0", "layers.0", "layers.1", "last")
    assert outermost(graph, modules) == ("layers.0", "layers.1", "last")
    assert outermost(graph, modules[:1]) == ("shared.0",)


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_module_that_changes_state_in_its_forward_is_no_unit_but_what_it_holds_is(graph, offered, kind):
    name = f"blocks.{kind.__name__}"
    obstacle = {call.module: call.obstacle for call in graph.calls}
    assert name not in offered
    assert STATEFUL[kind] in obstacle[name]
    inside = f"{name}.plain" if kind is Around else f"{name}.linear"
    assert obstacle[inside] is None
    assert inside in offered


@pytest.mark.parametrize("kind", REPEATABLE)
def test_a_module_whose_forward_can_be_repeated_is_a_unit(offered, kind):
    assert f"blocks.{kind.__name__}" in offered


def test_what_contains_a_module_that_changes_state_is_no_unit_either(graph, offered):
    assert "" not in offered
    assert next(call for call in graph.calls if call.module == "").obstacle is not None


@pytest.mark.parametrize("kind", [FunctionalNorm, ReassignedBuffer, BufferInPlace])
def test_recomputing_a_module_that_changes_its_buffers_would_train_otherwise(kind):
    batches = [(torch.randn(8, WIDTH),) for _ in range(2)]
    assert differences(Net(Plain), Checkpoint(modules=("blocks.Plain",)), batches=batches) == []
    assert differences(Net(kind), Checkpoint(modules=(f"blocks.{kind.__name__}",)), batches=batches) != []


# ---- data of parameters that is replaced --------------------------------------------------------------------------


class Diagonal(torch.nn.Module):
    """Multiplies with a parameter that autograd saves itself, and not a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x * self.weight


class Signs(Plain):
    """Multiplies with the signs of its weights, as BinaryConnect does, and puts the weights back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Diagonal()

    def data(self, weight):
        return weight.sign()

    def forward(self, x):
        weight = self.linear.weight.data
        self.linear.weight.data = self.data(weight)
        y = super().forward(x)
        self.linear.weight.data = weight
        return y


class SignsOfMatrix(Signs):
    __init__ = Plain.__init__


class FrozenSigns(Signs):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(False)


class BufferSigns(Signs):
    def __init__(self) -> None:
        super().__init__()
        del self.linear.weight
        self.linear.register_buffer("weight", torch.randn(WIDTH))


class CachedData(Signs):
    """The other data exists before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cached", torch.randn(WIDTH))

    def data(self, weight):
        return self.cached


class OtherBias(Plain):
    """Backward does not need the bias, but a second run of the linear layer alone would add another one."""

    def forward(self, x):
        bias = self.linear.bias.data
        self.linear.bias.data = bias + 1
        y = super().forward(x)
        self.linear.bias.data = bias
        return y


class Decay(Plain):
    """Does not put the weight back."""

    def forward(self, x):
        self.linear.weight.data = self.linear.weight.data * 0.9
        return super().forward(x)


class SignsBetween(Signs):
    """Puts the weights back in a hook, after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, _: module.exchange(module.linear.weight.data.sign()))
        self.register_forward_hook(lambda module, *_: module.exchange(None))

    def exchange(self, data):
        self.before, self.linear.weight.data = self.linear.weight.data, self.before if data is None else data

    forward = Plain.forward


REPLACING = (Signs, SignsOfMatrix, FrozenSigns, BufferSigns, CachedData, OtherBias, Decay, SignsBetween)


@pytest.mark.parametrize("kind", REPLACING)
def test_a_module_that_replaces_the_data_of_a_parameter_is_no_unit(kind):
    graph = what_if(workload(Net(kind, Plain), torch.zeros(64, WIDTH)))
    offered = set(units(graph, kinds=(Checkpoint,))[0].modules)
    inside = f"blocks.{kind.__name__}.linear"
    assert f"blocks.{kind.__name__}" not in offered or kind is OtherBias
    assert inside not in offered or kind is Decay
    assert {"blocks.Plain", "blocks.Plain.linear"} <= offered


@pytest.mark.parametrize("kind", [Signs, SignsOfMatrix, FrozenSigns, BufferSigns, CachedData])
def test_recomputing_a_module_that_replaces_the_data_of_a_parameter_would_train_otherwise(kind):
    model, batches = Net(Plain, kind), [(torch.randn(8, WIDTH),) for _ in range(2)]
    assert differences(model, Checkpoint(modules=(f"blocks.{kind.__name__}",)), batches=batches) != []


@pytest.mark.parametrize("kind", REPLACING)
def test_replays_and_offloading_read_the_data_that_backward_reads(kind):
    model, batches = Net(Plain, kind, Dropout), [(torch.randn(8, WIDTH),) for _ in range(2)]
    name = f"blocks.{kind.__name__}"
    for decision in (
        Replay(modules=(name,), stretches=((0, 3),), kept=((),)),
        Replay(modules=("",), stretches=((0, 20),), kept=((),)),
        Offload(modules=(name,), inputs_of=(), from_bytes=1),
    ):
        assert differences(model, decision, batches=batches) == [], decision


@pytest.mark.parametrize("kind", [Signs, SignsOfMatrix, FrozenSigns, CachedData, OtherBias])
def test_what_is_promised_for_replaced_data_is_what_the_step_takes(kind):
    work = workload(Net(Plain, kind, Dropout), torch.zeros(64, WIDTH))
    found, curve = units(what_if(work), kinds=(Replay, Offload))
    assert curve.peak(()) == plain(work).live_bytes().max()
    for number in range(len(found.units)):
        decisions = found.decisions((number,))
        assert curve.peak((number,)) == plain(work, decisions).live_bytes().max(), decisions


def test_data_that_the_step_puts_back_before_backward_is_seen():
    def step(model, optimizer, batch):
        weight = model.blocks["Plain"].linear.weight
        data = weight.data
        weight.data = data.sign()
        loss = model(batch)
        weight.data = data
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = Net(Plain, Dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offered = set(units(what_if(workload(model, torch.zeros(64, WIDTH), step=step, optimizer=optimizer)))[0].modules)
    assert "blocks.Dropout" in offered and not {"blocks.Plain", "blocks.Plain.linear"} & offered


# ---- compiled modules --------------------------------------------------------------------------------------------


class PartlyCompiled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.Sequential(Plain(), Plain())
        self.wrapped = torch.compile(torch.nn.Sequential(Plain(), Plain()), backend="eager")
        self.in_place = torch.nn.Sequential(Plain(), Plain())
        self.in_place.compile(backend="eager")
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.in_place(self.wrapped(self.plain(x)))).mean()


def test_a_compiled_module_and_what_runs_inside_of_it_are_no_units():
    found = units(what_if(workload(PartlyCompiled(), torch.zeros(64, WIDTH))))[0]
    assert {name.split(".")[0] for name in found.modules} == {"plain", "head"}
    assert {"plain", "plain.0", "plain.1", "plain.1.linear"} <= set(found.modules)


def test_the_plan_of_a_compiled_model_says_that_it_is_for_the_eager_step():
    layer = torch.nn.Linear(WIDTH, 1)
    options = {"loss_fn": lambda output, batch: output.mean(), "gpu": "bare", "vram": None}
    for model, expected in ((layer, False), (torch.compile(layer, backend="eager"), True)):
        plan = planner.plan(model, torch.randn(2, WIDTH), **options)
        assert any("the step without torch.compile" in note for note in plan.notes) == expected


def test_a_model_that_is_compiled_as_a_whole_has_no_units():
    model = torch.compile(torch.nn.Sequential(Plain(), Plain(), torch.nn.Linear(WIDTH, 1)), backend="eager")
    work = workload(model, (torch.zeros(64, WIDTH), torch.zeros(64, 1)), loss_fn=lambda output, _: output.mean())
    assert units(what_if(work))[0].modules == ()


def test_a_checkpointing_plan_of_a_partly_compiled_model_trains():
    model, batch = PartlyCompiled(), torch.randn(64, WIDTH)
    plan = planner.plan(model, batch, vram="1GiB", gpu="bare", fidelity="exact", force="checkpoint")
    checkpoint = plan.decision(Checkpoint)
    assert checkpoint is not None
    assert all(name.startswith(("plain", "head")) for name in checkpoint.modules)
    assert torch.isfinite(rewrite.apply(plan, model).step(batch))


SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale")


class ReadsContext(torch.nn.Module):
    """Reads a variable that is set while the forward of the model runs, but not while backward recomputes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)

    def forward(self, x):
        scale = SCALE.get()
        return x + self.down(F.gelu(self.up(x))) * scale


class SetsContext(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(ReadsContext() for _ in range(4))

    def forward(self, x):
        token = SCALE.set(0.5)
        for block in self.blocks:
            x = block(x)
        SCALE.reset(token)
        return x.square().mean()


@pytest.fixture(scope="module")
def narrow():
    """A budget in which the step of `SetsContext` does not fit unless tensors are recomputed or offloaded."""
    whole = planner.plan(SetsContext(), {"x": torch.randn(4096, 64)}, vram=None, gpu="bare", optimizer="sgd")
    return whole.peak.total_bytes // 2


def plan_in(narrow_bytes: int, **options):
    forbid = ["accumulation", "mixed-precision", "segment-checkpoint"]
    batch = {"x": torch.randn(4096, 64)}
    return planner.plan(SetsContext(), batch, vram=narrow_bytes, gpu="bare", optimizer="sgd", forbid=forbid, **options)


def test_a_technique_whose_step_cannot_be_rehearsed_is_left_out(narrow):
    found = plan_in(narrow)
    assert found.fits
    assert {decision.kind for decision in found.decisions} >= {"offload"}
    assert any(note.startswith("left out (checkpoint of blocks.{0-3}): backward failed") for note in found.notes)


def test_a_forced_technique_is_left_out_only_for_modules_with_which_the_step_fails(narrow):
    found = plan_in(narrow, force=["checkpoint"])
    assert not found.fits  # checkpoints of the linear layers inside of the blocks save nothing
    assert any("LookupError" in note for note in found.notes)
    recomputed = {module for decision in found.decisions for module in getattr(decision, "modules", ())}
    assert not recomputed & {f"blocks.{number}" for number in range(4)}


def test_a_front_goes_on_without_a_technique_whose_step_cannot_be_rehearsed():
    batch, forbid = {"x": torch.randn(4096, 64)}, ["segment-checkpoint", "accumulation", "mixed-precision"]
    found = planner.tradeoff(SetsContext(), batch, gpu="bare", optimizer="sgd", forbid=forbid)
    assert found.complete
    assert any(decision.kind == "offload" for plan in found.points for decision in plan.decisions)
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(render_tradeoff(found))
    assert "note: left out (checkpoint of blocks.{0-3}): " in console.export_text()


class ChecksIdentity(torch.nn.Module):
    """Checkpoints attention itself, whose ops depend on whether query, key and value are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.after = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.after(x)
        attend = torch.utils.checkpoint.checkpoint
        return self.after(attend(self.attention, hidden, hidden, hidden, use_reentrant=False)[0])


def test_a_checkpoint_of_the_users_own_gets_the_same_object_again():
    work = workload(ChecksIdentity(), torch.randn(4, 8, WIDTH), loss_fn=lambda out, _: out.square().mean())
    graph = what_if(work)
    assert units(graph)[1].peak(()) == plain(work).live_bytes().max()


def test_a_second_recording_in_a_process_gives_checkpoints_all_inputs():
    def run() -> list[int]:
        for _ in range(2):
            let_checkpoints_get_the_same_inputs()
        seen: list[int] = []

        def count(*inputs):
            seen.append(len({id(value) for value in inputs}) * 10 + len(inputs))
            return inputs[0] * inputs[1]

        x = torch.ones(2, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor.clone()):
            torch.utils.checkpoint.checkpoint(count, x, x, x, use_reentrant=False).sum().backward()
        return seen

    assert run_in_child(run) == [13, 13]
