"""Planning with another optimizer kernel: what is recorded, what may be pruned, and what is promised."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from torch import nn

import planner
from planner.choose.candidates import optimizer_ns
from planner.choose.chooser import Chooser
from planner.choose.recordings import Recordings
from planner.errors import DecisionError
from planner.estimate import roofline
from planner.pipeline import plan_workload
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import Accumulation, Fidelity, Optimizer, OptimizerKernel, Precision, StepInBackward
from planner.recording.step_graph import Category, Phase, StepGraph
from planner.workload.cards import resolve_card
from planner.workload.optimizer_choice import OPTIMIZERS as NAMED
from planner.workload.torch_optimizers import kernel_instead_of_foreach
from planner.workload.workload import workload
from tests.support.training import cross_entropy
from tests.support.workloads import BARE, CARD, certifying_graph, example, plain, transformer

pytestmark = pytest.mark.slow

OPTIMIZERS = tuple(name for name, named in NAMED.items() if named.library == "torch")
FUSED, LOOP = OptimizerKernel(kernel="fused"), OptimizerKernel(kernel="for-loop")
EXACT = Constraints(fidelity=Fidelity.EXACT, forced=(), forbidden=())
FP16 = Precision(dtype="fp16")


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)), nn.Linear(64, 3))


def work_of(optimizer="adamw", samples: int = 4, model: nn.Module | None = None):
    model = model or net()
    batch = torch.zeros(samples, 64), torch.zeros(samples, dtype=torch.long)
    return workload(model, batch, loss_fn=cross_entropy, optimizer=optimizer)


def made(name: str):
    """A work with an optimizer object of this class of torch.optim, or of this name."""
    model = net()
    if name in OPTIMIZERS:
        return work_of(name, model=model)
    return work_of(getattr(torch.optim, name)(model.parameters(), lr=0.01), model=model)


def parameter_bytes(work) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in work.model.parameters())


def update_peak(graph: StepGraph) -> int:
    return int(graph.live_bytes()[graph.update_tick :].max())


# ---- what is recorded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "copies"), [("adamw", 1), ("adam", 1), ("sgd", 0), ("adagrad", 2)])
def test_a_fused_update_makes_nothing(name, copies):
    """The second step of each: state is there, and beside it foreach needs copies of all parameters, fused none."""
    work = work_of(name)
    foreach, fused = (certifying_graph(work, decisions, BARE) for decisions in ((), (FUSED,)))
    born = [s for s in fused.storages if s.op is not None and fused.ops[s.op].phase is Phase.OPTIMIZER]
    state = [s for s in born if fused.ops[s.op].step == 0]
    assert all(s.category is Category.OPTIMIZER_STATE for s in state)
    assert [s for s in born if fused.ops[s.op].step == 1] == []
    steps = 4 * len(list(work.model.parameters())) if "sgd" not in name else 0
    grown = fused.bytes_of(Category.OPTIMIZER_STATE) - foreach.bytes_of(Category.OPTIMIZER_STATE)
    assert grown == steps, "each parameter's step number is on the card"
    assert update_peak(foreach) - update_peak(fused) == copies * parameter_bytes(work) - steps


def test_a_loop_makes_temporaries_of_one_parameter():
    work = made("RMSprop")
    largest = max(p.numel() * p.itemsize for p in work.model.parameters())
    graph = certifying_graph(work, (LOOP,), BARE)
    held = parameter_bytes(work) * 2 + graph.bytes_of(Category.OPTIMIZER_STATE)
    assert largest <= update_peak(graph) - held <= 3 * largest


def test_what_is_written_in_place_is_moved_as_well():
    work = work_of("adamw")
    whole = parameter_bytes(work)
    moved = {op.name: op.moved_bytes for op in plain(work, (FUSED,)).ops if op.phase is Phase.OPTIMIZER}
    steps = 4 * len(list(work.model.parameters()))
    assert moved["aten._fused_adamw_.default"] == 7 * whole + steps, "four are read, three of them written"
    loop, foreach = (
        sum(op.moved_bytes for op in plain(work, decisions).ops if op.phase is Phase.OPTIMIZER)
        for decisions in ((LOOP,), ())
    )
    assert loop == foreach == 21 * whole


def test_a_step_with_a_scaler_is_recorded():
    graph = certifying_graph(work_of("adamw"), (FP16, FUSED), CARD)
    names = [op.name for op in graph.ops if op.step == 1]
    assert names.index("aten._amp_foreach_non_finite_check_and_unscale_.default") < names.index(
        "aten._fused_adamw_.default"
    )


# ---- what may be pruned -----------------------------------------------------------------------------------------

EVERY = (*OPTIMIZERS, "ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop")


def decisions_for(name: str) -> list:
    found = [OptimizerKernel(kernel=kernel_instead_of_foreach(made(name).optimizer))]
    if name in ("adam", "adamw") and importlib.util.find_spec("bitsandbytes"):
        found.append(Optimizer())
    return found


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.thorough_after(1)
def test_no_update_goes_below_its_bounds(name, monkeypatch):
    """On a card that launches for nothing, so that bytes alone count; each op's time is rounded."""
    work, seen, card = made(name), [], dataclasses.replace(CARD, launch_ns=0)
    init = Chooser.__init__

    def noting(self, offer, cases, bounds, certificates, **options):
        seen.append(bounds)
        init(self, offer, cases, bounds, certificates, **options)

    monkeypatch.setattr(Chooser, "__init__", noting)
    plan_workload(
        work,
        card,
        vram_bytes=card.vram_bytes,
        constraints=Constraints(fidelity=Fidelity.ROUNDED, forced=(), forbidden=()),
    )
    bounds = seen[0]
    for decision in decisions_for(name):
        graph = plain(work, (decision,), card=card)
        took_ns = optimizer_ns(graph, roofline.op_times_ns(graph, card, 1))
        assert took_ns + len(graph.ops) // 2 >= bounds.least_update((decision,)).ns > 0
        assert graph.live_bytes().max() >= bounds.lower_bound_bytes((decision,)) >= 2 * parameter_bytes(work)


