"""Write the source code that builds a model and a random batch.

`plan.model.reference` says where the model comes from: a transformers configuration file, whose content is copied into
the emitted file; the name of a pretrained model; or `location:name`, a function or class of the user that returns it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import pathlib
import textwrap
from typing import Any

from planner.errors import PlanFileError
from planner.files import reading
from planner.plan_types.adapter import compute_dtype, quantization_options
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import assignment, literal
from planner.rewrite.emitter import quoted
from planner.rewrite.emitter.own_function import path_from, resolved
from planner.workload.call_convention import Calling
from planner.workload.optimizer_choice import OPTIMIZERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The parts of an emitted file that build the model and compute its loss. `emit.source` inserts them."""

    build: str = ""
    """Source of the function `build`; empty if the emitted file cannot build the model."""
    imports: tuple[str, ...] = ()
    own_imports: frozenset[str] = frozenset()
    """Import statements of the user's own modules, which come after all other imports."""
    constants: tuple[str, ...] = ()
    """Assignments at the top of the emitted file."""
    functions: tuple[str, ...] = ()
    """Sources of the functions that `training_step` calls."""
    target: str = "model"
    """Names that `main` assigns the result of `build` to, such as 'model, loss_fn'."""
    build_arguments: str = ""
    """Arguments that `main` passes to `build`."""
    arguments: tuple[str, ...] = ()
    """Lines of `main` that add arguments to `parser`."""
    structure: str = ""
    """Source of the function `build_structure`, which takes the arguments of `build`, and builds the same model on the
    meta device; empty if there is none."""
    structure_is_asked_for: bool = False
    """True if the model may need real tensors, so that `build_structure` is called only if the user asks for it."""
    returns_model_output: bool = False
    """True if the output of the model is known to have the attribute `loss`."""
    config: dict[str, object] = dataclasses.field(default_factory=dict)
    """The transformers configuration; empty if it is not known."""


def model_source(plan: Plan, folder: pathlib.Path | None = None) -> ModelSource:
    """Return the source that builds the model that the plan was made for.

    Args:
        plan: the plan.
        folder: the folder of the emitted file, which finds the user's file by a path from there, so that both can be
            moved together; None to write the absolute path.

    Raises:
        PlanFileError: if `plan.model.reference` is a configuration file that cannot be read.
    """
    reference = plan.model.reference
    if reference is None:
        return ModelSource(imports=_loss_imports(plan), functions=_loss_functions(plan))
    if ":" in reference and not os.path.exists(reference):
        location, _, name = reference.rpartition(":")
        return _callable_source(plan, location, name, folder)
    return _transformers_source(plan, reference)


def _transformers_source(plan: Plan, reference: str) -> ModelSource:
    kind, dtype = _class_of(plan), quoted.dtype(plan.model.dtype)
    config_path = pathlib.Path(reference)
    if os.path.isdir(config_path):
        config_path /= "config.json"
    if config_path.suffix.lower() != ".json" and not os.path.exists(config_path):
        if plan.model.adapter is not None:
            return _adapted_source(plan, {}, reference)
        return _hub_source(kind, reference, dtype)
    try:
        config = reading.json_data(config_path)
    except (OSError, ValueError) as error:
        raise PlanFileError(
            f"the plan was made from '{config_path}', which cannot be read ({error}): restore this file, or make the "
            "plan again"
        ) from error
    if plan.model.adapter is not None:
        return _adapted_source(plan, config)
    return ModelSource(
        build=f'''\
def build(weights=None):
    """Build the model, with random weights or with pretrained ones from a folder."""
    if weights is not None:
        return transformers.{kind}.from_pretrained(weights, dtype={dtype})
    config = transformers.{kind}.config_class.from_dict(CONFIG)
    return transformers.{kind}._from_config(config, dtype={dtype})
''',
        imports=("import transformers",),
        constants=(assignment("CONFIG", config),),
        build_arguments="arguments.weights",
        arguments=('parser.add_argument("--weights", help="folder of pretrained weights (default: random)")',),
        structure=_structure(
            kind,
            dtype,
            "weights=None",
            "kind.from_dict(CONFIG) if weights is None else kind.from_pretrained(weights)",
        ),
        returns_model_output=True,
        config=config,
    )


