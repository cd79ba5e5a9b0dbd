"""Measure the cost of recording: two steps compared with PyTorch's MemTracker, one step of Llama-3-70B, cost per op.

    python -m benchmarks.recording [--without-70b]

Both record the same two steps of the same model on the same virtual GPU, in turn, each in its own child process with
one thread; the smallest CPU time counts. Read the ratios: times depend on this machine, and even CPU times vary with
its load.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import resource
import threading
import time
import warnings
from collections.abc import Callable

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.main_job import EXAMPLES, MIB, proportional_bytes
from planner import profiles
from planner.assemble import versions
from planner.recording.recorder import Recorder
from planner.recording.rehearsal import make_virtual, record_steps
from planner.recording.virtual_batch import virtual_batch
from planner.rewrite.application import apply_decisions
from planner.rewrite.rehearse import start_rehearsal
from planner.virtual_gpu import backend, library_patches
from planner.virtual_gpu.forked_process import run_in_child
from planner.virtual_gpu.in_place import InPlaceRule
from planner.workload.loading import load_workload
from planner.workload.synthetic_batch import synthetic_batch
from planner.workload.workload import Workload, tensors_of, workload

STEPS = 2
MODELS = {
    "roberta_84m": (64, 128),
    "gpt2": (8, 512),
    "llama_1b": (2, 1024),
    "vit_base": (16, None),
    "unet.py:build": (16, None),
}
CARD = profiles.load("h100")
LLAMA_3_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def ours(work: Workload) -> tuple[float, int]:
    """Returns the CPU seconds of two recorded steps, and their number of ops."""

    def watched(model, batch, prepare) -> int:
        recorder = Recorder(backend.NAME, what_if=False, in_place=InPlaceRule(backend.NAME))
        sizes = (work.batch_size,)
        return len(
            record_steps(recorder, model, batch, prepare, steps=STEPS, primed=False, micro_batch_sizes=sizes).ops
        )

    return _timed(work, watched)


def theirs(work: Workload) -> tuple[float, int]:
    """Returns the same under `MemTracker`, which does not count ops (0)."""

    def watched(model, batch, prepare) -> int:
        tracker = MemTracker()
        tracker.track_external(model, *(tensor for _, tensor in tensors_of(batch)))
        with tracker:
            step, _ = prepare(model)
            for _ in range(STEPS):
                step(batch)
                tracker.reset_mod_stats()
                gc.collect()
        return 0

    return _timed(work, watched)


def unwatched(work: Workload) -> tuple[float, int]:
    """Returns the same without recording: the cost of the fake tensors."""

    def watched(model, batch, prepare) -> int:
        step, _ = prepare(model)
        for _ in range(STEPS):
            step(batch)
            gc.collect()
        return 0

    return _timed(work, watched)


def _timed(work: Workload, watched: Callable) -> tuple[float, int]:
    """Run the steps on the virtual GPU in a child process. Returns its CPU seconds and the result of `watched`."""

    def prepare(model):
        step = apply_decisions(
            (), model, optimizer="adamw", calling=work.calling, batch_size=work.batch_size, loss_fn=work.loss_fn
        )
        return step.step, (step.optimizer,)

    def run() -> tuple[float, int]:
        warnings.simplefilter("ignore")
        gc.freeze()
        gc.disable()
        backend.install(backend.Target(compute_capability=CARD.compute_capability))
        mode = backend.VirtualGpuMode()
        library_patches.let_libraries_take_fakes_for_real()
        with torch.autograd.set_multithreading_enabled(False), mode:
            make_virtual(work.model, backend.NAME)
            batch = virtual_batch(work.batch, work.batch_size, work.batch_size, backend.NAME)
            began = time.process_time()
            ops = watched(work.model, batch, prepare)
            return time.process_time() - began, ops

    return run_in_child(run)


def compare_with_tracker(console: Console, rounds: int) -> None:
    """Print the CPU time of both recorders for each model."""
    title = f"two steps on the virtual GPU, fp32, adamw: CPU seconds (best of {rounds})"
    table = Table(title=title)
    for column in (
        "model",
        "ops",
        "not recorded",
        "MemTracker",
        "ours",
        "ours / MemTracker",
        "ours, us per op",
        "of which recording",
    ):
        table.add_column(column)
    for example, (batch_size, seq_len) in MODELS.items():
        work = load_workload(str(EXAMPLES / example), batch_size=batch_size, seq_len=seq_len, optimizer="adamw")
        times: dict[Callable, list[tuple[float, int]]] = {unwatched: [], theirs: [], ours: []}
        for _ in range(rounds):
            for measure, results in times.items():
                results.append(measure(work))
        (bare, _), (tracker, _), (recorder, ops) = (min(results) for results in times.values())
        table.add_row(
            example,
            f"{ops:,}",
            f"{bare:.2f}",
            f"{tracker:.2f}",
            f"{recorder:.2f}",
            f"{recorder / tracker:.2f}",
            f"{1e6 * recorder / ops:.0f}",
            f"{1e6 * (recorder - bare) / ops:.0f}",
        )
    console.print(table)


def llama_70b(console: Console) -> None:
    """Print time and host memory of recording one step of Llama-3-70B."""
    config = transformers.AutoConfig.for_model("llama", **LLAMA_3_70B)
    config.use_cache = False
    began = time.perf_counter()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    work = workload(model, synthetic_batch(model, batch_size=1, seq_len=2048), seq_len=2048)
    built = time.perf_counter()
    largest, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            largest[0] = max(largest[0], proportional_bytes(os.getpid()))

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = start_rehearsal(work, (), CARD, sizes=(1,), steps=1, primed=True, what_if=True)
    watcher = threading.Thread(target=watch)
    watcher.start()
    graph = child.result()
    seconds = time.perf_counter() - built
    done.set()
    watcher.join()
    table = Table(title="Llama-3-70B on the meta device, 1 x 2048, fp32, adamw: one what-if step with optimizer state")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    for column in ("build s", "record s", "of CPU s", "ops", "CPU us per op", "host memory MiB", "curve's peak GiB"):
        table.add_column(column)
    row = (
        f"{built - began:.1f}",
        f"{seconds:.1f}",
        f"{cpu:.1f}",
        f"{len(graph.ops):,}",
        f"{1e6 * cpu / len(graph.ops):.0f}",
    )
    table.add_row(*row, f"{largest[0] / MIB:,.0f}", f"{graph.live_bytes().max() / (MIB << 10):,.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-70b", action="store_true", help="skip Llama-3-70B")
    parser.add_argument("--rounds", type=int, default=3, help="number of repetitions, of which the fastest counts")
    options = parser.parse_args()
    console = Console(width=150)
    console.print(
        f"{platform.machine()}, {os.cpu_count()} cores; " + ", ".join(f"{k} {v}" for k, v in versions().items())
    )
    if not options.without_70b:
        llama_70b(console)
    compare_with_tracker(console, options.rounds)


if __name__ == "__main__":
    main()
