"""A file is written as a whole or not at all, where the user expects it, and no file of others is touched."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import stat

import pytest

from planner.errors import PlanFileError
from planner.files.writing import write_atomically

pytestmark = pytest.mark.no_torch


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder" / "file")
    for text in ("first", "second"):  # the link dangles at first
        write_atomically(link, text)
        assert link.is_symlink() and (tmp_path / "folder" / "file").read_text() == text
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]


def test_a_link_that_somebody_planted_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".plan.json.part").symlink_to(victim)
    (tmp_path / ".plan.json.part2").mkdir()
    write_atomically(tmp_path / "plan.json", "plan")
    assert victim.read_text() == "mine" and (tmp_path / "plan.json").read_text() == "plan"


def test_permissions_are_those_of_the_file_or_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o604)
    write_atomically(tmp_path / "new", "other")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o604


def test_a_name_of_the_greatest_length_can_be_written(tmp_path):
    write_atomically(tmp_path / ("x" * 255), "text")
    with pytest.raises(PlanFileError, match="File name too long"):
        write_atomically(tmp_path / ("x" * 256), "text")


@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/full", "loop"])
def test_something_else_than_a_file_is_not_replaced(kind, tmp_path):
    path = pathlib.Path(tmp_path, kind)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(PlanFileError, match="cannot be written"):
        write_atomically(path, "text")
    assert [each.name for each in tmp_path.iterdir()] == ([] if kind == "/dev/full" else [kind])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_file_and_nothing_else(error, tmp_path, monkeypatch):
    write_atomically(tmp_path / "file", "old")

    def fail(*_):
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PlanFileError if isinstance(error, OSError) else KeyboardInterrupt):
        write_atomically(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def _write_often(path: str, text: str) -> None:
    for _ in range(100):
        write_atomically(pathlib.Path(path), text)


def test_processes_that_write_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "file"
    texts = {letter * 50_000 for letter in "abcd"}
    path.write_text(min(texts))
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(str(path), text)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text() in texts
    assert [writer.exitcode for writer in writers] == [0, 0, 0, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_half_of_a_surrogate_pair_is_written_as_an_escape(tmp_path):
    write_atomically(tmp_path / "file", "a\udc80")
    assert (tmp_path / "file").read_text() == "a\\udc80"