def _class_of(plan: Plan) -> str:
    """Return the name of the model's class in transformers, without adapters. Raises `PlanFileError` if it is none."""
    return quoted.class_name(plan.model.architecture or plan.model.name, "the class of the planned model")


def _structure(kind: str, dtype: str, parameters: str, config: str, adapters: str = "") -> str:
    """Return the source of `build_structure` for a transformers model.

    Args:
        kind: name of the model's class.
        dtype: expression for the dtype of the model's parameters.
        parameters: those of `build_structure`.
        config: expression for the configuration, given the class `kind` of the configuration.
        adapters: statements that add adapters to `model`.
    """
    built = f"transformers.{kind}._from_config(config, dtype={dtype})"
    body = f"model = {built}\n{adapters}return model\n" if adapters else f"return {built}\n"
    return f'''\
def build_structure({parameters}):
    """Build the same model on the meta device, where tensors have no values."""
    kind = transformers.{kind}.config_class
    config = {config}
    with torch.device("meta"):
{textwrap.indent(body, " " * 8)}'''


def _adapted_source(plan: Plan, config: dict[str, object], hub_id: str | None = None) -> ModelSource:
    """Return the source that loads pretrained weights, perhaps in 4 bits, and adds adapters to them."""
    source = "required=True" if hub_id is None else f"default={literal(hub_id)}"
    return ModelSource(
        build=f'''\
def build(weights):
    """Load pretrained weights from a folder, freeze them, and add adapters that are trained."""
{textwrap.indent(adapted_model(plan, "weights"), "    ")}    return model
''',
        imports=("import peft", "import transformers"),
        build_arguments="arguments.weights",
        arguments=(f'parser.add_argument("--weights", {source}, help="folder or hub id of pretrained weights")',),
        structure=_structure(
            _class_of(plan),
            quoted.dtype(plan.model.dtype),
            "weights",
            "kind.from_pretrained(weights)",
            _adapters(plan),
        )
        if plan.model.adapter is not None and not plan.model.adapter.folder
        else "",  # PEFT loads an adapter with its weights
        returns_model_output=True,
        config=config,
    )


def adapted_model(plan: Plan, weights: str) -> str:
    """Return the statements that load pretrained weights as the plan says, and assign the model with adapters.

    Args:
        weights: the expression for the folder or hub id of the weights.
    """
    kind, adapter, dtype = _class_of(plan), plan.model.adapter, plan.model.dtype
    assert adapter is not None
    quantization = prepared = ""
    options = [weights, f"dtype={quoted.dtype(dtype)}"]
    if adapter.is_quantized:
        settings = {name: literal(value) for name, value in quantization_options(kind).items()}
        settings["bnb_4bit_compute_dtype"] = quoted.dtype(compute_dtype(dtype))
        lines = "".join(f"    {name}={value},\n" for name, value in settings.items())
        quantization = f"quantization = transformers.BitsAndBytesConfig(\n{lines})\n"
        options.append("quantization_config=quantization")
        prepared = "model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)\n"
    loaded = f"model = transformers.{kind}.from_pretrained(\n    {', '.join(options)}\n)\n"
    return f"{quantization}{loaded}{prepared}{_adapters(plan)}"


def _adapters(plan: Plan) -> str:
    """Return the statements that add the planned adapters to `model`."""
    adapter, kind = plan.model.adapter, _class_of(plan)
    assert adapter is not None
    if adapter.folder:
        folder = literal(str(resolved(adapter.folder)))
        return f"model = peft.PeftModel.from_pretrained(\n    model, {folder}, is_trainable=True\n)\n"
    options = "".join(f"    {name}={literal(value)},\n" for name, value in adapter.lora_options(kind).items())
    return f"adapters = peft.LoraConfig(\n{options})\nmodel = peft.get_peft_model(model, adapters)\n"


def _hub_source(kind: str, reference: str, dtype: str) -> ModelSource:
    return ModelSource(
        build=f'''\
def build():
    """Load the pretrained model."""
    return transformers.{kind}.from_pretrained({literal(reference)}, dtype={dtype})
''',
        imports=("import transformers",),
        structure=_structure(kind, dtype, "", f"kind.from_pretrained({literal(reference)})"),
        returns_model_output=True,
    )


