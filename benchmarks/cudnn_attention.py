"""Asks cuDNN for the workspaces of attention, without a GPU, and compares them with the planner's formula.

    python -m benchmarks.cudnn_attention --frontend DIR --cudnn DIR --nvrtc DIR [--capability 9.0] [--calls 40]

The folders are those of the unpacked wheels nvidia-cudnn-frontend 1.22 (the folder with `cudnn`), nvidia-cudnn-cu13 and
nvidia-cuda-nvrtc (their folders with shared libraries). gcc is needed: cuDNN looks for a driver and for libcublasLt
when it builds a plan, so two libraries are compiled whose functions do nothing. A question takes one to four seconds.

The graph is the one that PyTorch builds (aten/src/ATen/native/cudnn/MHA.cpp, `build_graph` and `build_graph_backward`),
made by the Python interface of the same frontend. `--known` asks the calls of tests/workspaces/cudnn_attention.txt
again. Every answer is printed in the notation of that file, and those that the formula does not give are marked.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from planner import profiles
from planner.workspaces.cudnn.device_text import device_text
from planner.workspaces.cudnn_attention import backward, forward
from planner.workspaces.registry import KernelCall, Layout

ANSWERS = pathlib.Path(__file__).parents[1] / "tests/workspaces/cudnn_attention.txt"
_CHILD = "BENCHMARK_ASKS_CUDNN"
"""Environment variable that is set in the process that asks."""
_LOADS = ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuModuleLoadData", "cuModuleLoadDataEx")
_LOADS += ("cuModuleGetFunction", "cuLibraryGetModule")
_SUCCEEDS = ("cuLibraryUnload", "cuModuleUnload", "cuKernelSetAttribute", "cuFuncSetAttribute", "cuFuncSetCacheConfig")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """One call of attention. Its text is one line: card, direction, dtype, layout, the sizes, and options."""

    capability: tuple[int, int]
    is_backward: bool
    dtype: str
    layout: str
    """Order of the dimensions in memory: 'bhsd' or 'bshd' (batch, heads, sequence, width)."""
    sizes: tuple[int, ...]
    """Batch, heads of queries, heads of keys, queries, keys, width of queries and keys, width of values."""
    is_causal: bool = False
    bias: tuple[int, int] | None = None
    """Batch and heads of the mask; None without a mask."""
    dropout: float = 0.0

    @property
    def text(self) -> str:
        options = ["causal"] if self.is_causal else []
        options += [f"bias={self.bias[0]},{self.bias[1]}"] if self.bias else []
        options += [f"dropout={self.dropout}"] if self.dropout else []
        direction = "backward" if self.is_backward else "forward"
        card = ".".join(map(str, self.capability))
        return " ".join((card, direction, self.dtype, self.layout, ",".join(map(str, self.sizes)), *options))

    @classmethod
    def of(cls, text: str) -> Attention:
        card, direction, dtype, layout, sizes, *rest = text.split()
        major, minor = card.split(".")
        options = dict(option.partition("=")[::2] for option in rest)
        batch, heads = options["bias"].split(",") if "bias" in options else (0, 0)
        return cls(
            capability=(int(major), int(minor)),
            is_backward=direction == "backward",
            dtype=dtype,
            layout=layout,
            sizes=tuple(map(int, sizes.split(","))),
            is_causal="causal" in options,
            bias=(int(batch), int(heads)) if "bias" in options else None,
            dropout=float(options.get("dropout", 0)),
        )

    def strides(self, heads: int, rows: int, width: int) -> tuple[int, int, int, int]:
        """Returns the strides of a tensor [batch, heads, rows, width] in this layout."""
        if self.layout == "bhsd":
            return heads * rows * width, rows * width, width, 1
        return rows * heads * width, width, heads * width, 1

    @property
    def formula_bytes(self) -> int:
        """Bytes by the planner's formula."""
        batch, heads, key_heads, queries, keys, width, value_width = self.sizes

        def layout(*shape: int) -> Layout:
            return Layout(shape=(batch, *shape), stride=self.strides(*shape), itemsize=2, dtype=self.dtype)

        arguments: dict[str, Any] = {
            "query": layout(heads, queries, width),
            "key": layout(key_heads, keys, width),
            "value": layout(key_heads, keys, value_width),
            "grad_out": layout(heads, queries, value_width),
            "dropout_p": self.dropout,
        }
        card = dataclasses.replace(profiles.load("h100"), compute_capability=self.capability)
        formula = backward if self.is_backward else forward
        return sum(formula(KernelCall(arguments=arguments, outputs=()), card))


