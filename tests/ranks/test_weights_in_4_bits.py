"""Adapters on 4-bit weights on several cards: the ways that work, and trainings in several processes."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
import transformers

from planner.cli.command import main
from planner.errors import WorkloadError
from planner.plan_types.adapter import ALL_LINEAR, Adapter
from planner.plan_types.decisions import Accumulation, Decision, Shard
from planner.rewrite.application import apply_decisions
from planner.space.sharding import Cards, shardings
from planner.virtual_gpu.forked_process import run_in_child
from planner.workload.adapters import adapted
from planner.workload.call_convention import Calling
from tests.ranks.test_rank_emitted_main import content, run_main
from tests.support.ranks import in_group
from tests.support.training import tokens

SAMPLES, STEPS = 8, 3
CONFIG = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TWO = Accumulation(micro_batch_size=2, micro_batches=2)


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**CONFIG, vocab_size=60, architectures=["LlamaForCausalLM"])
    )


def with_adapters() -> torch.nn.Module:
    adapter = Adapter(rank=4, targets=(ALL_LINEAR,), is_quantized=True)
    model = adapted(llama(), adapter, dtype="float32").train()
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.compute_dtype = torch.float32
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)  # with zeros, the first gradients of the other factor are zero
    return model


def trained(rank: int, cards: int, *decisions: Decision) -> tuple[dict[str, torch.Tensor], float]:
    """Trains with a part of the batch, and returns the adapters and the loss of the last step, weighed by its part."""
    torch.set_num_threads(1)
    model, part = with_adapters(), SAMPLES // cards
    batch = {name: value[rank * part : (rank + 1) * part] for name, value in tokens(SAMPLES).items()}
    rewritten = apply_decisions(
        decisions,
        model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        calling=Calling.of(batch, None),
        batch_size=part,
    )
    for _ in range(STEPS):
        loss = rewritten.step(batch)
    found = {name: w.detach().clone() for name, w in model.named_parameters() if w.requires_grad}
    if cards > 1:
        dist.all_reduce(loss)
        dist.barrier()
    return found, float(loss) / cards


def test_only_ways_that_leave_weights_whole_are_offered():
    model = with_adapters()
    assert [shard.way for shard in shardings(model, Cards(count=4))] == ["ddp", "zero1"]
    assert [shard.way for shard in shardings(model, Cards(count=4, prepared_by="accelerate"))] == ["ddp"]
    own = Shard(way="own", mesh=(4,), dimensions=("tp",))
    for more in ({"way": "fsdp"}, {"way": "zero2"}, {"mesh": (2, 2)}, {"offload": True}, {"own": own}):
        with pytest.raises(WorkloadError, match=r"has 4-bit weights, which FSDP2 cannot divide: choose --sharding ddp"):
            shardings(model, Cards(count=4, **more))


@pytest.mark.slow
@pytest.mark.parametrize(
    "decisions",
    [
        (Shard(way="ddp", mesh=(2,)),),
        (Shard(way="ddp", mesh=(2,), reduces_once=True), TWO),
        (Shard(way="zero1", mesh=(2,)),),
    ],
    ids=["DDP", "DDP, reduced once", "ZeRO-1"],
)
@pytest.mark.thorough_after(1)
def test_two_cards_train_adapters_as_one_does(decisions):
    before = {name: w.detach() for name, w in with_adapters().named_parameters() if w.requires_grad}
    expected, loss = run_in_child(lambda: trained(0, 1))
    for found, found_loss in in_group(2, lambda rank: trained(rank, 2, *decisions)):
        assert found_loss == pytest.approx(loss, rel=1e-5)
        for name, weight in expected.items():
            change = (weight - before[name]).norm()
            assert change > 1e-3 and (found[name] - weight).norm() < 1e-5 * change, name


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["ddp", "zero1"])
def test_an_emitted_file_saves_adapters_only_and_resumes(way, tmp_path, monkeypatch):
    model = llama()
    model.save_pretrained(tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    options = ["--vram", "2GiB", "--gpu", "rtx-3090", "--batch-size", "4", "--seq-len", "16", "--dtype", "float32"]
    cards = ["--cards", "2", "--sharding", way, "--qlora", "4", "--emit", "train.py"]
    assert main(["weights/config.json", *options, *cards]) == 0

    def run(*arguments: object) -> list[str]:
        return run_main(tmp_path / "train.py", 2, "--weights", tmp_path / "weights", *arguments)

    whole = run("--steps", 4, "--checkpoint", tmp_path / "whole")
    first = run("--steps", 2, "--checkpoint", tmp_path / "first")
    then = run("--steps", 2, "--resume", tmp_path / "first", "--checkpoint", tmp_path / "then")
    assert whole[0] == first[0] + then[0] and whole[0].count("\n") == 4
    saved, again = content(tmp_path / "whole"), content(tmp_path / "then")
    assert saved.keys() == again.keys() and all(torch.equal(saved[name], again[name]) for name in saved)
    assert not any("base_layer.weight" in name for name in saved)
