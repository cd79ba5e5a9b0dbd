"""The `main` of emitted files for several cards: it saves, resumes, clips, and sends the weights of rank 0."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import sys
import weakref
from collections.abc import Callable

import pytest
import torch

from planner.plan_types.decisions import Decision, Optimizer, Precision, Shard
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite import emit
from planner.space.sharding import repeated_blocks
from planner.virtual_gpu.forked_process import run_in_child
from tests.rewrite.emitter.test_emitted_fixtures import FOLDER
from tests.support.ranks import in_processes
from tests.support.training import imported, plan_for, tokens
from tests.support.truth import LANGUAGE

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

MODEL = '''\
import torch
from torch import nn

class Scaled(nn.Module):
    """A block with buffers of many kinds, most of which no state dict has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.rand(16), persistent=False)
        self.register_buffer("rotations", torch.polar(torch.ones(8), torch.rand(8)), persistent=False)
        self.register_buffer("is_used", torch.rand(16) > 0.3, persistent=False)
        self.register_buffer("places", torch.arange(4), persistent=False)
        self.register_buffer("factor", torch.tensor(0.5), persistent=False)
        self.register_buffer("turned", torch.rand(16, 2).half().T)
        {more}

    def forward(self, x):
        turned = torch.view_as_real(self.rotations * torch.view_as_complex(x.view(-1, 8, 2))).flatten(1)
        factors = self.scale * self.is_used * self.factor * self.turned[1].float() + self.shift[0] + self.places.sum()
        return torch.tanh(self.linear(turned * factors))

def loss_fn(output, batch):
    return nn.functional.mse_loss(output, batch[-1])

def build():
    return nn.Sequential(Scaled(), Scaled(), nn.Linear(16, 16)), (torch.randn(4, 16), torch.randn(4, 16)), loss_fn
