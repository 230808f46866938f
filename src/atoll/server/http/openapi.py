"""The OpenAPI 3.1 document, built from the same rows as the routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from atoll import __version__
from atoll.core.checks import ENV_PATTERN, NAME_PATTERN, RUN_ID_PATTERN
from atoll.core.settings import DISPLAY_NAME_PATTERN
from atoll.core.spec import URI_PATTERN
from atoll.core.text import QUANTITY_PATTERN
from atoll.server.http.operations import SSE, Operation

REF = "#/components/schemas/{name}"

_STRINGS = {"type": "array", "items": {"type": "string"}}
_COMMAND = {
    "type": "array",
    "minItems": 1,
    "prefixItems": [{"type": "string", "minLength": 1}],
    "items": {"type": "string"},
}
_QUANTITY = {"type": "string", "pattern": QUANTITY_PATTERN}


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


# One server-sent event; `data` is JSON in one line.
_EVENT = {
    "type": "object",
    "properties": {
        "event": {"enum": ["changed", "removed", "error"]},
        "id": {"type": "string", "description": "the version to continue from"},
        "data": {
            "type": "string",
            "description": "the training, or for `error` a problem",
            "contentMediaType": "application/json",
            "contentSchema": {
                "anyOf": [{"$ref": REF.format(name=name)} for name in ("Training", "Problem")]
            },
        },
    },
    "required": ["event", "data"],
}

# Rules that core/spec.py checks beyond types and bounds: schema, field, what to document.
RULES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("Resources", "cpu", _or_null(_QUANTITY)),
    ("Resources", "memory", _or_null(_QUANTITY)),
    ("TrainingSpec", "name", {"pattern": DISPLAY_NAME_PATTERN}),
    ("TrainingSpec", "runId", _or_null({"type": "string", "pattern": RUN_ID_PATTERN})),
    ("TrainingSpec", "executor", _or_null({"type": "string", "pattern": NAME_PATTERN})),
    ("TrainingSpec", "workingDir", _or_null({"type": "string", "pattern": "^/"})),
    ("TrainingSpec", "image", _or_null({"type": "string", "minLength": 1})),
    ("TrainingSpec", "command", _or_null(_COMMAND)),
    ("TrainingSpec", "env", {"propertyNames": {"pattern": f"^{ENV_PATTERN}$"}}),
    ("TrainingSpec", "ncclEnv", {"propertyNames": {"pattern": f"^{ENV_PATTERN}$"}}),
    ("ProviderFilter", "include", _or_null({**_STRINGS, "minItems": 1})),
    ("RendezvousSpec", "uri", _or_null({"type": "string", "pattern": URI_PATTERN})),
    ("Source", "content", {"minLength": 1}),
    ("Source", "filename", {"pattern": "^[^/]+$"}),
    ("Source", "directory", _or_null({"type": "string", "pattern": "^/"})),
)


def document(operations: Sequence[Operation], streamed: Mapping[str, str]) -> dict[str, Any]:
    kinds = [op.body for op in operations if op.body is not None]
    answers = [answer for op in operations for answer in op.answers.values()]
    kinds += [kind for answer in answers for kind in (answer.body, *answer.others) if kind]
    distinct = list({id(kind): kind for kind in kinds}.values())
    schemas, components = msgspec.json.schema_components(distinct, ref_template=REF)
    schema_of = dict(zip(map(id, distinct), schemas, strict=True))
    for schema, field, rules in RULES:
        components[schema]["properties"][field] |= rules
    paths: dict[str, Any] = {}
    for op in operations:
        paths.setdefault(op.path, {})[op.method.lower()] = _operation(op, schema_of, streamed)
    return {
        "openapi": "3.1.0",
        "info": {"title": "atoll", "version": __version__},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(
    op: Operation, schema_of: Mapping[int, Any], streamed: Mapping[str, str]
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "operationId": op.handler.__name__ + ("" if op.path.startswith("/v1") else "_server"),
        "summary": op.summary,
        "parameters": list(_parameters(op)),
        "responses": {},
    }
    if op.is_open:
        entry["security"] = []
    if op.body is not None:
        content = {"application/json": {"schema": schema_of[id(op.body)]}}
        entry["requestBody"] = {"required": True, "content": content}
    for status, answer in sorted(op.answers.items()):
        schema = schema_of[id(answer.body)]
        if answer.others:
            schema = {"anyOf": [schema, *(schema_of[id(kind)] for kind in answer.others)]}
        content = {answer.media_type: {"schema": schema}}
        if op.method == "GET" and status == 200 and op.path in streamed:
            content[SSE] = {"schema": _EVENT}
        entry["responses"][str(status)] = {"description": answer.description, "content": content}
    return entry


def _parameters(op: Operation) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    if op.has_name:
        label = {"type": "string", "pattern": DISPLAY_NAME_PATTERN}
        parameters.append({"name": "name", "in": "path", "required": True, "schema": label})
    for name, header in op.headers.items():
        schema = {"type": "string", "pattern": header.pattern}
        parameters.append(
            {"name": name, "in": "header", "description": header.description, "schema": schema}
        )
    query = msgspec.json.schema(op.query)
    properties = query["$defs"][op.query.__name__]["properties"]
    for name, schema in properties.items():
        parameters.append({"name": name, "in": "query", "schema": _optional(schema)})
    return parameters


def _optional(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a query option, which may be left out but is never null. `?watch` is true."""
    if schema.get("type") == "boolean":
        return {"anyOf": [schema, {"type": "string", "const": ""}]}
    if "anyOf" not in schema:
        return schema
    choices = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
    return choices[0] if len(choices) == 1 else {"anyOf": choices}
