"""Adds to a recording the memory that belongs to no tensor: scratch memory of kernels, and cuBLAS workspaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import Category, Op, Phase, StepGraph, Storage
from planner.workspaces import convolutions
from planner.workspaces.cudnn import sources
from planner.workspaces.cudnn.dispatch import is_convolution
from planner.workspaces.cudnn.notes import notes
from planner.workspaces.gemm import GEMM_OPS
from planner.workspaces.registry import Block, Trials, blocks_of

_LT_BYTES = 1 << 20
"""Size of the cublasLt workspace (`_getWorkspaceSize` in aten/src/ATen/cuda/CUDABlas.cpp, default 1024 KiB)."""

_THREADS = ((Phase.FORWARD, Phase.OPTIMIZER), (Phase.BACKWARD, Phase.RECOMPUTE))
"""Phases of the ops that the main thread runs, and of those that autograd's thread runs."""


def with_workspaces(graph: StepGraph, card: DeviceProfile, torch_version: str) -> StepGraph:
    """Returns the recording with workspaces as additional storages.

    For a card without a caching allocator (`bare`), on which only the bytes of tensors count, it is unchanged.
    """
    if not card.allocator:
        return graph
    births = _births(graph)
    born = [ticks[-1] for ticks in births]
    scratch = list(_scratch(graph, births, card, torch_version))
    added = [
        *_cublas_workspaces(graph, born, card.cublas_workspace_bytes(torch_version)),
        *_cublaslt_workspaces(graph, born, torch_version),
        *scratch,
    ]
    ops = _with_scratch_bytes(graph.ops, scratch)
    return dataclasses.replace(graph, ops=ops, storages=[*graph.storages, *added])


def convolution_notes(graph: StepGraph, card: DeviceProfile, torch_version: str) -> tuple[str, ...]:
    """Returns what a plan says about the workspaces of its convolutions: where they come from, and if they are exact.

    Args:
        graph: a recording of two steps. Only the first of them is counted.
    """
    known = _known_convolutions((op for op in graph.ops if op.step == 0), card, torch_version)
    return tuple(
        notes(
            known.answers,
            torch_version=torch_version,
            others=known.others,
            searched=known.searched,
            silent=sources.reasons(),
        )
    )


def _known_convolutions(ops: Iterable[Op], card: DeviceProfile, torch_version: str) -> convolutions.Known:
    return convolutions.known(((op.name, op.kernel) for op in ops), card, torch_version)


def unknown_ops(graph: StepGraph) -> dict[str, int]:
    """Returns the names of the ops whose scratch memory is unknown, each with the number of times that it runs."""
    counts: dict[str, int] = {}
    for op in graph.ops:
        if not op.scratch_known:
            counts[op.name] = counts.get(op.name, 0) + 1
    return counts


def _births(graph: StepGraph) -> list[list[int]]:
    """Returns for each op the ticks at which it allocates its outputs, in order; the op's tick if it allocates none."""
    born: list[list[int]] = [[] for _ in graph.ops]
    for storage in graph.storages:
        if storage.op is not None and storage.lives:
            born[storage.op].append(storage.lives[0][0])
    return [sorted(ticks) or [op.tick] for op, ticks in zip(graph.ops, born, strict=True)]


def _scratch(graph: StepGraph, births: list[list[int]], card: DeviceProfile, torch_version: str) -> Iterator[Storage]:
    """Yields the scratch memory of the ops for which a formula is registered.

    The workspaces of all convolutions are looked up together. A block after all outputs lives for one tick. Another
    block lives until the tick of the output that follows it.
    """
    _known_convolutions(graph.ops, card, torch_version)
    for index, op in enumerate(graph.ops):
        if op.kernel is not None:
            for block in blocks_of(op.name, op.kernel, card, torch_version):
                yield Storage(
                    size_bytes=block.size_bytes,
                    lives=[_life(block, op.tick, births[index])],
                    category=Category.WORKSPACE,
                    op=index,
                    trials=_in_thread(block.trials, op.phase),
                )


def _with_scratch_bytes(ops: Sequence[Op], scratch: Iterable[Storage]) -> list[Op]:
    """Returns the ops, with `scratch_bytes` set for each convolution. The estimate of its time includes these bytes.

    If PyTorch searches for the fastest algorithm, it is not known which algorithm will run. Then the workspace of the
    algorithm that runs without a search is used.
    """
    sizes: dict[int, int] = {}
    for storage in scratch:
        if storage.op is not None and is_convolution(ops[storage.op].name):
            search = None if storage.trials is None else storage.trials.search
            size = storage.size_bytes if search is None else search.heuristic_bytes[0]
            sizes[storage.op] = sizes.get(storage.op, 0) + size
    return [
        dataclasses.replace(op, scratch_bytes=sizes[number]) if number in sizes else op for number, op in enumerate(ops)
    ]


def _in_thread(trials: Trials | None, phase: Phase) -> Trials | None:
    """Returns the trials of an op. Each thread remembers its own results, and autograd has a thread of its own."""
    if trials is None:
        return None
    thread = "autograd" if phase in (Phase.BACKWARD, Phase.RECOMPUTE) else "main"
    return dataclasses.replace(trials, remembered_as=f"{thread}: {trials.remembered_as}")


def with_least_workspaces(graph: StepGraph) -> StepGraph:
    """Returns the recording as if each convolution ran with the algorithm that needs the smallest workspace."""
    if not any(storage.trials for storage in graph.storages):
        return graph
    storages = [
        storage if storage.trials is None else dataclasses.replace(storage, size_bytes=storage.trials.sizes_bytes[-1])
        for storage in graph.storages
    ]
    return dataclasses.replace(graph, storages=storages)


