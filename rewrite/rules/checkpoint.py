"""Checkpoint: keep only the inputs of a module call, and optionally some op results; recompute the rest in backward.

The mechanism is `torch.utils.checkpoint.checkpoint` (non-reentrant), one call per module (Chen et al., Training Deep
Nets with Sublinear Memory Cost, 2016). With kept results it is selective activation checkpointing: a pair of dispatch
modes as `context_fn`, of which the first stores results and the second returns them instead of running the op again.
torch's own `create_selective_checkpoint_contexts` is not used, because it selects by kind of op, while a plan selects
single calls ("the third and fifth product of this module", `planner.recompute.kept_products`). The modes also drop a
result that the forward overwrites later, and never keep one whose op draws random numbers.

The gradients have the same bits as without checkpointing: dropout draws the same masks (`preserve_rng_state`), and
batch and instance normalisation do not update their running statistics a second time. It stops being exact for

- other modules that change buffers of their own in forward (spectral norm), which would do so twice;
- modules that draw from a generator of their own, which would draw other numbers;
- a transformers model that filled a cache of keys and values: the cache is turned off, attention then reads another
  memory layout, and its last bit may differ.

The planner does not offer modules of the first two kinds.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.plan_types.decisions import Checkpoint
from planner.plan_types.plan import Plan
from planner.recompute import kept_products
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.portable.module_forward import detached, written_by
from planner.rewrite.recompute_observer import CHECK_IMPORTS, check_source
from planner.rewrite.recomputed_modules import modules_to_run_again
from planner.rewrite.rewriting import Rewriting

PRODUCTS = {getattr(torch.ops.aten, name).default: position for name, position in kept_products.PRODUCTS.items()}
"""Ops whose results may be kept -> position of the argument dropout_p, None for ops without dropout."""


def checkpoint(rewriting: Rewriting, decision: Checkpoint) -> None:
    """Wrap the forward of each named module, on the instance: classes, parameters and `state_dict` keys are kept.

    Raises:
        DecisionError: if a module does not exist or is never called, or if modules are nested in each other.
    """
    kept = decision.by_module
    for name, module in modules_to_run_again(rewriting, decision.modules, decision.kind, nested=False).items():
        contexts = functools.partial(keeping, kept[name]) if kept[name] else keeping_nothing
        forward = types.MethodType(recomputed(rewriting.watched_forward(module, name), contexts), module)
        rewriting.replace(module, "forward", forward, place=f"forward of '{name}'")
    rewriting.turn_cache_off()  # the recompute would append the same keys and values a second time


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def recomputed(forward, contexts):
    """Return a forward that is recomputed in backward. Without gradients it is unchanged.

    `contexts(module)` returns the context manager of the first run and that of the recompute.
    """

    @functools.wraps(forward)
    def wrapper(module, /, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        # Pass keyword arguments by position: only positional tensors are saved through autograd, where hooks see them.
        positional, names = len(args), tuple(kwargs)

        def run(*inputs):
            return forward(module, *inputs[:positional], **dict(zip(names, inputs[positional:], strict=True)))

        return torch.utils.checkpoint.checkpoint(
            run,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=lambda: contexts(module),
        )

    return wrapper


def keeping_nothing(module):
    """Return the contexts of the first run and of the recompute, if only the inputs are kept."""
    return contextlib.nullcontext(), Recompute(statistics_kept, module)


def keeping(numbers, module):
    """Return the contexts of the first run and of the recompute, which reuses the results of the products `numbers`.

    Products are numbered from 0 in the order in which a call of the module runs them.
    """
    first = KeepingResults(numbers)
    return first, Recompute(statistics_kept, module, TakingResults(first.results))


class Recompute(contextlib.ExitStack):
    """The context of the recompute. It can be entered again, since a graph may be traversed more than once."""

    def __init__(self, statistics, module, *modes):
        super().__init__()
        self.statistics, self.module, self.modes = statistics, module, modes

    def __enter__(self):
        for context in (self.statistics(self.module), *self.modes):
            self.enter_context(context)
        return self


class KeepingResults(TorchDispatchMode):
    """Keeps the results of the products with the given numbers, in the first run.

    A result is not kept if its op draws random numbers, and is dropped if a later op writes to it. This is checked
    while the ops run, because the op behind a number may differ between devices and between batches.
    """

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.count, self.results = frozenset(numbers), 0, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if op in PRODUCTS:
            if self.count in self.numbers and not drops_out(op, args, kwargs):
                kept = tree_map_only(torch.Tensor, detached, result)
                self.results[self.count] = op, kept, versions(kept)
            self.count += 1
        elif op._schema.is_mutable and self.results:
            # The recompute would read the overwritten numbers: recompute that result instead.
            written = storages(written_by(op, args, kwargs))
            for number in [n for n, (_, kept, _) in self.results.items() if not written.isdisjoint(storages(kept))]:
                del self.results[number]
        return result


class TakingResults(TorchDispatchMode):
    """Returns kept results instead of running their ops again, in the recompute.

    Each result is returned once, so that it can be freed, and only for the same op with the same number, if nothing
    was written to it since.
    """

    def __init__(self, results):
        super().__init__()
        self.results = results

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in PRODUCTS:
            product, kept, before = self.results.pop(self.count, (None, None, None))
            self.count += 1
            if product is op and versions(kept) == before:
                return kept
        return op(*args, **(kwargs or {}))


def drops_out(op, args, kwargs):
    """Return True if attention draws random numbers: skipping it would shift those that later ops draw."""
    position = PRODUCTS[op]
    return position is not None and kwargs.get("dropout_p", args[position] if len(args) > position else 0.0) > 0.0


def storages(tree):
    """Return the numbers of the storages of all tensors in nested containers."""
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def versions(tree):
    """Return how often each tensor in nested containers was written to in place."""
    return [leaf._version for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def statistics_kept(module):
    """Keep normalisation layers from updating their running statistics, as the first forward has done so already."""
    with contextlib.ExitStack() as restore:
        for norm in module.modules():
            if not isinstance(norm, torch.nn.modules.batchnorm._NormBase) or not norm.track_running_stats:
                continue
            hidden = {"momentum": 0.0, "num_batches_tracked": None}
            if isinstance(norm, torch.nn.modules.instancenorm._InstanceNorm):
                # With momentum 0 it still averages the statistics over the samples, which rounds: give it copies.
                hidden |= {name: getattr(norm, name).clone() for name in ("running_mean", "running_var")}
            for name, value in hidden.items():
                restore.callback(setattr, norm, name, getattr(norm, name))
                setattr(norm, name, value)
        yield


def checkpoint_source(plan: Plan, decision: Checkpoint) -> EmittedCode:
    """Return the emitted counterpart of `checkpoint`. The dispatch modes are emitted only if results are kept."""
    constants: tuple[str, ...]
    keeps = any(decision.kept)
    if keeps:
        products = kept_products.PRODUCTS.items()
        listed = "".join(f"    torch.ops.aten.{name}.default: {position},\n" for name, position in products)
        constants = (
            "# Ops whose results may be kept: products, and attention with the position of its argument dropout_p.\n"
            f"PRODUCTS = {{\n{listed}}}",
            "# Modules that are recomputed in backward, except for the results of these PRODUCTS. They are numbered\n"
            "# from 0 in the order in which the module's forward runs them.\n"
            + assignment("RECOMPUTED", decision.by_module),
        )
        rewriting = """\
