"""The command ends with the right exit code and one line, whatever the shell, the system or the model's code does.

Exit codes 0 and 1 are answers. Nothing that prevents an answer may end with one of them.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from planner.cli import main
from planner.plan_types.plan import Plan
from planner.snapshot.command import main as snapshot_main

ROOT = pathlib.Path(__file__).parents[2]
NET = """
import os, sys, torch
def build(batch_size=4):
    {misbehaviour}
    return torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.ones(batch_size, 4), lambda output, batch: output.sum()
"""


def model(folder: pathlib.Path, misbehaviour: str = "pass") -> str:
    (folder / "net.py").write_text(NET.format(misbehaviour=misbehaviour))
    return f"{folder / 'net.py'}:build"


def run(*words: str, shell: str = "", folder: pathlib.Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run the command in a process of its own, as `shell`, in which "$@" stands for it."""
    command = [sys.executable, "-m", "planner.cli", *words]
    if shell:
        command = ["bash", "-c", shell, "bash", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False, errors="replace"
    )


MISBEHAVIOUR = {
    "os._exit(0)": "exit",
    "os._exit(1)": "exit",
    "sys.exit(0)": "exit",
    "raise SystemExit": "exit",
    "raise type('Skip', (BaseException,), {})('later')": "Skip: later",
    "raise GeneratorExit": "GeneratorExit",
    "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})": "Mute",
    "raise ValueError('\\x1b[2J' + 'x' * 10**6)": "ValueError",
    "raise ValueError('a\\nb')": "ValueError: a",
    "sys.stdout.close(); raise ValueError('after')": "after",
    "sys.stderr.close(); raise ValueError('after')": "after",
    "os.close(1); os.close(2); raise ValueError('after')": "net.py:build' raised ",
    "raise MemoryError": "Memory",
    "(lambda f: f(f))(lambda f: f(f))": "ecursion",
}


@pytest.mark.parametrize("misbehaviour", MISBEHAVIOUR)
def test_code_that_misbehaves_ends_the_command_with_one_line(misbehaviour, tmp_path, capfd):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", os.fdopen(os.dup(2), "w"))  # the code may close it
        code = main([model(tmp_path, misbehaviour), "--gpu", "bare", "-q"])
        sys.stderr.flush()
    out, error = capfd.readouterr()
    assert code in (2, 3) and out == ""
    assert MISBEHAVIOUR[misbehaviour] in error and "Traceback" not in error
    assert len(error.strip().splitlines()) == 1 and len(error) < 3000 and "\x1b" not in error


def test_code_that_closes_the_streams_and_returns_gets_its_answer(tmp_path, capfd):
    assert main([model(tmp_path, "sys.stdout.close()"), "--gpu", "bare", "-q"]) == 0
    assert capfd.readouterr().out.startswith("Sequential needs ")
    print("standard output still works")
    assert "still works" in capfd.readouterr().out


@pytest.mark.slow
def test_code_that_forks_and_returns_twice_gets_one_answer(tmp_path):
    found = run(model(tmp_path, "os.fork()"), "--gpu", "bare", "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["certified"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ('set -o pipefail; "$@" | true', 2),
        ('"$@" > /dev/full', 2),
        ('"$@" >&-', 2),
        ('"$@" 2>&-', 0),
        ('"$@" <&-', 0),
        ('"$@" 2> /dev/full', 0),
    ],
)
def test_streams_that_are_closed_or_full(shell, code, tmp_path):
    found = run(model(tmp_path), "--gpu", "bare", "-q", shell=shell)
    assert found.returncode == code, found.stderr
    assert "Traceback" not in found.stderr and "Exception ignored" not in found.stderr
    assert len(found.stderr.strip().splitlines()) == (code == 2)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["explain", "--help"]])
def test_help_that_cannot_be_written_is_an_error(words):
    found = run(*words, shell='"$@" > /dev/full', PYTHONUNBUFFERED="1")
    assert found.returncode == 2
    assert found.stderr == "plan: the answer cannot be written to standard output: No space left on device\n"


def test_an_answer_that_cannot_be_shown_does_not_end_with_the_exit_code_of_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("planner.cli.report.render", None)
    assert main([model(tmp_path), "--gpu", "bare"]) == 2
    assert "'NoneType' object is not callable; this is a bug of the planner" in capsys.readouterr().err


