"""Processes that the planner starts: they end with it, and one that the machine ends changes no plan."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
import torch

import planner
from planner.cli import command
from planner.errors import MachineError, PlannerError, RehearsalProcessError
from planner.spawned import answer, interrupts
from planner.spawned.interrupts import interrupts_held_back
from planner.virtual_gpu import forked_process
from planner.virtual_gpu.forked_process import Child, end_all, run_in_child

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


@pytest.fixture
def interrupted_wait(monkeypatch) -> None:
    """Sends an interrupt when a child is waited for the first time, and lets interrupts raise an error as usual."""
    waitpid, interrupts = os.waitpid, [signal.SIGINT]

    def interrupted(process: int, options: int) -> tuple[int, int]:
        if interrupts:
            signal.raise_signal(interrupts.pop())
        return waitpid(process, options)

    monkeypatch.setattr(os, "waitpid", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_child_whose_end_was_interrupted_can_be_ended_again(interrupted_wait, monkeypatch):
    """By then, its descriptors may belong to other files, and its id to another process."""
    child = Child(lambda refuse: time.sleep(WAIT_SECONDS))
    descriptor = min(child._process._answer._descriptors.values())
    with pytest.raises(KeyboardInterrupt):
        child.end()
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append(process))
    with open(os.devnull, "rb") as file:
        assert file.fileno() == descriptor
        child.end()
        os.fstat(descriptor)
    assert killed == [] and child.is_ready


def test_an_interrupt_while_the_end_of_a_child_is_waited_for_leaves_nothing(interrupted_wait):
    child = Child(lambda refuse: 7)
    process, reader = child._process._pid, child._process._answer._descriptors["reader"]
    with pytest.raises(KeyboardInterrupt):
        child.result()
    with pytest.raises(ChildProcessError):
        os.waitpid(process, os.WNOHANG)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


def test_an_interrupt_just_after_the_end_of_a_child_ends_no_other_process(monkeypatch):
    """The system may give the id of the child to another process by then."""
    waitpid, killed = os.waitpid, []

    def interrupted(process: int, options: int) -> tuple[int, int]:
        ended = waitpid(process, 0)
        signal.raise_signal(signal.SIGINT)
        return ended

    monkeypatch.setattr(os, "waitpid", interrupted)
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append(process))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_child(lambda: 7)
    finally:
        signal.signal(signal.SIGINT, before)
    assert killed == []


def test_an_interrupt_ends_all_children(interrupted_wait):
    children = [Child(lambda refuse: time.sleep(WAIT_SECONDS)) for _ in range(3)]
    processes = [child._process._pid for child in children]
    with pytest.raises(KeyboardInterrupt):
        end_all(children)
    assert not any(map(is_running, processes))


def test_a_child_ends_if_nobody_can_ask_for_its_answer():
    child = Child(lambda refuse: time.sleep(WAIT_SECONDS))
    process = child._process._pid
    del child
    assert not is_running(process)


def test_handlers_that_raise_errors_do_so_after_a_fork(monkeypatch):
    fork = os.fork

    def late() -> int:
        signal.raise_signal(signal.SIGUSR1)
        return fork()

    def fails(number, frame) -> None:
        raise TimeoutError

    monkeypatch.setattr(os, "fork", late)
    before = signal.signal(signal.SIGUSR1, fails)
    try:
        with pytest.raises(TimeoutError):
            run_in_child(lambda: 7)
        monkeypatch.setattr(os, "fork", fork)
        assert run_in_child(lambda: signal.getsignal(signal.SIGUSR1) is fails)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_all_signals_that_were_held_back_take_effect():
    got: list[int] = []

    def fails(number, frame) -> None:
        got.append(number)
        raise TimeoutError

    signals = [signal.SIGUSR1, signal.SIGUSR2]
    before = [signal.signal(number, fails) for number in signals]
    try:
        with pytest.raises(TimeoutError), interrupts_held_back():
            for number in signals:
                signal.raise_signal(number)
            assert got == []
        assert sorted(got) == sorted(signals)
        assert all(signal.getsignal(number) is fails for number in signals)
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def test_a_child_that_has_lost_its_pipe_and_goes_on_can_be_interrupted():
    def closes_all_files() -> None:
        os.closerange(3, 200)
        time.sleep(WAIT_SECONDS)

    def fails(number, frame) -> None:
        raise TimeoutError

    before, began = signal.signal(signal.SIGALRM, fails), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(TimeoutError):
            run_in_child(closes_all_files)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < WAIT_SECONDS / 2


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2), (0, 1, 2)], ids=str)
def test_a_process_whose_standard_streams_are_closed_gets_answers(closed, tmp_path):
    program = f"""
        import os
        for stream in {closed}:
            os.close(stream)
        from planner.virtual_gpu.forked_process import run_in_child
        answer = run_in_child(lambda: (print("text"), 7)[1])
        open({str(tmp_path / "answer")!r}, "w").write(str(answer))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=WAIT_SECONDS * 4)
    assert (tmp_path / "answer").read_text() == "7"


