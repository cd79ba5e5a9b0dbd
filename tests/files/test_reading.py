"""Only regular files are read, up to a size and a depth: no file makes the command wait or fill the memory."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from planner.cli.output_files import refuse_strange_path
from planner.errors import PlanFileError, SnapshotError, WorkloadError
from planner.files import reading
from planner.plan_types.adapter import saved_config
from planner.plan_types.plan import Plan
from planner.profiles import ProfileError
from planner.profiles.device import read
from planner.run_memory.lengths import read_lengths
from planner.snapshot import load
from planner.workload.batch_source import read_shapes
from planner.workload.transformers_models import transformers_config

READERS = {
    "plan": (Plan.load, PlanFileError),
    "profile": (read, ProfileError),
    "lengths": (read_lengths, WorkloadError),
    "shapes": (read_shapes, WorkloadError),
    "snapshot": (load, SnapshotError),
    "config": (lambda path: transformers_config(str(path), "another"), WorkloadError),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "zero", "full", "folder", "large", "loop", "long"])
def test_what_is_no_regular_file_of_moderate_size_is_refused_at_once(reader, kind, tmp_path):
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind in ("zero", "full"):
        path.symlink_to(f"/dev/{kind}")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "long":
        path = tmp_path / ("x" * 300)
    else:
        with path.open("wb") as file:  # without blocks on the disk
            file.truncate(3 << 30)
    function, error = READERS[reader]
    with pytest.raises((error, OSError)) as caught:
        function(path)
    assert "\n" not in str(caught.value)
    assert kind == "long" or caught.type is error


@pytest.mark.parametrize("reader", ["plan", "shapes", "config", "profile"])
def test_a_file_that_is_nested_deeply_is_refused(reader, tmp_path):
    path = tmp_path / "file"
    path.write_text(("a = " if reader == "profile" else "") + "[" * 20_000 + "]" * 20_000)
    function, error = READERS[reader]
    with pytest.raises(error, match="nested more than 60 levels deep"):
        function(path)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 10)
    assert reading.content(tmp_path / "file", most_bytes=10) == b"x" * 10
    with pytest.raises(OSError, match="it has more than 9 bytes"):
        reading.content(tmp_path / "file", most_bytes=9)


def test_sixty_levels_are_read_and_a_mark_of_utf_8_is_left_out(tmp_path):
    (tmp_path / "file").write_text("\ufeff" + "[" * 60 + "]" * 60, encoding="utf-8")
    assert reading.json_data(tmp_path / "file")
    with pytest.raises(ValueError, match="nested"):
        reading.parsed_json("[" * 61 + "]" * 61)
    with pytest.raises(ValueError, match="nested"):
        reading.parsed_toml("a = " + "[" * 90 + "]" * 90)


def test_a_count_of_lengths_that_would_fill_the_memory_is_refused(tmp_path):
    (tmp_path / "lengths").write_text("128 1000000000000\n")
    with pytest.raises(WorkloadError, match="more than 10,000,000 samples"):
        read_lengths(tmp_path / "lengths")


def test_adapters_that_may_not_be_read_are_named(tmp_path):
    assert saved_config(str(tmp_path)) is None and saved_config("x" * 5000) is None
    (tmp_path / "adapter_config.json").symlink_to("/dev/zero")
    with pytest.raises(WorkloadError, match="it is a device or a pipe"):
        saved_config(str(tmp_path))


@pytest.mark.parametrize("kind", ["/dev/full", "pipe", "loop", "x" * 300])
def test_output_files_that_are_no_files_are_refused_before_anything_is_computed(kind, tmp_path):
    path = pathlib.Path(tmp_path, kind)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(PlanFileError, match="cannot be written"):
        refuse_strange_path(path)
    refuse_strange_path(tmp_path / "new.json")


WRONG = {
    "vocab_size": ["1000", None, 1000.5, [], {}],
    "n_layer": ["two", -1],
    "n_embd": [0, "x"],
    "n_head": [0, 5],
    "embd_pdrop": ["x"],
    "architectures": [5, [["a"]], "GPT2LMHeadModel", {}],
    "model_type": [[], 5, {}],
    "dtype": ["float99", 5],
    "cls": [1],
    "self": [1],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_config_with_a_wrong_value_is_refused_on_one_line(name, value, tmp_path, capsys):
    from planner.cli import main

    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 8, "n_head": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "vocab_size": 16, "n_positions": 16, name: value}))
    code = main([str(path), "--gpu", "bare", "-q"])
    error = capsys.readouterr().err
    assert code == 2 or name in ("cls", "self", "dtype", "embd_pdrop", "vocab_size", "n_layer", "architectures")
    assert "Traceback" not in error and code in (0, 2) and len(error.strip().splitlines()) == (code == 2)
