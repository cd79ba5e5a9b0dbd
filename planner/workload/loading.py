"""Loads the workload that MODEL names on the command line: a config, a model folder or hub id, or a Python callable."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from typing import Any

import torch

from planner.errors import WorkloadError, first_line
from planner.plan_types.adapter import Adapter, saved_config
from planner.plan_types.answers import NOTHING_STATED, Answers
from planner.plan_types.plan import TrainingProgram, names_code
from planner.plan_types.words import counted
from planner.workload.adapters import adapted, why_no_adapters
from planner.workload.batch_source import batch_of_shapes, candidate_batches
from planner.workload.own_step import of_own_step
from planner.workload.synthetic_batch import Masking, synthetic_batch
from planner.workload.transformers_models import (
    sequence_length,
    stored_dtype,
    transformers_config,
    transformers_model,
)
from planner.workload.unsupported import refuse_uncallable
from planner.workload.workload import Workload, main_dtype, resized, workload

DEFAULT_SEQ_LEN = 512
"""Default number of tokens in a sample. Models with a smaller maximum length use their maximum."""

ONE_SAMPLE = "the batch is a single sample, because no size was given: state yours with --batch-size"
"""Note of a transformers model whose batch size nobody stated."""

FORMS = "config.json, a model folder or hub id, path/file.py:name, package.module:name, or a saved plan"
"""The list in error messages of what MODEL may be on the command line."""


def load_workload(
    reference: str,
    *,
    batch_size: int | None,
    seq_len: int | None,
    optimizer: str,
    gradients_alive: bool = False,
    by_sample: Sequence[str] | None = None,
    dtype: str | None = None,
    adapter: Adapter | None = None,
    program: TrainingProgram | None = None,
    with_weights: bool = False,
    input_shapes: Any = None,
    masking: Masking = Masking.NONE,
    answers: Answers = NOTHING_STATED,
    arguments: Sequence[str] = (),
    choose: Callable[[Sequence[Workload]], Workload] | None = None,
    keep: bool = False,
) -> Workload:
    """Returns the workload that `reference` names. The model is built on the meta device if its code can run there.

    Args:
        reference: MODEL as on the command line; see `FORMS`.
        batch_size: samples in the batch. None means 1 for a transformers model, else what the function returns.
        seq_len: tokens in a sample. None means `DEFAULT_SEQ_LEN` for a transformers model, but at most its limit.
        optimizer: name of the optimizer.
        gradients_alive: True if the user's loop accumulates gradients; see `Workload.gradients_alive`.
        by_sample: paths of the tensors of the batch whose dimension 0 is the batch dimension; None to guess them.
        dtype: name of the dtype of a transformers model's weights, such as 'bfloat16'. None means the one that
            `from_pretrained` chooses: that of the config, or else that of the weights in the folder, or else float32.
        adapter: adapters to add to a transformers model; None to train its weights.
        program: the program that trains a transformers model; None for other loops.
        with_weights: if True, the model is built on the CPU with random weights, and the batch has random values, so
            that the model can be trained.
        input_shapes: JSON data for `batch_of_shapes`; None for the function's own batch, or a synthetic one.
        masking: the attention mask of a synthetic batch. The programs that `program` may name always pad.
        answers: values of tensors that the user states.
        arguments: arguments for the Python file or module, which it finds in `sys.argv`.
        choose: function that chooses one of several workloads, one for each candidate batch of a data loader; None to
            choose the workload whose batch has the most bytes.
        keep: True if recordings may be kept for later calls: no code of the user's has run in this process.

    Raises:
        WorkloadError: `reference` does not exist, or the model's code fails; the message quotes the error.
    """
    request = _Request(
        batch_size=batch_size,
        seq_len=seq_len,
        optimizer=optimizer,
        gradients_alive=gradients_alive,
        by_sample=by_sample,
        dtype=dtype,
        adapter=adapter,
        program=program,
        device="cpu" if with_weights else "meta",
        input_shapes=input_shapes,
        masking=masking if program is None else Masking.PADDED,
        answers=answers,
        choose=choose or (lambda workloads: max(workloads, key=lambda workload: workload.batch_bytes)),
        keep=keep,
    )
    if names_code(reference):
        if dtype is not None:
            raise WorkloadError(
                f"'{reference}' builds the model itself, so --dtype does not apply: convert the model there, as in "
                f"model.to(torch.{dtype})"
            )
        if adapter is not None and adapter.is_quantized:
            raise WorkloadError(
                f"'{reference}' builds the model itself, so --qlora does not apply: load the weights in 4 bits there, "
                "with from_pretrained(..., quantization_config=...), and give --lora"
            )
        with _script_arguments(reference, arguments):
            return dataclasses.replace(_from_callable(reference, request), arguments=tuple(arguments))
    if arguments:
        raise WorkloadError(
            f"arguments after -- are for a Python file or module, as in path/file.py:name, which '{reference}' is not: "
            "leave them out"
        )
    path = pathlib.Path(reference)
    if not (path / "config.json").is_file() and (saved := saved_config(reference)) is not None:
        return _from_adapter_folder(reference, saved, request)
    suffix = path.suffix.lower()
    if not path.exists() and (suffix == ".json" or (path.parent != pathlib.Path() and path.parent.is_dir())):
        raise WorkloadError(f"'{reference}' does not exist: give {FORMS}")
    if suffix == ".py":
        raise WorkloadError(f"'{reference}' names a Python file but no function or class in it: write {reference}:name")
    if path.exists() or not reference.startswith((".", "/")):
        return _from_transformers(reference, request)
    raise WorkloadError(f"model '{reference}' does not exist: give {FORMS}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """The user's settings of a workload apart from the model itself. None means the default."""

    batch_size: int | None
    seq_len: int | None
    optimizer: str
    gradients_alive: bool
    by_sample: Sequence[str] | None
    dtype: str | None
    """Name of the dtype of the weights, such as 'bfloat16'."""
    adapter: Adapter | None
    program: TrainingProgram | None
    device: str
    """Device on which the model and the batch are created."""
    input_shapes: Any
    masking: Masking
    answers: Answers
    choose: Callable[[Sequence[Workload]], Workload] = dataclasses.field(repr=False)
    keep: bool

    def batch(self, model: torch.nn.Module, seq_len: int) -> Any:
        """Returns a batch of the stated shapes, or a synthetic one for a transformers model."""
        if self.input_shapes is not None:
            return batch_of_shapes(self.input_shapes, self.device)
        samples = self.batch_size or 1
        return synthetic_batch(model, batch_size=samples, seq_len=seq_len, device=self.device, masking=self.masking)


