"""The command with a file whose function returns a step of the user's own: a plan, a saved plan, an emitted file."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from planner.cli.command import main
from planner.errors import DecisionError
from planner.plan_types.decisions import Optimizer, OptimizerKernel
from planner.plan_types.plan import Plan
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite import emit
from planner.workload.call_convention import Calling
from tests.support.loops import LOOPS
from tests.support.training import imported, plan_for

MODULE = """
import torch
from torch.nn import functional as F
from tests.support.loops import LOOPS, two

def build(batch_size=64):
    return {{"model": two("G", "D", out=(16, 1))(), "batch": torch.randn(batch_size, 16), "step": LOOPS["GAN"].step,
            "optimizer": {optimizer}}}
"""


def own(plan: Plan) -> Plan:
    return dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, calling=Calling.STEP.name))


def written(folder, optimizer: str) -> str:
    (folder / "loop.py").write_text(MODULE.format(optimizer=optimizer))
    return f"{folder / 'loop.py'}:build"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ['{"G": "adam", "D": torch.optim.SGD}', '{"G": "adam", "D": "adamw"}'])
@pytest.mark.thorough
def test_a_file_with_a_step_is_planned_saved_and_emitted(tmp_path, capsys, optimizer, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    reference, options = written(tmp_path, optimizer), ["--gpu", "bare", "--only", "checkpoint,optimizer-kernel"]
    assert main([reference, *options, "--vram", "1GiB", "--force", "checkpoint,optimizer-kernel", "--json",
                 "--save", str(tmp_path / "plan.json"), "--emit", str(tmp_path / "train.py")]) == 0  # fmt: skip
    shown = json.loads(capsys.readouterr().out)
    assert {decision["kind"] for decision in shown["decisions"]} == {"checkpoint", "optimizer-kernel"}
    assert Plan.load(tmp_path / "plan.json").decisions == Plan.from_json(shown).decisions
    text = (tmp_path / "train.py").read_text()
    assert "step(model, optimizer, batch)" in text and "--optimizer" not in text
    for arguments in (["--check"], ["--steps", "2"]):
        ran = subprocess.run(
            [sys.executable, "train.py", "--device", "cpu", *arguments], cwd=tmp_path, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        assert ("agrees with a plain step" if arguments == ["--check"] else "step 2: (tensor(") in ran.stdout
    assert main([str(tmp_path / "plan.json"), "--trust-reference", "--json"]) == 0


def test_a_file_for_live_modules_has_the_functions_and_says_how_to_use_them(tmp_path):
    loop = LOOPS["GAN"]
    model = loop.model()
    decisions = (Checkpoint(modules=("D.0",)), OptimizerKernel(kernel="fused", optimizers=("[1]",)))
    plan = own(plan_for(model, (loop.batch(4),), *decisions))
    emit(plan, tmp_path / "train.py")
    emitted = imported(tmp_path / "train.py")
    optimizers = emitted.make_optimizers(emitted.rewrite(model), ("adamw", "adamw"))
    assert optimizers[1].param_groups[0]["fused"] and not optimizers[0].param_groups[0]["fused"]
    emitted.training_step(model, {"G": optimizers[0], "D": optimizers[1]}, loop.batch(4), loop.step)
    with pytest.raises(SystemExit, match="import check, make_optimizers, rewrite, training_step"):
        emitted.main()


def test_no_file_is_written_for_8_bit_state_and_the_message_says_what_to_do(tmp_path):
    loop = LOOPS["GAN"]
    plan = own(plan_for(loop.model(), (loop.batch(4),), Optimizer(optimizers=("G",))))
    with pytest.raises(DecisionError, match=r"forbid 8bit-optimizer, or use rewrite\.apply"):
        emit(plan, tmp_path / "train.py")


def test_a_dict_that_lacks_the_step_is_refused(tmp_path, capsys):
    (tmp_path / "loop.py").write_text("def build():\n    return {'model': 1, 'batch': 2}\n")
    assert main([f"{tmp_path / 'loop.py'}:build", "--vram", "1GiB", "--gpu", "bare"]) == 2
    assert "return a dict with model, batch, step and optimizer" in capsys.readouterr().err
