"""The process that asks a libcudnn, what is remembered of it, and what happens where it does not answer."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import platform
import stat

import pytest

from planner.workspaces.cudnn import asking, remembered, sources, stub, tables
from planner.workspaces.cudnn.asking import CannotAskError, ask, libraries
from planner.workspaces.cudnn.convolution import Convolution
from planner.workspaces.cudnn.sources import Source, workspaces
from planner.workspaces.cudnn.versions import PINNED, expected

pytestmark = pytest.mark.no_torch

SIZES = ("8,3,31,31", "8,3,32,32", "8,3,33,33")
QUESTIONS = [Convolution.of(f"forward:float32:tf32 {x}/16,3,3,3/1,1/0,0/1,1") for x in SIZES]


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "_SILENT", {})
    sources._ANSWERS.clear()
    yield
    sources._ANSWERS.clear()


def pretend(monkeypatch, tmp_path: pathlib.Path, script: str) -> pathlib.Path:
    """Makes a shell script answer in place of the process that asks, and returns the path of a library."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/question\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(asking.sys, "executable", str(program))
    library = tmp_path / "libcudnn.so.9"
    library.write_bytes(b"")
    monkeypatch.setenv("PLANNER_CUDNN", str(library))
    return library


def test_answers_are_remembered_and_not_asked_again(monkeypatch, tmp_path):
    library = pretend(monkeypatch, tmp_path, "echo 9 20 0; echo '100>40>0'; echo 0; echo no algorithm computes it")
    answers = ask(library, (8, 0), QUESTIONS)
    assert answers.version == (9, 20, 0) and answers.workspaces == dict(
        zip(QUESTIONS[:2], ((100, 40, 0), (0,)), strict=True)
    )
    pretend(monkeypatch, tmp_path, "exit 1").touch()
    library.unlink()
    with pytest.raises(CannotAskError, match="cannot be read"):
        ask(library, (8, 0), QUESTIONS)


def test_what_is_remembered_answers_without_a_process_until_the_library_changes(monkeypatch, tmp_path):
    library = pretend(monkeypatch, tmp_path, "echo 9 20 0; echo 100; echo 200; echo 300")
    first = ask(library, (8, 0), QUESTIONS)
    monkeypatch.setattr(asking, "ask_child", lambda *_: pytest.fail("asked again"))
    assert ask(library, (8, 0), QUESTIONS) == first
    library.write_bytes(b"another version")
    with pytest.raises(pytest.fail.Exception):
        ask(library, (8, 0), QUESTIONS)


def test_a_question_that_ends_the_process_leaves_the_answers_before_it(monkeypatch, tmp_path):
    library = pretend(monkeypatch, tmp_path, "echo 9 20 0; echo 100; echo 200; kill -ABRT $$")
    assert list(ask(library, (8, 0), QUESTIONS).workspaces.values()) == [(100,), (200,)]
    found = workspaces(QUESTIONS, (8, 0), "2.13.0")
    assert [found[each].source for each in QUESTIONS[:2]] == [Source.LIBRARY] * 2
    assert found[QUESTIONS[2]].source is not Source.LIBRARY


def test_a_library_that_aborts_is_not_asked_again_and_its_reason_is_kept(monkeypatch, tmp_path):
    pretend(monkeypatch, tmp_path, "echo 9 20 0; echo 'Cannot load symbol cublasLtGetVersion' >&2; kill -ABRT $$")
    found = workspaces(QUESTIONS, (8, 0), "2.13.0")
    assert {each.source for each in found.values()} <= {Source.TABLE, Source.FORMULA}
    assert "Cannot load symbol cublasLtGetVersion" in sources.reasons()[0]
    monkeypatch.setattr(sources, "ask", lambda *_: pytest.fail("asked again"))
    workspaces([Convolution.of("forward:float64 1,1,9,9/1,1,3,3/1,1/0,0/1,1")], (8, 0), "2.13.0")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setenv("PLANNER_CUDNN", "/nowhere/libcudnn.so.9")
    assert workspaces(QUESTIONS, (8, 0), "2.13.0")[QUESTIONS[0]].source is not Source.LIBRARY
    assert "/nowhere/libcudnn.so.9 cannot be read" in sources.reasons()[0]