# ---- transformers --------------------------------------------------------------------------------------------------


def _from_transformers(reference: str, request: _Request) -> Workload:
    """Returns a workload of a transformers model, built from its config, with a synthetic batch."""
    config = transformers_config(reference, FORMS)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # training has no use for key-value caches
    dtype = request.dtype or stored_dtype(config, reference) or "float32"
    model, program = transformers_model(
        config, reference, dtype=dtype, adapter=request.adapter, program=request.program, device=request.device
    )
    seq_len = sequence_length(config, model, request.seq_len, default=DEFAULT_SEQ_LEN)
    batch = request.batch(model, seq_len)
    takes_tokens = request.input_shapes is None and (
        "input_ids" in batch or ("labels" in batch and batch["labels"].dim() == 2)
    )
    result = workload(
        model,
        batch,
        optimizer=request.optimizer,
        seq_len=seq_len if takes_tokens else None,
        reference=reference,
        gradients_alive=request.gradients_alive,
        by_sample=request.by_sample,
        is_synthetic=request.input_shapes is None,
        input_shapes=request.input_shapes,
        answers=request.answers,
        dtype=dtype,
        adapter=request.adapter,
        program=program,
        notes=() if request.batch_size or request.input_shapes is not None else (ONE_SAMPLE,),
    )
    if request.keep:
        made_from = repr((type(config).__name__, config.to_json_string(use_diff=False), dtype, seq_len, request))
        result = dataclasses.replace(result, made_from=made_from)
    return _resized(result, request)


