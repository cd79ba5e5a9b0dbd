"""Compares the runs that peft published, one for each of its methods, with predictions.

    python -m benchmarks.published.peft_runs FOLDER [NAME ...]
    python -m benchmarks.published.peft_runs FOLDER NAME ... --whole [--steps 1000] [--new-tokens 300]

FOLDER holds the results of Llama-3.2-3B on MetaMathQA (github.com/huggingface/peft,
`method_comparison/MetaMathQA/results/*.json`): an NVIDIA L40S, torch 2.13.0, transformers 5.13.1, bf16 weights, batches
of 4 samples in buckets of similar lengths, AdamW. Each result holds the settings of peft and two figures:

- `mem allocated avg`: bytes of tensors after a step, with the last output alive; the mean over 250 steps. It grows with
  the mean length of the batches, which is not published.
- `accelerator_memory_max`: the largest number of bytes that the allocator reserved. It grows with the length of the
  longest batch, which is not published, and depends on the order of the lengths and on the generation between steps.

The lengths do not depend on the method. So both are taken from one run (`REFERENCE`), and all others are predicted.

With `--whole`, nothing is fitted: the steps of a run are simulated in the allocator, one after the other, and three
figures are compared: the mean and the 99th percentile of the bytes that are reserved after a step, and the maximum. The
lengths of the samples are not published. They are drawn at random from what is known (`sample_lengths`), and batches
are rounded to the nearest multiple of 32 tokens, so that each length can be rehearsed. Generation (4 below) is left out
unless `--new-tokens` gives the number of tokens that are generated after every 250th step; the runs generate 300. The
generation for the test set at the end (6) is left out.

The stream of events of a run (`run.py`, `utils.py`, `data.py`; commit 5d602fdbf):

1. Weights are loaded to the card in bf16, and adapters are added (in fp32, unless `autocast_adapter_dtype` is false).
2. Without the adapter, in inference mode: 25 forwards of 4 Wikipedia texts, truncated to 768 tokens and padded on the
   left, without labels: bf16 logits of [4, up to 768, vocabulary], then a cross-entropy of one text after the other.
   The last outputs stay alive until the function returns.
3. 5,000 steps. MetaMathQA in its own order, without shuffling: only pairs of at most 1,300 characters (query, a space,
   response), as "Question: {query} Think step by step.\nAnswer:" and the response, cut to 768 tokens. Buckets of 80
   samples are sorted by length, longest first, and cut into 20 batches of 4, so that the lengths fall 20 times and then
   start again. A batch is padded on the right to its longest sample. A step is `zero_grad()` (the gradients of the step
   before are alive until then), forward, backward, clipping of gradients to a norm of 1.0, `step()`, and
   `loss.item()`. The outputs and the batch of a step stay alive until the next ones replace them.
4. After every 250th step: `generate()` in inference mode on 50 questions of GSM8K in one batch, padded
   on the left, with a cache of keys and values, until 300 new tokens or 800 in all. The last outputs of the
   training step stay alive meanwhile.
5. After every 10th step, and after the generation of that step: `empty_cache()`.
6. At the end: `generate()` on the 1,319 questions of GSM8K's test set in batches of 50, and the forwards of 2 again,
   with the adapter. `accelerator_memory_max` is `max_memory_reserved()` of all of this, except before 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import math
import pathlib
import random
import resource
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.published.rehearsing import graph_of, outcome_of
from planner import profiles
from planner.allocator.settings import PYTORCH_DEFAULTS
from planner.assemble import versions
from planner.errors import PlannerError
from planner.estimate.add_workspaces import with_workspaces
from planner.plan_types.sizes import MIB
from planner.progress import Watch
from planner.run_memory.batches import BatchShape
from planner.run_memory.moments import RELEASE, Events, Moment
from planner.run_memory.simulation import simulate
from planner.whole_run.activities import Activity
from planner.whole_run.recordings import RunRecordings
from planner.workload.cards import resolve_card
from planner.workload.workload import Workload, workload

REFERENCE = "lora--llama-3.2-3B-rank32"
CARD, TORCH = "l40s", "2.13.0"
SAMPLES, STEPS = 4, 2
FIRST_BYTES = 2 * MIB
"""Bytes that `run.py` subtracts from the figures after a step: the segment of a small layer, made before the model."""
MEAN_SAMPLE = 4_198_051 / 20_000 - 1
"""Mean tokens of a sample: `train total tokens`, which counts one more token for each of the 20,000 samples."""
LARGEST_SAMPLE, MOST_CHARACTERS, KEPT = 768, 1300, 0.938
"""Limits of a sample in tokens and characters, and the part of all texts that is within the limit (`data.py`)."""
BUCKET, LONGEST_BUCKETS, ROUNDING, EMPTY_EVERY, GENERATE_EVERY = 20, 10, 32, 10, 250
QUESTIONS, QUESTION_TOKENS = 50, 192
"""Questions in a batch of generation, and the assumed tokens of the longest one. Their lengths are not published."""
LLAMA_3B = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}
MEAN_TOKENS, MOST_TOKENS = range(150, 400), range(400, 769)
"""Lengths of a batch that are tried for the reference: the mean of all batches, and the longest batch."""


def model_of(result: dict[str, Any]) -> Any:
    """Returns the model of a run with its adapters, on the default device."""
    import peft
    import transformers

    settings, train = result["run_info"]["peft_config"], result["run_info"]["train_config"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.LlamaConfig(**LLAMA_3B)
        model: Any = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        if settings is not None:
            chosen = peft.PeftConfig.from_peft_type(**settings)
            model = peft.get_peft_model(model, chosen, autocast_adapter_dtype=train["autocast_adapter_dtype"])
    return model.train()


def optimizer_of(result: dict[str, Any], model: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of a run."""
    import peft

    train = result["run_info"]["train_config"]
    if train["optimizer_type"] == "lora-fa":
        return peft.optimizers.create_lorafa_optimizer(model, **train["optimizer_kwargs"])
    return getattr(torch.optim, train["optimizer_type"])(model.parameters(), **train["optimizer_kwargs"])


