"""Plans of whole runs: batches of several lengths, and what happens between the steps."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
from torch import nn

import planner
from planner import Plan, pipeline
from planner.cli.command import main
from planner.cli.run_report import run_advice, run_sentence
from planner.errors import WorkloadError
from planner.estimate.footprint import measure
from planner.plan_types.sizes import MIB
from planner.profiles import load
from planner.progress import TimeIsUp, Watch
from planner.replan import replan
from planner.run_memory.batches import BatchShape
from planner.run_memory.interpolation import RECORDINGS
from planner.whole_run import planning, simulated_run
from planner.whole_run.orders import given_order, random_orders
from planner.whole_run.recordings import RunRecordings
from planner.whole_run.request import RunRequest
from planner.workload.loading import load_workload
from planner.workload.synthetic_batch import Masking, synthetic_batch
from planner.workload.workload import Workload, workload
from tests.support.tagger import Tagger

LENGTHS = (50, 100, 130, 222, 400)
SAMPLES = 8


def loss(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())


def tokens(length: int, samples: int = SAMPLES) -> torch.Tensor:
    return torch.zeros(samples, length, dtype=torch.long)


def mixed() -> list[torch.Tensor]:
    source = random.Random(0)
    return [tokens(source.choice(LENGTHS)) for _ in range(50)]


def planned(batches, vram: str | None = "2GiB", **options) -> Plan:
    batch = iter(batches) if isinstance(batches, list) else batches
    return planner.plan(
        Tagger(), batch, vram=vram, gpu="rtx-3060", loss_fn=loss, fidelity="exact", progress=False, **options
    )


@pytest.fixture(scope="module")
def run() -> Plan:
    return planned(mixed(), forbid=["allocator"])


@pytest.mark.slow
def test_a_run_of_several_lengths_needs_more_than_its_largest_step(run):
    assert run.fits
    assert run.run.fits
    assert run.total_bytes == run.run.total_bytes > run.peak.total_bytes + 10 * MIB
    assert (run.run.shapes, run.run.lengths, run.run.samples, run.run.steps) == (5, (50, 400), (8, 8), 1000)
    assert run.run.retries == 0
    assert run.room_bytes == 2048 * MIB - run.total_bytes


@pytest.mark.slow
def test_batches_of_one_shape_are_planned_as_one_step():
    assert planned([tokens(50)] * 3).run is None
    assert planned(tokens(50)).run is None


@pytest.mark.slow
def test_a_smaller_last_batch_of_an_epoch_is_no_second_length():
    assert planned([tokens(50), tokens(50), tokens(50, samples=3)]).run is None


@pytest.mark.slow
@pytest.mark.thorough
def test_batches_may_differ_in_samples_and_length():
    shapes = [(1600 // length, length) for length in range(40, 440, 8)]
    run = planned([tokens(length, samples=count) for count, length in shapes]).run
    assert (run.shapes, run.lengths, run.samples) == (50, (40, 432), (3, 40))
    assert run.shapes - run.predicted_shapes == 11
    assert "50 different shapes of batches, 3 to 40 samples, lengths 40 to 432; 11 of them rehearsed" in run_sentence(
        run
    )


@pytest.mark.slow
def test_the_options_of_the_allocator_are_chosen_for_the_run(run):
    vram = f"{(run.run.total_bytes + run.peak.total_bytes) // 2 // MIB}MiB"
    plan = planned(mixed(), vram=vram)
    assert plan.fits
    assert plan.run.retries == 0
    assert "allocator" in {decision.kind for decision in plan.decisions}
    assert plan.peak.total_bytes <= plan.total_bytes <= plan.vram_bytes


@pytest.mark.slow
def test_without_options_the_step_is_planned_smaller_or_the_cache_is_emptied(run):
    vram = f"{(run.run.total_bytes + run.peak.total_bytes) // 2 // MIB}MiB"
    plan = planned(mixed(), vram=vram, forbid=["allocator"])
    assert plan.fits
    assert plan.run.retries or plan.peak.total_bytes < run.peak.total_bytes
    assert plan.total_bytes <= plan.vram_bytes


@pytest.mark.slow
def test_without_a_budget_the_run_is_simulated_too():
    plan = planned(mixed(), vram=None)
    assert plan.run.fits
    assert plan.run.total_bytes > plan.peak.total_bytes


@pytest.mark.slow
def test_what_happens_between_steps_takes_its_memory(run):
    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(tokens(400, samples=64).to(model.head.weight.device))

    plan = planned(mixed(), between={"my evaluation": evaluate}, forbid=["allocator"])
    assert [moment.name for moment in plan.run.moments] == ["loading the model", "training step", "my evaluation"]
    assert plan.run.binding == "my evaluation"
    assert plan.run.moments[2].tensor_bytes > 64 * 400 * 5000 * 4
    taken = sum(moment.new_bytes for moment in plan.run.moments)
    assert run.total_bytes < plan.total_bytes
    assert taken == plan.total_bytes - load("rtx-3060").context_bytes


def test_an_activity_that_does_not_fit_is_named_and_the_step_is_not_blamed():
    plan = planned(tokens(100), vram="500MiB", eval_batch_size=512)
    assert not plan.fits
    assert plan.run.binding == "evaluation"
    assert plan.shortfall.missing_bytes > 0
    assert "the whole run takes" in plan.summary()
    assert "lower --eval-batch-size" in run_advice(plan.run)


@pytest.mark.slow
@pytest.mark.thorough
def test_an_average_of_the_weights_stays_on_the_card():
    weights = sum(p.numel() * 4 for p in Tagger().parameters())
    with_average, without = (
        planned(tokens(50), between=between) for between in (["average", "save"], ["save", lambda model: None])
    )
    grown = with_average.run.moments[1].tensor_bytes + weights
    assert with_average.run.moments[2].tensor_bytes >= without.run.moments[2].tensor_bytes + weights
    assert with_average.total_bytes > without.total_bytes
    assert grown > weights


def test_an_evaluation_that_keeps_logits_needs_more():
    batch = {"input_ids": tokens(64), "labels": tokens(64)}

    class WithLoss(Tagger):
        def forward(self, input_ids, labels):
            logits = super().forward(input_ids)
            return {"loss": loss(logits, labels), "logits": logits}

    def evaluated(**options) -> int:
        question = RunRequest(eval_batch_size=8, **options)
        from planner.ask import LiveWorkload
        from planner.plan_types.constraints import parse_constraints
        from planner.progress import Watch
        from planner.whole_run.request import plan_step_or_run

        card = load("rtx-3060")
        plan = plan_step_or_run(
            LiveWorkload(model=WithLoss(), batch=batch).resolve(card, Watch()),
            card,
            vram_bytes=None,
            constraints=parse_constraints(fidelity="exact", force=(), forbid=(), only=None, max_slowdown=None),
            request=question,
        )
        return plan.run.moments[2].tensor_bytes

    kept, dropped = evaluated(eval_samples=80), evaluated()
    assert kept - dropped > 80 * 64 * 5000 * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"between": ["nap"]}, "choose from average, save, resume"),
        ({"between": [lambda a, b, c: None]}, r"function\(model, optimizer\)"),
        ({"between": [lambda model: (yield)]}, "a coroutine or a generator"),
    ],
)
def test_what_cannot_happen_between_steps_is_refused(options, words):
    with pytest.raises(WorkloadError, match=words):
        planned(tokens(50), **options)


def test_an_error_between_steps_names_the_function():
    def evaluate(model):
        raise RuntimeError("no data")

    with pytest.raises(WorkloadError, match="'evaluate' failed between the steps: RuntimeError: no data"):
        planned(tokens(50), between=[evaluate])


def test_numbers_may_be_logged_between_steps():
    logged = []
    plan = planned(tokens(50), between=[lambda model: logged.append(float(model.head.weight.sum()))])
    assert plan.fits


def test_an_evaluation_by_size_needs_to_know_how_the_model_is_called():
    def step(model, optimizer, batch):
        loss(model(batch), batch).backward()
        optimizer.step()

    with pytest.raises(WorkloadError, match="only your code says how the model is called"):
        planner.plan(Tagger(), tokens(50), vram=None, step=step, eval_batch_size=4, progress=False)


def test_if_time_is_up_the_plan_of_the_step_says_so(monkeypatch):
    def ended(*_):
        raise TimeIsUp

    monkeypatch.setattr(simulated_run.RunRecordings, "add", ended)
    plan = planned(mixed())
    assert plan.run is None
    assert "the whole run was not simulated" in plan.notes[0]


def test_if_time_is_up_after_a_run_did_not_fit_the_plan_does_not_fit(monkeypatch):
    real, tries = planning.SimulatedRun.with_best_allocator, []

    def ended(*arguments):
        tries.append(arguments)
        if len(tries) > 1:
            raise TimeIsUp
        plan = real(*arguments)
        needed = plan.usable_bytes + 10 * MIB
        return dataclasses.replace(plan, run=dataclasses.replace(plan.run, fits=False, total_bytes=needed))

    monkeypatch.setattr(planning.SimulatedRun, "with_best_allocator", ended)
    plan = planned([tokens(50), tokens(100)] * 3)
    assert len(tries) == 2
    assert not plan.fits
    assert plan.shortfall.missing_bytes == 10 * MIB


@pytest.mark.slow
def test_a_plan_file_holds_the_run(run, tmp_path):
    run.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == run
    data = run.to_json()
    del data["run"]
    assert Plan.from_json(data).run is None


CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 2000, "n_positions": 528}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["GPT2LMHeadModel"]}))
    (tmp_path / "lengths.txt").write_text("\n".join(str(length) for length in range(16, 500, 3)))
    return tmp_path


@pytest.mark.slow
@pytest.mark.thorough
def test_the_command_plans_the_run_over_lengths_of_samples(folder, capsys):
    arguments = [str(folder), "--vram", "1GiB", "--gpu", "rtx-3060", "--batch-size", "4"]
    run = ["--lengths", str(folder / "lengths.txt"), "--pad-to-multiple-of", "48", "--between", "save"]
    saved = folder / "plan.json"
    assert main([*arguments, *run, "--fidelity", "exact", "--save", str(saved)]) == 0
    text = capsys.readouterr().out
    assert "Memory of the whole run" in text
    assert "1,000 steps simulated (" in text
    assert "saving a checkpoint" in text
    assert "samples grouped by length" in text
    plan = Plan.load(saved)
    assert (plan.run.lengths[1], plan.workload.seq_len) == (528, 528)
    assert 0 < plan.run.predicted_shapes < plan.run.shapes
    by_tokens = next(change for change in plan.run.changes if "tokens" in change.change)
    assert 0.82 < by_tokens.relative_time < 0.95
    assert by_tokens.total_bytes < plan.run.total_bytes


@pytest.mark.slow
@pytest.mark.thorough
def test_a_saved_run_is_simulated_again(folder):
    """The same verdict, down to the byte; and a budget between the longest step and the run does not fit."""
    saved, again = folder / "plan.json", folder / "again.json"
    run = ["--lengths", str(folder / "lengths.txt"), "--eval-batch-size", "8", "--between", "average"]
    arguments = [str(folder), "--gpu", "rtx-3060", "--batch-size", "4", "--pad-to-multiple-of", "48", *run]
    assert main([*arguments, "--vram", "1GiB", "--only", "offload", "--fidelity", "exact", "--save", str(saved)]) == 0
    assert main([str(saved), "--save", str(again)]) == 0
    plan, found = Plan.load(saved), Plan.load(again)
    assert found.run == plan.run and found.fits
    assert plan.run.source.lengths[:2] == ((16, 1), (19, 1)) and plan.run.source.between == ("average",)
    between = (plan.peak.total_bytes + plan.run.total_bytes) // 2
    assert plan.peak.total_bytes + 2 * MIB < plan.run.total_bytes
    tight = replan(plan, vram=f"{between // MIB}MiB", gpu=None)
    assert not tight.fits if tight.run.retries == 0 else tight.run.total_bytes <= between
    unknown = dataclasses.replace(plan, run=dataclasses.replace(plan.run, source=None))
    found = replan(unknown, vram=None, gpu=None)
    assert found.run is None and found.fits and "verdict for the longest step" in found.notes[0]


@pytest.mark.slow
def test_a_run_of_functions_of_your_own_is_not_stored():
    request = RunRequest(samples=(3, 5, 3), multiple=2, eval_batch_size=4, between=("save",))
    assert RunRequest.of(request.source) == dataclasses.replace(request, samples=(3, 3, 5))
    for between in (print, {"own": print}, ("save", print)):
        assert RunRequest(samples=(3, 5), between=between).source is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pad-to-multiple-of", "8"], "works only with --lengths"),
        (["--eval-samples", "8"], "works only with --eval-batch-size"),
        (["--lengths", "missing.txt"], "cannot be read"),
        (["--between", "nap"], "choose from average, save, resume"),
        (["--between", "save", "--largest-batch", "--vram", "1GiB"], "cannot be combined with --largest-batch"),
        (["--eval-batch-size", "4", "--for", "axolotl"], "cannot be combined with --for axolotl"),
    ],
)
def test_options_of_the_run_that_do_not_go_together_are_refused(folder, capsys, options, words):
    assert main([str(folder), "--batch-size", "4", *options]) == 2
    assert words in capsys.readouterr().err


def test_lengths_that_cannot_be_predicted_are_padded_to_a_few_that_exist():
    fixed = given_order([BatchShape(2, length) for length in (3, 10, 11, 17, 30)])
    assert [shape.length for shape in fixed.padded(8).shapes] == [3, 11, 17, 30]
    free = random_orders([3, 10, 11, 17, 30] * 4, batch_size=1, multiple=1, longest=30)
    assert [shape.length for shape in free.padded(8).shapes] == [8, 16, 24, 30]
    assert "padded" in free.padded(8).notes[-1]


@pytest.mark.slow
@pytest.mark.thorough
def test_batches_of_several_lengths_have_the_mask_of_a_collator(tmp_path):
    """With padding attention gets a mask of all pairs of tokens, so that the step needs more memory."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=128)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    lengths = {"one": "96 8\n", "several": "96 4\n80 4\n"}
    found = {}
    for name, text in lengths.items():
        (tmp_path / name).write_text(text)
        saved = tmp_path / f"{name}.json"
        run = ["--lengths", str(tmp_path / name), "--batch-size", "4", "--gpu", "rtx-3060", "--save", str(saved)]
        assert main([str(tmp_path), *run]) == 0
        found[name] = Plan.load(saved)
        assert "attention_mask" in {path for path, _, _ in found[name].workload.batch}
    again = replan(found["several"], vram=None, gpu=None)
    assert (again.peak, again.run) == (found["several"].peak, found["several"].run)
    alone = load_workload(str(tmp_path), batch_size=4, seq_len=96, optimizer="adamw")
    peaks = [found[name].peak.allocated_bytes for name in lengths]
    card = load("rtx-3060")
    bare = measure(pipeline.record_step(alone, card), card, vram_bytes=None).footprint
    layers, samples, tokens, scores_bytes = 2, 4, 96, 4
    assert peaks[0] == bare.allocated_bytes + samples * tokens * 8
    assert peaks[1] >= peaks[0] + layers * samples * tokens**2 * scores_bytes
    assert found["several"].run.total_bytes > found["one"].run.total_bytes


@pytest.mark.slow
@pytest.mark.thorough
def test_with_masks_aligned_lengths_and_others_are_predicted_apart():
    """Memory-efficient attention takes a padded copy of a mask whose rows are not a multiple of 16 long."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, use_cache=False)
        model = transformers.GPT2LMHeadModel(config).train()

    def at(shape: BatchShape) -> Workload:
        batch = synthetic_batch(model, batch_size=shape.samples, seq_len=shape.length, masking=Masking.PADDED)
        return workload(model, batch, seq_len=shape.length, is_synthetic=True)

    shapes = [BatchShape(4, length) for length in range(40, 264, 8)]
    predicted, rehearsed = (RunRecordings(at, (), load("rtx-3060"), Watch()) for _ in range(2))
    assert predicted.add(shapes)
    guesses = [shape for shape in shapes if predicted.steps[shape].is_predicted]
    assert {shape.length % 16 for shape in guesses} == {0, 8} and len(guesses) >= len(shapes) - 3 * RECORDINGS
    chosen = guesses[::4]
    rehearsed.rehearse(chosen)
    streams = [
        [[e.stream for e in each.steps[shape].moment.again] for shape in chosen] for each in (predicted, rehearsed)
    ]
    assert streams[0] == streams[1]