def _from_adapter_folder(folder: str, saved: dict[str, Any], request: _Request) -> Workload:
    """Returns the workload that trains the adapters of a folder further, on the model for which they were made."""
    base = saved.get("base_model_name_or_path")
    if request.adapter is not None or not base:
        why = "--lora and --qlora are for the base model" if base else "its adapter_config.json names no base model"
        raise WorkloadError(
            f"'{folder}' holds adapters of peft, and {why}: plan that model with these adapters, as in "
            f"plan {base or 'BASE_MODEL'} --qlora {folder}"
        )
    try:
        return _from_transformers(base, dataclasses.replace(request, adapter=Adapter.saved(folder)))
    except WorkloadError as error:
        raise WorkloadError(
            f"the adapters in '{folder}' are for '{base}': {error}; if the model is elsewhere, give "
            f"plan BASE_MODEL --lora {folder}"
        ) from error


# ---- Python callables ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _script_arguments(reference: str, arguments: Sequence[str]) -> Iterator[None]:
    """Let the user's code find its own arguments in `sys.argv` instead of the planner's, within the context.

    Raises:
        WorkloadError: the code ended with `sys.exit`, as a parser of arguments does if one is missing.
    """
    before = sys.argv
    sys.argv = [reference.rpartition(":")[0], *arguments]
    try:
        yield
    except SystemExit as error:
        raise WorkloadError(
            f"'{reference}' called sys.exit({error.code!r}): give the arguments that it expects after --, as in "
            f"plan {reference} -- --epochs 3, or name a function that only builds the model"
        ) from error
    finally:
        sys.argv = before


def _from_callable(reference: str, request: _Request) -> Workload:
    """Calls the user's function or class, and returns a workload of the model, batch and loss function it returns."""
    function = load_callable(reference)
    try:
        accepted = inspect.signature(function).parameters
    except ValueError as error:
        raise WorkloadError(f"'{reference}' cannot be called to build a model: {error}") from error
    # The function may take the sizes as arguments. If it returns a batch of another size, the batch is resized below.
    sizes = {"batch_size": request.batch_size, "seq_len": request.seq_len}
    arguments = {name: size for name, size in sizes.items() if size is not None and name in accepted}
    returned = _call(function, arguments, reference, request.device)
    own_step: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        own_step = of_own_step(returned, reference)
        returned = returned["model"], returned["batch"]
    if isinstance(returned, tuple) and not 1 <= len(returned) <= 3:
        raise WorkloadError(
            f"'{reference}' returned {len(returned)} values: return model, (model, batch), "
            "(model, batch, loss_fn), or a dict with model, batch, step and optimizer"
        )
    model, batch, loss_fn = (*returned, None, None)[:3] if isinstance(returned, tuple) else (returned, None, None)
    if request.adapter is not None:
        if own_step:
            raise WorkloadError(
                f"'{reference}' returns the optimizer, which holds the weights of the model: add the adapters there, "
                "with peft.get_peft_model, and leave --lora out"
            )
        if why_not := why_no_adapters(model):
            raise WorkloadError(why_not)
        model = adapted(model, request.adapter, dtype=main_dtype(model))
    is_synthetic = batch is None and request.input_shapes is None
    if request.input_shapes is not None or (batch is None and hasattr(model, "main_input_name")):
        batch = request.batch(model, request.seq_len or DEFAULT_SEQ_LEN)
    if batch is None:
        raise WorkloadError(
            f"'{reference}' returned no batch: return (model, batch) or (model, batch, loss_fn), or describe the batch "
            "with --input-shapes"
        )
    batches, notes, stream = candidate_batches(batch, worst_case=request.answers.worst_case)
    workloads = [
        workload(
            model,
            batch,
            loss_fn=loss_fn,
            optimizer=own_step.get("optimizer", request.optimizer),
            step=own_step.get("step"),
            seq_len=request.seq_len if "seq_len" in accepted else None,
            reference=reference,
            gradients_alive=request.gradients_alive,
            by_sample=request.by_sample,
            is_synthetic=is_synthetic,
            input_shapes=request.input_shapes,
            answers=request.answers,
            adapter=request.adapter,
            notes=notes,
        )
        for batch in batches
    ]
    chosen = request.choose([_resized(workload, request) for workload in workloads])
    return dataclasses.replace(chosen, stream=stream)


