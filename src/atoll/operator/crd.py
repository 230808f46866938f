"""The CustomResourceDefinition `trainings.atoll.dev`, made from the types of spec and status. Pure.

Types, bounds and descriptions come from the msgspec models; a field is described by the string
below it. The tables here add what Python checks beyond the types, and the limits that the API
server needs to accept the rules.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import textwrap
from typing import Any

import msgspec
import msgspec.inspect

from atoll.backends.kubernetes.names import GROUP, VERSION
from atoll.core.checks import (
    LAUNCH_VARIABLES,
    NAME_PATTERN,
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    RUN_ID_PATTERN,
)
from atoll.core.phase import ExitReason, Phase, PhaseReason, listing
from atoll.core.settings import MAX_DISPLAY_CHARS, MAX_ENTRIES
from atoll.core.spec import URI_PATTERN, TrainingSpec
from atoll.core.status import AttemptStatus, Event, StatusHead
from atoll.core.text import QUANTITY_PATTERN
from atoll.operator.resource import ExitGroup, RankGroup

Json = dict[str, Any]

# The API server estimates what a rule costs from these limits, and refuses a schema without them.
STRINGS = {"maxItems": 1024, "items": {"type": "string", "maxLength": 65_536}}
NAMES = {"maxItems": 64, "items": {"type": "string", "maxLength": 253}}

# Lengths and patterns by path, merged over what the types say.
LIMITS: dict[str, Json] = {
    "command": {"minItems": 1, **STRINGS},
    "args": STRINGS,
    "pipPackages": NAMES,
    "image": {"minLength": 1, "maxLength": 1024},
    "workingDir": {"pattern": "^/", "maxLength": 4096},
    "env": {"maxProperties": 256},
    "ncclEnv": {"maxProperties": 256},
    "resources.cpu": {"pattern": QUANTITY_PATTERN, "maxLength": 32},
    "resources.memory": {"pattern": QUANTITY_PATTERN, "maxLength": 32},
    "resources.gpuModels": NAMES,
    "providerFilter.include": {"minItems": 1, **NAMES},
    "providerFilter.exclude": NAMES,
    "bench.placement": {"maxLength": 32},
    "rendezvous.uri": {"pattern": URI_PATTERN, "maxLength": 2048},
    "runId": {"pattern": RUN_ID_PATTERN, "maxLength": 80},
    "source.content": {"minLength": 1, "maxLength": 1_400_000},  # base64 of 1 MiB
    "code.content": {"minLength": 96, "maxLength": 96},  # a digest: the archive is in ConfigMaps
    "code.path": NAMES,
    "source.filename": {"pattern": "^[^/\\x00]+$", "maxLength": 255},
    "displayName": {"minLength": 1, "maxLength": MAX_DISPLAY_CHARS},
    "labels": {"maxProperties": MAX_ENTRIES},
    "settings": {"maxProperties": MAX_ENTRIES},
    "executor": {"default": "kubernetes", "maxLength": 63, "pattern": NAME_PATTERN},
}

_RESERVED = ", ".join(f"'{name}'" for name in sorted(RESERVED_ENV))
_OF_LAUNCHES = ", ".join(f"'{name}'" for name in LAUNCH_VARIABLES)
_PREFIXES = " || ".join(f"k.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES)
_ENV_RULES = [
    (
        "self.all(k, k.matches('^[A-Za-z_][A-Za-z0-9_]*$'))",
        "expected names of letters, digits and '_', no digit first",
    ),
    (
        f"self.all(k, k in [{_OF_LAUNCHES}] || !(k in [{_RESERVED}] || {_PREFIXES}))",
        "atoll sets this one for every rank",
    ),
]

# Rules between fields (CEL), by path. `oldSelf` is the object before the change.
RULES: dict[str, list[tuple[str, str]]] = {
    "worldSize": [
        ("self.min <= self.target", "world_size.min: expected at most world_size.target"),
        ("self.target <= self.max", "world_size.target: expected at most world_size.max"),
        (
            "self.min == oldSelf.min && self.max == oldSelf.max",
            "world_size: only target may change after the start",
        ),
    ],
    "": [
        ("has(self.command) != has(self.source)", "command: expected either a command or a source"),
        (
            "!(has(oldSelf.cancel) && oldSelf.cancel) || (has(self.cancel) && self.cancel)",
            "cancel: cannot be taken back",
        ),
    ],
    "bench": [
        (
            "!has(self.mode) || self.mode == 'off' || !has(self.placement) || "
            "self.placement in ['preferred', 'strict']",
            "bench_placement: expected 'preferred' or 'strict'",
        )
    ],
    "providerFilter": [
        (
            "!has(self.include) || !has(self.exclude) || "
            "!self.exclude.exists(p, p in self.include)",
            "provider_filter.exclude: expected none of provider_filter.include",
        )
    ],
    "env": _ENV_RULES,
    "ncclEnv": _ENV_RULES,
}
# Rules cannot compare settings, whose values have several types; nothing depends on them.
CHANGEABLE = ("worldSize", "cancel", "settings")

# Of a condition, as Kubernetes has them.
CONDITION = {
    "type": "Ready, Complete, Succeeded, Failed, Cancelled, Admitted, BelowMinimum, and others "
    "where they apply: RanksLost, Warnings, ExitsFromBackend, MeshCapable, DegradedMesh, "
    "ExecutorMissing, ExecutorUnreachable, StatusIncomplete.",
    "status": "True, False or Unknown.",
    "reason": "Why, in one word.",
    "message": "The same for people, in one sentence.",
    "lastTransitionTime": "When the status of the condition last changed.",
}
COLUMNS = [
    ("Phase", "string", ".status.phase", 0),
    ("Ready", "integer", ".status.world.ready", 0),
    ("Target", "integer", ".spec.worldSize.target", 0),
    ("Min", "integer", ".spec.worldSize.min", 0),
    ("Max", "integer", ".spec.worldSize.max", 1),
    ("Message", "string", ".status.message", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
]


def render_crd() -> Json:
    spec = spec_schema()
    columns = [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": wide} if wide else {})
        for name, kind, path, wide in COLUMNS
    ]
    schema = {
        "type": "object",
        "description": "One elastic training: what is wanted, and what was observed.",
        "required": ["spec"],
        "properties": {"spec": spec, "status": status_schema()},
        "x-kubernetes-validations": [
            {
                "rule": f"self.metadata.name.matches('{NAME_PATTERN}')",
                "message": "name: expected 1 to 63 lower-case letters, digits or '-'",
            }
        ],
    }
    scale = {
        "specReplicasPath": ".spec.worldSize.target",
        "statusReplicasPath": ".status.world.ready",
        "labelSelectorPath": ".status.selector",
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}, "scale": scale},
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"trainings.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": "Training",
                "listKind": "TrainingList",
                "plural": "trainings",
                "singular": "training",
                "shortNames": ["tr"],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def spec_schema() -> Json:
    """The schema of a spec without `name`: the object's own name serves."""
    (root,), parts = _components(TrainingSpec)
    schema = _structural(root, parts)
    schema["properties"].pop("name")
    schema["required"].remove("name")
    for path, limits in LIMITS.items():
        _at(schema, path).update(limits)
    for path, rules in RULES.items():
        _at(schema, path)["x-kubernetes-validations"] = [
            {"rule": rule, "message": message} for rule, message in rules
        ]
    schema["x-kubernetes-validations"] += [
        {"rule": _unchanged(field), "message": f"{field}: cannot change after the start"}
        for field in schema["properties"]
        if field not in CHANGEABLE
    ]
    schema["properties"]["code"]["properties"]["content"]["description"] = (
        "Digest of the archive, in base64; the archive itself is in ConfigMaps."
    )
    text = "What is wanted. Only worldSize.target and cancel can change later."
    return {**schema, "description": text}


