"""Plans of steps of the user's own: what is offered, what is refused by name, and that promises are kept."""

from __future__ import annotations

import pytest
import torch

import planner
from planner import pipeline
from planner.errors import DecisionError, PlannerError, WorkloadError
from planner.recording.step_graph import Category
from planner.workload.workload import workload
from tests.support.loops import LOOPS, WIDTH, closure, gan, network, two
from tests.support.workloads import BARE

BATCH = torch.randn(64, WIDTH)


def planned(model, step, optimizer="adamw", *, vram=None, batch=BATCH, **options):
    return planner.plan(model, batch, vram=vram, step=step, optimizer=optimizer, gpu="bare", **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOOPS if name not in ("WGAN-GP", "shared trunk")])
@pytest.mark.thorough_after(1)
def test_the_promise_of_a_plan_is_its_certificate(name):
    loop = LOOPS[name]
    model = loop.model()
    arguments = {"batch": loop.batch(256), "optimizer": loop.optimizer_of(model), "fidelity": "exact"}
    baseline = planned(model, loop.step, **arguments).peak.total_bytes
    plan = planned(model, loop.step, vram=int(0.75 * baseline), **arguments)
    assert plan.fits and plan.decisions
    assert plan.solver.promised_bytes == plan.solver.certified_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["WGAN-GP", "shared trunk"])
@pytest.mark.thorough
def test_what_two_backwards_read_is_promised_with_at_least_its_bytes(name):
    loop = LOOPS[name]
    model = loop.model()
    arguments = {"batch": loop.batch(256), "optimizer": loop.optimizer_of(model), "only": ("checkpoint",)}
    baseline = planned(model, loop.step, **arguments).peak.total_bytes
    plan = planned(model, loop.step, vram=int(0.9 * baseline), **arguments)
    assert plan.fits and plan.decisions
    assert plan.solver.promised_bytes >= plan.solver.certified_bytes


@pytest.mark.slow
@pytest.mark.thorough
def test_techniques_of_the_planners_own_step_are_refused_by_name():
    model = two("G", "D", out=(WIDTH, 1))()
    plan = planned(model, gan, {"G": "adamw", "D": torch.optim.SGD}, vram="1GiB")
    for name in ("accumulation", "mixed-precision", "chunked-loss", "step-in-backward"):
        assert any(note.startswith(f"no {name}: your step function") for note in plan.notes)
    assert "no 8-bit optimizer state for 'D': SGD has no 8-bit counterpart here" in plan.notes
    with pytest.raises(DecisionError, match="accumulation is forced, but your step function runs forward and backward"):
        planned(network(), closure, vram="1GiB", force=("accumulation",))


