"""A recording that is lengthened by the layers that were left out is what a recording of all layers is."""

from __future__ import annotations

import pytest
import torch

from planner.choose.recordings import Recordings, runs_to_shorten
from planner.derive.graft_optimizer import graft_update
from planner.derive.lengthen import lengthened
from planner.plan_types.decisions import Accumulation, Optimizer, Precision, ShardedPrecision
from planner.recording.layer_runs import KEPT, KEPT_WHEN_GATHERED, LayerRun, is_uniform, layer_runs, takes_the_same_ops
from planner.recording.step_graph import Category, Op, Phase, StepGraph
from planner.rewrite.rehearse import certifying_graph, start_rehearsal, start_update
from planner.sharded import smallest_way
from planner.space.micro_batches import MicroBatching
from planner.space.sharding import Cards
from planner.workload.workload import Workload, workload
from tests.support.workloads import BARE, transformer, what_if

LAYERS = 2 * KEPT + 2
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "num_hidden_layers": LAYERS,
}
GPT2 = {"n_layer": LAYERS, "n_embd": 64, "n_head": 4, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1}
MODELS = {
    "llama": ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "roberta": ("RobertaForMaskedLM", SMALL),
    "mixtral": ("MixtralForCausalLM", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **SMALL,
            "num_hidden_layers": LAYERS + 2,
            "first_k_dense_replace": 2,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "encoder_layers": LAYERS,
            "decoder_layers": LAYERS,
            "d_model": 64,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "vocab_size": 128,
        },
    ),
}
SPLIT = Accumulation(micro_batch_size=2, micro_batches=2)
CASES = {
    "fp32": ((), (4,)),
    "bf16": ((Precision(dtype="bf16"),), (4,)),
    "micro-batches": ((SPLIT,), (2, 2)),
}


def model(name: str, batch_size: int = 4, **others) -> Workload:
    head, settings = MODELS[name]
    return transformer(name, head, batch_size=batch_size, seq_len=32, **(settings | others))


def on_cards(work: Workload, cards: Cards) -> Workload:
    """Returns the step of one of the cards, with the sharding that divides the most."""
    return smallest_way(work, BARE, cards)[0]


def shortened(work: Workload, decisions=(), *, sizes: tuple[int, ...] | None = None) -> StepGraph:
    """Returns the what-if recording with a few layers of each run."""
    return start_rehearsal(
        work,
        decisions,
        BARE,
        sizes=sizes or (work.batch_size,),
        steps=1,
        primed=True,
        what_if=True,
        runs=runs_to_shorten(work),
    ).result()


def with_all_layers(graph: StepGraph | None, work: Workload) -> StepGraph | None:
    for run in runs_to_shorten(work):
        graph = graph and lengthened(graph, run)
    return graph


@pytest.mark.slow
@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_the_lengthened_recording_is_the_recorded_one(name, case):
    assert_lengthened(model(name), *CASES[case])


