"""Emitted files for several cards replace a checkpoint only if that is what the user asks for."""

from __future__ import annotations

import pathlib
import warnings

import pytest
import torch

from planner.plan_types.decisions import Shard
from planner.rewrite import emit
from tests.ranks.test_rank_emitted_main import content, run_main
from tests.support.training import imported, plan_for

NORMALIZED = """\
import torch
from torch import nn

def loss_fn(output, batch):
    return nn.functional.mse_loss(output, batch[-1])

def build():
    norms = (nn.BatchNorm1d(8) for _ in range(3))
    model = nn.Sequential(*(layer for norm in norms for layer in (nn.Linear(8, 8), norm)))
    return model, (torch.randn(4, 8), torch.randn(4, 8)), loss_fn
"""


class Started(Exception):
    """Raised where an emitted file would start the process group."""


def emitted_file(folder: pathlib.Path, way: str) -> pathlib.Path:
    """Writes a model with normalized layers, and the emitted file that trains it on two cards."""
    (folder / "net.py").write_text(NORMALIZED)
    model, batch, loss_fn = imported(folder / "net.py").build()
    shard = Shard(way=way, mesh=(2,))
    emit(plan_for(model, batch, shard, loss_fn=loss_fn, reference=f"{folder / 'net.py'}:build"), folder / "train.py")
    return folder / "train.py"


def main_refuses(monkeypatch, path: pathlib.Path, *arguments: object) -> str | None:
    """Returns the refusal of the `main` of an emitted file; None if it starts the process group."""

    def start(backend: str) -> None:
        raise Started

    file = imported(path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["train_step.py", "--device", "cpu", *map(str, arguments)])
    monkeypatch.setattr(torch.distributed, "init_process_group", start)
    with pytest.raises((SystemExit, Started)) as ended:
        file.main()
    return None if ended.type is Started else str(ended.value)


def test_a_checkpoint_is_replaced_only_by_the_training_that_continues_it(monkeypatch, tmp_path):
    path, first, second = emitted_file(tmp_path, "ddp"), tmp_path / "first", tmp_path / "second"
    assert main_refuses(monkeypatch, path, "--checkpoint", first) is None
    for folder in (first, second):
        folder.mkdir()
        (folder / ".metadata").touch()
    refusal = f"{first} has a checkpoint already: give another folder, or --resume {first} to continue it"
    assert main_refuses(monkeypatch, path, "--checkpoint", first) == refusal
    assert main_refuses(monkeypatch, path, "--checkpoint", first, "--resume", second) == refusal
    assert main_refuses(monkeypatch, path, "--checkpoint", f"{second}/../first/", "--resume", first) is None
    assert main_refuses(monkeypatch, path, "--checkpoint", tmp_path / "third", "--resume", first) is None
    assert main_refuses(monkeypatch, path, "--resume", tmp_path).endswith(
        "has no checkpoint: give the folder of a --checkpoint"
    )


def test_a_checkpoint_is_replaced_without_a_warning(tmp_path):
    file, model = imported(emitted_file(tmp_path, "ddp")), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Detected an existing checkpoint")
        for step in (1, 2):
            file.save_checkpoint(tmp_path / "run", model, optimizer, step)
    assert file.load_checkpoint(tmp_path / "run", model, optimizer) == 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_each_rank_has_running_statistics_and_those_of_rank_0_are_saved_and_loaded(way, tmp_path):
    path = emitted_file(tmp_path, way)

    def keep_buffers(file) -> None:
        """Writes the buffers of each rank before they are saved and after they are loaded."""
        save, load = file.save_checkpoint, file.load_checkpoint

        def write(name: str, model: torch.nn.Module) -> None:
            buffers = {path.removeprefix("module."): buffer for path, buffer in model.named_buffers()}
            torch.save(buffers, tmp_path / f"{name}_{torch.distributed.get_rank()}.pt")

        def noted_save(folder, model, *others, **named):
            write("saved", model)
            save(folder, model, *others, **named)

        def noted_load(folder, model, *others, **named):
            done = load(folder, model, *others, **named)
            write("loaded", model)
            return done

        file.save_checkpoint, file.load_checkpoint = noted_save, noted_load

    def of_rank(name: str, rank: int) -> dict[str, torch.Tensor]:
        return torch.load(pathlib.Path(tmp_path / f"{name}_{rank}.pt"))

    run_main(path, 2, "--steps", 2, "--checkpoint", tmp_path / "run", change=keep_buffers)
    first, second = of_rank("saved", 0), of_rank("saved", 1)
    statistics = [path for path in first if "running" in path]
    assert len(statistics) == 6 and not any(torch.equal(first[path], second[path]) for path in statistics)
    saved = content(tmp_path / "run")
    assert all(torch.equal(saved[path], first[path]) for path in statistics)
    run_main(path, 2, "--steps", 0, "--resume", tmp_path / "run", change=keep_buffers)
    for rank in (0, 1):
        assert all(torch.equal(of_rank("loaded", rank)[path], first[path]) for path in statistics)
