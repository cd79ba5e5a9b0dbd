"""How an emitted file gets its model and a batch: from an embedded configuration, or from where the plan got it."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import pathlib

from planner.errors import PlanFileError
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import assignment, literal
from planner.workload.call_convention import Calling


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Source text around `build`. An empty `build` means that the file cannot make the model."""

    build: str = ""
    imports: tuple[str, ...] = ()
    own_imports: frozenset[str] = frozenset()
    """Imports of the user's own modules, which sort last."""
    constants: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    """Functions that `training_step` calls."""
    target: str = "model"
    """What `build(...)` is assigned to."""
    build_arguments: str = ""
    arguments: tuple[str, ...] = ()
    """Lines that add to `parser`."""
    returns_model_output: bool = False
    """Whether the model's output has its loss as `.loss`."""
    config: dict[str, object] = dataclasses.field(default_factory=dict)


def model_source(plan: Plan) -> ModelSource:
    """Source for `plan.model.reference`.

    Raises:
        PlanFileError: when the reference is a configuration file that cannot be read.
    """
    reference = plan.model.reference
    if reference is None:
        return ModelSource(imports=_loss_imports(plan), functions=_loss_functions(plan))
    if ":" in reference and not pathlib.Path(reference).exists():
        place, _, name = reference.rpartition(":")
        return _callable_source(plan, place, name)
    return _transformers_source(plan, reference)


def _transformers_source(plan: Plan, reference: str) -> ModelSource:
    kind = plan.model.name
    config_path = pathlib.Path(reference)
    if config_path.is_dir():
        config_path /= "config.json"
    if config_path.suffix != ".json" and not config_path.exists():
        return _hub_source(kind, reference)
    try:
        config = json.loads(config_path.read_text())
    except (OSError, ValueError) as error:
        raise PlanFileError(f"'{config_path}', which the plan was made from, cannot be read ({error})") from error
    return ModelSource(
        build=f'''\
def build(weights=None):
    """The model, with random weights or those saved in a folder."""
    if weights is not None:
        return transformers.{kind}.from_pretrained(weights, dtype=torch.float32)
    return transformers.{kind}(transformers.{kind}.config_class.from_dict(CONFIG))
''',
        imports=("import transformers",),
        constants=(assignment("CONFIG", config),),
        build_arguments="arguments.weights",
        arguments=('parser.add_argument("--weights", help="folder of pretrained weights; random without")',),
        returns_model_output=True,
        config=config,
    )


def _hub_source(kind: str, reference: str) -> ModelSource:
    return ModelSource(
        build=f'''\
def build():
    """The pretrained model."""
    return transformers.{kind}.from_pretrained({literal(reference)}, dtype=torch.float32)
''',
        imports=("import transformers",),
        returns_model_output=True,
    )


def _callable_source(plan: Plan, place: str, name: str) -> ModelSource:
    sizes = {"batch_size": plan.workload.batch_size, "seq_len": plan.workload.seq_len}
    accepted = _parameters(place, name)
    given = ", ".join(f"{key}={size}" for key, size in sizes.items() if key in accepted and size is not None)
    if place.endswith(".py"):
        path = pathlib.Path(place).resolve()
        load = f"""\
    path = pathlib.Path({literal(str(path))})
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location({literal(f"planned_{path.stem}")}, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.{name}({given})
"""
        imports, own_imports = ("import importlib.util", "import pathlib", "import sys"), frozenset()
    else:
        load = f"    made = {place}.{name}({given})\n"
        imports, own_imports = (), frozenset({f"import {place}"})
    loss_fn = plan.workload.has_loss_fn
    wanted = "(model, batch, loss function)" if loss_fn else "the model, alone or first of a tuple"
    result = "made[0], made[2]" if loss_fn else "made[0] if isinstance(made, tuple) else made"
    return ModelSource(
        build=f'def build():\n    """From {place}:{name}, which returns {wanted}."""\n{load}    return {result}\n',
        functions=_loss_functions(plan),
        imports=(*imports, *_loss_imports(plan), *(["import dataclasses"] if _takes_dataclass(plan) else [])),
        own_imports=own_imports,
        target="model, loss_fn" if loss_fn else "model",
    )


