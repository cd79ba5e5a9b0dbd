"""On every error the command prints one line, exits with 2, and prints at most one JSON object."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch

import planner
from planner import pipeline
from planner.cli import hub, main
from planner.errors import WorkloadError
from planner.plan_types.decisions import Accumulation
from planner.plan_types.plan import Plan
from planner.plan_types.recompute_decisions import Checkpoint
from planner.workload import cards
from planner.workload.loading import load_workload

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
MODEL = """
import os
import sys

import torch

def build(batch_size=16):
    layers = (torch.nn.Linear(8, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 1))
    return torch.nn.Sequential(*layers), (torch.zeros(batch_size, 8), torch.zeros(batch_size, 1)), loss

def loss(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])

def exits():
    sys.exit(3)

def exits_quietly():
    sys.exit(0)

def exits_with_words():
    raise SystemExit("not today\\nnor tomorrow")

def raises_lines():
    raise ValueError("first line\\nsecond line")

def returns_nothing():
    return ()

def interrupted():
    raise KeyboardInterrupt

class InterruptedInAnImport(torch.nn.Module):
    def parameters(self, recurse=True):
        try:
            raise KeyboardInterrupt
        except BaseException as error:
            raise ModuleNotFoundError("could not import module") from error

def interrupted_in_an_import():
    return InterruptedInAnImport(), (torch.zeros(4, 8),)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def forward(self, x):
        print("from a forward")
        return self.linear(x).mean()

class Leaves(Model):
    def forward(self, x):
        sys.exit(0)

def leaves_in_forward():
    return Leaves(), (torch.zeros(4, 8),)

class Unexpected(Model):
    def parameters(self, recurse=True):
        raise ZeroDivisionError("first line\\nsecond line")

def has_no_parameters():
    return Unexpected(), (torch.zeros(4, 8),)

class Batch(list):
    def __len__(self):
        raise ValueError("no length")

def has_no_length():
    return Model(), Batch([torch.zeros(4, 8)])

def needs_a_card():
    return Model().cuda(), (torch.zeros(4, 8),)

def talks():
    print("from a builder")
    os.write(1, b"from a file descriptor\\n")
    os.system("echo from a shell")
    return Model(), (torch.zeros(4, 8),)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cards, "_present_card", lambda: None)
    return tmp_path


def refused(*arguments: str, capsys) -> str:
    """Returns the message of a refusal, which is the same with and without `--json`."""
    assert main(list(arguments)) == 2
    plain = capsys.readouterr()
    assert plain.out == ""
    assert main([*arguments, "--json"]) == 2
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["fits"] is None
    message = data["error"]["message"]
    assert "\n" not in message
    for error in (plain.err, captured.err):
        assert error.rstrip().splitlines()[-1] == f"plan: {message}"
    return message


# ---- the user's code ---------------------------------------------------------------------------------------------