def train_step(model: Any, optimizer: Any, tokens: int, device: torch.device, result: dict[str, Any]) -> object:
    """Train one step as `method_comparison/MetaMathQA/run.py` does, and return what stays alive after it.

    One sample is shorter than the others.
    """
    mask = torch.ones(SAMPLES, tokens, dtype=torch.int64)
    mask[0, -1] = 0
    batch = {"input_ids": torch.zeros(SAMPLES, tokens, dtype=torch.int64), "attention_mask": mask}
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    batch["labels"] = batch["input_ids"].clone()
    optimizer.zero_grad()
    output = model(**batch, num_items_in_batch=SAMPLES * tokens - 1)
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), result["run_info"]["train_config"]["grad_norm_clip"])
    optimizer.step()
    return batch, output


def program(device: torch.device, result: dict[str, Any], tokens: int) -> None:
    """Train two steps."""
    with device:
        model = model_of(result)
    optimizer = optimizer_of(result, model)
    held = None
    for _ in range(STEPS):
        held = train_step(model, optimizer, tokens, device, result)  # noqa: F841 (alive until the next step)
    torch.zeros(1, device=device)  # the moment at which the memory is read


def predicted(result: dict[str, Any], tokens: int) -> tuple[int, int]:
    """Returns the bytes that tensors take after the step, and the reserved bytes at the peak."""
    graph = graph_of(functools.partial(program, result=result, tokens=tokens), CARD)
    with_cublas = with_workspaces(graph, profiles.load(CARD), TORCH)
    after = with_cublas.live_bytes(granularity_bytes=512)[graph.ops[-1].tick] - FIRST_BYTES
    return int(after), outcome_of(graph, CARD, TORCH).peak_reserved_bytes


def measured(result: dict[str, Any]) -> tuple[float, int]:
    """Returns the published bytes of tensors after a step (mean over the run), and the maximum of reserved bytes."""
    steps = [step["mem allocated avg"] for step in result["train_info"]["metrics"] if "mem allocated avg" in step]
    return sum(steps) / len(steps), result["train_info"]["accelerator_memory_max"]


