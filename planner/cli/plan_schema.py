"""The JSON schema of plan files, made from the plan's types.

python -m planner.cli.plan_schema > docs/plan.schema.json
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import functools
import inspect
import json
import textwrap
import types
import typing
from typing import Any

from planner.files.fields import ANY_NUMBER, GREATEST, LEAST, MOST
from planner.plan_types.categories import Category
from planner.plan_types.decision_base import Decision
from planner.plan_types.plan import SCHEMA_VERSION, Footprint, Plan
from planner.plan_types.techniques import KINDS

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SIZES_BY_CATEGORY = {
    "type": "object",
    "propertyNames": {"enum": [category.key for category in Category]},
    "additionalProperties": {"type": "integer", "minimum": 0},
}
_BINDING = {"enum": [category.key for category in Category]}


def plan_schema() -> dict[str, Any]:
    """Returns the JSON schema of the current version of plan files, as JSON data.

    A file may have more keys than the schema names, so that a later version may add some.
    """
    plan = _object(Plan)
    properties = plan["properties"]
    properties["plan"] = properties.pop("peak")
    properties |= {"schema_version": {"const": SCHEMA_VERSION}, "slowdown": {"type": "number"}}
    properties["shortfall"]["anyOf"][0]["properties"]["binding"] |= _BINDING
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Plan of torch-planner",
        **plan,
        "required": list(properties),
        "$defs": {"decision": {"oneOf": [_decision(kind) for kind in KINDS.values()]}, "footprint": _footprint()},
    }


def _schema(hint: Any) -> dict[str, Any]:
    """Returns the schema of the JSON form of a type."""
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_schema(argument) for argument in arguments]}
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is tuple:
        items = [_schema(argument) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in (dict, collections.abc.Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    if hint in (Decision, Footprint):
        return {"$ref": f"#/$defs/{hint.__name__.lower()}"}
    if dataclasses.is_dataclass(hint):
        return _object(hint)
    raise TypeError(f"{hint!r} has no JSON form")


def _object(kind: Any) -> dict[str, Any]:
    """Returns the schema of a dataclass whose fields are written under their names. Times are not written."""
    fields = [field for field in dataclasses.fields(kind) if field.compare]
    return {
        "type": "object",
        "description": _first_paragraph(kind.__doc__),
        "properties": {field.name: _property(kind, field.name) for field in fields},
        "required": [field.name for field in fields],
    }


def _property(kind: Any, name: str) -> dict[str, Any]:
    """Returns the schema of a field with the note below it as its description."""
    note = _notes(kind).get(name)
    schema = _schema(typing.get_type_hints(kind)[name])
    if name not in ANY_NUMBER:
        schema = _with_limits(schema, {"minimum": LEAST.get(name, 0), "maximum": GREATEST.get(name, MOST)})
    return schema | ({"description": note} if note else {})


def _with_limits(schema: dict[str, Any], limits: dict[str, int]) -> dict[str, Any]:
    """Returns a schema with limits on its integers, such as {"minimum": 0}. References are left as they are."""
    if schema.get("type") == "integer":
        return schema | limits
    nested = {
        key: [_with_limits(part, limits) for part in value] if isinstance(value, list) else _with_limits(value, limits)
        for key, value in schema.items()
        if key in ("anyOf", "items", "prefixItems") or (key == "additionalProperties" and isinstance(value, dict))
    }
    return schema | nested


def _decision(kind: type[Decision]) -> dict[str, Any]:
    data = _object(kind)
    data["properties"] = {"kind": {"const": kind.kind}, **data["properties"]}
    data["required"] = ["kind", *(name for name in data["required"] if name not in kind.left_out_if_empty)]
    return data


def _footprint() -> dict[str, Any]:
    """Returns the schema of `Footprint.to_json`, whose keys are not all names of fields."""
    data = _object(Footprint)
    properties = data["properties"]
    at = {name: properties.pop(name) for name in ("phase", "module", "op")}
    del properties["step_ns"]
    for name in ("breakdown", "most"):
        properties[name] = _SIZES_BY_CATEGORY | {"description": properties[name]["description"]}
    properties["at"] = {"type": "object", "properties": at, "required": list(at)}
    properties["step_seconds"] = {"type": "number", "description": "Predicted time of the step in seconds."}
    return {**data, "required": list(properties)}


@functools.cache
def _notes(kind: Any) -> dict[str, str]:
    """Returns the notes below the fields of a class, by name of the field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(note.value.value.split())
        for field, note in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(note, ast.Expr)
        and isinstance(note.value, ast.Constant)
        and isinstance(note.value.value, str)
    }


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


if __name__ == "__main__":
    print(json.dumps(plan_schema(), indent=2))