@pytest.mark.parametrize(
    ("version", "torch_version", "capability", "is_exact"),
    [
        ("9 20 0", "2.13.0+cpu", (8, 0), True),
        ("9 21 0", "2.13.0+cpu", (8, 0), False),
        ("9 21 0", "2.13.0+cu130", (8, 0), True),  # a CUDA build runs what is installed
        ("9 20 0", "2.14.0+cpu", (8, 0), False),  # a release whose version is not known
    ],
)
def test_answers_are_exact_if_pytorch_runs_this_version(
    monkeypatch, tmp_path, version, torch_version, capability, is_exact
):
    pretend(monkeypatch, tmp_path, f"echo {version}; echo 100; echo 200; echo 300")
    found = workspaces(QUESTIONS, capability, torch_version)
    assert {each.is_exact for each in found.values()} == {is_exact}
    assert {each.source for each in found.values()} == {Source.LIBRARY}


def test_a_library_is_not_asked_about_cards_that_it_does_not_know(monkeypatch, tmp_path):
    """It would answer, with algorithms that take nothing."""
    pretend(monkeypatch, tmp_path, "echo 9 20 0; echo 0; echo 0; echo 0")
    assert Source.LIBRARY not in {each.source for each in workspaces(QUESTIONS, (7, 0), "2.13.0").values()}
    assert expected("2.13.0", (7, 0)).version == (9, 10, 2) and expected("2.13.0", (7, 5)).version == (9, 20, 0)


def test_the_version_is_that_of_the_release_or_the_nearest_that_is_known():
    assert expected("2.11.1+cu130", (9, 0)).version == (9, 19, 0) and expected("2.11.1", (9, 0)).is_pinned
    oldest, newest = PINNED[min(PINNED)], PINNED[max(PINNED)]
    assert expected("2.5.0", (8, 0)).version == oldest and not expected("2.5.0", (8, 0)).is_pinned
    assert expected("3.0.0", (8, 0)).version == newest and not expected("3.0.0", (8, 0)).is_pinned
    with pytest.raises(ValueError, match="cannot be read"):
        expected("main", (8, 0))


def test_what_is_remembered_is_bounded_and_a_broken_file_is_written_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(remembered, "_MOST_ANSWERS", 2)
    monkeypatch.setattr(remembered, "_MOST_FILES", 3)
    library = tmp_path / "libcudnn.so.9"
    library.write_bytes(b"")
    kept = remembered.Remembered.of(library, (8, 0)).with_answers((9, 20, 0), {"a b": (1,), "c d": (2, 0), "e f": ()})
    assert remembered.Remembered.of(library, (8, 0)).workspaces == {"c d": (2, 0), "e f": ()}
    for minor in range(5):
        remembered.Remembered.of(library, (9, minor)).with_answers((9, 20, 0), {"a b": (1,)})
    assert len(list(kept.folder.iterdir())) == 3
    (kept.folder / remembered.Remembered.of(library, (9, 4)).name).write_text("9 20")
    assert remembered.Remembered.of(library, (9, 4)).version is None