def _unchanged(field: str) -> str:
    both = f"has(self.{field}) == has(oldSelf.{field})"
    return f"{both} && (!has(self.{field}) || self.{field} == oldSelf.{field})"


def _at(schema: Json, path: str) -> Json:
    for name in path.split(".") if path else ():
        schema = schema["properties"][name]
    return schema


def _structural(node: Json, parts: dict[str, Any], *, is_open: bool = False) -> Json:
    """JSON Schema as Kubernetes accepts it: no references, no unions with null, no defaults.

    With `is_open`, types and descriptions alone, and every object takes unknown fields.
    """
    if "description" in node:
        text, node = node["description"], {k: v for k, v in node.items() if k != "description"}
        return {**_structural(node, parts, is_open=is_open), "description": text}
    if "$ref" in node:
        return _structural(parts[node["$ref"]], parts, is_open=is_open)
    if "anyOf" in node:
        real, *others = [part for part in node["anyOf"] if part.get("type") != "null"]
        if others:  # a setting is a number, a text or a boolean
            return ANYTHING
        schema = _structural(real, parts, is_open=is_open)
        # Otherwise the API server drops a null, and an exit code that is not known is missing.
        return {**schema, "nullable": True} if is_open else schema
    inner = {
        k: _structural(v, parts, is_open=is_open) for k, v in node.get("properties", {}).items()
    }
    if is_open and inner:
        return _object(inner)
    if is_open and not node.keys() & {"type", "enum"}:
        return ANYTHING
    checks = () if is_open else ("enum",)
    schema = {key: node[key] for key in ("type", *checks) if key in node}
    if not is_open:
        schema |= _bounds(node)
    schema.setdefault("type", "string")
    if node.get("contentEncoding") == "base64" and not is_open:
        schema["format"] = "byte"
    if inner:
        schema["properties"] = inner
        if required := node.get("required"):
            schema["required"] = list(required)
    elif isinstance(values := node.get("additionalProperties"), dict):
        schema["additionalProperties"] = _structural(values, parts, is_open=is_open)
    if node.get("type") == "array":
        items = node.get("items")
        schema["items"] = _structural(items, parts, is_open=is_open) if items else ANYTHING
    return schema