@pytest.mark.slow
@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("decisions", "sizes"),
    [((), (4,)), ((ShardedPrecision(),), (4,)), ((SPLIT,), (2, 2))],
    ids=["fp32", "bf16", "micro-batches"],
)
@pytest.mark.parametrize("cards", [Cards(count=8), Cards(count=8, mesh=(2, 4))], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("name", ["llama", "roberta"])
def test_a_recording_under_fsdp2_is_lengthened(name, cards, decisions, sizes):
    work = on_cards(model(name, batch_size=32, num_hidden_layers=2 * KEPT_WHEN_GATHERED + 1), cards)
    assert_lengthened(work, decisions, sizes)


def assert_lengthened(work: Workload, decisions, sizes) -> None:
    runs = runs_to_shorten(work)
    assert runs
    assert all(takes_the_same_ops(certifying_graph(work, (), BARE), run) for run in runs)
    longer = with_all_layers(shortened(work, decisions, sizes=sizes), work)
    full = what_if(work, decisions, sizes=sizes)
    assert longer is not None
    update = start_update(work, [d for d in decisions if d is not SPLIT], BARE, full.trained).result()
    assert_equal(graft_update(longer, update), graft_update(full, update))
    assert longer.module_types == full.module_types
    assert set(longer.trained) == set(full.trained)


def assert_equal(graph: StepGraph, full: StepGraph) -> None:
    """Both have the same events from the first op of the forward on, at the same ticks."""
    (ops, start), (all_ops, all_start) = of_step(graph), of_step(full)
    assert (graph.live_bytes()[start:] == full.live_bytes()[all_start:]).all()
    assert [op_at(op, start) for op in ops] == [op_at(op, all_start) for op in all_ops]
    for op, same in zip(ops, all_ops, strict=True):
        for indices, others in ((op.inputs, same.inputs), (op.outputs, same.outputs), (op.written, same.written)):
            assert [storage_at(graph, i, start) for i in indices] == [storage_at(full, i, all_start) for i in others]
        assert op.call == same.call
        if op.forward_op is not None:
            assert same.forward_op is not None
            assert graph.ops[op.forward_op].tick - start == full.ops[same.forward_op].tick - all_start
    assert saves_at(graph, start) == saves_at(full, all_start)
    assert calls_at(graph, start) == calls_at(full, all_start)


def of_step(graph: StepGraph) -> tuple[list[Op], int]:
    ops = [op for op in graph.ops if op.phase is not Phase.SETUP]
    return ops, ops[0].tick


def op_at(op: Op, start: int) -> tuple:
    numbers = op.flops, op.moved_bytes, op.host_bytes, op.micro_batch, op.shapes, op.kernel
    return op.name, op.phase, op.tick - start, op.module, op.dtype, op.source, op.draws_random_numbers, *numbers


def storage_at(graph: StepGraph, index: int, start: int) -> tuple:
    storage = graph.storages[index]
    lives = [(max(birth - start, 0), death - start) for birth, death in storage.lives]
    return storage.size_bytes, storage.category, storage.name, storage.shape, storage.dtype, lives


def saves_at(graph: StepGraph, start: int) -> list[tuple]:
    ticks = [(save.pack, save.unpack, save.release, save.again) for save in graph.saves]
    return [tuple(tick and tick - start for tick in each) for each in ticks]


def calls_at(graph: StepGraph, start: int) -> list[tuple]:
    return [(call.module, call.parent, call.start - start, call.end - start, call.obstacle) for call in graph.calls]


# ---- models that cannot be shortened ----------------------------------------------------------------------------


class Layers(torch.nn.Module):
    """Identical layers, used in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(LAYERS))

    def forward(self, x):
        outputs = []
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if self.way == "every third is doubled" and number % 3 == 2:
                x = x * 2
            if self.way == "every other is wider inside":
                x = x.expand(2 + number % 2, *x.shape).clone()[0]
            outputs.append(x)
        if self.way == "all outputs are summed":
            return torch.stack(outputs).sum(0).square().mean()
        if self.way == "one more output is part of the loss":  # the last one of a model with `KEPT` layers
            return x.square().mean() + outputs[KEPT - 1].abs().mean()
        if self.way == "a tensor has a row for each layer":
            return x.square().mean() * x.new_ones(len(self.layers), 8).mean()
        return x.square().mean()


def layers(way: str) -> Workload:
    with torch.device("meta"):
        return workload(Layers(way), torch.zeros(8, 16))


def test_a_model_of_plain_layers_is_lengthened():
    work = layers("one after the other")
    longer, full = with_all_layers(shortened(work), work), what_if(work)
    assert longer is not None
    update = start_update(work, (), BARE, full.trained).result()
    assert_equal(graft_update(longer, update), graft_update(full, update))


@pytest.mark.parametrize("way", ["every third is doubled", "every other is wider inside", "all outputs are summed"])
def test_layers_that_are_used_differently_or_together_are_not_lengthened(way):
    work = layers(way)
    assert with_all_layers(shortened(work), work) is None


def test_the_recording_of_the_baseline_shows_layers_that_differ():
    """Every sixth layer of Gemma 3 attends to all tokens, and the others to a window."""
    settings = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 1}
    work = transformer("gemma3_text", "Gemma3ForCausalLM", batch_size=2, seq_len=16, **settings)
    (run,) = layer_runs(work.model)
    assert not takes_the_same_ops(certifying_graph(work, (), BARE), run)


def test_runs_are_found_by_structure():
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            same = torch.nn.Linear(8, 8)
            self.shared = torch.nn.ModuleList([same] * LAYERS)
            self.few = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2 * KEPT - 1))
            self.mixed = torch.nn.Sequential(
                torch.nn.Linear(8, 16), *(torch.nn.Linear(16, 16) for _ in range(2 * KEPT)), torch.nn.Linear(16, 8)
            )

    (run,) = layer_runs(Net())
    assert (run.container, run.first, run.layers) == ("mixed", 1, 2 * KEPT)
    assert run.left_out == KEPT


def recorded(work: Workload, runs: tuple[LayerRun, ...], config=()) -> StepGraph:
    """Returns the recording that the search gets if these runs may be shortened."""
    recordings = Recordings(
        lambda decisions, sizes, runs: start_rehearsal(
            work, decisions, BARE, sizes=sizes, steps=1, primed=True, what_if=True, runs=runs
        ),
        lambda decisions: start_update(work, decisions, BARE, [n for n, _ in work.model.named_parameters()]),
        lambda graph: graph,
        runs=runs,
    )
    return recordings.of(config, MicroBatching(micro_batches=1, size=work.batch_size))


@pytest.mark.parametrize("config", [(), (Optimizer(),)], ids=["the user's optimizer", "8-bit optimizer"])
def test_the_search_gets_the_update_of_all_layers(config):
    work = layers("one after the other")
    longer, full = recorded(work, layer_runs(work.model), config), recorded(work, (), config)
    (ops, _), (all_ops, _) = of_step(longer), of_step(full)
    assert [op.name for op in ops] == [op.name for op in all_ops]
    ticks, all_ticks = ([op.tick for op in each] for each in (ops, all_ops))
    assert (longer.live_bytes()[ticks] == full.live_bytes()[all_ticks]).all()
    for category in Category:
        assert longer.bytes_of(category) == full.bytes_of(category)


@pytest.mark.parametrize("way", ["one more output is part of the loss", "a tensor has a row for each layer"])
def test_layers_whose_position_or_number_matters_are_all_recorded(way):
    work = layers(way)
    assert with_all_layers(shortened(work), work) is not None  # two layers are alike, but one more is different
    assert_equal(recorded(work, layer_runs(work.model)), recorded(work, ()))


def test_recordings_with_buckets_of_gradients_have_all_layers():
    work = model("gpt2", batch_size=16)
    assert not runs_to_shorten(on_cards(work, Cards(count=8, way="ddp")))
    assert not runs_to_shorten(on_cards(work, Cards(count=8, way="zero1")))


COUNTING = {"it counts its calls": 9, "the last layer counts its calls": 17}


class Counting(torch.nn.Module):
    """A layer that may count its calls."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear, self.counts, self.calls = torch.nn.Linear(16, 16), counts, 0

    def forward(self, x):
        if self.counts:
            self.calls += 1
        return torch.relu(self.linear(x))


class Stack(torch.nn.Module):
    """Identical layers, the tenth of which differs in one of several ways, or does not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = torch.nn.ModuleList(Counting(n == COUNTING.get(way)) for n in range(18))

    def forward(self, x):
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
            if self.way == "its output is doubled by the model" and len(outputs) == 10:
                x = x * 2
        return x.square().mean() + (outputs[9].mean() if self.way == "its output is part of the loss" else 0)


@pytest.mark.parametrize(
    "way",
    [
        "it is like the others",
        *COUNTING,
        "its output is doubled by the model",
        "its output is part of the loss",
    ],
)
def test_one_layer_in_the_middle_that_differs_is_seen_in_the_baseline(way):
    with torch.device("meta"):
        work = workload(Stack(way), torch.zeros(8, 16))
    (run,) = layer_runs(work.model)
    assert is_uniform(certifying_graph(work, (), BARE), run) == (way == "it is like the others")


def test_copies_of_recordings_share_what_is_known_about_shortened_runs():
    work = layers("one after the other")
    recordings = Recordings(
        lambda decisions, sizes, runs: start_rehearsal(
            work, decisions, BARE, sizes=sizes, steps=1, primed=True, what_if=True, runs=runs
        ),
        lambda decisions: start_update(work, decisions, BARE, [n for n, _ in work.model.named_parameters()]),
        lambda graph: graph,
        runs=layer_runs(work.model),
    )
    whole = MicroBatching(micro_batches=1, size=work.batch_size)
    recordings.prefetch((), [whole])
    other = recordings.finished_by(lambda graph: graph)
    assert len(other.of((), whole).ops) == len(recordings.of((), whole).ops)
    recordings.close()