FAULTS = {
    "exits": "called sys.exit(3)",
    "exits_quietly": "called sys.exit(0)",
    "exits_with_words": "called sys.exit('not today",
    "raises_lines": "raised ValueError: first line",
    "returns_nothing": "returned 0 values: return model",
    "interrupted": "interrupted",
    "leaves_in_forward": "failed with this batch: SystemExit",
    "needs_a_card": "compiled with CUDA enabled: planning needs no card, so leave the model and the batch on the CPU",
    "has_no_parameters": "ZeroDivisionError: first line second line, raised at ",
    "has_no_length": "the planner ran this line to read the model or the batch; fix it there",
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_the_users_code_does_is_reported_on_one_line_with_exit_code_two(folder, capsys, monkeypatch, name):
    monkeypatch.delattr(torch._C, "_cuda_getDeviceCount", raising=False)  # as in a CPU build of PyTorch
    assert FAULTS[name] in refused(f"net.py:{name}", capsys=capsys)


@pytest.mark.parametrize("module", ["planner.plan_types.plan", "planner.cli.options"])
def test_ctrl_c_while_the_command_is_imported_gives_one_line(module, tmp_path):
    blocked = f"""
import sys

class Interrupting:
    def find_spec(name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting)
from planner.cli import main
sys.exit(main(["model", "--vram", "6GiB"]))
"""
    ended = subprocess.run([sys.executable, "-c", blocked], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "plan: interrupted\n")


def test_ctrl_c_that_a_library_turns_into_an_error_is_an_interruption(folder, capsys):
    assert refused("net.py:interrupted_in_an_import", capsys=capsys) == "interrupted"


SCRIPT = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
width = parser.parse_args().width

def build():
    return torch.nn.Linear(width, 1), (torch.zeros(4, width),), lambda output, batch: output.mean()
"""


@pytest.mark.thorough
def test_arguments_after_two_dashes_go_to_the_users_script_and_stay_in_the_plan(folder, capsys):
    (folder / "script.py").write_text(SCRIPT)
    words = ("--gpu", "bare", "--save", "p.json", "--emit", "emitted.py")
    assert main(["script.py:build", *words, "--", "--width", "7"]) == 0
    plan = Plan.load("p.json")
    assert (plan.model.parameters, plan.model.arguments) == (8, ("--width", "7"))
    assert main(["p.json", "--trust-reference", "--gpu", "bare"]) == 0
    emitted = (folder / "emitted.py").read_text()
    assert "-- --width 7" in emitted and "'script.py', '--width', '7'" in emitted.replace('"', "'")
    ran = subprocess.run([sys.executable, "emitted.py"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    before = list(sys.argv)
    capsys.readouterr()
    message = refused("script.py:build", capsys=capsys)
    assert "called sys.exit(2): give the arguments that it expects after --" in message
    assert sys.argv == before
    (folder / "config.json").write_text("{}")
    assert main(["config.json", "--", "3"]) == 2
    assert "arguments after -- are for a Python file" in capsys.readouterr().err


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_id_that_cannot_be_loaded_is_refused_at_once(folder, capsys, monkeypatch, offline):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nothing listens there
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    began = time.perf_counter()
    message = refused("some/model", capsys=capsys)
    assert time.perf_counter() - began < 2
    assert f"'some/model' is not a file or folder in {folder}, and cannot be loaded from the hub" in message
    assert ("HF_HUB_OFFLINE is set" if offline else "http://127.0.0.1:1 cannot be reached") in message
    (folder / "models--some--model").mkdir()
    assert hub.refuse_unreachable("some/model") is None


def test_a_budget_below_context_and_parameters_is_refused_without_a_rehearsal(folder, capsys, monkeypatch):
    monkeypatch.setattr(pipeline, "open_session", None)  # it must not be reached
    for question in ((), ("--largest-batch",)):
        assert main(["net.py:build", "--vram", "50MiB", "--gpu", "rtx-2060", "--json", *question]) == 1
        data = json.loads(capsys.readouterr().out)
        assert data["fits"] is False and data["error"]["type"] == "BudgetError"
        assert "does not fit: a budget of 50.0 MiB cannot hold the model" in data["error"]["message"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit(0)", "called sys.exit(0)"),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("def build(:", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_imported_is_reported_on_one_line(folder, capsys, text, message):
    (folder / "bad.py").write_text(text)
    assert message in refused("bad.py:build", capsys=capsys)


def test_an_unexpected_fault_of_ours_is_reported_on_one_line_below_its_traceback(folder, capsys, monkeypatch):
    monkeypatch.setattr(pipeline, "plan_workload", None)
    assert main(["net.py:build", "--json"]) == 2
    captured = capsys.readouterr()
    fault = "TypeError: 'NoneType' object is not callable"
    message = f"{fault}; this is a bug of the planner, please report it with the traceback above"
    assert json.loads(captured.out)["error"] == {"type": "PlannerError", "message": message}
    assert captured.err.startswith("Traceback")
    assert captured.err.rstrip().splitlines()[-1] == f"plan: {message}"


@pytest.mark.thorough
def test_with_json_standard_output_is_one_object_whoever_else_prints(folder):
    ran = subprocess.run(
        [sys.executable, "-m", "planner.cli", "net.py:talks", "--gpu", "bare", "--json"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["fits"] is True
    for place in ("a builder", "a file descriptor", "a shell", "a forward"):
        assert f"from {place}" in ran.stderr


@pytest.mark.parametrize(("option", "message"), [("--help", "usage: plan"), ("--version", "plan ")])
def test_help_and_version_are_no_errors_even_with_json(option, message, capsys):
    with pytest.raises(SystemExit) as left:
        main([option, "--json"])
    assert left.value.code == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(message)
    assert '"error"' not in captured.out
    assert captured.err == ""


def test_a_share_of_no_card_is_refused(folder, capsys):
    assert "percentage of the card's memory" in refused("net.py:build", "--vram", "80%", capsys=capsys)


# ---- names of files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "planner", "random", "json", "my-net"])
def test_a_file_may_have_the_name_of_a_module_that_is_in_use(folder, name):
    before = sys.modules.get(name)
    (folder / "net.py").rename(f"{name}.py")
    work = load_workload(f"{name}.py:build", batch_size=None, seq_len=None, optimizer="adamw")
    assert type(work.model).__name__ == "Sequential"
    assert sys.modules.get(name) is before


def test_files_of_one_name_in_two_folders_are_two_files(folder):
    (folder / "other").mkdir()
    (folder / "other/net.py").write_text(MODEL.replace("batch_size=16", "batch_size=7"))
    sizes = [
        load_workload(f"{place}:build", batch_size=None, seq_len=None, optimizer="adamw").batch_size
        for place in ("net.py", "other/net.py", "net.py")
    ]
    assert sizes == [16, 7, 16]


def test_the_folder_of_a_file_is_searched_for_its_imports_but_hides_nothing(folder, monkeypatch):
    (folder / "nets").mkdir()
    (folder / "nets/neighbour_of_net.py").write_text("SIZE = 5\n")
    (folder / "nets/colorsys.py").write_text("raise ValueError('this is not the standard library')\n")
    text = MODEL.replace("batch_size=16", "batch_size=neighbour_of_net.SIZE")
    (folder / "nets/net.py").write_text(f"import colorsys\nimport neighbour_of_net\n{text}")
    for name in ("colorsys", "neighbour_of_net"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    work = load_workload("nets/net.py:build", batch_size=None, seq_len=None, optimizer="adamw")
    assert work.batch_size == 5


def test_a_misspelt_name_is_answered_with_what_the_file_itself_offers(folder, capsys):
    (folder / "short.py").write_text("from pathlib import Path\n\ndef build():\n    pass\n")
    assert refused("short.py:bild", capsys=capsys).endswith("choose from build")


# ---- saved plans -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict:
    """A plan with every decision that depends on the batch or the model."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "net.py").write_text(MODEL)
    forced = ("--force", "accumulation", "--force", "checkpoint", "--forbid", "optimizer-kernel", "--fidelity", "exact")
    given = (f"{folder}/net.py:build", "--vram", "1GiB", "--gpu", "bare", *forced, "--save", f"{folder}/p.json")
    assert main(list(given)) == 0
    plan = Plan.load(folder / "p.json")
    assert plan.decision(Accumulation) == Accumulation(micro_batch_size=8, micro_batches=2)
    assert plan.decision(Checkpoint) is not None
    return plan.to_json()


@pytest.mark.parametrize(
    "option",
    [
        ("--batch-size", "8"),
        ("--seq-len", "8"),
        ("--optimizer", "sgd"),
        ("--fidelity", "rounded"),
        ("--force", "optimizer"),
        ("--forbid", "checkpoint"),
    ],
    ids=lambda option: option[0],
)
@pytest.mark.thorough_after(2)
def test_options_that_would_change_a_saved_plan_are_refused(folder, capsys, saved, option):
    (folder / "p.json").write_text(json.dumps(saved))
    message = refused("p.json", "--trust-reference", *option, capsys=capsys)
    assert message.startswith(f"{option[0]} cannot be combined with a saved plan")


def test_a_saved_plan_may_be_rehearsed_for_another_budget_and_card(folder, capsys, saved):
    (folder / "p.json").write_text(json.dumps(saved))
    assert main(["p.json", "--trust-reference", "--vram", "16GiB", "--gpu", "rtx-2060", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["card"], data["vram_bytes"], data["decisions"]) == ("rtx-2060", 16 << 30, saved["decisions"])
    assert data["notes"][0].startswith("GeForce RTX 2060 6 GB offers 5.79 GiB")


def test_a_saved_plan_that_no_longer_fits_says_by_how_much(folder, capsys, saved):
    (folder / "p.json").write_text(json.dumps(saved))
    needed = saved["plan"]["total_bytes"]
    assert main(["p.json", "--trust-reference", "--vram", f"{needed - 100}B"]) == 1
    assert "100 B over the budget" in capsys.readouterr().out


EDITED = {
    "another number of micro-batches": (
        ("decisions", 0, "micro_batches"),
        3,
        "3 micro-batches of 8 samples do not make up",
    ),
    "another micro-batch": (("decisions", 0, "micro_batch_size"), 5, "2 micro-batches of 5 samples do not make up"),
    "another batch": (("workload", "batch_size"), 40, "do not make up its batch of 40"),
    "a share of a micro-batch": (("decisions", 0, "micro_batches"), 2.0, "needs at least 2 micro-batches"),
    "a module that is not there": (("decisions", 1, "modules"), ["9"], "names module '9'"),
    "another model": (("model", "fingerprint"), "0", "is not the Sequential that the plan was made for"),
    "an unknown card": (("card",), "rtx-9999", "card 'rtx-9999' is unknown"),
    "an unknown fidelity": (("fidelity",), "loose", "fidelity 'loose' is unknown"),
    "an unknown technique": (("forced",), ["magic"], "technique 'magic' is unknown"),
    "an unknown optimizer": (("workload", "optimizer"), "lion", "optimizer 'lion' is unknown"),
}


@pytest.mark.parametrize("case", EDITED)
def test_a_saved_plan_that_was_edited_until_it_contradicts_itself_is_refused(folder, capsys, saved, case):
    (*path, last), value, message = EDITED[case]
    data = place = copy.deepcopy(saved)
    for step in path:
        place = place[step]
    place[last] = value
    (folder / "p.json").write_text(json.dumps(data))
    assert message in refused("p.json", "--trust-reference", capsys=capsys)


@pytest.mark.parametrize("arguments", [("--vram", "12"), ("--vram", "6GiB", "--gpu", "rtx-9999")])
def test_a_wrong_size_or_card_is_refused_before_torch_is_imported(arguments):
    code = (
        "import sys; from planner.cli.command import main\n"
        f"code = main(['nets.py:build', *{arguments!r}]); print(code, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["2", "False"]


@pytest.mark.parametrize(
    "file, content, words",
    [
        (
            "config.json",
            {"_class_name": "UNet2DModel", "_diffusers_version": "0.3"},
            "diffusers.UNet2DModel.from_config",
        ),
        ("model_index.json", {"_class_name": "StableDiffusionPipeline"}, "a model of diffusers"),
        ("config.json", {"architecture": "resnet18"}, "timm.create_model('resnet18')"),
    ],
)
def test_folders_of_other_libraries_are_refused_with_what_to_do(file, content, words, tmp_path):
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(WorkloadError) as refusal:
        load_workload(str(tmp_path), batch_size=None, seq_len=None, optimizer="adamw")
    assert words in str(refusal.value)


def test_a_forgotten_loss_function_is_named():
    with pytest.raises(WorkloadError, match=r"give the loss function \(loss_fn=\)"):
        planner.plan(torch.nn.Linear(4, 1), (torch.randn(2, 4), torch.randn(2, 1)), vram=None, gpu="bare")


def test_lines_in_a_log_stay_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\ndef build():\n"
        "    return torch.nn.Linear(4, 1), torch.randn(2, 4), lambda output, batch: output.mean()\n"
    )
    assert main(["net.py:build", "--gpu", "bare", "--vram", "1GiB"]) == 0
    assert any("solver: " in line and "torch " in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("value", ["", "  ", ","])
@pytest.mark.parametrize("option", ["--only", "--force", "--optimizer", "--gpu", "--vram", "--by-sample", "--value"])
def test_an_option_with_an_empty_value_is_refused(option, value, folder, capsys):
    assert main(["net.py:build", "-q", option, value]) == 2
    assert f"plan: {option} has an empty value: give one" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--save", "--emit", "--report", "--svg", "--snapshot"])
@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_folder_is_no_output_file(option, path, folder, capsys):
    assert main(["net.py:build", option, path, "--tradeoff"]) == 2
    assert "cannot be written: it is a folder; name a file in it" in capsys.readouterr().err


def test_names_of_tensors_are_divided_at_commas(monkeypatch, capsys):
    given = {}

    def load(reference, **settings):
        given.update(settings)
        raise WorkloadError("enough")

    monkeypatch.setattr("planner.cli.answer.load_workload", load)
    assert main(["config.json", "--vram", "1GiB", "--by-sample", "input_ids, labels"]) == 2
    assert given["by_sample"] == ("input_ids", "labels")