@pytest.mark.slow
def test_modules_whose_parameters_are_replaced_for_a_call_are_not_recomputed():
    def maml(model, optimizer, batch):
        parameters = dict(model.named_parameters())
        inner = torch.func.functional_call(model, parameters, (batch[:32],)).square().mean()
        gradients = torch.autograd.grad(inner, tuple(parameters.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
        torch.func.functional_call(model, fast, (batch[32:],)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert planned(network(), maml, vram=1, only=("checkpoint",)).decisions == ()


@pytest.mark.slow
def test_a_step_that_counts_its_calls_gets_a_note_of_the_calls_that_are_covered():
    calls = []

    def counts(model, optimizer, batch):
        calls.append(1)
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    (note,) = planned(network(), counts).notes
    assert note.startswith("each step changes the state of the step function, and the plan covers 16 calls")
    assert calls == []


@pytest.mark.slow
def test_a_number_that_is_logged_stops_nothing_and_one_that_is_compared_is_refused():
    def logs(model, optimizer, batch):
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        return {"loss": round(2 * loss.item() + 1, 3), "text": f"{loss:.3f}"}

    def compares(model, optimizer, batch):
        if model(batch).mean().item() > 0:
            optimizer.step()

    assert planned(network(), logs).certified
    with pytest.raises(PlannerError, match=r"asks for the value of a tensor.*test_own_step\.py"):
        planned(network(), compares)


@pytest.mark.slow
def test_a_step_that_names_cuda_is_rehearsed_on_the_virtual_gpu():
    def plain(model, optimizer, batch):
        loss = (model(batch + torch.randn(len(batch), WIDTH, device=batch.device))).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def names_cuda(model, optimizer, batch):
        torch.manual_seed(0)
        loss = (model(batch.to("cuda") + torch.randn(len(batch), WIDTH, device="cuda:0"))).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=torch.ones(1).cuda() is not None)
        torch.cuda.synchronize()
        return float(loss)

    plan = planned(network(), names_cuda)
    assert plan.peak.total_bytes == planned(network(), plain).peak.total_bytes
    assert any("the number that float() gives is only logged: outside of the model" in note for note in plan.notes)


@pytest.mark.slow
def test_a_step_may_make_its_own_samples():
    def samples(model, optimizer, batch):
        gan(model, optimizer, torch.randn(64, WIDTH, device=next(model.parameters()).device))

    options = {"optimizer": {"G": "adamw", "D": "adamw"}, "batch": None}
    assert planned(two("G", "D", out=(WIDTH, 1))(), samples, **options).certified


@pytest.mark.slow
def test_modules_that_the_step_changes_before_their_backward_are_not_recomputed():
    def evaluates_early(model, optimizer, batch):
        loss = model.train()(batch).mean()
        model.eval()
        loss.backward()
        optimizer.step()

    assert planned(network(dropout=0.1), evaluates_early, vram=1, only=("checkpoint",)).decisions == ()


def _captures(module_or_tensor):
    def step(model, optimizer, batch):
        captured = module_or_tensor(batch) if callable(module_or_tensor) else module_or_tensor
        (model(batch) - captured).square().mean().backward()
        optimizer.step()

    return step


def _steps_its_own(model, optimizer, batch):
    model(batch).mean().backward()
    _OTHER.step()


_OTHER = torch.optim.AdamW(network().parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "optimizer", "message"),
    [
        (
            _captures(network()),
            "adamw",
            "put every module that the step uses, such as a frozen teacher, into the model",
        ),
        (_captures(BATCH), "adamw", "tensors into the batch or the buffers of a module"),
        (_steps_its_own, "adamw", "AdamW, which has no parameter of the model: give this optimizer as optimizer="),
        (closure, torch.optim.LBFGS, "in the step of LBFGS.*does not depend on tensor values"),
        (lambda model, optimizer, batch: None, "adamw", "the step runs no op"),
        (lambda model: None, "adamw", "takes 1 positional argument but 3 were given"),
    ],
)
def test_a_step_that_cannot_be_rehearsed_is_refused_with_the_way_out(step, optimizer, message):
    with pytest.raises(PlannerError, match=message):
        planned(network(), step, optimizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": {"a.b": network()}, "step": gan}, "cannot become a torch.nn.ModuleDict"),
        ({"model": {"G": network()}}, "the model is of type dict"),
        ({"optimizer": ("adamw", "sgd")}, "several optimizers were given"),
        ({"optimizer": {}, "step": gan}, "no optimizer was given"),
        ({"optimizer": {"G": 3}, "step": gan}, "optimizer 'G' is of type int"),
        ({"step": 3}, "step is 3 .int.: give a function"),
        ({"step": gan, "loss_fn": gan}, "leave loss_fn out"),
        ({"step": gan, "gradients_alive": True}, "gradients_alive"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments, message):
    with pytest.raises(WorkloadError, match=message):
        planner.plan(**{"model": network(), "batch": BATCH, "vram": None, "gpu": "bare", **arguments})


def test_gradients_that_the_step_sets_itself_count_as_gradients():
    def step(model, optimizer, batch):
        parameters = tuple(model.parameters())
        gradients = torch.autograd.grad(model(batch).square().mean(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    work = workload(torch.nn.Linear(64, 32), torch.randn(2, 64), step=step, optimizer="sgd")
    graph = pipeline.record_step(work, BARE)
    sizes = {storage.size_bytes for storage in graph.storages if storage.category is Category.GRADIENT}
    assert sizes == {4 * 64 * 32, 4 * 32}