def _callable_source(plan: Plan, location: str, name: str, folder: pathlib.Path | None) -> ModelSource:
    """Return the source that builds the model by calling the user's function or class `name`.

    `location` is the Python file or the dotted name of the module that defines it.
    """
    sizes = {"batch_size": plan.workload.batch_size, "seq_len": plan.workload.seq_len}
    accepted = _parameters(location, name)
    name = quoted.name(name, "the function that returns the model")
    arguments = ", ".join(
        f"{key}={quoted.number(size, key)}" for key, size in sizes.items() if key in accepted and size is not None
    )
    imports: tuple[str, ...] = ("import sys",) if plan.model.arguments else ()
    given = f"    sys.argv = {literal([location, *plan.model.arguments])}\n" if plan.model.arguments else ""
    own_imports: frozenset[str] = frozenset()
    if location.lower().endswith(".py"):
        path = resolved(location)
        load = f"""\
    path = {path_from(folder, path)}
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location({literal(f"planned_{path.stem}")}, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
{given}    spec.loader.exec_module(module)
    built = module.{name}({arguments})
"""
        imports = ("import importlib.util", "import pathlib", "import sys")
    else:
        module = quoted.name(location, "the module of the model")
        load = f"{given}    built = {module}.{name}({arguments})\n"
        own_imports = frozenset({f"import {module}"})
    if plan.workload.calling == Calling.STEP.name:
        doc = f"Call {location}:{name}, which returns a dict. Return its model, step and optimizers."
        return ModelSource(
            build=f"def build():\n    {quoted.docstring(doc)}\n{load}{_own_step_built(plan)}",
            imports=imports,
            own_imports=own_imports,
        )
    loss_fn = plan.workload.has_loss_fn
    returned = "(model, batch, loss function)" if loss_fn else "the model or a tuple that starts with it"
    model = "built[0] if isinstance(built, tuple) else built"
    if plan.model.adapter is not None:
        load += f"    model = {model}\n{textwrap.indent(_adapters(plan), '    ')}"
        model, imports = "model", (*imports, "import peft")
    result = f"{model.partition(' if ')[0]}, built[2]" if loss_fn else model
    doc = quoted.docstring(f"Call {location}:{name}, which returns {returned}.")
    return ModelSource(
        build=f"def build():\n    {doc}\n{load}    return {result}\n",
        functions=_loss_functions(plan),
        imports=(*imports, *_loss_imports(plan), *(["import dataclasses"] if _takes_dataclass(plan) else [])),
        own_imports=own_imports,
        target="model, loss_fn" if loss_fn else "model",
        structure=_CALLED_STRUCTURE,
        structure_is_asked_for=True,
    )


_CALLED_STRUCTURE = '''\
def build_structure():
    """Build the same on the meta device, where tensors have no values."""
    with torch.device("meta"):
        return build()
'''


