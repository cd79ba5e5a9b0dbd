"""Show how the time and the host memory of planning grow with the number of layers, stage by stage.

    python -m benchmarks.layers [--layers 60 125 250] [--vram-per-layer 1.024]

The model is a Llama of width 64 with a batch of 8 x 128, and the card has no fixed costs. The budget is about a fifth
of the baseline's peak, so that most layers are recomputed. Each number of layers is planned in a new process. A column
is a stage, with its CPU seconds: rehearsals run in child processes, the other stages in the process that plans. The
column "memory" has the largest resident set of one process. The last row has the exponents of the last two rows: a
stage with the exponent 1 takes time in proportion to the layers, a stage with the exponent 2 to their square. "ops" is
the number of ops in the two recorded steps of the baseline. Recordings of earlier calls are not used.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import io
import json
import math
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import transformers

from benchmarks.planning import MIB, Counts, console_with_versions, print_row, watch_rehearsals

CONFIG = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}  # fmt: skip
STAGES = {
    "lengthening": (
        "planner.derive.lengthen:lengthened", "planner.derive.extrapolate:extrapolate",
        "planner.derive.graft_optimizer:graft_update", "planner.derive.same_step:is_same_step",
    ),
    "problem": ("planner.recompute.units:units_of",),
    "presolve": (
        "planner.search.presolve:Presolve.__init__", "planner.search.presolve:Presolve.above",
        "planner.search.curve:CompiledProblem.__init__",
    ),
    "rows": (
        "planner.search.linear_rows:RowSource.__init__", "planner.search.linear_rows:RowSource._rows",
        "planner.search.linear_rows:RowSource.violated", "planner.search.cutting_loop:fold",
        "planner.search.integer_program:Solver.add",
    ),
    "integer programs": ("planner.search.integer_program:Solver._run",),
    "footprint": ("planner.estimate.footprint:measure", "planner.estimate.roofline:op_times_ns"),
}  # fmt: skip
"""The stages in the process that plans, and their functions. A stage lacks the time of the stages that it calls."""
COLUMNS = ("layers", "ops", "rehearsals", *STAGES, "other", "CPU, s", "memory, MiB", "plan")


class Clock:
    """Adds up the CPU seconds of the stages of this process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._running = ["other"]
        self._last = time.process_time()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time of the context for a stage, and not for the stage that enters it."""
        self.switch()
        self._running.append(name)
        try:
            yield
        finally:
            self.switch()
            self._running.pop()

    def switch(self) -> None:
        """Adds the time since the last call to the stage that runs."""
        now = time.process_time()
        self.seconds[self._running[-1]] += now - self._last
        self._last = now

    def timed(self, function: Callable, name: str) -> Callable:
        """Returns the function, which then counts for a stage."""

        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return function(*args, **kwargs)

        return inner


def watch_stages(clock: Clock) -> None:
    """Counts the time of the functions of all stages, in whatever module they are called."""
    for name, paths in STAGES.items():
        for path in paths:
            module, _, attribute = path.partition(":")
            holder: Any = importlib.import_module(module)
            *outer, last = attribute.split(".")
            for part in outer:
                holder = getattr(holder, part)
            function = getattr(holder, last)
            timed = clock.timed(function, name)
            users = [m for n, m in sys.modules.items() if n.startswith("planner") and vars(m).get(last) is function]
            for user in (holder, *users):
                setattr(user, last, timed)


def answer(words: Sequence[str]) -> dict[str, Any]:
    """Runs a `plan` command in this process, and returns its counts and figures as JSON data."""
    counts: dict[str, Counts] = collections.defaultdict(Counts)
    watch_rehearsals(counts)
    import planner.cli
    import planner.pipeline
    from planner.choose.planning_session import PlanningSession

    clock, ops = Clock(), [0]
    watch_stages(clock)
    measured = PlanningSession._measured

    def counted(self: PlanningSession, graph: Any, *args: Any) -> Any:
        ops[0] = len(self.baseline_graph.ops)
        return measured(self, graph, *args)

    PlanningSession._measured = counted  # type: ignore[method-assign]  # counts the ops of the baseline
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = planner.cli.main([*words, "--json"])
    clock.switch()
    text = printed.getvalue()
    own_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {
        "status": status,
        "ops": ops[0],
        "plan": json.loads(text) if text.startswith("{") else None,
        "seconds": {"rehearsals": sum(count.cpu_seconds for count in counts.values()), **clock.seconds},
        "memory_bytes": max([own_bytes, *(count.memory_bytes for count in counts.values())]),
    }


def asked(layers: int, vram_mib: int, folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the JSON data of `answer` in a new process; None if it failed."""
    config = transformers.AutoConfig.for_model("llama", num_hidden_layers=layers, **CONFIG)
    config.architectures = ["LlamaForCausalLM"]
    path = folder / f"{layers}.json"
    path.write_text(config.to_json_string(use_diff=False))
    words = f"{path} --batch-size 8 --seq-len 128 --vram {vram_mib}MiB --gpu bare"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.layers", "--answer", *words.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "PLANNER_RECORDINGS": "none"},
    )
    if not done.stdout.strip():
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def figures(result: dict[str, Any]) -> list[float]:
    """Returns the numbers of a row: ops, CPU seconds of each stage and of all, and memory in MiB."""
    seconds = result["seconds"]
    stages = [seconds.get(name, 0.0) for name in ("rehearsals", *STAGES, "other")]
    return [result["ops"], *stages, sum(stages), result["memory_bytes"] / MIB]


def exponent(sizes: tuple[int, int], values: tuple[float, float]) -> str:
    """Returns the exponent with which a value grows; "-" if it is too small to tell."""
    if min(values) < 0.05:
        return "-"
    return f"{math.log(values[1] / values[0]) / math.log(sizes[1] / sizes[0]):.2f}"


def main() -> int:
    """Prints the table, one row at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[60, 125, 250], help="numbers of layers")
    parser.add_argument("--vram-per-layer", type=float, default=1.024, help="budget in MiB for each layer")
    parser.add_argument("--answer", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        print(json.dumps(answer(options.answer)))
        return 0
    console = console_with_versions()
    print_row(console, COLUMNS)
    print_row(console, ["---", *["---:"] * (len(COLUMNS) - 2), "---"])
    rows: list[tuple[int, list[float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for layers in options.layers:
            result = asked(layers, int(layers * options.vram_per_layer), pathlib.Path(folder))
            if result is None or result["plan"] is None:
                print_row(console, (str(layers), "failed"))
                return 1
            ops, *seconds, memory_mib = figures(result)
            rows.append((layers, [ops, *seconds, memory_mib]))
            fits = "fits" if result["plan"]["fits"] else "does not fit"
            price = f"{fits}, {result['plan']['slowdown']:.2f} x"
            times = [f"{second:.1f}" for second in seconds]
            print_row(console, (str(layers), f"{ops:,.0f}", *times, f"{memory_mib:,.0f}", price))
    if len(rows) > 1:
        (few, before), (many, after) = rows[-2:]
        row = [exponent((few, many), pair) for pair in zip(before, after, strict=True)]
        print_row(console, ("exponent", *row, ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
