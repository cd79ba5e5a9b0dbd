"""`--for` prints lines that train with the plan: they are run here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import tokenizers
import torch
import transformers

import planner
import planner.rewrite
from planner.cli.command import main
from planner.cli.training_lines import LOOPS, training_lines
from planner.errors import DecisionError
from planner.plan_types.plan import Plan
from planner.workload.programs import PROGRAMS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the weights of a small language model."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def planned(folder, tmp_path, capsys, *arguments) -> str:
    """Plans with --save, and returns what the command prints."""
    options = ["--batch-size", "4", "--seq-len", "8", "--gpu", "bare", "--vram", "300KiB", "--save", "plan.json"]
    assert main([str(folder), *options, *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("loop", "adapter"),
    [*((loop, ()) for loop in sorted(LOOPS.keys() - PROGRAMS.keys())), ("trainer", ("--lora", "4"))],
)
@pytest.mark.thorough_after(2)
def test_the_printed_lines_train(loop, adapter, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = planned(folder, tmp_path, capsys, "--for", loop, *adapter).partition("paste into your script:\n")[2]
    tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    if adapter:
        pytest.importorskip("peft")
    names = {"device": "cpu"} | {
        "loader": [batch, batch],
        "dataset": [{name: value[0] for name, value in batch.items()}] * 8,
    }
    if loop == "accelerate":
        names["loader"] = torch.utils.data.DataLoader([batch, batch], batch_size=None)
    if loop == "lightning":
        pytest.importorskip("lightning")
    if loop == "trainer":  # the test machine has no card
        lines = lines.replace("output_dir='out'", "output_dir='out', use_cpu=True, max_steps=2, report_to='none'")
    exec(lines, names)
    if adapter:
        assert {p.shape for p in names["model"].parameters() if p.requires_grad} == {(4, 32), (32, 4)}
        return
    trained = names["model"].state_dict()
    untrained = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    if loop != "lightning":  # its lines end with a class
        assert any(not torch.equal(trained[name], untrained[name]) for name in trained)


def test_options_of_the_allocator_come_first(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--gpu", "rtx-2060", "--vram", "2GiB", "--for", "loop", "--force", "allocator"]
    report, _, lines = planned(folder, tmp_path, capsys, *options, "--only", "allocator").partition(
        "paste into your script:\n"
    )
    assert "The baseline already fits" in report and "makes the step faster" not in report
    assert lines.strip().split("\n\n")[:2] == [
        "import os",
        'os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)\n'
        'os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # before CUDA starts',
    ]


@pytest.mark.thorough
def test_the_lines_set_all_options_whatever_the_process_has(folder, tmp_path, monkeypatch, capsys):
    """The lines are run where both variables have other values: PyTorch then reads the options of the plan."""
    monkeypatch.chdir(tmp_path)
    options = ["--gpu", "rtx-2060", "--vram", "2GiB", "--for", "trainer", "--force", "allocator", "--only", "allocator"]
    given = "roundup_power2_divisions:[256:1,512:2,>:4],max_split_size_mb:64"
    lines = planned(folder, tmp_path, capsys, *options, "--alloc-conf", given).partition("paste into your script:\n")[2]
    assert Plan.load("plan.json").alloc_conf == given
    head = lines.split("import planner")[0]
    code = f"{head}\nimport torch\nprint(torch._C._accelerator_getAllocatorSettings())"
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32", "PYTORCH_ALLOC_CONF": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{given},expandable_segments:True"


@pytest.mark.parametrize("kept", [0, 6])
@pytest.mark.thorough
def test_the_lines_of_a_run_train_as_it_was_planned(kept, folder, tmp_path, monkeypatch, capsys):
    """Batches are padded as planned, in training and in the evaluation, which keeps as many logits as planned."""
    monkeypatch.chdir(tmp_path)
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="[PAD]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="[PAD]").save_pretrained(folder)
    (tmp_path / "lengths.txt").write_text("5 4\n12 4\n19 4\n21 4\n")
    options = ["--batch-size", "4", "--lengths", "lengths.txt", "--pad-to-multiple-of", "8", "--eval-batch-size", "3"]
    options += ["--eval-samples", str(kept)] if kept else []
    command = [str(folder), *options, "--gpu", "rtx-3060", "--vram", "2GiB", "--for", "trainer", "--save", "plan.json"]
    assert main(command) == 0
    lines = capsys.readouterr().out.partition("paste into your script:\n")[2]
    lines = lines.replace("output_dir='out'", "output_dir='out', use_cpu=True, max_steps=4, report_to='none'")
    samples = [{"input_ids": [1] * length, "labels": [1] * length} for length in (5, 12, 19, 21) for _ in range(4)]
    seen = {True: set(), False: set()}

    def see(module, arguments, options):
        seen[module.training].add(tuple(options["input_ids"].shape))

    def metrics(prediction):
        seen["kept"] = prediction.predictions.shape
        return {}

    text = lines.replace(
        "trainer = transformers", "model.register_forward_pre_hook(see, with_kwargs=True)\ntrainer = transformers"
    )
    names = {"dataset": samples, "eval_dataset": samples[:6], "compute_metrics": metrics, "see": see}
    exec(text, names)
    arguments = names["arguments"]
    assert arguments.per_device_eval_batch_size == 3 and arguments.train_sampling_strategy == "random"
    assert arguments.prediction_loss_only == (not kept) and arguments.eval_accumulation_steps is None
    plan = Plan.load("plan.json")
    possible = {(4, length) for length in (8, 16, 24)}
    assert seen[True] and {(4, length) for _, length in seen[True]} <= possible
    assert plan.run.lengths[1] == 24 and seen[False] == {(3, 8), (3, 16)}
    assert seen.get("kept", (0,))[0] == kept


def test_another_evaluation_than_the_planned_one_is_refused(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    planned(folder, tmp_path, capsys, "--eval-batch-size", "3", "--for", "trainer", "--vram", "1GiB")
    plan = Plan.load("plan.json")
    assert planner.rewrite.training_arguments(plan, output_dir="out")["per_device_eval_batch_size"] == 3
    with pytest.raises(DecisionError, match="per_device_eval_batch_size=16 contradicts the plan, which has 3"):
        planner.rewrite.training_arguments(plan, output_dir="out", per_device_eval_batch_size=16)


def test_techniques_that_the_loop_cannot_do_are_not_used(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    planned(folder, tmp_path, capsys, "--for", "trainer")
    assert "step-in-backward" in Plan.load(tmp_path / "plan.json").forbidden


def test_without_a_saved_plan_the_lines_say_what_is_missing(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    planned(folder, tmp_path, capsys)
    assert "add --save plan.json" in training_lines(Plan.load(tmp_path / "plan.json"), "loop", None)


def test_the_trainers_arguments_are_written_as_json(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["--emit", "arguments.JSON", "--optimizer", "sgd-momentum"]
    planned(folder, tmp_path, capsys, "--for", "trainer", *arguments)
    plan = Plan.load("plan.json")
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (read,) = parser.parse_json_file("arguments.JSON")
    for name, value in planner.rewrite.training_arguments(plan, output_dir="out").items():
        assert getattr(read, name) == value
    assert main([str(folder), "--vram", "300KiB", "--gpu", "bare", *arguments]) == 2
    assert "add --for trainer" in capsys.readouterr().err