def _parameters(location: str, name: str) -> set[str]:
    """Return the names of the parameters of the function or class `name`, read from its source without running it.

    The set is empty if the source is not found.
    """
    try:
        spec = None if location.endswith(".py") else importlib.util.find_spec(location)
        file = location if spec is None else spec.origin
        if file is None:
            return set()
        tree = ast.parse(reading.content(file))
    except (ImportError, OSError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return set()
    definitions = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    definition = definitions.get(name)
    if isinstance(definition, ast.ClassDef):
        methods = (node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        definition = next(methods, None)
    if definition is None:
        return set()
    return {argument.arg for argument in (*definition.args.args, *definition.args.kwonlyargs)}


def batch_source(plan: Plan, model: ModelSource) -> str:
    """Return the source of `synthetic_batch(device)`, which returns random data of the planned shapes and dtypes."""
    batch: dict[str, Any] = {}
    for path, shape, dtype in plan.workload.batch:
        container = batch
        *parents, last = path.split(".")
        for parent in parents:
            container = container.setdefault(parent, {}) if isinstance(container, dict) else container
        if not isinstance(container, dict) or last in container:
            raise PlanFileError(f"two tensors of the planned batch have the path {path[:60]!r}: make the plan again")
        container[last] = _tensor(last, tuple(shape), quoted.dtype(dtype), plan, model)
    if list(batch) == [""]:
        text = batch[""]
    elif _takes_dataclass(plan):
        text = f'dataclasses.make_dataclass("Batch", {literal(list(batch))})(**{_container(batch, True)})'
    else:
        text = _container(batch, plan.workload.calling == Calling.KEYWORDS.name)
    docstring = '"""Return random data of the planned shapes: replace it with your own."""'
    return f"def synthetic_batch(device):\n    {docstring}\n    return {text}\n"


def _takes_dataclass(plan: Plan) -> bool:
    """Return True if the batch is one object with attributes, which the model takes as its only argument."""
    paths = [path for path, _, _ in plan.workload.batch]
    return plan.workload.calling == Calling.SINGLE.name and paths[:1] != [""]


def _container(items: dict[str, Any], mapping: bool, indent: int = 4) -> str:
    """Return the source of a dict with the given items, one per line.

    If all keys are digits and `mapping` is False, it is the source of a tuple. Items that are dicts are written in the
    same way. `indent` is the indentation of the closing bracket.
    """
    mapping = mapping or not all(key.isdigit() for key in items)
    pad = " " * (indent + 4)
    lines = []
    for key, value in items.items():
        text = value if isinstance(value, str) else _container(value, False, indent + 4)
        lines.append(f"{pad}{f'{literal(key)}: ' if mapping else ''}{text},\n")
    opening, closing = ("{", "}") if mapping else ("(", ")")
    return f"{opening}\n{''.join(lines)}{' ' * indent}{closing}"


def _tensor(name: str, shape: tuple[int, ...], dtype: str, plan: Plan, model: ModelSource) -> str:
    """Return the source of an expression that creates a tensor of the given shape and dtype, an expression as well.

    The values are such that the model accepts them: token ids are below the vocabulary size, and masks are ones.
    """
    size = literal(shape)
    if dtype.startswith(("torch.float", "torch.bfloat")):
        return f"torch.randn({size}, dtype={dtype}, device=device)"
    if dtype == "torch.bool" or name.endswith("_mask"):
        return f"torch.ones({size}, dtype={dtype}, device=device)"
    language = "LM" in plan.model.name or plan.model.name.endswith("ForConditionalGeneration")
    tokens = name.endswith("input_ids") or (name == "labels" and language)
    text_config = model.config.get("text_config")
    vocabulary = {**(text_config if isinstance(text_config, dict) else {}), **model.config}.get("vocab_size", 100)
    if tokens and plan.workload.calling == Calling.KEYWORDS.name:
        vocabulary = quoted.number(vocabulary, "'vocab_size' of the model's config")
        return f"torch.randint({vocabulary}, {size}, dtype={dtype}, device=device)"
    return f"torch.zeros({size}, dtype={dtype}, device=device)"


def _needs_loss_of(plan: Plan) -> bool:
    return not plan.workload.has_loss_fn and plan.workload.calling != Calling.STEP.name


def _loss_functions(plan: Plan) -> tuple[str, ...]:
    return (_LOSS_OF,) if _needs_loss_of(plan) else ()


def _loss_imports(plan: Plan) -> tuple[str, ...]:
    return () if not _needs_loss_of(plan) else ("from collections.abc import Mapping",)


def _own_step_built(plan: Plan) -> str:
    """Return the statements that return model, step and optimizers, given the dict `built`."""
    name = plan.workload.optimizer
    optimizer = f'built.get("optimizer", {literal(name)})' if name in OPTIMIZERS else 'built["optimizer"]'
    return (
        '    model = built["model"]\n'
        "    if not isinstance(model, torch.nn.Module):\n"
        "        model = torch.nn.ModuleDict(model)\n"
        f'    return model, built["step"], {optimizer}\n'
    )


_LOSS_OF = '''\
def loss_of(output):
    """Return the loss from a model's output: `.loss`, `["loss"]`, the first item of a tuple, or the output itself."""
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss
    if isinstance(output, Mapping):
        return output["loss"]
    return output[0] if isinstance(output, (tuple, list)) else output
'''
