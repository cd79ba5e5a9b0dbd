"""Recordings are read from the cache folder only where a new one would be the same, and files there are only data."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import types
import zlib

import msgspec
import pytest
import torch
import transformers

from planner.cli import main
from planner.files import cache
from planner.kept import identity as identity_of
from planner.kept import recordings
from planner.kept.identity import identity
from planner.kept.recordings import KeptRecordings
from planner.plan_types.decisions import Precision, Shard
from planner.progress import Watch
from planner.recording import rehearsal
from planner.recording.repeats.layer_runs import layer_runs
from planner.rewrite.rehearse import start_certificate, start_rehearsal
from planner.workload.loading import load_workload
from planner.workload.workload import Workload, workload
from tests.support.workloads import BARE, CARD

SETTINGS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """Recordings are kept, in a new folder."""
    monkeypatch.delenv(recordings.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "torch-planner" / "recordings"


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SETTINGS))
    return str(path)


def loaded(config: str, **settings) -> Workload:
    return load_workload(config, **{"batch_size": 2, "seq_len": 8, "optimizer": "adamw", "keep": True, **settings})


@pytest.fixture
def children(monkeypatch) -> list[object]:
    """Receives each rehearsal whose result is waited for. Others, which were started in vain, depend on the machine."""
    waited_for: list[object] = []

    class Noted(rehearsal.Child):
        def result(self):
            waited_for.append(self)
            return super().result()

    monkeypatch.setattr(rehearsal, "Child", Noted)
    return waited_for


@pytest.mark.slow
def test_the_same_question_is_answered_without_a_rehearsal(folder, config, children, capsys):
    words = [config, "--vram", "16MiB", "--gpu", "bare", "--batch-size", "16", "--seq-len", "64", "--json"]
    answers = []
    for more in ((), (), ("--no-cache",)):
        before = len(children)
        assert main([*words, *more]) == 0
        answers.append(({**json.loads(capsys.readouterr().out), "seconds": None}, len(children) - before))
    assert [answer for answer, _ in answers] == [answers[0][0]] * 3
    assert [rehearsals > 0 for _, rehearsals in answers] == [True, False, True]
    assert main([*words[:-1], "--batch-size", "17"]) == 0  # another question
    assert len(children) > answers[0][1] + answers[2][1]
    assert "of earlier calls" not in capsys.readouterr().out
    assert main(words[:-1]) == 0
    assert "recordings of earlier calls" in capsys.readouterr().out.replace("\n", " ")


def test_recordings_are_kept_whole(tmp_path, config):
    """With all kinds of entries: saves, collectives, several micro-batches."""
    work, sharded = loaded(config), Shard(way="fsdp", mesh=(2,), units=("model.layers.0",))
    for child in (
        start_certificate(work, (), BARE),
        start_certificate(work, (Precision(dtype="fp16"), sharded), BARE),
        start_rehearsal(work, (), BARE, sizes=(1, 1), steps=1, primed=True, what_if=True),
    ):
        graph = child.result()
        recordings._write(tmp_path / "graph", graph)
        assert recordings._read(tmp_path / "graph") == graph


def ways_to_differ(config: str) -> dict[str, tuple[Workload, object]]:
    """Returns workloads and cards that differ from `loaded(config)` on BARE in one way."""
    found: dict[str, tuple[Workload, object]] = {
        "samples": (loaded(config, batch_size=3), BARE),
        "tokens": (loaded(config, seq_len=9), BARE),
        "optimizer": (loaded(config, optimizer="sgd"), BARE),
        "dtype": (loaded(config, dtype="bfloat16"), BARE),
        "gradients": (loaded(config, gradients_alive=True), BARE),
        "card": (loaded(config), CARD),
        "cards": (dataclasses.replace(loaded(config), sharding=(Shard(way="fsdp", mesh=(2,), units=()),)), BARE),
        "batch": (dataclasses.replace(loaded(config), batch_size=4), BARE),
    }
    for name, change in {
        "frozen": lambda model: model.lm_head.requires_grad_(False),
        "evaluated": lambda model: model.eval(),
        "config": lambda model: setattr(model.config, "attention_dropout", 0.5),
        "attention": lambda model: setattr(model.config, "_attn_implementation", "eager"),
        "checkpoints": lambda model: model.gradient_checkpointing_enable(),
        "experts": lambda model: setattr(model.config, "_experts_implementation_internal", "batched_mm"),
        "an attribute": lambda model: setattr(model.model.layers[0], "number_of_terms", 9),
        "another class": lambda model: setattr(model.model, "norm", torch.nn.LayerNorm(32, device="meta")),
    }.items():
        work = loaded(config)
        change(work.model)
        found[name] = work, BARE
    return found


def test_everything_on_which_a_recording_depends_is_part_of_its_identity(config, tmp_path, monkeypatch):
    first = identity(loaded(config), BARE)
    assert first and first == identity(loaded(config), BARE)
    known = {name: identity(*changed) for name, changed in ways_to_differ(config).items()}
    (tmp_path / "config.json").write_text(json.dumps({**SETTINGS, "rope_theta": 5000.0}))
    known["another config"] = identity(loaded(config), BARE)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    monkeypatch.setenv("TORCH_CUDNN_SDPA_ENABLED", "1")
    known["environment"] = identity(loaded(config), BARE)
    assert None not in known.values() and len({first, *known.values()}) == len(known) + 1


IN_A_PROCESS = """
import sys, transformers
from planner.kept.identity import identity
from planner.workload.loading import load_workload
from planner.workload.cards import resolve_card
for path in sys.argv[1:]:
    work = load_workload(path, batch_size=2, seq_len=8, optimizer="adamw", keep=True)
    print(identity(work, resolve_card("rtx-3060", None)))