'''
KINDS = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 32}),
    "llama": ("LlamaForCausalLM", {**LANGUAGE, "num_key_value_heads": 2}),
    "bert": ("BertForMaskedLM", LANGUAGE),
    "gemma3_text": ("Gemma3ForCausalLM", {**LANGUAGE, "num_key_value_heads": 2, "head_dim": 8}),
}


SHIFT = "self.register_buffer('shift', torch.rand(2, 16), persistent=False)"


def emitted_for_module(folder: pathlib.Path, *decisions: Decision, more: str = SHIFT) -> pathlib.Path:
    """Writes a model and the emitted file for it."""
    (folder / "net.py").write_text(MODEL.replace("{more}", more))
    model, batch, loss_fn = imported(folder / "net.py").build()
    plan = plan_for(model, batch, *decisions, loss_fn=loss_fn, reference=f"{folder / 'net.py'}:build")
    emit(plan, folder / "train.py")
    return folder / "train.py"


def emitted_for_config(folder: pathlib.Path, kind: str, mesh: tuple[int, ...]) -> pathlib.Path:
    """Writes a configuration, a folder with weights, and the emitted file."""
    import transformers

    name, settings = KINDS[kind]
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(5)
    model = getattr(transformers, name)(config)
    config.save_pretrained(folder / "config")
    model.save_pretrained(folder / "weights")
    shard = Shard(way="fsdp", mesh=mesh, units=repeated_blocks(model))
    emit(plan_for(model, tokens(4), shard, reference=str(folder / "config")), folder / "train.py")
    return folder / "train.py"


def run_main(path: pathlib.Path, cards: int, *arguments: object, change: Callable = lambda file: None) -> list[str]:
    """Runs `main` of a file in several processes, and returns what they print.

    change: is called with the module of the file before its `main` runs.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> str:
        torch.set_num_threads(1)
        os.environ.update(WORLD_SIZE=str(cards), RANK=str(rank), LOCAL_RANK=str(rank))
        # All ranks use the store of the test's process, as under torchrun: no other process can take its port.
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
        sys.argv = [str(path), "--device", "cpu", *map(str, arguments)]
        file = imported(path)
        change(file)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            file.main()
        return printed.getvalue()

    return in_processes(cards, run)


def content(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a checkpoint, put together."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def read() -> dict[str, torch.Tensor]:
        dcp_to_torch_save(folder, folder / "whole.pt")
        whole = torch.load(folder / "whole.pt", weights_only=False)
        return whole["model"] | {
            name: value for name, value in whole["optimizer"].items() if isinstance(value, torch.Tensor)
        }

    return run_in_child(read)


def assert_same_bits(found: pathlib.Path, expected: pathlib.Path) -> None:
    before, after = content(expected), content(found)
    assert before.keys() == after.keys() and len(before) > 6
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    "decisions",
    [
        (Shard(way="ddp", mesh=(2,)),),
        (Shard(way="ddp", mesh=(2,)), Precision(dtype="fp16")),
        (Shard(way="ddp", mesh=(2,)), Optimizer()),
        (Shard(way="zero1", mesh=(2,)),),
        (Shard(way="zero1", mesh=(2,)), Checkpoint(modules=("0",))),
        (Shard(way="fsdp", mesh=(2,), units=("0", "1")),),
        (Shard(way="fsdp", mesh=(2,), offload=True),),
    ],
    ids=["DDP", "DDP in fp16", "DDP with 8-bit state", "ZeRO-1", "ZeRO-1, checkpointed", "FSDP2", "offloaded"],
)
def test_a_resumed_file_prints_and_saves_what_an_uninterrupted_one_does(decisions, tmp_path):
    path, clipped = emitted_for_module(tmp_path, *decisions), ("--max-grad-norm", 1e-6)
    whole = run_main(path, 2, "--steps", 4, "--checkpoint", tmp_path / "whole", *clipped)
    first = run_main(path, 2, "--steps", 2, "--checkpoint", tmp_path / "first", *clipped)
    then = run_main(path, 2, "--steps", 2, "--resume", tmp_path / "first", "--checkpoint", tmp_path / "then", *clipped)
    assert whole[0] == first[0] + then[0] and whole[0].count("\n") == 4 and whole[1] == ""
    assert re.findall(r"step (\d):", then[0]) == ["3", "4"]
    assert_same_bits(tmp_path / "then", tmp_path / "whole")
    means = [value for name, value in content(tmp_path / "whole").items() if name.endswith(("exp_avg", "state1"))]
    assert 0 < torch.nn.utils.get_total_norm(means) < 1e-6  # a mean of clipped gradients


@pytest.mark.parametrize("way", ["ddp", "zero1"])
def test_the_process_group_is_freed_after_copies_of_the_model(way, tmp_path):
    """Otherwise DistributedDataParallel frees it while it holds the GIL, for which a thread of gloo may wait."""

    def watch(file) -> None:
        rewrite = file.rewrite

        def watched(*arguments):
            model = rewrite(*arguments)
            group = weakref.ref(torch.distributed.group.WORLD)
            weakref.finalize(model.reducer, lambda: print(f"the group is alive: {group() is not None}"))
            return model

        file.rewrite = watched

    printed = run_main(emitted_for_module(tmp_path, Shard(way=way, mesh=(2,))), 2, "--steps", 1, change=watch)
    assert [text.splitlines()[-1] for text in printed] == ["the group is alive: True"] * 2


def in_each_process(file) -> None:
    """Makes each process build the whole model. Nothing is sent then."""
    file.build_structure = file.build
    file.receive_from_rank_0 = lambda model, whole, device: None


def only_structure(file) -> None:
    """Lets only rank 0 build on the CPU. In other processes, memory that nothing has written to has NaN in it."""
    build, receive = file.build, file.receive_from_rank_0

    def build_on_rank_0(*arguments) -> object:
        assert os.environ["RANK"] == "0" or torch.get_default_device().type == "meta"
        return build(*arguments)

    def receive_in_place_of_nan(*arguments) -> None:
        torch.use_deterministic_algorithms(True)
        receive(*arguments)
        torch.use_deterministic_algorithms(False)

    file.build, file.receive_from_rank_0 = build_on_rank_0, receive_in_place_of_nan


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=["FSDP2", "HSDP"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_rank_0_sends_train_as_weights_that_each_process_loads(kind, mesh, tmp_path):
    path, cards = emitted_for_config(tmp_path, kind, mesh), 2 * len(mesh)
    for number, source in enumerate(([], ["--weights", tmp_path / "weights"])):
        folders = [tmp_path / f"{name}_{number}" for name in ("sent", "loaded")]
        sent = run_main(path, cards, *source, "--checkpoint", folders[0], change=only_structure)
        loaded = run_main(path, cards, *source, "--checkpoint", folders[1], change=in_each_process)
        assert sent == loaded
        assert_same_bits(*folders)


def test_a_model_of_the_users_own_is_built_on_rank_0_if_asked_for(tmp_path):
    expanded = "self.register_buffer('shift', torch.rand(16).expand(2, 16), persistent=False)"
    path = emitted_for_module(tmp_path, Shard(way="fsdp", mesh=(2,), units=("0", "1")), more=expanded)
    plain = run_main(path, 2, "--checkpoint", tmp_path / "plain")
    asked = run_main(path, 2, "--meta", "--checkpoint", tmp_path / "meta", change=only_structure)
    assert asked == plain
    assert_same_bits(tmp_path / "meta", tmp_path / "plain")


def print_refusal(file) -> None:
    """Makes `main` print an error, since the first process to end ends the others, too."""
    main = file.main

    def main_or_error() -> None:
        try:
            main()
        except (RuntimeError, SystemExit) as error:
            print(error)

    file.main = main_or_error


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ("self.shift = torch.rand(2, 16)", "'0.shift'"),
        (f"self.where = str(self.linear.weight.device); {SHIFT}", "'0.where'"),
        ("self.register_buffer('shift', self.scale, persistent=False)", "'0.shift'"),
    ],
    ids=["a tensor", "a string", "a shared buffer"],
)
def test_what_differs_on_the_meta_device_is_named(more, names, tmp_path):
    path = emitted_for_module(tmp_path, Shard(way="fsdp", mesh=(2,)), more=more)

    printed = run_main(path, 2, "--meta", change=print_refusal)
    assert names in printed[1] and "step" not in "".join(printed)


def test_offloaded_shards_have_a_process_group_for_host_memory():
    text = (FOLDER / "sharded_on_host.py").read_text()
    assert '"cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo"' in text


def test_a_file_refuses_another_number_of_processes():
    (printed,) = run_main(FOLDER / "sharded_on_host.py", 1, change=print_refusal)
    assert printed.startswith("start this file with: torchrun --nproc-per-node 2 ")


def test_a_folder_without_a_checkpoint_is_refused_in_one_line(tmp_path):
    for printed in run_main(FOLDER / "sharded_on_host.py", 2, "--resume", tmp_path, change=print_refusal):
        assert printed.strip() == f"{tmp_path} has no checkpoint: give the folder of a --checkpoint"