def _parameters(place: str, name: str) -> set[str]:
    """Names of the callable's parameters, read from its source without running it; none where that is not found."""
    try:
        spec = None if place.endswith(".py") else importlib.util.find_spec(place)
        tree = ast.parse(pathlib.Path(place if spec is None else spec.origin).read_text())
    except (ImportError, OSError, SyntaxError, TypeError, ValueError):
        return set()
    body = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found = body.get(name)
    if isinstance(found, ast.ClassDef):
        methods = (node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        found = next(methods, None)
    return set() if found is None else {argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)}


def batch_source(plan: Plan, model: ModelSource) -> str:
    """`synthetic_batch(device)`: random data of the planned shapes."""
    batch: dict[str, object] = {}
    for path, shape, dtype in plan.workload.batch:
        place = batch
        *parents, last = path.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = _tensor(last, tuple(shape), dtype.removeprefix("torch."), plan, model)
    if list(batch) == [""]:
        text = batch[""]
    elif _takes_dataclass(plan):
        text = f'dataclasses.make_dataclass("Batch", {literal(list(batch))})(**{_container(batch, True)})'
    else:
        text = _container(batch, plan.workload.calling == Calling.KEYWORDS.name)
    docstring = '"""Random data of the planned shapes: put yours here."""'
    return f"def synthetic_batch(device):\n    {docstring}\n    return {text}\n"


def _takes_dataclass(plan: Plan) -> bool:
    return plan.workload.calling == Calling.SINGLE.name and plan.workload.batch[0][0] != ""


def _container(items: dict[str, object], mapping: bool, indent: int = 4) -> str:
    """A dict, or a tuple where the keys are 0, 1, ...; one item a line."""
    mapping = mapping or not all(key.isdigit() for key in items)
    pad = " " * (indent + 4)
    lines = []
    for key, value in items.items():
        text = value if isinstance(value, str) else _container(value, False, indent + 4)
        lines.append(f"{pad}{f'{literal(key)}: ' if mapping else ''}{text},\n")
    opening, closing = ("{", "}") if mapping else ("(", ")")
    return f"{opening}\n{''.join(lines)}{' ' * indent}{closing}"


def _tensor(name: str, shape: tuple[int, ...], dtype: str, plan: Plan, model: ModelSource) -> str:
    size = literal(shape)
    if dtype.startswith(("float", "bfloat")):
        return f"torch.randn({size}, dtype=torch.{dtype}, device=device)"
    if dtype == "bool" or name.endswith("_mask"):
        return f"torch.ones({size}, dtype=torch.{dtype}, device=device)"
    language = "LM" in plan.model.name or plan.model.name.endswith("ForConditionalGeneration")
    tokens = name.endswith("input_ids") or (name == "labels" and language)
    text_config = model.config.get("text_config")
    vocabulary = {**(text_config if isinstance(text_config, dict) else {}), **model.config}.get("vocab_size", 100)
    if tokens and plan.workload.calling == Calling.KEYWORDS.name:
        return f"torch.randint({vocabulary}, {size}, dtype=torch.{dtype}, device=device)"
    return f"torch.zeros({size}, dtype=torch.{dtype}, device=device)"


def _loss_functions(plan: Plan) -> tuple[str, ...]:
    return () if plan.workload.has_loss_fn else (_LOSS_OF,)


def _loss_imports(plan: Plan) -> tuple[str, ...]:
    return () if plan.workload.has_loss_fn else ("from collections.abc import Mapping",)


_LOSS_OF = '''\
def loss_of(output):
    """The loss of a forward: `.loss`, `["loss"]`, the first of a tuple, or the output itself."""
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss
    if isinstance(output, Mapping):
        return output["loss"]
    return output[0] if isinstance(output, (tuple, list)) else output
'''