def _sparse(path: pathlib.Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


HOSTILE = {
    "a terabyte of zeros": _sparse,
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a loop": lambda path: path.symlink_to(path),
    "a folder": pathlib.Path.mkdir,
    "a version of too many digits": lambda path: path.write_text("9" * 5000 + " 1 1\n"),
    "a size of too many digits": lambda path: path.write_text("9 20 0\na b " + "9" * 40 + "\n"),
    "a size below zero": lambda path: path.write_text("9 20 0\na b -5\n"),
    "too many sizes": lambda path: path.write_text("9 20 0\na b " + ">".join("1" * 1000) + "\n"),
    "other bytes": lambda path: path.write_bytes(b"9 20 0\n\xff\xfe\n"),
    "deep JSON": lambda path: path.write_text("[" * 100_000),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_remembered_is_read_as_data_with_limits(kind, monkeypatch, tmp_path):
    library = pretend(monkeypatch, tmp_path, "exit 1")
    empty = remembered.Remembered.of(library, (8, 0))
    HOSTILE[kind](empty.folder / empty.name)
    found = remembered.Remembered.of(library, (8, 0))
    assert found.version is None and not found.workspaces
    assert found.with_answers((9, 20, 0), {"a b": (1,)}).workspaces == {"a b": (1,)}  # whether or not it can be kept


def test_nothing_is_kept_or_loaded_where_others_can_write(monkeypatch, tmp_path):
    library = pretend(monkeypatch, tmp_path, "exit 1")
    folder = remembered.Remembered.of(library, (8, 0)).folder
    assert stat.S_IMODE(folder.stat().st_mode) & 0o022 == 0
    folder.chmod(0o777)
    assert remembered.Remembered.of(library, (8, 0)).folder is None


def test_nothing_is_kept_where_the_folder_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    library = pretend(monkeypatch, tmp_path, "echo 9 20 0; echo 100; echo 200; echo 300")
    assert list(ask(library, (8, 0), QUESTIONS).workspaces.values()) == [(100,), (200,), (300,)]


def test_a_written_library_has_its_functions_and_is_found_by_its_name(tmp_path):
    machine = platform.machine()
    if machine not in stub.MACHINES:
        pytest.skip(f"{machine} has no code of functions")
    path = tmp_path / "any name.so"
    names = ["cublasLtCreate", "cublasLtGetVersion", *(f"cublasLtOther{number}" for number in range(40))]
    path.write_bytes(stub.shared_library("libplannerstub.so.7", names, machine=machine, version=130_100))
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    assert library.cublasLtGetVersion() == 130_100 and library.cublasLtOther39() == 1
    handle = ctypes.c_void_p()
    assert library.cublasLtCreate(ctypes.byref(handle)) == 0 and handle.value
    assert ctypes.CDLL("libplannerstub.so.7").cublasLtGetVersion() == 130_100
    assert not hasattr(library, "cublasLtMissing")


@pytest.mark.skipif(
    os.environ.get("PLANNER_CUDNN_TO_TEST") is None, reason="PLANNER_CUDNN_TO_TEST names no libcudnn.so.9"
)
def test_a_libcudnn_answers_as_the_table_of_its_version():
    path = pathlib.Path(os.environ["PLANNER_CUDNN_TO_TEST"])
    version = ask(path, (8, 0), []).version
    table = tables.load(version)
    wanted = [
        Convolution.of(f"{kind} {shape}") for shape in list(table.lines)[::97] for kind in table.kinds if "tf32" in kind
    ]
    answers = ask(path, (8, 0), wanted).workspaces
    found = {each: tables.read_item(tables.written([sizes])) for each, sizes in answers.items()}
    assert found == {each: table.workspaces(each, (8, 0)) for each in wanted}
    searched = {each: Convolution(dataclasses.replace(each.kind, benchmark=True), each.shape) for each in wanted}
    answers = ask(path, (8, 0), searched.values()).workspaces
    known = tables.load(version, benchmark=True)
    for each, question in searched.items():
        item = tables.read_item(tables.written([answers[question]], benchmark=True))
        assert item == known.workspaces(question, (8, 0))
        assert each not in found or answers[question][0] == found[each][0]


def test_no_library_is_looked_for_where_the_user_says_none(monkeypatch):
    monkeypatch.setenv("PLANNER_CUDNN", "none")
    assert libraries() == ()
