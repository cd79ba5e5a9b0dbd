"""A recording that is lengthened by the layers that were left out is what a recording of all layers is."""

from __future__ import annotations

import pytest
import torch

from planner.choose.recordings import Recordings
from planner.choose.shortening import Shortening, runs_to_shorten
from planner.derive.graft_optimizer import graft_update
from planner.derive.lengthen import lengthened
from planner.derive.same_step import is_same_step
from planner.plan_types.decisions import Accumulation, Optimizer, Precision, ShardedPrecision
from planner.recording.layer_runs import KEPT, KEPT_WHEN_GATHERED, layer_runs
from planner.recording.step_graph import Category, Op, Phase, StepGraph
from planner.rewrite.rehearse import certifying_graph, start_certificate, start_rehearsal, start_update
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


def shortening(work: Workload) -> Shortening:
    """Returns what the search uses to find out whether recordings may have a few layers of each run."""
    return Shortening(
        runs_to_shorten(work),
        lambda runs: start_certificate(work, (), BARE, runs=runs),
        lambda: certifying_graph(work, (), BARE),
    )


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
    assert shortening(work).is_right()
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


@pytest.mark.slow
def test_the_recording_of_the_baseline_shows_layers_that_differ():
    """Every sixth layer of Gemma 3 attends to all tokens, and the others to a window."""
    settings = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 1}
    work = transformer("gemma3_text", "Gemma3ForCausalLM", batch_size=2, seq_len=16, **settings)
    assert runs_to_shorten(work)
    assert not shortening(work).is_right()


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


def recordings_of(work: Workload, known: Shortening | None = None) -> Recordings:
    """Returns the recordings that the search uses."""
    return Recordings(
        lambda decisions, sizes, runs: start_rehearsal(
            work, decisions, BARE, sizes=sizes, steps=1, primed=True, what_if=True, runs=runs
        ),
        lambda decisions: start_update(work, decisions, BARE, [n for n, _ in work.model.named_parameters()]),
        lambda graph: graph,
        shortening=known,
    )


def recorded(work: Workload, known: Shortening | None = None, config=()) -> StepGraph:
    """Returns the recording that the search gets."""
    return recordings_of(work, known).of(config, MicroBatching(micro_batches=1, size=work.batch_size))


@pytest.mark.parametrize("config", [(), (Optimizer(),)], ids=["the user's optimizer", "8-bit optimizer"])
def test_the_search_gets_the_update_of_all_layers(config):
    work = layers("one after the other")
    known = shortening(work)
    longer, full = recorded(work, known, config), recorded(work, None, config)
    assert known.runs
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
    assert_equal(recorded(work, shortening(work)), recorded(work))


def test_recordings_with_buckets_of_gradients_have_all_layers():
    work = model("gpt2", batch_size=16)
    assert not runs_to_shorten(on_cards(work, Cards(count=8, way="ddp")))
    assert not runs_to_shorten(on_cards(work, Cards(count=8, way="zero1")))


class Layer(torch.nn.Module):
    """A layer that may differ from the others in one of several ways."""

    def __init__(self, way: str | None) -> None:
        super().__init__()
        self.linear, self.way, self.calls = torch.nn.Linear(16, 16), way, 0
        if way == "a forward hook":
            self.register_forward_hook(lambda layer, inputs, output: None)

    def forward(self, x):
        if self.way == "it counts its calls":
            self.calls += 1
        if self.way == "another kernel for equal shapes":
            x = x + x.sum(1)
        elif self.way == "kernels of one kind":
            x = x + x.sum(0)
        x = torch.relu(self.linear(x))
        if self.way == "the gradient of its output is kept":
            x.retain_grad()
            self.output = x
        return x


class Stack(torch.nn.Module):
    """Eighteen layers that look identical, of which one may differ."""

    def __init__(self, way: str, differs: int = 9) -> None:
        super().__init__()
        others = "kernels of one kind" if way == "another kernel for equal shapes" else None
        self.way, self.differs = way, differs
        self.layers = torch.nn.ModuleList(Layer(way if number == differs else others) for number in range(18))

    def forward(self, x):
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
            if self.way == "all outputs are doubled by the model":
                x = x * 2
            if self.way == "its output is doubled by the model" and len(outputs) == self.differs + 1:
                x = x * 2
        if self.way == "its output is part of the loss":
            return x.square().mean() + outputs[self.differs].mean()
        if self.way == "its weight is part of the loss":
            return x.square().mean() + self.layers[self.differs].linear.weight.mean()
        if self.way == "rows for layers from the tenth on":
            return x.square().mean() * x.new_ones(max(0, len(self.layers) - 9), 8).sum()
        return x.square().mean()


def stack(way: str, differs: int = 9) -> Workload:
    with torch.device("meta"):
        return workload(Stack(way, differs), torch.zeros(16, 16))


DIFFERENCES = [
    "it counts its calls",
    "a forward hook",
    "another kernel for equal shapes",
    "the gradient of its output is kept",
    "its output is doubled by the model",
    "its output is part of the loss",
    "its weight is part of the loss",
]


@pytest.mark.parametrize("way", [*DIFFERENCES, "rows for layers from the tenth on"])
def test_what_tells_one_layer_from_the_others_is_seen_in_the_baseline(way):
    work = stack(way)
    assert runs_to_shorten(work)
    assert not shortening(work).is_right()


@pytest.mark.parametrize("way", ["it counts its calls", "the gradient of its output is kept"])
def test_a_last_layer_that_differs_is_seen_in_the_baseline(way):
    """Another layer stands for the last one in a shortened recording."""
    assert not shortening(stack(way, differs=17)).is_right()


@pytest.mark.parametrize("way", ["nothing", "all outputs are doubled by the model"])
def test_layers_between_which_the_same_ops_run_are_lengthened(way):
    work = stack(way)
    known = shortening(work)
    assert is_same_step(recorded(work, known), recorded(work))
    assert known.runs


def test_layers_whose_parameters_are_used_elsewhere_or_have_hooks_are_all_recorded():
    plain, tied, hooked, accumulated = (stack("nothing") for _ in range(4))
    assert runs_to_shorten(plain)
    tied.model.head = torch.nn.Linear(16, 16, device="meta")
    tied.model.head.weight = tied.model.layers[9].linear.weight
    hooked.model.layers[9].linear.weight.register_hook(lambda gradient: gradient * 2)
    accumulated.model.layers[9].linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert not any(map(runs_to_shorten, (tied, hooked, accumulated)))


def test_copies_of_recordings_share_what_is_known_about_shortened_runs():
    work = layers("one after the other")
    recordings = recordings_of(work, shortening(work))
    whole = MicroBatching(micro_batches=1, size=work.batch_size)
    recordings.prefetch((), [whole])
    other = recordings.finished_by(lambda graph: graph)
    assert len(other.of((), whole).ops) == len(recordings.of((), whole).ops)
    recordings.close()