def test_only_the_first_generation_of_processes_closes_the_pipe():
    """In later ones, the number of the pipe belongs to other files."""

    def of_the_second_generation() -> int:
        reader, writer = os.pipe()
        if not os.fork():
            files = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
            if not os.fork():
                for file in files:
                    os.fstat(file)
                os.write(writer, b"open")
            else:
                os.wait()
            os._exit(0)
        os.close(writer)
        os.wait()
        return os.read(reader, 4)

    assert run_in_child(of_the_second_generation) == b"open"


def test_a_process_without_output_streams_can_be_forked(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert run_in_child(lambda: 7) == 7


def test_a_process_that_may_open_no_more_files_is_refused(monkeypatch):
    def refused() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pipe", refused)
    opened = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    with pytest.raises(MachineError, match=r"cannot open a file and a pipe .*Too many open files.*`ulimit -n`"):
        run_in_child(lambda: 7)
    assert opened in (0, len(os.listdir("/proc/self/fd")))


def test_a_process_that_may_write_no_files_is_refused(monkeypatch):
    def refused(*arguments) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "memfd_create", refused, raising=False)
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(MachineError, match=r"Read-only file system.*set TMPDIR"):
        run_in_child(lambda: 7)


def test_a_process_that_the_model_leaves_behind_is_not_waited_for():
    def starts_a_process() -> int:
        process = multiprocessing.Process(target=time.sleep, args=(WAIT_SECONDS,), daemon=True)
        process.start()
        return process.pid

    began = time.monotonic()
    left = run_in_child(starts_a_process)
    assert time.monotonic() - began < WAIT_SECONDS / 2
    os.kill(left, signal.SIGKILL)


def test_a_process_that_outlives_a_child_without_an_answer_is_not_waited_for(tmp_path):
    def starts_a_process_and_ends() -> None:
        process = multiprocessing.Process(target=time.sleep, args=(WAIT_SECONDS,), daemon=True)
        process.start()
        (tmp_path / "pid").write_text(str(process.pid))
        os._exit(3)

    began = time.monotonic()
    try:
        with pytest.raises(RehearsalProcessError, match="without a result: exit code 3"):
            run_in_child(starts_a_process_and_ends)
        assert time.monotonic() - began < WAIT_SECONDS / 2
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="the end of a process cannot be seen without reaping it")
def test_a_child_with_a_large_answer_need_not_wait_for_its_parent():
    child = Child(lambda refuse: bytes(8 << 20))
    process, until = child._process._pid, time.monotonic() + WAIT_SECONDS / 2
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert child.is_ready
    assert child.result() == bytes(8 << 20)


