"""Answers a model that asks for the value of a tensor (`.item()`, `bool()`, `.tolist()`) during a rehearsal.

There are three kinds of answers:

- The true value, if it follows from shapes and constants (`shadow_values`).
- An assumed value, if the question has a documented neutral answer. The assumption is noted in the plan, with the
  module and the line that asked.
- A *refusal*: a `RehearsalError` that names the question, the module and the line.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from planner.errors import PlannerError, RehearsalError
from planner.plan_types.answers import Answers
from planner.virtual_gpu import backend
from planner.virtual_gpu.source_lines import frames, optimizer_in, source_line
from planner.virtual_gpu.values import transformers_patches
from planner.virtual_gpu.values.assertion_checks import assertion_outcome
from planner.virtual_gpu.values.shadow_ops import ASSUMED_FINITE, ASSUMED_VALUES
from planner.virtual_gpu.values.shadow_values import ShadowValues

ASSUMED_CHECKS = "every check on tensor values (assert, or `if ...: raise`) passes"
ASSUMED_MATCHING = (
    "predictions are matched to targets in order; the number of matched pairs is the same for every matching"
)
STATED = ", as you stated"
"""The end of an assumption that the user stated."""
_MOST_ANSWERS = 10_000
"""Maximum number of times that a line gets a stated value in succession: a loop that it controls may not end."""
ASSUMED_LOGGED = "the number that float() gives is only logged"

_SCALING_FACTORS = {
    "torch/amp/grad_scaler.py": 0.0,  # The number of gradients that are not finite.
    "torch/optim/_adafactor.py": 1.0,  # Norms of parameters and updates.
    "torch/nn/modules/batchnorm.py": 1.0,  # The number of batches so far, for a cumulative average.
    "transformers/optimization.py": 1.0,  # Adafactor: whether the size of a parameter is above a minimum.
}
"""Files that ask for a number on which no allocation depends, and the number that they get."""
_PACKAGE = pathlib.Path(__file__).parents[2]
_OURS, _REWRITE = str(_PACKAGE), str(_PACKAGE / "rewrite")
_DISPATCH_WRAPPERS = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")
"""Files of torch whose frames are on the stack between the frame that asks and `Recorder.__torch_dispatch__`."""

_WITHOUT_VALUES = "rewrite that line so that shapes and control flow do not depend on tensor values"
_IN_A_PACKAGE = (
    "that line belongs to an installed package: set an option or replace the module, so that shapes and control flow "
    "do not depend on tensor values"
)
_STATE_IT = "; or state the value there, as in --value {name}=1 (in Python: values={{'{name}': 1}})"
_OTHER_OPTIMIZER = "give an optimizer whose step does not depend on tensor values"
_ASKS = "the step asks for the value of a tensor (.item(), bool() or an index), but a rehearsal computes no values"


class DataDependence:
    """Answers questions for tensor values in one rehearsal, and collects the assumptions that the answers need.

    Args:
        where: returns the name of the running module, for messages.
        line: returns the line of model code that needs a value.
    """

    def __init__(self, where: Callable[[], str], line: Callable[[], str] = source_line) -> None:
        self.known = ShadowValues()
        self.answers = Answers()
        self.numbers_are_for_logging = False
        """True if `.item()` of an unknown value returns an `UnknownNumber` instead of a refusal."""
        self.assumptions: dict[str, None] = {}
        """The assumptions, each with module and line, in the order in which they were first needed."""
        self._where = where
        self._line = line
        self._answered: tuple[str, int] = ("", 0)
        """The line that got a stated value last, with the number of times that it got one in succession."""
        self._noted: set[tuple[str, str]] = set()
        """(assumption, source line) of the assumptions that are noted already."""
        self._in_istft = False
        self.on_refusal_in_backward: Callable[[PlannerError], None] = lambda error: None
        """Called with a refusal in a backward, where raising it would abort the process.

        The error would pass through C++ code that has a device guard in Python. So in a rehearsal this function sends
        the error to the parent and ends the process.
        """

    def assume(self, assumptions: Iterable[str]) -> None:
        """Notes that the line of the model's code that is running depends on these assumptions."""
        line = self._line()
        for assumption in sorted(assumptions):
            if (assumption, line) not in self._noted:
                self._noted.add((assumption, line))
                self.assumptions[f"assumed that {assumption}: {self._where()} at {line or 'unknown line'}"] = None

    def refusal(self, what: str, way_out: str = _WITHOUT_VALUES) -> RehearsalError:
        """Returns the error to raise if the rehearsal cannot continue. Its message also names the module and the line.

        In a backward it first calls `on_refusal_in_backward`, which may end the process.

        Args:
            what: the reason why the rehearsal cannot continue, as a sentence.
            way_out: what the user can change, as an imperative.
        """
        where, line = self._where(), self._line()
        if way_out is _WITHOUT_VALUES:
            way_out = _IN_A_PACKAGE if "-packages" in line else _WITHOUT_VALUES
            way_out += _STATE_IT.format(name=pathlib.PurePath(line).name) if line else ""
        if (optimizer := optimizer_in(frames())) is not None:
            where, way_out = f"in the step of {type(optimizer).__name__}", _OTHER_OPTIMIZER
        error = RehearsalError(f"{what}: {where} at {line or 'unknown line'}; {way_out}")
        if torch._C._current_autograd_node() is not None:
            self.on_refusal_in_backward(error)
        return error

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the values of a tensor as a real tensor, and notes the assumptions that they depend on.

        Returns None if the values are not known.
        """
        value = self.known.value(tensor)
        if value is not None:
            self.assume(self.known.assumptions((tensor,)))
        return value

    def scalar(self, tensor: torch.Tensor) -> float | int | bool | None:
        """Returns the stated, known or assumed value of a tensor with one element; None if it is none of these."""
        if (stated := self.stated()) is not None:
            return stated if tensor.is_floating_point() else bool(stated) if tensor.dtype == torch.bool else int(stated)
        # If an answer does not depend on values, those of the batch are not used: the plan then holds for others too.
        if not self._is_of_batch(tensor) and (value := self._number(tensor)) is not None:
            return value
        answer = self._answer_of_place(tensor)
        return self._number(tensor) if answer is None else answer

    def stated(self) -> float | None:
        """Returns the number that the user stated for the running line, and notes it; None if there is none.

        Raises:
            RehearsalError: a loop on this line would not end.
        """
        line = self._line()
        value = self.answers.at(line)
        if value is not None:
            self.assume((f"the value or the number of elements is {value:g}{STATED}",))
            self._answered = (line, self._answered[1] + 1 if line == self._answered[0] else 1)
            if self._answered[1] > _MOST_ANSWERS:
                raise self.refusal(
                    f"the value {value:g}, which you stated, was asked for {_MOST_ANSWERS:,} times in succession",
                    "state a value with which the loop ends, or give the loop a largest number of rounds",
                )
        return value

    def is_stated(self) -> bool:
        """True if the user stated a number for the running line."""
        return self.answers.at(self._line()) is not None

    def stated_count(self) -> int | None:
        """Returns the number of elements that the user stated for the running line; None if there is none.

        Raises:
            RehearsalError: it is no number of elements.
        """
        value = self.stated()
        if value is not None and (value < 0 or value != int(value)):
            raise self.refusal(
                f"this line selects elements, and {value:g}, which you stated, cannot be their number",
                "state a whole number",
            )
        return None if value is None else int(value)

    def _number(self, tensor: torch.Tensor) -> float | int | bool | None:
        """Returns the known value of a tensor with one element; None if it is not known."""
        value = self.known_value(tensor)
        if value is None:
            return None
        with unset_fake_temporarily():
            return value.item()

    def _answer_of_place(self, tensor: torch.Tensor) -> float | bool | None:
        """Returns the answer that the running code gets whatever the values are; None if there is none."""
        for frame in frames():
            filename = frame.f_code.co_filename
            answer = next((factor for file, factor in _SCALING_FACTORS.items() if filename.endswith(file)), None)
            if answer is not None:
                return answer
            if frame.f_code.co_name == "warn_if_padding_and_no_attention_mask":
                return False  # transformers asks whether to log a warning; nothing else depends on the answer.
        return self.check_outcome() if tensor.dtype == torch.bool else None

    def _is_of_batch(self, tensor: torch.Tensor) -> bool:
        """True if the known values of a tensor follow from values of the batch that the user gave."""
        return any(assumption.startswith(ASSUMED_VALUES) for assumption in self.known.assumptions((tensor,)))

    def check_outcome(self) -> bool | None:
        """Returns the boolean that passes the check for which the running code asks for a value.

        Such a check is `if not mask.all(): raise ...`. The boolean is noted as an assumption. Returns None if the code
        needs the value for anything else (`assertion_checks`).
        """
        if self._in_istft:
            self.assume((ASSUMED_CHECKS,))
            return False  # it asks whether the window is zero somewhere
        asker = next((frame for frame in frames() if _may_ask(frame.f_code.co_filename)), None)
        answer = None if asker is None else assertion_outcome(asker)
        if answer is not None:
            self.assume((ASSUMED_CHECKS,))
        return answer

    def scalar_or_refuse(self, tensor: torch.Tensor) -> float | int | bool:
        """Returns the value of a tensor with one element, or raises `RehearsalError`."""
        value = self.scalar(tensor)
        if value is None:
            raise self.refusal(_ASKS)
        return value

    def values_or_refuse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the values of a tensor as a real tensor, or raises `RehearsalError`."""
        if (stated := self.stated()) is not None:
            with unset_fake_temporarily():
                return torch.full(tensor.shape, stated, dtype=tensor.dtype, device="cpu")
        value = self.known_value(tensor)
        if value is None:
            raise self.refusal(
                "the step asks for the values of a tensor (.tolist() or .numpy()), but a rehearsal computes no values"
            )
        return value

    def list_or_refuse(self, tensor: torch.Tensor) -> Any:
        """Returns the values of a tensor as nested lists, or raises `RehearsalError`."""
        with unset_fake_temporarily():
            return self.values_or_refuse(tensor).tolist()

    def list_or_assume(self, tensor: torch.Tensor, value: int, assumption: str) -> list[int]:
        """Returns the values of a tensor with one dimension as a list; `value` for each if they are not known.

        Args:
            value: the largest possible value. It also stands for values of the batch: the plan then holds for others.
            assumption: text of the assumption that is noted if `value` is used.
        """
        known = None if self._is_of_batch(tensor) else self.known_value(tensor)
        if known is None:
            self.assume((assumption,))
            return [value] * tensor.numel()
        with unset_fake_temporarily():
            return known.expand(tensor.shape).tolist()

    def install(self, autograd_key: str) -> None:
        """Patches fake tensors and libraries in this process, which must be a child process.

        Fake tensors then answer `.tolist()`, `.numpy()` and f-strings, and libraries run the code of a real step.

        Args:
            autograd_key: dispatch key of composite ops on the device of the rehearsal (`Target.autograd_key`).
        """
        dependence = self

        def tolist(self: FakeTensor) -> Any:
            return dependence.list_or_refuse(self)

        def numpy(self: FakeTensor, *, force: bool = False) -> Any:
            with unset_fake_temporarily():
                return dependence.values_or_refuse(self).clone().numpy()

        real_item, real_float = torch.Tensor.item, torch.Tensor.__float__

        def item(self: FakeTensor) -> Any:
            if not dependence.numbers_are_for_logging or self.numel() != 1 or self.constant is not None:
                return real_item(self)
            value = dependence.scalar(self)
            return UnknownNumber(dependence) if value is None else value

        def as_float(self: FakeTensor) -> float:
            return float(item(self)) if dependence.numbers_are_for_logging else real_float(self)

        def formatted(self: FakeTensor, spec: str) -> str:
            value = dependence.scalar(self) if self.numel() == 1 and not self.dim() else None
            if value is None and self.numel() == 1 and dependence.numbers_are_for_logging:
                value = 1.0
            return object.__format__(self, spec) if value is None else format(value, spec)

        fake_tensor: Any = FakeTensor  # mypy does not allow to patch methods of a class.
        fake_tensor.item = item
        fake_tensor.__float__ = as_float
        fake_tensor.tolist = tolist
        fake_tensor.numpy = numpy
        fake_tensor.__format__ = formatted
        self._let_matching_answer()
        self._let_finite_checks_pass(autograd_key)
        self._let_istft_pass()
        transformers_patches.install(self.known)

    def _let_matching_answer(self) -> None:
        """Patches scipy's `linear_sum_assignment`, with which detection models match predictions to targets by cost.

        If the costs are not known, it matches the first prediction to the first target, and so on. This is an
        assumption, but the number of matched pairs is the same for all costs.
        """
        optimize: Any = sys.modules.get("scipy.optimize")
        if optimize is None:
            return
        match = optimize.linear_sum_assignment

        def linear_sum_assignment(costs: Any, maximize: bool = False) -> Any:
            if not isinstance(costs, FakeTensor) or self.known.value(costs) is not None:
                return match(costs, maximize)
            self.assume((ASSUMED_MATCHING,))
            with unset_fake_temporarily():
                return match(torch.zeros(costs.shape).numpy(), maximize)

        # Modules that imported the function by name hold their own reference to it.
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("linear_sum_assignment") is match:
                setattr(module, "linear_sum_assignment", linear_sum_assignment)  # noqa: B010

    def _let_istft_pass(self) -> None:
        """Patches `torch.istft`, whose window is checked in C++: no Python code shows what passes the check."""
        istft = torch.istft

        def checked(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._in_istft = True
            try:
                return istft(*args, **kwargs)
            finally:
                self._in_istft = False

        functions: Any = torch  # mypy does not allow to patch functions of a module
        functions.istft = checked

    def _let_finite_checks_pass(self, autograd_key: str) -> None:
        """Makes `isfinite` assume that all values are finite, unless its result is known.

        It still runs the ops of which `isfinite` consists (ATen/native/TensorCompare.cpp), so that they are recorded.
        """

        def isfinite(tensor: torch.Tensor) -> torch.Tensor:
            finite = (tensor == tensor) * (tensor.abs() != float("inf"))
            if isinstance(finite, FakeTensor) and finite not in self.known:
                self.known.assume(finite, True, ASSUMED_FINITE)
            return finite

        backend.route("aten::isfinite", isfinite, autograd_key)


class UnknownNumber(float):
    """The number that `.item()` returns in a step of the user's own, in which most numbers are only logged.

    Arithmetic returns another such number. Ops on tensors use the value 1.0, on which no memory depends. Operations
    that control flow needs, such as comparisons, are refused. `float()` has to return a plain number, which can be
    compared, so that it notes an assumption.
    """

    _dependence: DataDependence

    def __new__(cls, dependence: DataDependence) -> UnknownNumber:
        number = super().__new__(cls, 1.0)
        number._dependence = dependence
        return number

    __hash__ = float.__hash__

    def __float__(self) -> float:
        self._dependence.assume((ASSUMED_LOGGED,))
        return 1.0


def _unknown(self: UnknownNumber, *_: object) -> UnknownNumber:
    return UnknownNumber(self._dependence)


def _refused(self: UnknownNumber, *_: object) -> NoReturn:
    raise self._dependence.refusal(_ASKS)


for _name in "add radd sub rsub mul rmul truediv rtruediv pow rpow floordiv rfloordiv mod rmod neg abs round".split():
    setattr(UnknownNumber, f"__{_name}__", _unknown)
for _name in "lt le gt ge eq ne bool int floor ceil trunc".split():
    setattr(UnknownNumber, f"__{_name}__", _refused)


def _may_ask(filename: str) -> bool:
    """True if a frame of this file may be the code that asks for a value.

    Frames of the planner and of torch's dispatch wrappers are only on the way. Code of `rewrite` may ask, because it is
    part of the training step.
    """
    ours = filename.startswith(_OURS) and not filename.startswith(_REWRITE)
    return not ours and not filename.endswith(_DISPATCH_WRAPPERS)
