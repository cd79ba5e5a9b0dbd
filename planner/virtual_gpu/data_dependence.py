"""What a rehearsal answers when the model asks for a value, and how it refuses.

Three kinds of answers: the true one, where a value follows from shapes and constants (`shadow_values`); an
*assumed* one, where there is a documented neutral case, which is written down with its module and line; and a refusal
that names op, module and line.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from planner.errors import RehearsalError
from planner.virtual_gpu import backend
from planner.virtual_gpu.assertion_checks import assertion_outcome
from planner.virtual_gpu.shadow_values import ASSUMED_FINITE, ShadowValues
from planner.virtual_gpu.source_lines import frames, source_line

ASSUMED_CHECKS = "checks on values pass"
ASSUMED_MATCHING = "predictions are matched to targets in order (the number of pairs is the same for any matching)"

_ANY_NUMBER_DOES = {
    "torch/amp/grad_scaler.py": 0.0,  # finite gradients were found
    "torch/optim/_adafactor.py": 1.0,  # norms of parameters and updates
    "torch/nn/modules/batchnorm.py": 1.0,  # a counter of batches, for a cumulative average
}
"""Files of torch that ask for numbers which only scale something, and what they are told."""
_PACKAGE = pathlib.Path(__file__).parents[1]
_OURS, _REWRITE = str(_PACKAGE), str(_PACKAGE / "rewrite")
_ON_THE_WAY = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")
"""Files of torch that stand between a question and `Recorder.__torch_dispatch__`."""

_WITHOUT_VALUES = "rewrite that line so that shapes and control flow do not depend on tensor values"
_ASKS = "the model asks for the value of a tensor (.item(), bool() or an index), and a rehearsal has none"


class DataDependence:
    """Of one rehearsal."""

    def __init__(self, where: Callable[[], str]) -> None:
        self.known = ShadowValues()
        self.assumptions: dict[str, None] = {}
        """In the order in which they were first needed."""
        self._where = where
        """Names the running module."""
        self._told: set[tuple[str, str]] = set()
        self.on_refusal_in_backward: Callable[[RehearsalError], None] = lambda error: None
        """Called before the error is raised in an op of a backward: a device guard in Python does not survive that."""

    def assume(self, assumptions: Iterable[str]) -> None:
        """Write down that something was decided by these assumptions, here."""
        line = source_line()
        for assumption in sorted(assumptions):
            if (assumption, line) not in self._told:
                self._told.add((assumption, line))
                self.assumptions[f"assumed that {assumption}: {self._where()} at {line or 'unknown line'}"] = None

    def refusal(self, what: str, way_out: str = _WITHOUT_VALUES) -> RehearsalError:
        """The error that says where a rehearsal must stop: by default since a value is asked for that nothing tells."""
        error = RehearsalError(f"{what}: {self._where()} at {source_line() or 'unknown line'}; {way_out}")
        if torch._C._current_autograd_node() is not None:
            self.on_refusal_in_backward(error)
        return error

    def real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's values, with what they were assumed from written down; None if they are not known."""
        value = self.known.value(tensor)
        if value is not None:
            self.assume(self.known.assumptions((tensor,)))
        return value

    def scalar(self, tensor: torch.Tensor) -> float | int | bool | None:
        """The value of a tensor with one element; None if nothing tells it."""
        value = self.real(tensor)
        if value is not None:
            with unset_fake_temporarily():
                return value.item()
        for frame in frames():
            answer = next((a for file, a in _ANY_NUMBER_DOES.items() if frame.f_code.co_filename.endswith(file)), None)
            if answer is not None:
                return answer
            if frame.f_code.co_name == "warn_if_padding_and_no_attention_mask":
                return False  # transformers asks whether to warn, nothing else depends on it
        return self._assertion_outcome(tensor)

    def _assertion_outcome(self, tensor: torch.Tensor) -> bool | None:
        """The answer to a check that raises an error otherwise; None if the value is asked for another reason."""
        asker = next((frame for frame in frames() if _may_ask(frame.f_code.co_filename)), None)
        answer = assertion_outcome(asker) if asker is not None and tensor.dtype == torch.bool else None
        if answer is not None:
            self.assume((ASSUMED_CHECKS,))
        return answer

    def scalar_or_refuse(self, tensor: torch.Tensor) -> float | int | bool:
        value = self.scalar(tensor)
        if value is None:
            raise self.refusal(_ASKS)
        return value

    def values_or_refuse(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self.real(tensor)
        if value is None:
            raise self.refusal(
                "the model asks for the values of a tensor (.tolist(), .numpy()), and a rehearsal has none"
            )
        return value

    def list_or_refuse(self, tensor: torch.Tensor) -> Any:
        with unset_fake_temporarily():
            return self.values_or_refuse(tensor).tolist()

    def install(self) -> None:
        """Let tensors answer .tolist(), .numpy() and f-strings, and libraries take a real run's paths; in a child."""
        answers = self

        def tolist(self: FakeTensor) -> Any:
            return answers.list_or_refuse(self)

        def numpy(self: FakeTensor, *, force: bool = False) -> Any:
            with unset_fake_temporarily():
                return answers.values_or_refuse(self).clone().numpy()

        def formatted(self: FakeTensor, spec: str) -> str:
            value = answers.scalar(self) if self.numel() == 1 and not self.dim() else None
            return object.__format__(self, spec) if value is None else format(value, spec)

        FakeTensor.tolist = tolist
        FakeTensor.numpy = numpy
        FakeTensor.__format__ = formatted
        self._let_matching_answer()
        self._let_finite_checks_pass()
        _let_transformers_skip_what_a_real_run_skips()

    def _let_matching_answer(self) -> None:
        """Detection models match predictions to targets by cost with scipy: the result has one size for all costs."""
        optimize = sys.modules.get("scipy.optimize")
        if optimize is None:
            return
        match = optimize.linear_sum_assignment

        def linear_sum_assignment(costs: Any, maximize: bool = False) -> Any:
            if not isinstance(costs, FakeTensor) or self.known.value(costs) is not None:
                return match(costs, maximize)
            self.assume((ASSUMED_MATCHING,))
            with unset_fake_temporarily():
                return match(torch.zeros(costs.shape).numpy(), maximize)

        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("linear_sum_assignment") is match:
                module.linear_sum_assignment = linear_sum_assignment

    def _let_finite_checks_pass(self) -> None:
        """`isfinite` runs as it is composed in ATen/native/TensorCompare.cpp; its result is taken to be true."""

        def isfinite(tensor: torch.Tensor) -> torch.Tensor:
            finite = (tensor == tensor) * (tensor.abs() != float("inf"))
            if finite not in self.known:
                self.known.assume(finite, True, ASSUMED_FINITE)
            return finite

        backend.library("aten").impl("isfinite", isfinite, "AutogradPrivateUse1")


def _may_ask(filename: str) -> bool:
    """Whether a file is neither ours nor the part of torch through which an op comes to us."""
    ours = filename.startswith(_OURS) and not filename.startswith(_REWRITE)
    return not ours and not filename.endswith(_ON_THE_WAY)


def _let_transformers_skip_what_a_real_run_skips() -> None:
    """It asks whether a tensor is fake, and then builds masks in full that a real run leaves to the kernel."""
    module = sys.modules.get("transformers.utils.import_utils")
    if module is not None and hasattr(module, "is_fake_tensor"):
        module.is_fake_tensor = lambda tensor: False
