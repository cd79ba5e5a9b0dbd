"""Segment checkpoint: recompute segments of a module's forward op by op, instead of keeping their saved tensors.

A segment is a range of consecutive ops. Activation checkpointing recomputes whole module calls, so it cannot divide the
forward of one module. This rule can. In the forward, a dispatch mode records the ops of each segment. When backward
asks for the first tensor that was saved in a segment, the recorded ops that lead to its saved tensors run again (a
replay). They run on the same values with the same random numbers, without autograd and autocast. Nothing is traced in
advance: the forward may take any path, and its Python code runs once.

`rewrite/portable/replay_tape.py` describes the mechanism, its limits, and how it differs from selective activation
checkpointing. The method is rematerialization from a tape (Griewank, Achieving logarithmic growth of temporal and
spatial complexity in reverse automatic differentiation, 1992). A dispatcher records the tape, as in Kirisame et al.,
Dynamic Tensor Rematerialization, 2021. They decide during the step what to recompute; here the plan has decided it
before.
"""

from __future__ import annotations

import inspect
import types

from planner.plan_types.plan import Plan
from planner.plan_types.recompute_decisions import Replay
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.portable import replay_ops, replay_tape
from planner.rewrite.portable.module_forward import detached
from planner.rewrite.recompute_observer import CHECK_IMPORTS, check_source
from planner.rewrite.recomputed_modules import modules_to_run_again
from planner.rewrite.rewriting import Rewriting


def segment_checkpoint(rewriting: Rewriting, decision: Replay) -> None:
    """Replace the forward of each planned module by one that records its segments and recomputes them in backward.

    Raises:
        DecisionError: if a module does not exist or has no forward.
    """
    for name, module in modules_to_run_again(rewriting, decision.by_module, decision.kind, nested=True).items():
        forward = types.MethodType(
            replay_tape.replayed(rewriting.watched_forward(module, name), decision.by_module[name]), module
        )
        rewriting.replace(module, "forward", forward, place=f"forward of '{name}'")


def segment_checkpoint_source(plan: Plan, decision: Replay) -> EmittedCode:
    """Return the code that does the same as `segment_checkpoint` in an emitted file."""
    parts = (
        replay_tape.replayed,
        replay_tape.Tape,
        replay_tape.Segment,
        replay_ops.halves,
        replay_ops.leading_to,
        replay_ops.TapeEntry,
        replay_ops.traits_of,
        replay_ops.device_of,
        replay_ops.random_numbers,
        replay_ops.rng_state_restored,
        replay_ops.StorageView,
        replay_ops.DeferredTensor,
        replay_ops.KeptTensor,
        replay_ops.refuse_change,
        replay_ops.may_overlap,
        replay_ops.is_parameter,
        replay_ops.present_data,
        replay_ops.key_of,
        replay_ops.version_of,
        replay_ops.without_bits,
        replay_ops.copy_of,
        replay_ops.tensors_in,
        replay_ops.map_args,
        detached,
    )
    rewriting = """\
for name, segments in REPLAYED.items():
    module = model.get_submodule(name)
    forward = RECOMPUTE_CHECK.watched(forward_function(module), name)
    module.forward = types.MethodType(replayed(forward, segments), module)
"""
    return EmittedCode(
        imports=(
            "import contextlib",
            "import functools",
            "import itertools",
            "import types",
            "import weakref",
            "from bisect import bisect",
            "from collections import Counter, defaultdict",
            "from typing import NamedTuple",
            "from weakref import WeakSet",
            "from torch.multiprocessing.reductions import StorageWeakRef",
            "from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass",
            "from torch.utils._python_dispatch import _get_current_dispatch_mode_stack",
            "from torch.utils._pytree import tree_leaves",
            *CHECK_IMPORTS,
        ),
        constants=(
            "# Segments of a module's forward that backward recomputes op by op: the first op, the op after the last,\n"
            "# ops whose results are kept, ops before which the segment is divided.\n"
            + assignment("REPLAYED", decision.by_module),
        ),
        functions=(*(inspect.getsource(part) for part in parts), *check_source(plan)),
        rewriting=(rewriting,),
        is_watched=True,
    )