def without_searches(graph: StepGraph) -> StepGraph:
    """Returns the recording as if PyTorch did not search for the fastest algorithms of convolutions."""
    storages = []
    for storage in graph.storages:
        search = None if storage.trials is None else storage.trials.search
        if storage.trials is not None and search is not None:
            sizes = search.heuristic_bytes
            if not sizes[0]:
                continue
            trials = dataclasses.replace(storage.trials, sizes_bytes=sizes, search=None) if len(sizes) > 1 else None
            storage = dataclasses.replace(storage, size_bytes=sizes[0], trials=trials)
        storages.append(storage)
    return dataclasses.replace(graph, storages=storages)


def with_known_algorithms(graph: StepGraph) -> StepGraph:
    """Returns the recording as if the search had ended before it, with the algorithms of the largest workspaces."""
    storages = [
        storage
        if storage.trials is None
        else dataclasses.replace(storage, trials=dataclasses.replace(storage.trials, search=None))
        for storage in graph.storages
    ]
    return dataclasses.replace(graph, storages=storages)


def has_searches(graph: StepGraph) -> bool:
    """True if PyTorch searches for the fastest algorithms of convolutions in this step."""
    return any(storage.trials is not None and storage.trials.search is not None for storage in graph.storages)


def _life(block: Block, tick: int, births: list[int]) -> tuple[int, int]:
    """Returns the ticks in which a block is alive.

    Args:
        tick: when the op began, before it allocated an output.
        births: when the op allocated its outputs. Outputs that share the memory of others have no birth of their own.
    """
    start = tick if block.first == 0 else births[min(block.first, len(births)) - 1]
    return start, births[block.last] if block.last < len(births) else births[-1] + 1


def _for_one_tick(size_bytes: int, op: int, start: int) -> Storage:
    return Storage(size_bytes=size_bytes, lives=[(start, start + 1)], category=Category.WORKSPACE, op=op)


def _cublas_workspaces(graph: StepGraph, born: list[int], workspace_bytes: int) -> Iterator[Storage]:
    """Yields the cuBLAS workspaces: one for each thread that multiplies matrices.

    The main thread allocates its workspace at the first matrix product of the forward, and autograd's thread at the
    first one of the backward. Both live as long as the process (aten/src/ATen/cuda/CublasHandlePool.cpp). A `primed`
    recording stands for a step after the first one, so it has both workspaces from the beginning.
    """
    for first in _first_products(graph):
        life = (0 if graph.primed else born[first], graph.ticks)
        yield Storage(size_bytes=workspace_bytes, lives=[life], category=Category.WORKSPACE, op=0)


def _first_products(graph: StepGraph) -> Iterator[int]:
    """Yields the index of the first matrix product of each thread that multiplies matrices."""
    for phases in _THREADS:
        first = next((i for i, op in enumerate(graph.ops) if op.name in GEMM_OPS and op.phase in phases), None)
        if first is not None:
            yield first


def allocated_in_first_step(graph: StepGraph) -> dict[int, tuple[int, bool]]:
    """Returns when a first step would allocate the cuBLAS workspaces.

    `graph` is a `primed` recording, as `with_workspaces` returns it. The keys are indices of its storages. The
    values are (tick of the first matrix product of a thread, True for autograd's thread). In `graph` itself, the
    workspaces are alive from the beginning. Workspaces of cublasLt, which come after them in the recording, are left
    out.
    """
    kept = (
        index
        for index, storage in enumerate(graph.storages)
        if storage.category is Category.WORKSPACE and storage.lives == [(0, graph.ticks)]
    )
    born = [ticks[-1] for ticks in _births(graph)]
    return {
        index: (born[first], graph.ops[first].phase in _THREADS[1])
        for index, first in zip(kept, _first_products(graph), strict=False)
    }


def _cublaslt_workspaces(graph: StepGraph, born: list[int], torch_version: str) -> Iterator[Storage]:
    """Yields the workspaces of cublasLt, on which `addmm` with a bias runs. From torch 2.11 on, it has none of its own.

    Up to torch 2.8 each call allocates a workspace and frees it; in 2.9 and 2.10 each thread keeps one
    (aten/src/ATen/cuda/CUDABlas.cpp, `gemm_and_bias`; aten/src/ATen/native/cuda/Blas.cpp, `addmm_out_cuda_impl`).
    """
    release = tuple(int(part) for part in torch_version.split(".")[:2])
    if release >= (2, 11):
        return
    for phases in _THREADS:
        for index, op in enumerate(graph.ops):
            if op.phase in phases and op.name == "aten.addmm.default" and _has_bias_row(op):
                if release >= (2, 9):
                    life = (0 if graph.primed else born[index], graph.ticks)
                    yield Storage(size_bytes=_LT_BYTES, lives=[life], category=Category.WORKSPACE, op=0)
                    break
                yield _for_one_tick(_LT_BYTES, index, born[index])


def _has_bias_row(op: Op) -> bool:
    """True if an `addmm` adds a vector (a bias) to each row of a matrix product, for which PyTorch uses cublasLt."""
    assert op.kernel is not None  # The recorder keeps the call of every op that has a formula, as `addmm` has.
    bias, matrix = op.kernel.tensor("self"), op.kernel.tensor("mat2")
    return len(bias.shape) == 1 and bias.shape[0] == matrix.shape[1] and min(matrix.shape) > 1