def tokens_at(result: dict[str, Any], lengths: range, published: float, which: int) -> int:
    """Returns the length with which the prediction is nearest to a published figure, by bisection."""
    low, high = lengths[0], lengths[-1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if predicted(result, middle)[which] > published else (middle, high)
    return min((low, high), key=lambda tokens: abs(predicted(result, tokens)[which] - published))


def sample_lengths(count: int, *, characters_a_token: float = 3.0) -> list[int]:
    """Returns lengths of samples in tokens.

    Characters are distributed log-normally, cut at the limit, such that the known part of the texts is kept and the
    mean is that of the published tokens. Assumed, and not published: the form of the distribution, the mean number of
    characters of a token, and 13 tokens of template. The ratio of characters to tokens varies by 13 %, so that the
    densest of some 10,000 long texts has 768 tokens in 1,304 characters, as `data.py` says.
    """
    template, spread, normal, source = 13, 0.13, statistics.NormalDist(), random.Random(0)
    cut = normal.inv_cdf(KEPT)

    def parameters(sigma: float) -> tuple[float, float]:
        """Returns the logarithm of the median, and the mean of the texts that are kept."""
        median = math.log(MOST_CHARACTERS) - cut * sigma
        return median, math.exp(median + sigma**2 / 2) * normal.cdf(cut - sigma) / KEPT

    low, high = 0.05, 1.5
    while high - low > 1e-6:
        sigma = (low + high) / 2
        is_long = parameters(sigma)[1] > (MEAN_SAMPLE - template) * characters_a_token
        low, high = (sigma, high) if is_long else (low, sigma)
    lengths: list[int] = []
    while len(lengths) < count:
        characters = math.exp(source.gauss(parameters(sigma)[0], sigma))
        tokens = characters / characters_a_token / math.exp(source.gauss(spread**2 / 2, spread))
        if characters <= MOST_CHARACTERS:
            lengths.append(min(LARGEST_SAMPLE, template + round(tokens)))
    return lengths


def batches_of(lengths: Sequence[int]) -> list[int]:
    """Returns the lengths of the batches, bucket by bucket, longest first, each to the nearest multiple."""
    size = BUCKET * SAMPLES
    buckets = [sorted(lengths[start : start + size], reverse=True) for start in range(0, len(lengths), size)]
    longest = [bucket[start] for bucket in buckets for start in range(0, len(bucket), SAMPLES)]
    return [max(1, round(tokens / ROUNDING)) * ROUNDING for tokens in longest]


class Training:
    """The steps of a run, as workloads of the planner."""

    def __init__(self, result: dict[str, Any]) -> None:
        self._result = result
        with torch.device("meta"):
            self._model = model_of(result)
        self._optimizer = optimizer_of(result, self._model)

    def at(self, tokens: int) -> Workload:
        held: list[object] = []

        def step(model: Any, optimizer: Any, _: object) -> None:
            held[:] = [train_step(model, optimizer, tokens, next(model.parameters()).device, self._result)]

        return workload(self._model, None, step=step, optimizer=self._optimizer)


def forwards_at_the_start(model: Any, *_: object) -> None:
    """Compute the loss of texts of 768 tokens without the adapter."""
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad(), model.disable_adapter() if hasattr(model, "peft_config") else contextlib.nullcontext():
        for _number in range(STEPS):
            ids = torch.zeros(SAMPLES, LARGEST_SAMPLE, dtype=torch.int64).to(device)
            outputs = model(input_ids=ids)
            for logits, target in zip(outputs.logits, ids, strict=True):
                _losses = torch.nn.functional.cross_entropy(logits[:-1], target[1:], reduction="none")
    model.train()


def generation(model: Any, new_tokens: int) -> None:
    """Generate answers to one batch of questions, as `evaluate` in `run.py` does."""
    import transformers

    device = next(model.parameters()).device
    model.eval()
    with torch.inference_mode():
        ids = torch.zeros(QUESTIONS, QUESTION_TOKENS, dtype=torch.int64).to(device)
        config = transformers.GenerationConfig(max_length=QUESTION_TOKENS + new_tokens, pad_token_id=0)
        _answers = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    model.train()


def whole_run(
    recordings: RunRecordings, batches: Sequence[BatchShape], start: Moment, generated: Moment | None
) -> tuple[float, float, int]:
    """Returns mean and 99th percentile of the bytes that are reserved after a step, and the maximum of the run.

    Args:
        generated: the generation after every 250th step; None to leave it out.
    """
    released = (Events(((RELEASE, 0),), ()),)
    moments, steps = [recordings.steps[batches[0]].setup, start.first], []
    for number, shape in enumerate(batches, start=1):
        steps.append(len(moments))
        moment = recordings.steps[shape].moment
        moments.append(moment.first if number == 1 else moment.again)
        if generated is not None and number % GENERATE_EVERY == 0:
            moments.append(generated.first if number == GENERATE_EVERY else generated.again)
        if number % EMPTY_EVERY == 0:
            moments.append(released)
    outcome = simulate(moments, PYTORCH_DEFAULTS, resolve_card(CARD, None), None)
    after = [outcome.peaks[number] - FIRST_BYTES for number in steps]
    percentile = statistics.quantiles(after, n=100, method="inclusive")[-1]
    return statistics.mean(after), percentile, outcome.peak_bytes


def recordings_of(training: Training) -> RunRecordings:
    """Returns recordings of a run of peft's benchmark, without any step so far."""
    return RunRecordings(lambda shape: training.at(shape.length), (), resolve_card(CARD, None), Watch())


def compare_whole_runs(results: dict[str, dict[str, Any]], count: int, new_tokens: int) -> None:
    """Prints the three figures of each run, and those with generation if there are new tokens.

    After the first steps, the ten buckets with the longest batches follow, because one of them sets the maximum.
    """
    batches = batches_of(sample_lengths(20_000))
    buckets = [batches[start : start + BUCKET] for start in range(0, len(batches), BUCKET)]
    longest = sorted(buckets, reverse=True)[:LONGEST_BUCKETS]
    print(f"{len(batches)} batches: mean {statistics.mean(batches):.0f} tokens, longest {max(batches)}")
    taken = [BatchShape(SAMPLES, tokens) for tokens in (*batches[:count], *itertools.chain.from_iterable(longest))]
    print("| run | mean: published | predicted | error | 99th | predicted | error | maximum | predicted | error |")
    for name, result in results.items():
        recordings = recordings_of(Training(result))
        recordings.rehearse(taken)
        activity = Activity(name="forwards at the start", run=forwards_at_the_start)
        start = recordings.activities([activity], taken[0])[0]
        _print_row(name, result, whole_run(recordings, taken, start, None))
        if new_tokens:
            generate = Activity(name="generation", run=lambda model, *_: generation(model, new_tokens))
            began = time.process_time() + _seconds_of_children()
            generated = recordings.activities([generate], taken[0])[0]
            seconds = time.process_time() + _seconds_of_children() - began
            _print_row(f"{name}, {new_tokens} new tokens", result, whole_run(recordings, taken, start, generated))
            print(f"generation: {generated.peak_bytes / 1e9:.3f} GB of tensors, recorded in {seconds:.0f} CPU s")


def _print_row(name: str, result: dict[str, Any], found: tuple[float, float, int]) -> None:
    info, cells = result["train_info"], []
    figures = ("accelerator_memory_reserved_avg", "accelerator_memory_reserved_99th", "accelerator_memory_max")
    for figure, value in zip(figures, found, strict=True):
        cells += [f"{info[figure] / 1e9:.3f}", f"{value / 1e9:.3f}", f"{value / info[figure] - 1:+.1%}"]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names of results (default: all)")
    parser.add_argument("--whole", action="store_true", help="simulate the whole runs")
    parser.add_argument("--steps", type=int, default=1000, help="number of steps of a whole run (default 1000)")
    parser.add_argument("--new-tokens", type=int, default=0, help="tokens of a generation (default 0: left out)")
    arguments = parser.parse_args()
    importlib.import_module("peft")  # bitsandbytes, which it imports, cannot be imported on the virtual GPU
    results = {path.stem: json.loads(path.read_text()) for path in sorted(arguments.folder.glob("*.json"))}
    if arguments.whole:
        named = {name: result for name, result in results.items() if name.startswith(tuple(arguments.names))}
        compare_whole_runs(named, arguments.steps, arguments.new_tokens)
        return
    reference = results[REFERENCE]
    after, reserved = measured(reference)
    mean = tokens_at(reference, MEAN_TOKENS, after, 0)
    longest = tokens_at(reference, MOST_TOKENS, reserved, 1)
    rest = after - predicted(reference, mean)[0]  # less than what one token takes
    console = Console(width=150)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    table = Table(title=f"lengths from {REFERENCE}: mean {mean}, longest {longest} tokens; GB of 1e9 bytes")
    for column in ("run", "after a step", "predicted", "error", "reserved", "predicted", "error"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, result in track(results.items(), console=Console(stderr=True)):
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        try:
            found = predicted(result, mean)[0] + rest, predicted(result, longest)[1]
        except PlannerError as error:
            table.add_row(name, "not rehearsed:", str(error)[:60])
            continue
        cells = [
            text
            for published, value in zip(measured(result), found, strict=True)
            for text in (f"{published / 1e9:.3f}", f"{value / 1e9:.3f}", f"{value / published - 1:+.2%}")
        ]
        table.add_row(name.replace("--llama-3.2-3B", ""), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