"""


@pytest.mark.slow
def test_the_identity_is_the_same_in_another_process(tmp_path):
    sizes = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}
    paths = []
    for kind in ("bert", "gpt2", "mixtral", "gemma3_text"):
        config = transformers.AutoConfig.for_model(kind, **sizes)
        config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        config.save_pretrained(tmp_path / kind)
        paths.append(str(tmp_path / kind))
    command = [sys.executable, "-c", IN_A_PROCESS, *paths]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == second and len({*first.split()} - {"None"}) == len(paths)


def test_a_changed_source_file_is_another_identity(config, monkeypatch):
    work, facts = loaded(config), identity_of._size_and_time
    first = identity(work, BARE)
    for changed in (transformers.models.llama.modeling_llama.__file__, str(pathlib.Path(rehearsal.__file__).resolve())):
        monkeypatch.setattr(
            identity_of, "_size_and_time", lambda path, changed=changed: (0, 0) if path == changed else facts(path)
        )
        assert identity(work, BARE) not in (first, None)


@pytest.mark.parametrize("name", ["sitecustomize", "a_script_of_the_users"])
def test_other_code_that_has_run_is_part_of_the_identity(config, tmp_path, monkeypatch, name):
    """It may have replaced a function of a library."""
    work, module, path = loaded(config), types.ModuleType(name), tmp_path / f"{name}.py"
    found = [identity(work, BARE)]
    monkeypatch.setitem(sys.modules, name, module)
    module.__file__ = str(path)
    for text in ("", "import transformers\n"):
        path.write_text(text)
        found.append(identity(work, BARE))
    assert None not in found and len(set(found)) == 3
    module.__file__ = transformers.__file__  # installed libraries are known by their versions
    assert name == "sitecustomize" or identity(work, BARE) == found[0]


@pytest.mark.parametrize(
    "change",
    [
        {"made_from": None},
        {"loss_fn": torch.nn.MSELoss()},
        {"step": lambda model, optimizer, batch: None},
        {"parallelize": lambda model, mesh: model},
        {"optimizer": lambda model: torch.optim.SGD(model.parameters())},
        {"batch": {"input_ids": torch.zeros(2, 8, dtype=torch.long)}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_code_of_the_user_takes_part_in_is_not_kept(config, change):
    assert identity(dataclasses.replace(loaded(config), **change), BARE) is None


def test_a_library_in_a_folder_of_sources_keeps_nothing(config, monkeypatch):
    work, distribution = loaded(config), importlib.metadata.distribution

    class Editable:
        version = "5.0"

        def read_text(self, name):
            return '{"dir_info":{"editable":true},"url":"file:///src/transformers"}'

    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda name: Editable() if name == "transformers" else distribution(name)
    )
    assert identity(work, BARE) is None


class Child:
    def __init__(self, graph) -> None:
        self.graph, self.asked = graph, 0

    def result(self):
        self.asked += 1
        return self.graph

    def end(self) -> None: ...

    is_ready = True


@pytest.fixture(scope="module")
def graph():
    return start_certificate(loaded_once(), (), BARE).result()


def loaded_once() -> Workload:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SETTINGS, "num_hidden_layers": 1}))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    return workload(model, {"input_ids": tokens, "labels": tokens})


DAMAGES = {
    "empty": lambda packed: b"",
    "half": lambda packed: packed[: len(packed) // 2],
    "a map": lambda packed: msgspec.msgpack.encode({}),
    "endless list": lambda packed: b"\xdd\xff\xff\xff\xff",
    "deep list": lambda packed: b"\x91" * 1_000_000,
    "large": lambda packed: packed + bytes(1 << 20),
    "another question": lambda packed: changed(packed, name="another"),
    "ticks are text": lambda packed: changed(packed, {"ticks": "x"}),
    "no ops": lambda packed: changed(packed, {"ops": None}),
    "another phase": lambda packed: changed(packed, {"ops": [{"phase": "lunch"}]}),
    "a call of no op": lambda packed: changed(
        packed, calls=[{"op": 10**9, "arguments": {}, "outputs": [], "settings": {}}]
    ),
    "an argument of no type": lambda packed: changed(
        packed, calls=[{"op": 0, "arguments": {"x": ["set", 1]}, "outputs": [], "settings": {}}]
    ),
}
"""Ways to damage a file, by name: functions of its decompressed bytes."""


def changed(packed: bytes, of_graph=None, **fields) -> bytes:
    data = msgspec.msgpack.decode(packed)
    return msgspec.msgpack.encode({**data, "graph": {**data["graph"], **(of_graph or {})}, **fields})


@pytest.mark.parametrize("damage", [*DAMAGES, "not compressed", "folder", "pipe"])
def test_a_damaged_or_hostile_file_is_ignored(folder, graph, damage, monkeypatch):
    kept, child = KeptRecordings(cache.folder("recordings"), "a workload", Watch()), Child(graph)
    kept.start(lambda: child, "two steps", ()).result()
    (path,) = folder.iterdir()
    packed = zlib.decompress(path.read_bytes())
    if damage in ("folder", "pipe"):
        path.unlink()
        path.mkdir() if damage == "folder" else os.mkfifo(path)
    else:
        data = DAMAGES[damage](packed) if damage in DAMAGES else packed
        path.write_bytes(data if damage == "not compressed" else zlib.compress(data))
        monkeypatch.setattr(recordings, "_MOST_UNPACKED_BYTES", max(len(packed), 1_000_000))
    again = Child(graph)
    assert kept.start(lambda: again, "two steps", ()).result() is graph
    assert again.asked == 1


def test_other_files_and_linked_folders_are_left_alone(folder, graph, tmp_path, monkeypatch):
    monkeypatch.setattr(recordings, "_MOST_BYTES", 1)
    kept = KeptRecordings(cache.folder("recordings"), "a workload", Watch())
    (folder / "notes.txt").write_text("mine")
    kept.start(lambda: Child(graph), "two steps", ()).result()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    linked = tmp_path / "cache" / "torch-planner" / "linked"
    linked.symlink_to(tmp_path)
    assert cache.folder("linked") is None


def test_questions_have_files_of_their_own_and_the_oldest_are_removed(folder, graph, monkeypatch):
    watch = Watch()
    kept = KeptRecordings(cache.folder("recordings"), "a workload", watch)
    runs = layer_runs(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(12))))
    questions = [("what-if", (), (2,), ()), ("what-if", (), (2,), runs), ("what-if", (), (1, 1), ()), ("two steps", ())]
    for number, question in enumerate(questions):
        kept.start(lambda: Child(graph), *question).result()
        for path in folder.iterdir():
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
        assert len(list(folder.iterdir())) == number + 1
    assert watch.recalled == 0
    assert kept.start(lambda: Child(None), *questions[0]).result() == graph  # it is now the one that was used last
    assert watch.recalled == 1
    size = next(folder.iterdir()).stat().st_size
    monkeypatch.setattr(recordings, "_MOST_BYTES", 5 * size // 2)
    kept.start(lambda: Child(graph), "another").result()
    for question, is_kept in zip(questions, (True, False, False, False), strict=True):
        child = Child(graph)
        kept.start(lambda child=child: child, *question).end()
        assert (watch.recalled == 2) == is_kept
        watch.recalled = 1


def test_a_folder_of_others_is_not_used(folder):
    assert cache.folder("recordings") == folder
    folder.chmod(0o777)
    assert cache.folder("recordings") is None
