"""Time the search: `python -m benchmarks.search [NAME ...] [--problems FOLDER]`. Does not need torch.

The problems imitate recordings of transformers: the module tree of a decoder, tensors that are saved by
several consumers, inputs that a checkpoint keeps alive, gradients that grow through the backward, and
a logits peak between the two. Layers are identical, which is the hard case: ties everywhere.

With `--problems` the problems are recordings: every `*.pkl` in FOLDER (or those called NAME), a pickled
`(CheckpointProblem, module of each unit, nanoseconds of a step)`. Each is solved at budgets that fall by 5 % of
the peak until nothing fits: exactly, then to within 0.1 % of a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner.search import curve, milp
from planner.search.problem import CheckpointProblem, Hold, Recompute, Selection

MIB = 1 << 20
TIME_LIMIT_SECONDS = 30.0
SHARES = (90, 80, 70, 60, 50, 40, 30)
RECORDED_SHARES = range(95, 0, -5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
    """The sizes of a synthetic problem."""

    layers: int
    hidden: int
    tokens: int
    vocabulary: int
    side_tensors: int
    """Small tensors that each op saves (statistics, masks, seeds): they make up the number of holds."""
    events_per_op: int
    uneven: bool = False
    """True if every layer has its own sizes and times, as in a convolutional network: there is no symmetry to use."""


TRANSFORMERS = {
    "roberta-12": Transformer(layers=12, hidden=768, tokens=8192, vocabulary=52_000, side_tensors=4, events_per_op=20),
    "gpt2-24": Transformer(layers=24, hidden=1024, tokens=8192, vocabulary=50_257, side_tensors=4, events_per_op=14),
    "llama-32": Transformer(
        layers=32, hidden=4096, tokens=16_384, vocabulary=128_256, side_tensors=10, events_per_op=20
    ),
    "uneven-32": Transformer(
        layers=32, hidden=1024, tokens=8192, vocabulary=1000, side_tensors=4, events_per_op=20, uneven=True
    ),
    "llama-80": Transformer(
        layers=80, hidden=8192, tokens=32_768, vocabulary=128_256, side_tensors=28, events_per_op=37
    ),
}

# name of the leaf under its layer, inputs, output width (in hidden sizes), FLOPs (per token and hidden size, in
# hidden sizes), which inputs it saves, whether it saves its output
LAYER_OPS = (
    ("norm1", ("x",), "n1", 1.0, 0.0, ("x",), False),
    ("attention.q", ("n1",), "q0", 1.0, 2.0, ("n1",), False),
    ("attention.k", ("n1",), "k0", 0.25, 0.5, ("n1",), False),
    ("attention.v", ("n1",), "v", 0.25, 0.5, ("n1",), False),
    ("attention.rotary.q", ("q0",), "q", 1.0, 0.0, (), False),
    ("attention.rotary.k", ("k0",), "k", 0.25, 0.0, (), False),
    ("attention.core", ("q", "k", "v"), "c", 1.0, 1.0, ("q", "k", "v"), True),
    ("attention.o", ("c",), "o", 1.0, 2.0, ("c",), False),
    ("dropout1", ("o",), "d1", 1.0, 0.0, (), True),
    ("", ("x", "d1"), "h", 1.0, 0.0, (), False),
    ("norm2", ("h",), "n2", 1.0, 0.0, ("h",), False),
    ("mlp.gate", ("n2",), "g", 3.5, 7.0, ("n2",), False),
    ("mlp.up", ("n2",), "u", 3.5, 7.0, ("n2",), False),
    ("mlp.act", ("g",), "a", 3.5, 0.0, ("g",), False),
    ("mlp", ("a", "u"), "m", 3.5, 0.0, ("a", "u"), False),
    ("mlp.down", ("m",), "w", 1.0, 7.0, ("m",), False),
    ("", ("h", "w"), "y", 1.0, 0.0, (), False),
)


@dataclasses.dataclass(kw_only=True)
class _Op:
    chain: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    cost_ns: int


def synthetic_problem(shape: Transformer) -> CheckpointProblem:
    """Returns the problem that recording such a transformer would give."""
    ops, size_bytes = _ops(shape)
    names = sorted({name for op in ops for name in op.chain})
    number = {name: k for k, name in enumerate(names)}
    inside: dict[str, list[int]] = {name: [] for name in names}
    for k, op in enumerate(ops):
        for name in op.chain:
            inside[name].append(k)
    step, half = shape.events_per_op, len(ops) * shape.events_per_op
    events = 3 * half
    producer = {tensor: k for k, op in enumerate(ops) for tensor in op.outputs}

    def forward(op: int) -> int:
        return op * step

    def backward(op: int) -> int:
        return half + (len(ops) - 1 - op) * 2 * step

    fixed_bytes = _temporaries(shape, events, half)
    holds: list[Hold] = []
    saved_inside = dict.fromkeys(names, 0)
    savers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    for k, op in enumerate(ops):
        for tensor in op.saved:
            savers.setdefault(tensor, []).append(k)
        for tensor in op.inputs:
            readers.setdefault(tensor, []).append(k)
    for tensor, born in producer.items():
        gone = max([forward(k) + step for k in readers.get(tensor, [])] + [forward(born) + step])
        fixed_bytes[forward(born) : gone] += size_bytes[tensor]
        outside = {name for k in readers.get(tensor, []) for name in ops[k].chain if born not in inside[name]}
        for name in ops[born].chain:
            saved_inside[name] += size_bytes[tensor] if tensor in savers else 0
        moments = sorted(
            {backward(k) + 2 * step for k in savers.get(tensor, [])} | {backward(inside[n][-1]) for n in outside}
        )
        for start, stop in zip([gone, *moments], moments, strict=False):
            unless = [ops[k].chain for k in savers.get(tensor, []) if backward(k) + 2 * step >= stop]
            when = [name for name in outside if backward(inside[name][-1]) >= stop]
            holds.append(
                Hold(
                    size_bytes=size_bytes[tensor],
                    start=start,
                    stop=stop,
                    unless=tuple(sorted(tuple(sorted(number[n] for n in chain)) for chain in unless)),
                    when=tuple(sorted(number[n] for n in when)),
                )
            )
    return CheckpointProblem(
        fixed_bytes=fixed_bytes,
        holds=tuple(holds),
        recomputes=tuple(
            Recompute(unit=number[n], at=backward(inside[n][-1]), extra_bytes=saved_inside[n] * 11 // 10) for n in names
        ),
        cost_ns=tuple(sum(ops[k].cost_ns for k in inside[n]) for n in names),
        paths=tuple(sorted({tuple(sorted(number[n] for n in op.chain)) for op in ops})),
    )


def _ops(shape: Transformer) -> tuple[list[_Op], dict[str, int]]:
    """Returns the ops of the forward, and the bytes of every tensor."""
    width_bytes = 2 * shape.tokens * shape.hidden
    size_bytes, ops = (
        {"l0.x": width_bytes},
        [_Op(chain=("model", "model.embed"), inputs=(), outputs=("l0.x",), saved=(), cost_ns=20_000)],
    )
    for layer in range(shape.layers):
        for leaf, inputs, output, width, flops, saved, saves_output in LAYER_OPS:
            parts = ("model", "layers", str(layer), *filter(None, leaf.split(".")))
            chain = tuple(".".join(parts[: k + 1]) for k in range(len(parts)))
            made = f"l{layer + 1}.x" if output == "y" else f"l{layer}.{output}"
            scale = (97 + layer * 61 % 53) / 100 if shape.uneven else 1.0
            size_bytes[made] = int(width * width_bytes * scale) // 512 * 512
            side = tuple(f"l{layer}.{output}.side{k}" for k in range(shape.side_tensors))
            size_bytes.update((name, 512 * (1 + k * 7)) for k, name in enumerate(side))
            work_ns = flops * shape.tokens * shape.hidden**2 * 2 / 1e5 + width * width_bytes / 500
            ops.append(
                _Op(
                    chain=chain[:1] + chain[2:],
                    inputs=tuple(f"l{layer}.{name}" for name in inputs),
                    outputs=(made, *side),
                    saved=tuple(f"l{layer}.{name}" for name in saved) + ((made,) if saves_output else ()) + side,
                    cost_ns=5_000 + int(work_ns * scale**2),
                )
            )
    last = f"l{shape.layers}.x"
    size_bytes["logits"] = 4 * shape.tokens * shape.vocabulary
    ops.append(
        _Op(chain=("model", "head"), inputs=(last,), outputs=("logits",), saved=(last, "logits"), cost_ns=4_000_000)
    )
    return ops, size_bytes


def _temporaries(shape: Transformer, events: int, half: int) -> np.ndarray:
    """Returns int64[E]: parameters, gradients that grow through the backward, and short-lived temporaries."""
    weights_bytes = 2 * 13 * shape.layers * shape.hidden**2
    saw_bytes = 2 * shape.tokens * shape.hidden * np.random.default_rng(0).integers(0, 4, events)
    gradient_bytes = np.maximum(0, np.arange(events) - half) * weights_bytes // (events - half)
    return weights_bytes + saw_bytes + gradient_bytes // 512 * 512


def main(names: list[str], folder: Path | None) -> None:
    """Print a table for each problem, with a line for each budget."""
    for name in names or (TRANSFORMERS if folder is None else sorted(path.stem for path in folder.glob("*.pkl"))):
        if folder is None:
            problem = synthetic_problem(TRANSFORMERS[name])
            _print_head(name, problem)
            _print_block(problem, SHARES, 0, max(problem.cost_ns))
        else:
            problem, _, step_ns = pickle.loads((folder / f"{name}.pkl").read_bytes())
            _print_head(name, problem)
            for tolerance_ns in (0, step_ns // 1000):
                print(f"tolerance {tolerance_ns / 1e6:.3f} ms of a step of {step_ns / 1e6:.1f} ms")
                _print_block(problem, RECORDED_SHARES, tolerance_ns, step_ns)


def _print_head(name: str, problem: CheckpointProblem) -> None:
    compiled = curve.CompiledProblem(problem)
    began = time.perf_counter()
    peak_bytes = compiled.peak(())
    evaluation_ms = (time.perf_counter() - began) * 1e3
    print(f"\n{name}: {len(problem.cost_ns)} units, {len(problem.holds)} holds, {len(problem.fixed_bytes)} events")
    print(f"peak with nothing selected {peak_bytes / MIB:.0f} MiB; one evaluation {evaluation_ms:.2f} ms")


def _print_block(problem: CheckpointProblem, shares: Sequence[int], tolerance_ns: int, whole_ns: int) -> None:
    """Print a line for each budget down to the first that nothing fits, and one for the smallest peak.

    Recompute time is printed as a share of `whole_ns`, the time of the whole forward or of a recorded step.
    """
    search = milp.Search(problem)
    peak_bytes = search.exact.peak(())
    print(f"{'budget':>16} {'seconds':>8} {'rows':>5} {'runs':>5} {'units':>6} {'recomputed':>11}  status")
    for share in shares:
        began = time.perf_counter()
        try:
            found = search.solve(
                peak_bytes * share // 100, time_limit_seconds=TIME_LIMIT_SECONDS, tolerance_ns=tolerance_ns
            )
        except milp.SearchTimeout as error:
            print(f"{share:>15}% {error}")
            continue
        _print_line(f"{share}%", time.perf_counter() - began, search, found, whole_ns)
        if found is None:
            break
    least = search.smallest_peak(time_limit_seconds=TIME_LIMIT_SECONDS, tolerance_ns=tolerance_ns)
    _print_line(f"least: {least.peak_bytes / peak_bytes:.1%}", least.seconds, search, least, whole_ns)


def _print_line(label: str, seconds: float, search: milp.Search, found: Selection | None, whole_ns: int) -> None:
    print(f"{label:>16} {seconds:>8.2f} {search.effort.rows:>5} {search.effort.rounds:>5}", end=" ")
    if found is None:
        print(f"{'-':>6} {'-':>11}  nothing fits")
    else:
        print(f"{len(found.units):>6} {found.cost_ns / whole_ns:>11.1%}  {found.status}, gap {found.gap:.2g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--problems", type=Path, metavar="FOLDER", help="recorded problems instead of synthetic ones")
    given = parser.parse_args()
    main(given.names, given.problems)
