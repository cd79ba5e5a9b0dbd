"""Activation checkpointing: save only the inputs of a module call for backward, and recompute the call in backward.

The forward of each planned module runs in `torch.utils.checkpoint.checkpoint` (non-reentrant; Chen et al., Training
Deep Nets with Sublinear Memory Cost, 2016). A plan may also keep the results of some products, which means matrix
products, convolutions and attention (selective activation checkpointing). Then `context_fn` returns two dispatch modes.
The first one stores these results in the forward. The second one returns them in the recompute, instead of running the
op again. PyTorch's `create_selective_checkpoint_contexts` is not used, because it selects all calls of an op, while a
plan selects single calls, such as the third and fifth product of a module (`planner.recompute.kept_products`). Besides,
the modes here drop a result that the forward overwrites later, and keep no result of an op that draws random numbers.

The gradients have the same bits as without checkpointing: dropout draws the same masks (`preserve_rng_state`), and
batch and instance normalization do not update their running statistics a second time. They may differ for

- other modules that change their own buffers in forward (spectral norm), which would do so twice;
- modules that draw from their own random number generator, which would draw other numbers;
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
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.plan_types.plan import Plan
from planner.plan_types.recompute_decisions import Checkpoint
from planner.recompute import kept_products
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.portable.module_forward import detached, written_by
from planner.rewrite.recompute_observer import CHECK_IMPORTS, check_source
from planner.rewrite.recomputed_modules import modules_to_run_again
from planner.rewrite.rewriting import Rewriting

PRODUCTS = {getattr(torch.ops.aten, name).default: position for name, position in kept_products.PRODUCTS.items()}
"""The products, which are the ops whose results may be kept.

Maps each op to the position of its argument `dropout_p`, or to None for ops without dropout.
"""


def checkpoint(rewriting: Rewriting, decision: Checkpoint) -> None:
    """Replace the forward of each planned module by one that is recomputed in backward.

    Only the attribute `forward` of the instance is set, so classes, parameters and `state_dict` keys do not change.

    Raises:
        DecisionError: if a module does not exist or has no forward, or if modules are nested in each other.
    """
    kept = decision.by_module
    for name, module in modules_to_run_again(rewriting, decision.modules, decision.kind, nested=False).items():
        contexts = functools.partial(keeping, kept[name]) if kept[name] else keeping_nothing
        forward = types.MethodType(recomputed(rewriting.watched_forward(module, name), contexts), module)
        rewriting.replace(module, "forward", forward, place=f"forward of '{name}'")
    rewriting.turn_cache_off()  # the recompute would append the same keys and values a second time


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def recomputed(forward, contexts):
    """Return a forward that is recomputed in backward. If gradients are disabled, it only calls `forward`.

    `contexts(module)` returns two context managers: one to run the forward in, and one to run the recompute in.
    """

    @functools.wraps(forward)
    def wrapper(module, /, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        # Pass keyword arguments by position: only positional tensors are saved through autograd, where hooks see them.
        # Pass an object once: hooks would give the recompute several objects for a tensor that is passed several times.
        positional, names, values = len(args), tuple(kwargs), (*args, *kwargs.values())
        keys = [id(value) for value in values]
        distinct = dict(zip(keys, values, strict=True))
        places = [list(distinct).index(key) for key in keys]

        def run(*inputs):
            each = [inputs[place] for place in places]
            return forward(module, *each[:positional], **dict(zip(names, each[positional:], strict=True)))

        for mode in _get_current_dispatch_mode_stack():
            if hasattr(mode, "latest_op_has_ended"):  # a tape of segments: the inputs saved now are not an op's results
                mode.latest_op_has_ended()
        return torch.utils.checkpoint.checkpoint(
            run,
            *distinct.values(),
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=lambda: contexts(module),
        )

    return wrapper


def keeping_nothing(module):
    """Return the context managers of the forward and of the recompute for a module of which only inputs are kept."""
    return contextlib.nullcontext(), Recompute(statistics_kept, module)


def keeping(numbers, module):
    """Return the context managers of the forward, which keeps some results, and of the recompute, which reuses them.

    `numbers` are the numbers of the products whose results are kept. The products that a call of the module runs are
    numbered from 0 in the order in which they run.
    """
    first = KeepingResults(numbers)
    return first, Recompute(statistics_kept, module, TakingResults(first.results))


class Recompute(contextlib.ExitStack):
    """The context manager of the recompute. Each backward through the same graph enters it anew.

    `statistics(module)` and `modes` are the context managers that it enters.
    """

    def __init__(self, statistics, module, *modes):
        super().__init__()
        self.statistics, self.module, self.modes = statistics, module, modes

    def __enter__(self):
        for context in (self.statistics(self.module), *self.modes):
            self.enter_context(context)
        return self


class KeepingResults(TorchDispatchMode):
    """Dispatch mode for the forward that keeps the results of the products with the given numbers in `results`.

    A result is not kept if its op draws random numbers, and is dropped if a later op writes to it. This is checked
    while the ops run, because the same number may belong to another op on another device or for another batch.
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
            # The recompute would read the overwritten values: drop the result, so that it is recomputed.
            written = storages(written_by(op, args, kwargs))
            for number in [n for n, (_, kept, _) in self.results.items() if not written.isdisjoint(storages(kept))]:
                del self.results[number]
        return result


class TakingResults(TorchDispatchMode):
    """Dispatch mode for the recompute that returns kept results instead of running their ops again.

    Each result is returned once and then released. The op runs again nevertheless if another op had the same number in
    the forward, or if the result was overwritten in place since the forward.
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
    """Return True if a product is attention with dropout, which draws random numbers.

    If the recompute skipped it, later ops would draw other random numbers than in the forward.
    """
    position = PRODUCTS[op]
    return position is not None and kwargs.get("dropout_p", args[position] if len(args) > position else 0.0) > 0.0


def storages(tree):
    """Return the set of the storages of all tensors in nested containers. An integer identifies each storage."""
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def versions(tree):
    """Return the list of the version counters of all tensors in nested containers. In-place writes increase them."""
    return [leaf._version for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def statistics_kept(module):
    """Inside this context, normalization layers do not update their running statistics: the forward has done so."""
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
    """Return the code that does the same as `checkpoint` in an emitted file.

    The dispatch modes are only included if results are kept.
    """
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
    imports = [
        "import contextlib",
        "import functools",
        "import types",
        "import torch.utils.checkpoint",
        "from torch.utils._python_dispatch import _get_current_dispatch_mode_stack",
    ]
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
        functions=(*(inspect.getsource(function) for function in functions), *check_source(plan)),
        rewriting=(rewriting,),
        is_watched=True,
    )