def known() -> Iterator[tuple[Attention, int]]:
    """Yields the calls that cuDNN was asked about, and the bytes that it answered."""
    for line in ANSWERS.read_text().splitlines():
        if line and not line.startswith("#"):
            text, _, size = line.rpartition(" ")
            yield Attention.of(text), int(size)


def drawn(count: int, seed: int, capability: tuple[int, int]) -> Iterator[Attention]:
    """Yields calls at random."""
    draw = random.Random(seed)
    for _ in range(count):
        batch, heads = draw.choice((1, 2, 3, 4, 8, 16)), draw.choice((1, 4, 8, 12, 16, 25, 32))
        groups = draw.choice([heads, heads, *(number for number in (1, 2, 4, 8) if heads % number == 0)])
        queries = draw.choice((17, 64, 100, 128, 129, 197, 200, 256, 511, 512, 1000, 1024, 2048, 4096))
        keys = draw.choice((queries, queries, queries, 77, 128, 333, 1024))
        width = draw.choice((8, 16, 32, 40, 64, 64, 72, 80, 96, 128, 128))
        is_causal = queries == keys and draw.random() < 0.5
        yield Attention(
            capability=capability,
            is_backward=draw.random() < 0.7,
            dtype=draw.choice(("float16", "bfloat16")),
            layout=draw.choice(("bhsd", "bshd")),
            sizes=(batch, heads, groups, queries, keys, width, draw.choice((width, width, width, 64, 128))),
            is_causal=is_causal,
            bias=None if is_causal else draw.choice((None, (1, 1), (batch, 1), (batch, heads))),
            dropout=draw.choice((0, 0, 0.1)),
        )


def ask(cudnn: Any, call: Attention) -> int:
    """Returns the bytes of the workspace of the plan that PyTorch takes, the first one that can be built.

    Args:
        cudnn: the module of the frontend.
    """
    batch, heads, key_heads, queries, keys, width, value_width = call.sizes
    io = cudnn.data_type.HALF if call.dtype == "float16" else cudnn.data_type.BFLOAT16
    fp32, int64 = cudnn.data_type.FLOAT, cudnn.data_type.INT64
    graph = cudnn.pygraph(
        io_data_type=io, intermediate_data_type=fp32, compute_data_type=fp32,
        device_property=cudnn.create_device_properties(device_text(call.capability)),
        sm_version=10 * call.capability[0] + call.capability[1], sm_count=108,
    )  # fmt: skip

    def tensor(name: str, *shape: int) -> Any:
        return graph.tensor(name=name, dim=[batch, *shape], stride=[*call.strides(*shape)], data_type=io)

    def number(name: str, kind: Any, **options: Any) -> Any:
        return graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=kind, **options)

    def output(made: Any, *shape: int) -> None:
        made.set_output(True).set_dim([batch, *shape]).set_stride([*call.strides(*shape)])

    q, k = tensor("Q", heads, queries, width), tensor("K", key_heads, keys, width)
    v = tensor("V", key_heads, keys, value_width)
    options = {"attn_scale": number("Attn_scale", fp32, is_pass_by_value=True), "use_causal_mask": call.is_causal}
    if call.bias:  # PyTorch expands the batch, and leaves the heads
        stride = [0 if call.bias[0] == 1 else call.bias[1] * queries * keys, queries * keys, keys, 1]
        dims = [batch, call.bias[1], queries, keys]
        options["bias"] = graph.tensor(name="bias", dim=dims, stride=stride, data_type=io)
    if call.dropout:
        options["dropout"] = (call.dropout, number("Seed", int64), number("Offset", int64))
    if call.is_backward:
        o, grad = (tensor(name, heads, queries, value_width) for name in ("O", "DO"))
        dims, stride = [batch, heads, queries, 1], [heads * queries, queries, 1, 1]
        stats = graph.tensor(name="Stats", dim=dims, stride=stride, data_type=fp32)
        grads = graph.sdpa_backward(q=q, k=k, v=v, o=o, dO=grad, stats=stats, **options)
        shapes = ((heads, queries, width), (key_heads, keys, width), (key_heads, keys, value_width))
        for made, shape in zip(grads, shapes, strict=True):
            output(made, *shape)
    else:
        o, stats = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **options)
        output(o, heads, queries, value_width)
        stats.set_output(True).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return int(graph.get_workspace_size())


