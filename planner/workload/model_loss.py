"""Finds out which labels a model's own loss averages over, by reading the source of its `forward`.

If a batch is split, the loss of each micro-batch must be weighted by the number of its labels that count. No interface
of transformers says which labels count: whether the first label of a sample is dropped, which label is ignored, and
whether the loss is divided by a number that the batch gives. So this is read from the source text. The few forms of
code that transformers uses are recognized. A loss in any other form is assumed to average over all labels.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator

import torch

from planner.plan_types.plan import OwnLoss
from planner.workload.call_convention import Calling, LossFn


def takes_the_loss(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model whose forward computes the loss: `model` itself, or the base model of a PEFT model."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def own_loss(model: torch.nn.Module, calling: Calling, loss_fn: LossFn | None) -> OwnLoss | None:
    """Describes which labels the model's own loss averages over.

    Returns None if there is a loss function, if the batch is not a mapping, or if the loss is not an average over
    labels (regression, CTC).
    """
    if loss_fn is not None or calling is not Calling.KEYWORDS or _is_regression(model) or _is_ctc(model):
        return None
    return OwnLoss(
        shifted=shifts_labels(model),
        ignored=ignored_label(model),
        divides=divides_by_count(type(takes_the_loss(model))),
        certain=_is_certain(takes_the_loss(model)),
        balances_experts=balances_experts(model),
    )


def balances_experts(model: torch.nn.Module) -> bool:
    """True if a transformers model adds a term to its loss that balances its experts and is not a mean over tokens."""
    return bool(getattr(getattr(takes_the_loss(model), "config", None), "output_router_logits", False))


def shifts_labels(model: torch.nn.Module) -> bool:
    """True if the model's own loss leaves out the first label of each sample, as in next-token prediction.

    This is read from the forward that computes the loss, because class names do not show it: `XLNetLMHeadModel` and
    `BartForCausalLM` do not shift labels, `GPT2LMHeadModel` does.
    """
    model = takes_the_loss(model)
    return _class_shifts_labels(type(model), lambda: getattr(getattr(model, "loss_function", None), "__name__", ""))


def ignored_label(model: torch.nn.Module) -> int:
    """Returns the label value that the model's own loss ignores: -100, unless the model states another value."""
    model = takes_the_loss(model)
    if "SemanticSegmentation" in type(model).__name__:
        return getattr(getattr(model, "config", None), "semantic_loss_ignore_index", 255)
    losses = (module for module in model.modules() if isinstance(module, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)))
    stated = {loss.ignore_index for loss in losses} or set(_literals(type(model), "ignore_index"))
    return stated.pop() if len(stated) == 1 else -100


def _is_ctc(model: torch.nn.Module) -> bool:
    """True if the loss is connectionist temporal classification (CTC), which averages over samples."""
    return any("ctc_loss(" in text for text in _forwards(type(takes_the_loss(model))))


def _is_regression(model: torch.nn.Module) -> bool:
    """True if the labels are target values of a regression, for which -100 is an ordinary value."""
    model = takes_the_loss(model)
    config = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    one_label = getattr(config, "num_labels", None) == 1 and "SequenceClassification" in type(model).__name__
    return problem == "regression" or (problem is None and one_label)


def divides_by_count(kind: type) -> bool:
    """True if the model divides the sum of the losses by `num_items_in_batch`, should the batch contain this key.

    The loss functions of transformers do so if the forward passes the key to them, by name or with all of its other
    keywords (`**kwargs`).

    Args:
        kind: class of the model that computes the loss.
    """
    for text in _forwards(kind):
        if "self.loss_function(" in text:
            if (calls := _calls(text)) is None:
                return "num_items_in_batch" in text
            losses = [call for call in calls if getattr(call.func, "attr", "") == "loss_function"]
            return any(keyword.arg in (None, "num_items_in_batch") for call in losses for keyword in call.keywords)
        if "num_items_in_batch" in text:
            return True
    return False


def _literals(kind: type, name: str) -> Iterator[int]:
    """Yields the integer literals that the forwards of a class pass to functions as the keyword argument `name`."""
    for call in itertools.chain.from_iterable(_calls(text) or () for text in _forwards(kind)):
        for keyword in call.keywords:
            if keyword.arg == name:
                with contextlib.suppress(ValueError):  # The argument is an expression, not a literal.
                    value = ast.literal_eval(keyword.value)
                    if isinstance(value, int):
                        yield value


def _calls(text: str) -> list[ast.Call] | None:
    """Returns the calls in a source text; None if the text cannot be parsed, such as a lambda inside an expression."""
    try:
        parsed = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return None
    return [node for node in ast.walk(parsed) if isinstance(node, ast.Call)]


def _forwards(kind: type) -> Iterator[str]:
    """Yields the source text of a class's `forward`, and of its base class's as long as a text calls `super()`."""
    for base in kind.__mro__:
        if "forward" in vars(base):
            try:
                text = inspect.getsource(vars(base)["forward"])
            except (OSError, TypeError):
                continue
            yield text
            if "super()" not in text:
                return


def _is_certain(model: torch.nn.Module) -> bool:
    """True if the source text of the model shows which labels its loss counts.

    It does not if the first label is dropped under a condition, if `ignore_index` is an expression, if the loss is
    computed outside of `forward` by other code than transformers' loss functions, or if the source is not available.
    """
    text = next(_forwards(type(model)), None)
    if text is None or "forward" in vars(model):
        return False
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return False
    parent = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def is_conditional(node: ast.AST) -> bool:
        while node in parent:
            node = parent[node]
            if isinstance(node, (ast.If, ast.IfExp)) and _names(node.test) != {"labels"}:
                return True
        return False

    shifts = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript) and _drops_first(node)]
    if any(is_conditional(node) for node in shifts):
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    ignored = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "ignore_index"]
    if not all(_is_number(value) or "semantic_loss_ignore_index" in ast.unparse(value) for value in ignored):
        return False
    return "self.loss_function(" in text or any(_LOSS_CALL.search(ast.unparse(call.func)) for call in calls)


_LOSS_CALL = re.compile(r"(cross_entropy|nll_loss|CrossEntropyLoss|NLLLoss|loss_fct|loss_fn|criterion)\b")
"""Names of functions that a forward calls if it computes a loss itself."""


def _names(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _drops_first(node: ast.Subscript) -> bool:
    """True for `labels[..., 1:]` and `labels[:, 1:]`."""
    return "labels" in ast.unparse(node.value) and ast.unparse(node.slice).replace(" ", "").strip("()") in (
        "...,1:",
        ":,1:",
    )


def _is_number(node: ast.expr) -> bool:
    try:
        return isinstance(ast.literal_eval(node), int)
    except ValueError:
        return False


def _class_shifts_labels(kind: type, loss_function_name: Callable[[], str]) -> bool:
    """True if a forward of the class drops the first label, or calls transformers' loss for causal language models."""
    for text in _forwards(kind):
        if "labels[..., 1:]" in text or "labels[:, 1:]" in text:
            return True
        if "self.loss_function(" in text:
            return "CausalLM" in loss_function_name()
    return False
