"""`--for trainer` and `--for accelerate` with `--cards`: what is printed and written, and what is refused."""

from __future__ import annotations

import ast
import copy
import json

import pytest
import transformers
import yaml

from planner.cli.command import main
from planner.plan_types.plan import Plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the config of a small language model."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    config.architectures = ["LlamaForCausalLM"]
    path = tmp_path_factory.mktemp("model")
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--for", "loop", "--cards", "2"], "--for cannot be combined with --cards: only trainer and accelerate"),
        (["--for", "axolotl", "--cards", "2"], "--for cannot be combined with --cards: only trainer and accelerate"),
        (["--for", "trainer", "--cards", "2", "--emit", "a.py"], "name a file that ends in .json"),
        (["--for", "accelerate", "--cards", "2", "--emit", "a.json"], "name a file that ends in .yaml"),
        (["--for", "accelerate", "--cards", "2", "--emit", "a.py"], "name a file that ends in .yaml"),
        (["--for", "accelerate", "--emit", "a.yaml"], "--for accelerate and --cards"),
        (["--for", "trainer", "--cards", "2", "--verify"], "--verify cannot be combined with --cards"),
        (["--for", "trainer", "--cards", "2", "--force", "chunked-loss"], "--force chunked-loss cannot be combined"),
        (["--for", "accelerate", "--cards", "4", "--sharding", "zero1"], "accelerate offers ZeRO-1 only by DeepSpeed"),
        (["--for", "trainer", "--cards", "4", "--mesh", "2x2"], "a mesh cannot be planned"),
        (["--for", "trainer", "--cards", "4", "--offload-shards"], "shards in host memory cannot be planned"),
        (["--cards", "two"], "'two' is not a number of cards: give a whole number from 1 to 65,536, or 'fewest'"),
    ],
)
def test_what_settings_cannot_say_is_refused(options, message, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([str(folder), "--vram", "1GiB", "--batch-size", "4", "--seq-len", "8", *options]) == 2
    assert message in capsys.readouterr().err


def planned(folder, *arguments: str) -> Plan:
    options = ["--batch-size", "8", "--seq-len", "16", "--gpu", "bare", "--vram", "450KiB", "--save", "plan.json"]
    assert main([str(folder), *options, *arguments]) == 0
    return Plan.load("plan.json")


@pytest.mark.slow
@pytest.mark.thorough
def test_the_trainer_gets_the_arguments_of_the_plan(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan = planned(folder, "--cards", "2", "--for", "trainer", "--emit", "arguments.json", "--sharding", "fsdp")
    (shard,) = (decision for decision in plan.decisions if decision.cards > 1)
    assert shard.tail == ("model.norm", "lm_head") and plan.workload.batch_size == 4
    settings = json.loads((tmp_path / "arguments.json").read_text())
    as_written = copy.deepcopy(settings)  # TrainingArguments adds to the settings of FSDP
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # TrainingArguments sets it
    arguments = transformers.TrainingArguments(**settings, use_cpu=True)
    assert arguments.fsdp_plugin_args["transformer_cls_names_to_wrap"] == "LlamaDecoderLayer"
    samples = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    assert samples == plan.workload.batch_size
    lines = capsys.readouterr().out.partition("paste into your script:\n")[2]
    (call,) = (node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Call) and node.keywords and
               ast.unparse(node.func) == "transformers.TrainingArguments")  # fmt: skip
    assert {argument.arg: ast.literal_eval(argument.value) for argument in call.keywords} == as_written


@pytest.mark.slow
@pytest.mark.thorough
def test_accelerate_gets_a_config_and_one_card_needs_no_sharding(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--for", "accelerate", "--emit", "accelerate.yaml", "--only", "accumulation,shard,checkpoint"]
    plan = planned(folder, "--cards", "2", "--sharding", "zero2", "--force", "checkpoint", *options)
    config = yaml.safe_load((tmp_path / "accelerate.yaml").read_text())
    assert "checkpoint" in {decision.kind for decision in plan.decisions}
    assert config["fsdp_config"]["fsdp_activation_checkpointing"]
    assert config["fsdp_config"]["fsdp_reshard_after_forward"] is False and config["num_processes"] == 2
    assert "accelerator.prepare(model, optimizer, loader)" in capsys.readouterr().out
    assert main(["plan.json", "--for", "accelerate", "--emit", "again.yaml"]) == 0
    assert (tmp_path / "again.yaml").read_text() == (tmp_path / "accelerate.yaml").read_text()
    options = ["--for", "accelerate", "--emit", "accelerate.yaml", "--vram", "4MiB", "--only", "accumulation"]
    planned(folder, "--cards", "fewest", *options)
    config = yaml.safe_load((tmp_path / "accelerate.yaml").read_text())
    assert (config["distributed_type"], config["num_processes"], config["mixed_precision"]) == ("NO", 1, "no")


@pytest.mark.parametrize(("value", "reason"), [("own.py", "is not the name of a function"), ("own.py:f", "own.py")])
def test_parallelize_has_to_name_a_function_of_a_file_that_exists(value, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["model", "--cards", "2", "--parallelize", value]) == 2
    error = capsys.readouterr().err
    assert "argument --parallelize" in error and reason in error