BROKEN = {
    "raise RuntimeError('no kernel')": "RuntimeError: no kernel",
    "import no_such_library": "ModuleNotFoundError: No module named 'no_such_library'",
    "this is no Python": "SyntaxError: invalid syntax (__init__.py, line 1)",
}


@pytest.mark.parametrize("source", BROKEN)
def test_a_library_whose_installation_is_broken_is_named_in_one_line(source, tmp_path):
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text(source)
    found = run("diff", "a.json", "b.json", folder=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1, found.stderr
    assert f"plan: rich cannot be imported ({BROKEN[source]}): install it again" in found.stderr


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'rich'", name="rich"), "rich cannot be imported"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_the_command_for_snapshots_refuses_in_one_line_too(error, message, monkeypatch, capsys):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("planner.snapshot.command.load", fails)
    assert snapshot_main(["snapshot.pickle"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"snapshot: {message}") and len(shown.splitlines()) == 1


@pytest.mark.parametrize("columns", ["0", "1", "-5", "x", "", "\N{SUPERSCRIPT TWO}", "9" * 5000])
def test_the_report_is_printed_whatever_the_number_of_columns(columns, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    assert main([model(tmp_path), "--gpu", "bare"]) == 0
    assert "parameters" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["x" * 300 + ".json", "x" * 300, "loop.json", "loop"])
def test_a_name_that_the_system_does_not_take_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("loop.json").symlink_to("loop.json")
    pathlib.Path("loop").symlink_to("loop")
    for words in ([name], [model(tmp_path), "--save", name], [model(tmp_path), "--emit", name], ["diff", name, name]):
        assert main([*words, "-q"] if words[0] != "diff" else words) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error and len(error.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_files_and_folders_without_rights_are_refused(tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "config.json").write_text("{}")
    secret = tmp_path / "config.json"
    secret.write_text("{}")
    secret.chmod(0o600)
    (tmp_path / "net.py").write_text("import torch\n")
    os.chown(closed, 65534, 65534)  # of somebody else
    os.chown(secret, 65534, 65534)
    code = "import sys; from planner.cli import main; [print(main(w.split() + ['-q'])) for w in sys.argv[1:]]"
    without_rights = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override"]
    commands = [
        str(secret), str(tmp_path), str(closed), f"{closed}/config.json", f"{closed}/net.py:build",
        f"{tmp_path}/net.py:build --save {closed}/plan.json", f"{tmp_path}/net.py:build --emit {secret}",
        f"{tmp_path}/net.py:build --gpu {closed}/card.toml", f"{tmp_path}/net.py:build --lengths {secret}",
    ]  # fmt: skip
    found = subprocess.run(
        [*without_rights, sys.executable, "-c", code, *commands],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.stdout.split() == ["2"] * len(commands), found.stdout + found.stderr
    assert "Traceback" not in found.stderr and len(found.stderr.strip().splitlines()) == len(commands)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_working_directory_that_was_deleted_is_no_bug(tmp_path):
    (tmp_path / "gone").mkdir()
    for words in (["no/such/model"], ["nosuch.json"], [model(tmp_path), "--save", "plan.json"]):
        found = run(*words, "-q", shell=f'cd {tmp_path}/gone; rmdir {tmp_path}/gone; "$@"', PYTHONSAFEPATH="1")
        assert found.returncode == 2 and "Traceback" not in found.stderr, found.stderr
        assert len(found.stderr.strip().splitlines()) <= 3
        (tmp_path / "gone").mkdir(exist_ok=True)


@pytest.mark.parametrize("words", [["--gpu", "rtx\n2"], ["--gpu", "x" * 5000], ["--gpu", "\x1b[2J"]])
def test_words_of_the_user_are_shown_on_one_line(words, tmp_path, capsys):
    assert main([model(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and len(error) < 3000 and "\x1b" not in error


@pytest.mark.parametrize("number", ["1" * 31, "2147483648", "0", "-1", "1.5", "x"])
def test_a_number_of_samples_out_of_range_is_refused(number, capsys):
    assert main(["net.py:build", "--batch-size", number]) == 2
    assert "is not a whole number above 0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.thorough
def test_a_report_is_written_in_a_locale_of_ascii_letters(tmp_path):
    words = [model(tmp_path), "--gpu", "bare", "--vram", "1GiB", "--report", str(tmp_path / "r.html")]
    found = run(*words, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert found.returncode == 0, found.stderr
    assert {path.name for path in tmp_path.iterdir()} >= {"r.html"} and not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("option", [["--force", "checkpoint"], ["--max-slowdown", "2"]])
def test_options_that_only_a_budget_gives_a_meaning_are_refused_without_one(option, tmp_path, capsys):
    assert main([model(tmp_path), *option]) == 2
    assert f"{option[0]} has no effect without a budget" in capsys.readouterr().err


@pytest.mark.slow
def test_a_saved_plan_of_a_function_needs_trust(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    reference = model(tmp_path, "pathlib = __import__('pathlib'); pathlib.Path('ran').touch()")
    assert main([reference, "--gpu", "bare", "--vram", "1GiB", "--save", "plan.json", "-q"]) == 0
    pathlib.Path("ran").unlink()
    capsys.readouterr()
    assert main(["plan.json"]) == 2
    error = capsys.readouterr().err
    assert f"'{reference}'" in error and "give --trust-reference if you trust this file" in error
    assert not pathlib.Path("ran").exists()
    assert main(["plan.json", "--trust-reference", "-q"]) == 0
    assert pathlib.Path("ran").exists()
    assert Plan.load("plan.json").model.reference == reference


NEVER_RETURNS = {
    "while True: pass": "a loop",
    "__import__('time').sleep(10**6)": "a wait",
    "__import__('ctypes').CDLL(None).sleep(10**6)": "a wait in C",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "misbehaviour, forms", [*zip(NEVER_RETURNS, (["--json"], ["-q", "--vram", "1GiB"], ["--json"]), strict=True)]
)
def test_the_time_limit_also_ends_code_that_builds_no_model(misbehaviour, forms, tmp_path):
    result = run(model(tmp_path, misbehaviour), "--gpu", "bare", "--time-limit", "1s", *forms)
    message = (
        r"planning ended after the time limit of 1 s while loading (torch|the model): give more time \(--time-limit\)"
    )
    assert result.returncode == 2 and re.search(message, result.stderr) and len(result.stderr.splitlines()) == 1
    if "--json" in forms:
        assert json.loads(result.stdout)["error"]["type"] == "TimeLimitError"


@pytest.mark.slow
def test_the_message_about_such_code_names_the_stage_of_a_search_for_the_largest_batch(tmp_path):
    result = run(
        model(tmp_path, "while True: pass"), "--gpu", "bare", "--vram", "1GiB", "--largest-batch", "--time-limit", "6s"
    )
    assert result.returncode == 2
    assert (
        "planning ended after the time limit of 6 s while searching for the largest batch: loading the model"
        in result.stderr
    )


def test_a_file_that_the_models_code_holds_in_a_cycle_is_written(tmp_path):
    """Python writes what is left of it when it exits, if it searches the objects of the user's code for cycles."""
    (tmp_path / "net.py").write_text(
        "import torch\n\n\n"
        "class Log:\n"
        "    def __init__(self):\n"
        "        self.file, self.write = open('log.txt', 'w'), self.noted\n\n"
        "    def noted(self, text):\n"
        "        self.file.write(text)\n\n\n"
        "log = Log()\nlog.write('built')\n\n\n"
        "def build():\n"
        "    return torch.nn.Linear(4, 4), torch.zeros(2, 4), lambda output, batch: output.mean()\n"
    )
    for words in (["net.py:build", "--vram", "1GiB", "--save", "plan.json"], ["plan.json", "--trust-reference"]):
        (tmp_path / "log.txt").unlink(missing_ok=True)
        command = [sys.executable, "-m", "planner.cli", *words, "--gpu", "bare"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        assert (tmp_path / "log.txt").read_text() == "built"


def test_the_objects_of_imported_libraries_are_not_searched_for_cycles_when_the_command_exits(tmp_path):
    """They are frozen before the model's code is imported, and only if the process belongs to the command."""
    (tmp_path / "net.py").write_text(
        "import gc\n\nfrozen = gc.get_freeze_count()\nimport torch\n\n\n"
        "def build():\n"
        "    open('frozen.txt', 'w').write(str(frozen))\n"
        "    return torch.nn.Linear(4, 4), torch.zeros(2, 4), lambda output, batch: output.mean()\n"
    )
    words = ["net.py:build", "--vram", "1GiB", "--gpu", "bare"]
    as_function = [sys.executable, "-c", f"from planner.cli import main; main({words!r})"]
    for command, is_frozen in (([sys.executable, "-m", "planner.cli", *words], True), (as_function, False)):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        assert (int((tmp_path / "frozen.txt").read_text()) > 100_000) == is_frozen