class _Counted:
    """Recordings begun while it is installed: of whole steps, and of updates alone."""

    def __init__(self, monkeypatch) -> None:
        self.whole, self.updates = [], []
        begin = Recordings._begin

        def counting(recordings, part):
            if part not in recordings._recorded and part not in recordings._running:
                (self.whole if part[1] else self.updates).append(part[0])
            begin(recordings, part)

        monkeypatch.setattr(Recordings, "_begin", counting)


def test_nothing_is_recorded_where_it_could_spare_no_more_than_a_tie(monkeypatch):
    """Plain SGD moves each byte once whatever its kernel is; and a batch may be so large that no update matters."""
    for work in (work_of("sgd"), work_of("adamw", samples=1 << 16)):
        counted = _Counted(monkeypatch)
        plan = plan_workload(work, CARD, vram_bytes=CARD.vram_bytes, constraints=EXACT)
        assert (plan.decisions, counted.updates) == ((), [])
        monkeypatch.undo()


def test_where_updates_matter_one_small_recording_tells(monkeypatch):
    counted = _Counted(monkeypatch)
    plan = plan_workload(work_of("adamw"), CARD, vram_bytes=CARD.vram_bytes, constraints=EXACT)
    assert plan.decisions == (FUSED,)
    assert plan.slowdown < 1 / 1.05
    assert counted.updates == [(FUSED,)]
    assert set(counted.whole) <= {(), (StepInBackward(),)}


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "RMSprop"])
@pytest.mark.parametrize("share", [0.8])
@pytest.mark.thorough
def test_what_is_pruned_would_not_have_been_chosen(name, share, monkeypatch):
    work = made(name)
    constraints = Constraints(fidelity=Fidelity.EXACT, forced=(), forbidden=("accumulation",))
    budget = int(share * plan_workload(work, BARE, vram_bytes=None, constraints=constraints).peak.total_bytes)
    quick = plan_workload(work, BARE, vram_bytes=budget, constraints=constraints)
    monkeypatch.setattr(Chooser, "_may_be_faster", lambda *_: True)
    monkeypatch.setattr(Chooser, "_bound_ns", lambda *_: 0)
    thorough = plan_workload(work, BARE, vram_bytes=budget, constraints=constraints)
    assert (quick.fits, quick.decisions) == (thorough.fits, thorough.decisions)


# ---- what is promised -------------------------------------------------------------------------------------------

PROMISED = {
    "net": work_of,
    "sequential": lambda: example("sequential.py:build", 64),
    "gpt2": lambda: transformer("gpt2", "GPT2LMHeadModel", batch_size=4, seq_len=64, n_layer=2, vocab_size=512),
    "llama": lambda: transformer(
        "llama",
        "LlamaForCausalLM",
        batch_size=4,
        seq_len=32,
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=344,
        num_attention_heads=4,
        vocab_size=512,
    ),
}


@pytest.mark.parametrize("share", [0.85])
@pytest.mark.parametrize("name", PROMISED)
@pytest.mark.thorough_after(1)
def test_promise_and_certificate_are_the_same_to_the_byte(name, share):
    work = PROMISED[name]()
    constraints = Constraints(fidelity=Fidelity.EXACT, forced=("optimizer-kernel",), forbidden=())
    whole = plan_workload(work, BARE, vram_bytes=None, constraints=constraints).peak.total_bytes
    plan = plan_workload(work, BARE, vram_bytes=int(share * whole), constraints=constraints)
    assert plan.decision(OptimizerKernel) == FUSED
    assert plan.solver.promised_bytes == plan.solver.certified_bytes


