"""The command as users call it: output, files, exit codes, and messages for bad input."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from planner.cli import main
from planner.cli.options import parser
from planner.plan_types.plan import SCHEMA_VERSION, Plan
from planner.plan_types.techniques import KINDS
from tests.support.workloads import EXAMPLES

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
MODEL = """
import torch

def build(batch_size=32):
    print("a model may print")
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 4))
    return model, (torch.randn(batch_size, 64), torch.randn(batch_size, 4)), loss

def loss(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])

def raises():
    raise ValueError("no such data")

def alone():
    return torch.nn.Linear(4, 4)

def odd():
    model, batch, loss_fn = build()
    return model, (torch.randn(32, 65), batch[1]), loss_fn

class Reads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).mean() * self.inner(x).sum().item()

def reads():
    return Reads(), torch.zeros(2, 4)

def with_a_target():
    return Reads(), {"x": torch.zeros(2, 4), "target": torch.zeros(2)}, loss

def vector():
    return torch.nn.Linear(4, 4), torch.zeros(2, 4), lambda output, batch: output

not_callable = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, capsys) -> tuple[int, dict | str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if "--json" in arguments else captured.out, captured.err


def test_a_model_that_fits_exits_with_zero_and_shows_both_peaks_and_the_plan(folder, capsys):
    code, text, _ = run("net.py:build", "--vram", "1GiB", "--gpu", "rtx-3090", "--batch-size", "8192", capsys=capsys)
    assert code == 0
    for words in ("baseline", "activations", "CUDA context", "total", "fits:", "certified by rehearsal", "1.00 GiB"):
        assert words in " ".join(text.split())


def test_json_is_one_object_with_the_promised_keys_and_nothing_else_on_standard_output(folder, capsys):
    code, data, _ = run("net.py:build", "--vram", "1GiB", "--json", capsys=capsys)
    assert code == 0
    assert data["schema_version"] == SCHEMA_VERSION
    assert {"fits", "vram_bytes", "slowdown", "decisions", "certified", "solver", "tensors"} <= set(data)
    assert data["vram_bytes"] == 1 << 30
    for key in ("baseline", "plan"):
        assert {"allocated_bytes", "reserved_bytes", "total_bytes", "at", "breakdown", "step_seconds"} <= set(data[key])
        assert set(data[key]["at"]) == {"phase", "module", "op"}
        assert sum(data[key]["breakdown"].values()) == data[key]["total_bytes"]
    assert {"status", "gap"} <= set(data["solver"])


def test_without_a_budget_the_step_is_rehearsed_and_nothing_chosen(folder, capsys):
    code, data, _ = run("net.py:build", "--json", capsys=capsys)
    assert (code, data["decisions"], data["vram_bytes"], data["certified"]) == (0, [], None, True)


def test_the_batch_size_is_the_one_asked_for(folder, capsys):
    small = run("net.py:build", "--batch-size", "4096", "--gpu", "bare", "--json", capsys=capsys)[1]
    large = run("net.py:build", "--batch-size", "8192", "--gpu", "bare", "--json", capsys=capsys)[1]
    assert small["workload"]["batch_size"] == 4096
    assert large["baseline"]["breakdown"]["activations"] == 2 * small["baseline"]["breakdown"]["activations"]


@pytest.mark.thorough
def test_when_nothing_fits_the_shortfall_and_the_binding_term_are_reported_and_the_exit_code_is_one(folder, capsys):
    arguments = ("--vram", "300KiB", "--gpu", "bare", "--fidelity", "exact", "--json")
    code, data, _ = run("net.py:build", *arguments, capsys=capsys)
    assert code == 1
    assert data["fits"] is False
    assert data["shortfall"]["missing_bytes"] > 0
    assert data["shortfall"]["binding"] in data["plan"]["breakdown"]


@pytest.mark.thorough
def test_a_forbidden_lever_is_named_as_the_next_step_with_its_price(folder, capsys):
    whole = run("net.py:build", "--batch-size", "4096", "--gpu", "bare", "--json", capsys=capsys)[1]
    budget = str(int(0.6 * whole["baseline"]["total_bytes"]))
    forbidden = ("--forbid", "accumulation", "--forbid", "checkpoint", "--forbid", "replay", "--fidelity", "exact")
    code, data, _ = run(
        "net.py:build", "--batch-size", "4096", "--gpu", "bare", "--vram", budget, *forbidden, "--json", capsys=capsys
    )
    assert code == 1
    step = data["shortfall"]["next_step"]
    assert step["relax"] in ("allow accumulation", "allow checkpoint", "allow segment-checkpoint", "--fidelity rounded")
    assert step["total_bytes"] <= int(budget)
    assert step["slowdown"] > 0
    assert step["decisions"]


@pytest.mark.thorough
def test_saved_plan_and_emitted_step_are_written_and_the_saved_plan_can_be_planned_again(folder, capsys):
    arguments = ("--gpu", "bare", "--batch-size", "8192")
    whole = run("net.py:build", *arguments, "--json", capsys=capsys)[1]["baseline"]["total_bytes"]
    arguments = (*arguments, "--vram", str(whole // 2))
    code, _, _ = run(
        "net.py:build", *arguments, "--save", "p.json", "--emit", "step.py", "--report", "r.html", capsys=capsys
    )
    plan = Plan.load("p.json")
    assert code == 0
    assert plan.decisions
    assert pathlib.Path("r.html").read_text().lstrip().lower().startswith("<!doctype html")
    again = run("p.json", "--trust-reference", "--json", capsys=capsys)[1]
    assert again["plan"]["total_bytes"] == plan.peak.total_bytes
    assert again["decisions"] == [decision.to_json() for decision in plan.decisions]
    ran = subprocess.run([sys.executable, "-I", "step.py", "--steps", "2"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "loss" in ran.stdout


@pytest.mark.thorough
def test_an_emitted_step_of_a_transformers_model_runs_by_itself(folder, capsys):
    settings = json.loads((EXAMPLES / "roberta_84m/config.json").read_text())
    settings |= {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 96, "vocab_size": 128}
    (folder / "small").mkdir()
    (folder / "small/config.json").write_text(json.dumps(settings))
    arguments = ("small", "--batch-size", "32", "--seq-len", "64", "--gpu", "bare")
    whole = run(*arguments, "--json", capsys=capsys)[1]["baseline"]["total_bytes"]
    code, data, _ = run(*arguments, "--vram", str(whole // 2), "--emit", "step.py", "--json", capsys=capsys)
    assert code == 0
    assert data["decisions"]
    ran = subprocess.run([sys.executable, "-I", "step.py", "--steps", "2"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


BAD = {
    "unknown model": (("no_such_model", "--vram", "6GiB"), "no_such_model"),
    "unknown folder": (("./nowhere", "--vram", "6GiB"), "does not exist"),
    "a file without a name in it": (("net.py", "--vram", "6GiB"), "net.py:name"),
    "an unknown name in it": (("net.py:missing", "--vram", "6GiB"), "build"),
    "no callable": (("net.py:not_callable", "--vram", "6GiB"), "int"),
    "a callable that raises": (("net.py:raises", "--vram", "6GiB"), "no such data"),
    "a model without a batch": (("net.py:alone", "--vram", "6GiB"), "no batch"),
    "an unknown module": (("nowhere.at_all:build", "--vram", "6GiB"), "nowhere"),
    "a budget without a unit": (("net.py:build", "--vram", "6"), "did you mean 6GiB"),
    "a budget that is no size": (("net.py:build", "--vram", "6gb of ram"), "6gb of ram"),
    "a batch the model refuses": (("net.py:odd", "--vram", "6GiB"), "failed with this batch"),
    "a value that a rehearsal has not": (("net.py:reads", "--vram", "6GiB"), "net.py:29"),
    "a dict with what only the loss takes": (
        ("net.py:with_a_target", "--vram", "6GiB"),
        "let the model's forward take",
    ),
    "a loss function that returns a vector": (
        ("net.py:vector", "--vram", "6GiB"),
        "the loss function returned a tensor",
    ),
    "an unknown card": (("net.py:build", "--vram", "6GiB", "--gpu", "rtx-2061"), "rtx-2060"),
    "an unknown technique": (("net.py:build", "--vram", "6GiB", "--forbid", "magic"), "checkpoint"),
    "forced and forbidden": (("net.py:build", "--vram", "6GiB", "--forbid", "freeze", "--force", "freeze"), "freeze"),
    "forced against the loop": (
        ("net.py:build", "--vram", "6GiB", "--for", "trainer", "--force", "optimizer-in-backward"),
        "cannot be combined with --for trainer",
    ),
    "a loop that cannot follow the plan": (("net.py:build", "--gpu", "bare", "--for", "trainer"), "a loss function"),
    "forced beyond the fidelity": (("net.py:build", "--vram", "6GiB", "--force", "freeze"), "partial"),
    "an unknown optimizer": (("net.py:build", "--vram", "6GiB", "--optimizer", "adamv"), "adamw"),
    "an unknown option": (("net.py:build", "--wram", "6GiB"), "--wram"),
    "no batch size": (("net.py:build", "--batch-size", "0"), "'0'"),
    "a file of another kind": (("net.py:build", "--vram", "6GiB", "--save", "net.py"), "net.py"),
    "a folder that is not there": (("net.py:build", "--vram", "6GiB", "--emit", "no/step.py"), "no/step.py"),
    "a config for no program": (("net.py:build", "--vram", "6GiB", "--emit", "config.YAML"), "--for axolotl"),
    "a function for axolotl": (("net.py:build", "--vram", "6GiB", "--for", "axolotl"), "is a function"),
    "a step for axolotl": (("gpt2", "--for", "axolotl", "--emit", "step.PY"), "reads a YAML config"),
    "arguments for no Trainer": (("net.py:build", "--vram", "6GiB", "--emit", "a.JSON"), "add --for trainer"),
    "adapters if needed": (("gpt2", "--for", "llama-factory", "--fidelity", "adapted"), "--lora"),
    "a batch for axolotl": (("gpt2", "--for", "axolotl", "--input-shapes", "shapes.json"), "padded to --seq-len"),
    "one file for two": (("net.py:build", "--vram", "6GiB", "--emit", "a.json", "--save", "a.json"), "same file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_line_exit_code_two_and_nothing_written(folder, capsys, case):
    arguments, message = BAD[case]
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    code, data, stderr = run(*arguments, "--json", capsys=capsys)
    assert code == 2
    assert data["fits"] is None
    assert message in data["error"]["message"]
    assert stderr.rstrip().splitlines()[-1] == f"plan: {data['error']['message']}"
    assert "\n" not in data["error"]["message"]
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_plan_for_a_model_that_changed_since_is_refused(folder, capsys):
    run("net.py:build", "--vram", "1GiB", "--save", "p.json", capsys=capsys)
    (folder / "net.py").write_text(MODEL.replace("torch.nn.Linear(64, 4)", "torch.nn.Linear(64, 4, bias=False)"))
    code, data, _ = run("p.json", "--trust-reference", "--json", capsys=capsys)
    assert code == 2
    assert "make the plan again" in data["error"]["message"]


@pytest.mark.parametrize("columns", ["60", "80", "110"])
def test_the_help_groups_the_options_and_breaks_no_name_in_the_middle(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for group in ("model", "budget and card", "techniques", "questions", "outputs", "examples"):
        assert any(line.startswith(group) for line in text.splitlines()), group
    for kind in KINDS:
        assert kind in text, f"{kind} is cut by the end of a line"


def test_an_accumulating_loop_is_the_same_as_gradients_alive(folder, capsys):
    arguments = ("net.py:build", "--gpu", "bare", "--json")
    plans = [run(*arguments, name, capsys=capsys)[1] for name in ("--accumulating-loop", "--gradients-alive")]
    assert plans[0]["workload"]["gradients_alive"] is True
    assert plans[0]["workload"] == plans[1]["workload"] and plans[0]["baseline"] == plans[1]["baseline"]


@pytest.mark.parametrize(
    "name, optimizer, technique",
    [("adamw_torch", "adamw", None), ("adamw_bnb_8bit", "adamw", "8bit-optimizer"), ("adafactor", "adafactor", None)],
)
@pytest.mark.thorough
def test_the_names_of_optimizers_in_the_trainer_are_known(folder, capsys, name, optimizer, technique):
    _, plan, _ = run("net.py:build", "--optimizer", name, "--vram", "1GiB", "--json", capsys=capsys)
    assert plan["workload"]["optimizer"] == optimizer
    assert technique is None or technique in [decision["kind"] for decision in plan["decisions"]]


def test_a_shell_can_complete_the_files():
    completed = {action.dest for action in parser()._actions if hasattr(action, "complete")}
    assert completed == {"model", "input_shapes", "lengths", "save", "emit", "report", "snapshot", "svg"}


def test_quiet_prints_one_line(folder, capsys):
    assert main(["net.py:build", "--gpu", "bare", "--vram", "1GiB", "-q"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "fits 1.00 GiB with" in line
    assert main(["net.py:build", "--gpu", "bare", "--tradeoff", "-q"]) == 2


def test_the_command_is_installed_under_its_name():
    found = subprocess.run(
        [sys.executable, "-m", "planner.cli", "--help"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert found.returncode == 0
    assert "--vram" in found.stdout