class PickledSlowly:
    """An object that takes three seconds to be pickled, after other parts of the answer were written."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        time.sleep(3.0)
        return PickledSlowly, ()


def test_a_child_is_not_ready_while_it_writes_its_answer():
    child, until = Child(lambda refuse: (bytes(8 << 20), PickledSlowly())), time.monotonic() + WAIT_SECONDS
    while not child.is_ready:
        assert time.monotonic() < until
        time.sleep(0.01)
    began = time.monotonic()
    child.result()
    assert time.monotonic() - began < 1.5


def test_a_value_that_cannot_be_pickled_is_an_error_with_its_cause():
    class Unwilling:
        def __reduce__(self) -> tuple[type, tuple[()]]:
            raise ValueError("cannot be sent")

    with pytest.raises(RehearsalProcessError, match="failed with ValueError: cannot be sent"):
        run_in_child(lambda: (bytes(1 << 20), Unwilling()))


def test_an_answer_that_cannot_be_unpickled_is_an_error_with_its_cause():
    class Unreadable:
        def __reduce__(self):
            return eval, ("1 / 0",)

    with pytest.raises(RehearsalProcessError, match="cannot be read: ZeroDivisionError: division by zero"):
        run_in_child(Unreadable)


def test_a_child_that_has_closed_its_files_can_be_forked(capfd):
    def closes_its_files() -> None:
        os.closerange(3, 200)
        if (process := os.fork()) == 0:
            os._exit(0)
        os.waitpid(process, 0)
        os._exit(3)

    with pytest.raises(RehearsalProcessError, match="without a result: exit code 3"):
        run_in_child(closes_its_files)
    assert capfd.readouterr().err == ""


def test_a_file_that_gets_the_number_of_the_answer_is_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "own"
    path.write_bytes(bytes(800))

    def opens_own_files() -> None:
        os.closerange(3, 200)
        for _ in range(3, 200):
            os.open(path, os.O_RDWR)

    def opens_own_files_at_the_pipe() -> None:
        os.closerange(max(channel._descriptors.values()), 200)
        for _ in range(3, 200):
            os.open(path, os.O_RDWR)

    open_channel, channel = answer.AnswerChannel.open, None

    def noted(self) -> None:
        nonlocal channel
        open_channel(self)
        channel = self

    monkeypatch.setattr(answer.AnswerChannel, "open", noted)
    for function in (opens_own_files, opens_own_files_at_the_pipe):
        with pytest.raises(RehearsalProcessError, match="without a result: exit code 1"):
            run_in_child(function)
        assert path.read_bytes() == bytes(800)


def test_an_answer_that_may_not_be_written_names_the_limit():
    resource = pytest.importorskip("resource")

    def limited() -> bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return bytes(1 << 20)

    with pytest.raises(MachineError, match=r"cannot write its result \(File too large\).*`ulimit -f`"):
        run_in_child(limited)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open files are counted in /proc")
def test_an_interrupt_at_any_line_leaves_no_descriptor_open():
    """At each line that runs in these files after the fork, SIGINT arrives once."""
    files = {forked_process.__file__, answer.__file__, interrupts.__file__}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    opened = len(os.listdir("/proc/self/fd"))
    try:
        for at in itertools.count():
            child, lines, sent = Child(lambda refuse: 7), itertools.count(), []

            def traced(frame, event, argument, at=at, lines=lines, sent=sent):
                if frame.f_code.co_filename in files and event == "line" and next(lines) == at:
                    sent.append(at)
                    signal.raise_signal(signal.SIGINT)
                return traced if frame.f_code.co_filename in files else None

            is_interrupted = False
            tracing = sys.gettrace()
            sys.settrace(traced)
            try:
                child.result()
            except KeyboardInterrupt:
                is_interrupted = True
            finally:
                sys.settrace(tracing)
            del child
            assert len(os.listdir("/proc/self/fd")) == opened, at
            assert is_interrupted == bool(sent), at
            if not sent:
                break
        assert at > 20
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_child_that_has_ended_does_nothing_when_nobody_refers_to_it(monkeypatch):
    """An interrupt in `__del__` would be lost."""
    child, ended = Child(lambda refuse: 7), []
    assert child.result() == 7
    monkeypatch.setattr(type(child._process), "end", lambda self: ended.append(True))
    del child
    assert not ended


@pytest.mark.parametrize("files_in_memory", ["allowed", "forbidden", "unknown"])
def test_an_answer_arrives_with_and_without_files_in_memory(files_in_memory, monkeypatch):
    def forbidden(name: str) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if files_in_memory == "forbidden":
        monkeypatch.setattr(os, "memfd_create", forbidden, raising=False)
    if files_in_memory == "unknown":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    assert run_in_child(lambda: list(range(100_000))) == list(range(100_000))


def test_a_child_that_is_killed_while_it_writes_its_answer_has_none():
    class KillsItsProcess:
        def __reduce__(self) -> tuple[type, tuple[()]]:
            os.kill(os.getpid(), signal.SIGUSR1)
            return KillsItsProcess, ()

    with pytest.raises(RehearsalProcessError, match=f"without a result: killed by signal {signal.SIGUSR1:d}"):
        run_in_child(lambda: (bytes(1 << 20), KillsItsProcess()))


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


def test_a_long_chain_of_nodes_that_python_has_seen_is_freed():
    """PyTorch frees such a chain recursively, which needs more than the usual 8 MiB of stack."""
    resource = pytest.importorskip("resource")

    def freed() -> int:
        nodes, y = 100_000, torch.ones(1, requires_grad=True)
        for _ in range(nodes):
            y = y * 1
            assert y.grad_fn is not None
        del y
        return nodes

    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if hard != resource.RLIM_INFINITY and hard < 96 << 20:
        pytest.skip(f"the hard limit of the stack is {hard >> 20} MiB (`ulimit -H -s`)")
    assert forked_process.Child(lambda refuse: freed()).result() == 100_000