@pytest.mark.thorough
def test_a_peak_in_the_optimizer_is_lowered_by_one_copy_of_the_parameters():
    work = work_of("adamw")
    whole = plan_workload(work, BARE, vram_bytes=None, constraints=EXACT)
    assert whole.peak.phase == "optimizer"
    constraints = Constraints(
        fidelity=Fidelity.EXACT, forced=(), forbidden=("step-in-backward", "checkpoint", "accumulation")
    )
    budget = whole.peak.total_bytes - int(0.9 * parameter_bytes(work))
    plan = plan_workload(work, BARE, vram_bytes=budget, constraints=constraints)
    assert plan.fits and plan.decisions == (FUSED,)
    without = Constraints(fidelity=Fidelity.EXACT, forced=(), forbidden=(*constraints.forbidden, "optimizer-kernel"))
    unfit = plan_workload(work, BARE, vram_bytes=budget, constraints=without)
    assert not unfit.fits
    assert unfit.shortfall.next_step.relax == "allow optimizer-kernel"


@pytest.mark.thorough
def test_a_loop_is_chosen_where_there_is_no_fused_kernel_and_no_room_for_foreach():
    work = made("RMSprop")
    whole = plan_workload(work, BARE, vram_bytes=None, constraints=EXACT).peak.total_bytes
    constraints = Constraints(fidelity=Fidelity.EXACT, forced=(), forbidden=("step-in-backward",))
    assert plan_workload(work, CARD, vram_bytes=CARD.vram_bytes, constraints=constraints).decisions == ()
    plan = plan_workload(work, BARE, vram_bytes=int(0.85 * whole), constraints=constraints)
    assert plan.fits and plan.decisions == (LOOP,)
    assert plan.solver.promised_bytes == plan.solver.certified_bytes


# ---- what is offered --------------------------------------------------------------------------------------------


class Custom(torch.optim.SGD):
    """Nobody knows what its step looks at."""


NOT_OFFERED = {
    "fused already": (lambda p: torch.optim.AdamW(p, fused=True), "fused=True, which is kept"),
    "a loop already": (lambda p: torch.optim.AdamW(p, foreach=False), "foreach=False, which is kept"),
    "of one's own": (lambda p: Custom(p, lr=0.1), "Custom is not known"),
}


@pytest.mark.parametrize(("optimizer", "reported"), NOT_OFFERED.values(), ids=NOT_OFFERED)
@pytest.mark.thorough_after(2)
def test_where_there_is_nothing_to_choose_nothing_is_offered_or_said(optimizer, reported):
    model = net()
    given = {"loss_fn": cross_entropy, "gpu": "rtx-3090", "vram": "20GiB", "forbid": "optimizer"}
    batch = torch.zeros(4, 64), torch.zeros(4, dtype=torch.long)
    plan = planner.plan(model, batch, optimizer=optimizer(model.parameters()), **given)
    assert plan.decision(OptimizerKernel) is None
    assert not any("kernel" in note for note in plan.notes)
    with pytest.raises(DecisionError, match=reported):
        planner.plan(model, batch, optimizer=optimizer(model.parameters()), force="optimizer-kernel", **given)


def test_a_function_is_not_called_to_look_at_its_optimizer():
    model, batch = net(), (torch.zeros(4, 64), torch.zeros(4, dtype=torch.long))
    options = {"loss_fn": cross_entropy, "gpu": "bare", "vram": 1 << 30, "optimizer": torch.optim.AdamW}
    with pytest.raises(DecisionError, match="give the optimizer itself"):
        planner.plan(model, batch, force="optimizer-kernel", **options)


def test_two_optimizers_are_not_forced_together():
    model, batch = net(), (torch.zeros(4, 64), torch.zeros(4, dtype=torch.long))
    with pytest.raises(DecisionError, match="two forced techniques cannot be combined"):
        planner.plan(
            model, batch, loss_fn=cross_entropy, gpu="bare", vram=1 << 30, force=["optimizer", "optimizer-kernel"]
        )


def test_a_learning_rate_in_a_tensor_is_planned_and_recorded():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    graph = certifying_graph(work_of(optimizer, model=model), (FUSED,), BARE)
    assert any("_fused_adamw_.tensor_lr" in op.name for op in graph.ops)


def test_accumulated_fp16_steps_are_grafted_as_they_are_rehearsed():
    work = work_of("adamw", samples=8)
    constraints = Constraints(
        fidelity=Fidelity.ROUNDED, forced=("optimizer-kernel", "precision", "accumulation"), forbidden=()
    )
    card = resolve_card("rtx-2060", None)
    plan = plan_workload(work, card, vram_bytes=card.vram_bytes, constraints=constraints)
    assert plan.decision(Precision) == FP16 and plan.decision(Accumulation) is not None
    assert plan.solver.promised_bytes == plan.solver.certified_bytes