def _resized(result: Workload, request: _Request) -> Workload:
    """Returns the workload with a batch of `request.batch_size` samples; unchanged if that is None."""
    if request.batch_size in (None, result.batch_size):
        return result
    if other := result.with_other_rows:
        raise WorkloadError(
            f"'{result.reference}' returns a batch of {counted(result.batch_size, 'sample')}, which cannot be changed "
            f"to {request.batch_size}: {other}, and the planner cannot tell whether it is the same for all samples; "
            "give the function an argument batch_size, or name the tensors with a row for each sample with --by-sample"
        )
    batch = resized(
        result.batch,
        request.batch_size,
        device=request.device,
        present=result.batch_size,
        not_by_sample=result.not_by_sample,
    )
    return dataclasses.replace(result, batch=batch, batch_size=request.batch_size)


def _call(function: Callable[..., Any], arguments: dict[str, int], reference: str, device: str) -> Any:
    """Calls the user's function with `device` as the default device; if that fails, with torch's default device.

    On the meta device no weights are allocated, but a function that reads values of tensors fails there.
    """
    try:
        with torch.device(device):
            return function(**arguments)
    except Exception:  # The first error may only be due to the meta device: the second call decides.
        try:
            return function(**arguments)
        except Exception as error:  # the user's code
            raise _failed(f"'{reference}'", error, "call it on its own in Python and fix it") from error


def _failed(name: str, error: Exception, remedy: str) -> WorkloadError:
    """Returns the error that says that the user's code raised an error, and what to do."""
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_code is torch.cuda._lazy_init.__code__ for frame, _ in frames):
        remedy = "planning needs no card, so leave the model and the batch on the CPU"
    return WorkloadError(f"{name} raised {first_line(error)}: {remedy}")


def load_callable(reference: str, *, again: bool = True) -> Callable[..., Any]:
    """Returns what 'path/file.py:name' or 'package.module:name' refers to; `again` runs a known file again."""
    location, _, name = reference.rpartition(":")
    is_file = location.lower().endswith(".py")
    module = _module_from_file(pathlib.Path(location), again) if is_file else _module_by_name(location)
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is None:
        own = (n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__ and callable(v))
        offered = ", ".join(sorted(name for name in own if not name.startswith("_"))[:8])
        remedy = f"choose from {offered}" if offered else "define a function there that returns the model"
        raise WorkloadError(f"'{location}' has no '{name}': {remedy}")
    refuse_uncallable(target, f"'{reference}'", "a function that returns the model")
    return target


def _module_from_file(path: pathlib.Path, again: bool) -> Any:
    """Imports a Python file by its path."""
    if not path.is_file():
        raise WorkloadError(f"file '{path}' does not exist: give {FORMS}")
    if (folder := str(path.parent.resolve())) not in sys.path:
        # The file may import other files of its folder. At the end of the path they hide no installed package.
        sys.path.append(folder)
    name = f"planned_{path.stem}"
    if not again and name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None  # None only without a path or a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code
        raise _failed(f"importing file '{path}'", error, "import it on its own in Python and fix it") from error
    return module


def _module_by_name(name: str) -> Any:
    """Imports a module by its dotted name. The working directory is searched, too."""
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        why = f"module '{name}' cannot be imported: {first_line(error)}; install it, or give path/file.py:name"
        raise WorkloadError(why) from error
    except Exception as error:  # the user's code
        raise _failed(f"importing module '{name}'", error, "import it on its own in Python and fix it") from error
