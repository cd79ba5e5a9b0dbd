"""Processes that the planner starts: they end with it, and one that the machine ends changes no plan."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import planner
from planner.cli import command
from planner.errors import MachineError, PlannerError, RehearsalProcessError
from planner.virtual_gpu import forked_process
from planner.virtual_gpu.forked_process import Child, run_in_child

WAIT_SECONDS = 30.0


def children_of(parent: int) -> list[int]:
    """Returns the ids of the processes that a process has started and that have not ended."""
    return [int(number) for number in pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def wait_until(holds) -> bool:
    end = time.monotonic() + WAIT_SECONDS
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def is_running(process: int) -> bool:
    try:
        return " Z " not in pathlib.Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize(
    ("method", "number"), [("fork", signal.SIGTERM), ("fork", signal.SIGKILL), ("spawn", signal.SIGKILL)]
)
@pytest.mark.slow
@pytest.mark.thorough_after(1)
def test_an_endless_rehearsal_ends_with_the_process_that_started_it(number, method, tmp_path):
    (tmp_path / "endless.py").write_text(
        textwrap.dedent("""
        import sys, time
        import torch
        import planner

        class Endless(torch.nn.Linear):
            def forward(self, x):
                print("running", file=sys.stderr, flush=True)
                while True:
                    time.sleep(0.01)

        planner.plan(Endless(2, 2), torch.zeros(1, 2), vram=None, gpu="bare", loss_fn=lambda out, _: out.sum())
        """)
    )
    environment = {**os.environ, "PLANNER_START_METHOD": method}
    started = subprocess.Popen(
        [sys.executable, "endless.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert any("running" in line for line in started.stderr)
    below = children_of(started.pid)
    below += [grandchild for child in below for grandchild in children_of(child)]
    assert len(below) >= (2 if method == "spawn" else 1)
    started.send_signal(number)
    started.wait()
    assert wait_until(lambda: not any(map(is_running, below)))


class Killed(torch.nn.Linear):
    """Ends the process in which it runs under autocast, as a system does whose memory has run out."""

    number: int = signal.SIGKILL

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(values.device.type):
            os.kill(os.getpid(), self.number)
        return super().forward(values)


def narrow_plan(model: torch.nn.Module) -> planner.Plan:
    return planner.plan(
        model, torch.zeros(4096, 64), vram="3MiB", gpu="bare", fidelity="rounded", loss_fn=lambda out, _: out.sum()
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_the_machine_ends_changes_no_plan(number):
    model = Killed(64, 256)
    model.number = number
    with pytest.raises(MachineError, match=f"was ended: .*{number.name}"):
        narrow_plan(model)


def test_a_technique_in_which_the_code_itself_crashes_is_left_out():
    model = Killed(64, 256)
    model.number = signal.SIGSEGV
    assert "mixed-precision" not in {decision.kind for decision in narrow_plan(model).decisions}


def test_a_process_that_cannot_be_started_is_an_error_of_the_machine(monkeypatch):
    def fork():
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(MachineError, match="starts no further process"):
        run_in_child(lambda: 1)
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == before


def test_an_answer_is_read_also_where_the_system_waits_for_the_process():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_in_child(lambda: 7) == 7
        with pytest.raises(RehearsalProcessError, match="exit code unknown, because this process ignores SIGCHLD"):
            run_in_child(lambda: os._exit(3))
        child = Child(lambda refuse: 1)
        time.sleep(0.5)  # it ends, and the system forgets it
        child.end()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_an_interrupt_that_reaches_a_child_before_it_is_ignored_has_no_effect(monkeypatch):
    """A terminal sends Ctrl-C to all processes, and Python's handler would return to the caller in the child, too."""
    monkeypatch.setattr(forked_process, "end_with", lambda parent: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run_in_child(lambda: 7) == 7
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_in_a_child_that_has_just_started_does_not_return_to_the_caller_a_second_time(monkeypatch, tmp_path):
    def fail(parent: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(forked_process, "end_with", fail)
    outcome = tmp_path / "outcome"
    with pytest.raises(RehearsalProcessError, match="exit code 1"):
        try:
            run_in_child(lambda: 7)
        finally:
            with outcome.open("a") as file:
                file.write("returned ")
    assert outcome.read_text() == "returned "


def test_an_interrupt_during_a_fork_takes_effect_after_it(monkeypatch):
    """Python's functions around a fork would swallow it."""
    fork, children = os.fork, []

    def interrupted() -> int:
        signal.raise_signal(signal.SIGINT)
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of parallel tests ignore interrupts
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_child(lambda: time.sleep(WAIT_SECONDS))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(children) == 1 and not is_running(children[0])


def test_a_handler_that_only_notes_an_interrupt_does_not_end_the_child(monkeypatch):
    fork, noted = os.fork, []

    def interrupted() -> int:
        signal.raise_signal(signal.SIGINT)
        return fork()

    monkeypatch.setattr(os, "fork", interrupted)
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        assert run_in_child(lambda: 7) == 7
    finally:
        signal.signal(signal.SIGINT, before)
    assert noted == [signal.SIGINT]


def test_a_process_that_the_model_leaves_behind_is_not_waited_for():
    def starts_a_process() -> int:
        process = multiprocessing.Process(target=time.sleep, args=(WAIT_SECONDS,), daemon=True)
        process.start()
        return process.pid

    began = time.monotonic()
    left = run_in_child(starts_a_process)
    assert time.monotonic() - began < WAIT_SECONDS / 2
    os.kill(left, signal.SIGKILL)


def test_a_process_with_many_open_files_can_be_forked():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this system allows no process 2048 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    opened: list[int] = []
    try:
        while len(opened) < 1100:
            opened.append(os.dup(0))
        assert run_in_child(lambda: 7) == 7
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_command_has_an_exit_code_for_it(monkeypatch, capsys):
    def ended(*_):
        raise MachineError("the child process that rehearses the step was ended: SIGKILL")

    monkeypatch.setattr(command, "_answer", ended)
    assert command.main(["model.py:build"]) == 3
    assert "SIGKILL" in capsys.readouterr().err
    monkeypatch.setattr(command, "_answer", lambda *_: (_ for _ in ()).throw(PlannerError("another")))
    assert command.main(["model.py:build"]) == 2