def _compile_stand_ins(cudnn: pathlib.Path, folder: pathlib.Path) -> None:
    """Compiles libraries that stand for the driver, which pretends to load kernels, and for libcublasLt."""
    pattern = re.compile(rb"(?<![A-Za-z0-9_])((?:cu[A-Z]|cublasLt[A-Z])[A-Za-z0-9_]{3,60})(?=\0)")
    names = {name.decode() for path in cudnn.glob("libcudnn_*.so.9") for name in pattern.findall(path.read_bytes())}
    bodies = {name: "(void){return 100;}" for name in names}
    bodies |= {name: "(void **handle){*handle = (void *)64; return 0;}" for name in _LOADS}
    bodies |= {name: "(void){return 0;}" for name in _SUCCEEDS}
    bodies["cuDriverGetVersion"] = "(int *version){*version = 13000; return 0;}"
    bodies["cublasLtGetVersion"] = "(void){return 130100;}"
    bodies["cublasLtCreate"] = "(void **handle){static char made[4096]; *handle = made; return 0;}"
    for library, prefix in (("libcuda.so.1", "cu"), ("libcublasLt.so.13", "cublasLt")):
        chosen = (name for name in sorted(bodies) if name.startswith("cublasLt") == (prefix == "cublasLt"))
        source = folder / f"{library}.c"
        source.write_text("".join(f"unsigned long {name}{bodies[name]}\n" for name in chosen))
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", str(folder / library), str(source)]
        subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("frontend", "cudnn", "nvrtc"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--capability", default="9.0")
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--known", metavar="FIRST:LAST", help="ask lines of the committed file again")
    asked = parser.parse_args()
    if _CHILD not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            _compile_stand_ins(asked.cudnn, pathlib.Path(folder))
            paths = os.pathsep.join((folder, str(asked.cudnn), str(asked.nvrtc)))
            environment = {**os.environ, _CHILD: "1", "LD_LIBRARY_PATH": paths}
            command = [sys.executable, "-m", "benchmarks.cudnn_attention", *sys.argv[1:]]
            raise SystemExit(subprocess.run(command, env=environment).returncode)
    sys.path.insert(0, str(asked.frontend))
    import cudnn

    print(f"# cuDNN {cudnn.backend_version()}, frontend {cudnn.__version__}", flush=True)
    major, minor = map(int, asked.capability.split("."))
    if asked.known:
        first, last = map(int, asked.known.split(":"))
        calls = [call for call, _ in known()][first:last]
    else:
        calls = list(drawn(asked.calls, asked.seed, (major, minor)))
    equal = answered = 0
    for call in calls:
        try:
            size = ask(cudnn, call)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
            print(f"# {call.text}: {str(error).splitlines()[0]}", flush=True)
            continue
        answered += 1
        equal += size == call.formula_bytes
        mark = "" if size == call.formula_bytes else f"  # the formula gives {call.formula_bytes}"
        print(f"{call.text} {size}{mark}", flush=True)
    print(f"# {equal} of {answered} as by the formula")


if __name__ == "__main__":
    main()
