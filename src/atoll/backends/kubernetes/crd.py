"""The CustomResourceDefinition `trainings.atoll.dev`, generated from the spec's types. Pure.

Types and the bounds of numbers come from the msgspec models. The tables below add what Python
checks beyond them, and the limits that the API server needs to accept the rules. What `kubectl
explain` says of the fields, and the schema of the status, are in `explain.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.backends.kubernetes.explain import SPEC, described, status_schema
from atoll.backends.kubernetes.names import GROUP, VERSION
from atoll.core.checks import (
    LAUNCH_VARIABLES,
    NAME_PATTERN,
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    RUN_ID_PATTERN,
)
from atoll.core.spec import QUANTITY_PATTERN, URI_PATTERN, TrainingSpec

Json = dict[str, Any]

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
    "source.content": {"minLength": 1, "maxLength": 1_400_000},
    "code.content": {"minLength": 96, "maxLength": 96},  # a digest: the archive is in ConfigMaps
    "code.path": NAMES,
    "source.filename": {"pattern": "^[^/\\x00]+$", "maxLength": 255},
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
CHANGEABLE = ("worldSize", "cancel")

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
        "description": "One elastic training: a wish, and what was seen of it.",
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
    (root,), parts = msgspec.json.schema_components([TrainingSpec], ref_template="{name}")
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
    return described(schema, SPEC, "What is wanted. Only worldSize.target and cancel change later.")


def _unchanged(field: str) -> str:
    both = f"has(self.{field}) == has(oldSelf.{field})"
    return f"{both} && (!has(self.{field}) || self.{field} == oldSelf.{field})"


def _at(schema: Json, path: str) -> Json:
    for name in path.split(".") if path else ():
        schema = schema["properties"][name]
    return schema


def _structural(node: Json, parts: dict[str, Any]) -> Json:
    """JSON Schema as Kubernetes accepts it: no references, no unions with null, no defaults."""
    if "$ref" in node:
        return _structural(parts[node["$ref"]], parts)
    if "anyOf" in node:
        real = [part for part in node["anyOf"] if part.get("type") != "null"]
        assert len(real) == 1, f"a union cannot be structural: {node}"
        return _structural(real[0], parts)
    schema: Json = {key: node[key] for key in ("type", "enum") if key in node} | _bounds(node)
    if "enum" in node:
        schema.setdefault("type", "string")
    if node.get("contentEncoding") == "base64":
        schema["format"] = "byte"
    if "properties" in node:
        schema["properties"] = {k: _structural(v, parts) for k, v in node["properties"].items()}
        if required := node.get("required"):
            schema["required"] = list(required)
    elif isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = _structural(node["additionalProperties"], parts)
    if "items" in node and isinstance(node["items"], dict):
        schema["items"] = _structural(node["items"], parts)
    if "description" in node:
        schema["description"] = node["description"]
    return schema


def _bounds(node: Json) -> Json:
    bounds: Json = {key: node[key] for key in ("minimum", "maximum") if key in node}
    if 0 < bounds.get("minimum", 0) < 1:
        # The API server compares whole numbers with whole bounds: 0 would pass a minimum of 0.001.
        return {"minimum": 0, "exclusiveMinimum": True, "maximum": bounds["maximum"]}
    return bounds