def _bounds(node: Json) -> Json:
    bounds: Json = {key: node[key] for key in ("minimum", "maximum") if key in node}
    if 0 < bounds.get("minimum", 0) < 1:
        # The API server compares whole numbers with whole bounds: 0 would pass a minimum of 0.001.
        return {"minimum": 0, "exclusiveMinimum": True, "maximum": bounds["maximum"]}
    return bounds


def status_schema() -> Json:
    """Open: a newer controller may add fields. Only types are checked, and no field is required."""
    schemas, parts = _components(StatusHead, RankGroup, ExitGroup, Event, AttemptStatus)
    head, ranks, exits, event, attempt = (
        _structural(node, parts, is_open=True) for node in schemas
    )
    fields = head["properties"]
    phases = ", ".join(filter(None, Phase))
    fields["phase"]["description"] += f" One of {phases}."
    for schema, field, reasons in (
        (head, "reason", PhaseReason),
        (fields["rootCause"], "terminationReason", ExitReason),
        (exits, "terminationReason", ExitReason),
        (attempt, "reason", ExitReason),
    ):
        schema["properties"][field]["description"] += f" {listing(reasons)}."
    condition = {name: _string(text) for name, text in CONDITION.items()}
    condition["lastTransitionTime"]["format"] = "date-time"
    text = fields["conditions"]["description"]
    fields |= {
        "selector": _string("Labels of the pods of the ranks."),
        "restarts": {"type": "integer", "description": "How often ranks were restarted, in all."},
        "conditions": _list(_object(condition), text),
        "events": _list(event, "What happened, the oldest first; the latest 100 events."),
        "attempts": _list(attempt, "Earlier attempts of ranks: 20 of each rank, 500 in all."),
        "ranks": _list(ranks, "The ranks, grouped by their state."),
        "removedRanks": _list(
            copy.deepcopy(ranks), "Ranks that were scaled away, grouped by their state."
        ),
        "rankData": _string("All ranks as JSON, through zlib, in base64; only atoll reads it."),
        "rankExits": _list(exits, "How every rank that ran ended, grouped by how."),
    }
    return {**head, "description": "What was observed."}


def _components(*roots: type) -> tuple[tuple[Json, ...], dict[str, Any]]:
    """The schemas of these types and of all they use, with the descriptions of their fields."""
    schemas, parts = msgspec.json.schema_components(roots, ref_template="{name}")
    for part in parts.values():
        part.pop("description", None)  # a class docstring is for readers of the code
    for kind in set().union(*(_structs(msgspec.inspect.type_info(root)) for root in roots)):
        texts = field_docs(kind)
        for field in msgspec.structs.fields(kind):
            if text := texts.get(field.name):
                parts[kind.__name__]["properties"][field.encode_name]["description"] = text
    return schemas, parts


def _structs(info: Any) -> set[Any]:
    """The struct types in a type, itself included."""
    inner = [field.type for field in getattr(info, "fields", ())]
    inner += [getattr(info, name) for name in ("item_type", "value_type") if hasattr(info, name)]
    inner += getattr(info, "types", ())
    own = {info.cls} if isinstance(info, msgspec.inspect.StructType) else set()
    return own.union(*map(_structs, inner))


def field_docs(kind: type) -> dict[str, str]:
    """The strings below the fields of a class and of its bases, by field."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("atoll."):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(node, ast.ClassDef)
            for field, below in itertools.pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    texts[ast.unparse(field.target)] = ast.literal_eval(below.value)
    return texts


def _string(description: str) -> Json:
    return {"type": "string", "description": description}


def _object(properties: Json) -> Json:
    return {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        "properties": properties,
    }


def _list(items: Json, description: str = "") -> Json:
    text = {"description": description} if description else {}
    return {"type": "array", "items": items, **text}


ANYTHING = {"x-kubernetes-preserve-unknown-fields": True}