for name, numbers in RECOMPUTED.items():
    module = model.get_submodule(name)
    contexts = functools.partial(keeping, numbers) if numbers else keeping_nothing
    forward = RECOMPUTE_CHECK.watched(forward_function(module), name)
    module.forward = types.MethodType(recomputed(forward, contexts), module)
"""
    else:
        constants = ("# Modules that are recomputed in backward.\n" + assignment("RECOMPUTED", decision.modules),)
        rewriting = """\
for name in RECOMPUTED:
    module = model.get_submodule(name)
    forward = RECOMPUTE_CHECK.watched(forward_function(module), name)
    module.forward = types.MethodType(recomputed(forward, keeping_nothing), module)
"""
    imports = ["import contextlib", "import functools", "import types", "import torch.utils.checkpoint"]
    functions: list[Callable] = [recomputed, keeping_nothing, Recompute, statistics_kept]
    if keeps:
        imports += [
            "from torch.utils._python_dispatch import TorchDispatchMode",
            "from torch.utils._pytree import tree_leaves, tree_map_only",
        ]
        functions[2:2] = [keeping, KeepingResults, TakingResults, drops_out, detached, written_by, storages, versions]
    return EmittedCode(
        imports=(*imports, *CHECK_IMPORTS),
        constants=constants,
        functions=(*map(inspect.getsource, functions), *check_source(plan)),
        rewriting=(rewriting,),
        is_watched=True,
    )
