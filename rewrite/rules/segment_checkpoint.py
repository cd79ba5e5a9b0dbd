"""Replay: of stretches of a long forward only what they start from is kept; their ops run again in backward.

For what one module does in a single forward there is no part to checkpoint. A dispatch mode writes down each op of a
stretch; when backward asks for the first tensor that was saved there, those ops that lead to saved tensors run once
more, on the same values, with the same random numbers, below autograd and autocast. Nothing is traced beforehand: what
the forward does may depend on anything, and its Python runs once.

Rematerialization from a tape: Griewank, Achieving logarithmic growth of temporal and spatial complexity in reverse
automatic differentiation, 1992; by a dispatcher as in Kirisame et al., Dynamic Tensor Rematerialization, 2021. What is
written below the dispatcher, by a kernel that is launched by hand on memory with contents, is not seen.
"""

from __future__ import annotations

import inspect
import types

from planner.plan_types.decisions import Replay
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.portable import replay_ops, replay_tape
from planner.rewrite.portable.module_forward import detached, forward_function
from planner.rewrite.recomputed_modules import modules_to_run_again
from planner.rewrite.rewriting import Rewriting


def segment_checkpoint(rewriting: Rewriting, decision: Replay) -> None:
    """Let the forward of each named module write down its stretches, on the instance.

    Raises:
        DecisionError: for a module that does not exist or is never called.
    """
    for name, module in modules_to_run_again(rewriting, decision.by_module, decision.kind, nested=True).items():
        forward = types.MethodType(replay_tape.replayed(forward_function(module), decision.by_module[name]), module)
        rewriting.replace(module, "forward", forward, place=f"forward of '{name}'")


def segment_checkpoint_source(plan: Plan, decision: Replay) -> EmittedCode:
    parts = (
        replay_tape.replayed,
        replay_tape.Tape,
        replay_tape.Stretch,
        replay_tape.halves,
        replay_tape.leading_to,
        replay_tape.TapeEntry,
        replay_ops.traits_of,
        replay_ops.random_numbers,
        replay_ops.rng_state_restored,
        replay_ops.StorageView,
        replay_tape.DeferredTensor,
        replay_ops.KeptTensor,
        replay_ops.refuse_change,
        replay_ops.key_of,
        replay_ops.version_of,
        replay_ops.without_bits,
        replay_ops.copy_of,
        replay_ops.tensors_in,
        replay_ops.map_args,
        detached,
    )
    rewriting = """\
for name, stretches in REPLAYED.items():
    module = model.get_submodule(name)
    module.forward = types.MethodType(replayed(type(module).forward, stretches), module)
"""
    return EmittedCode(
        imports=(
            "import contextlib",
            "import functools",
            "import itertools",
            "import types",
            "from bisect import bisect",
            "from collections import Counter",
            "from typing import NamedTuple",
            "from torch.multiprocessing.reductions import StorageWeakRef",
            "from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass",
            "from torch.utils._pytree import tree_leaves",
        ),
        constants=(
            "# Stretches of a module's forward that run again in backward: the first op, the one after the last,\n"
            "# ops whose results are kept, ops at which the stretch is divided.\n"
            + assignment("REPLAYED", decision.by_module),
        ),
        functions=tuple(map(inspect.getsource, parts)),
        rewriting=(rewriting,),
    )
