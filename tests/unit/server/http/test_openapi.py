"""The bounds in the OpenAPI document are those of the checks: what one takes the other takes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema_rs
import msgspec
import pytest
from starlette.requests import Request

from atoll.core.errors import ValidationError
from atoll.core.model import decode, encode
from atoll.core.problem import ON_WIRE, option_bounds
from atoll.core.spec import TrainingSpec
from atoll.server import app
from atoll.server.app import create_app
from atoll.server.handlers import trainings
from atoll.server.http import openapi
from atoll.server.http.openapi import RULES, document
from atoll.server.http.operations import Operation, read_query
from atoll.store.sqlite import MemoryStore

DOCUMENT = document(app.NATIVE, app.STREAMED)
BASE: dict[str, Any] = {
    "name": "a",
    "worldSize": {"min": 1, "target": 1, "max": 10_000},
    "command": ["true"],
}
SPEC = {"$ref": "#/components/schemas/TrainingSpec", "components": DOCUMENT["components"]}


def changed(path: str, value: Any) -> dict[str, Any]:
    section, _, field = path.rpartition(".")
    if not section:
        return {**BASE, field: value}
    return {**BASE, section: {**BASE.get(section, {}), field: value}}


def is_taken(body: dict[str, Any]) -> bool:
    try:
        decode(encode(body), TrainingSpec)
    except ValidationError:
        return False
    return True


def is_documented(body: dict[str, Any]) -> bool:
    return jsonschema_rs.is_valid(SPEC, body)


def around(low: float, high: float, *, is_integer: bool) -> Iterator[float]:
    if is_integer:
        yield from (low - 1, low, high, high + 1)
    else:
        yield from (math.nextafter(low, -1.0), low, high, math.nextafter(high, math.inf))


@pytest.mark.parametrize("field", sorted(option_bounds()))
def test_the_bounds_of_numbers_in_a_spec(field: str) -> None:
    bounds = option_bounds()[field]
    for value in around(bounds.low, bounds.high, is_integer=bounds.is_integer):
        is_within = bounds.low <= value <= bounds.high
        body = changed(ON_WIRE[field], value)
        assert is_documented(body) == is_within, (field, value)
        if not field.startswith("world_size"):  # those three also depend on each other
            assert is_taken(body) == is_within, (field, value)


VALUES: dict[str, list[Any]] = {
    "TrainingSpec.name": ["a", "a" * 200, "a" * 201, "", "A", "-a", "a_b", "a/b", "..", "a.1"],
    "TrainingSpec.executor": ["local", "a" * 64, "", None],
    "TrainingSpec.workingDir": ["/", "/a", "a", "", None],
    "TrainingSpec.image": ["x", "", None],
    "TrainingSpec.runId": ["", "a/b", " ", None],  # a good one needs a store beside it
    "TrainingSpec.command": [["x"], ["x", ""], [], [""], [1]],
    "TrainingSpec.env": [{"A": ""}, {"_a1": "x"}, {"1": "x"}, {"a-b": "x"}, {"": "x"}, {"A": 1}],
    "TrainingSpec.ncclEnv": [{"A": ""}, {"1": "x"}, {}],
    "ProviderFilter.include": [["a"], [], None],
    "RendezvousSpec.uri": ["s3://a/b", "file:///x", "http://x", "", "s3:// x", None],
    "Resources.cpu": ["1", "500m", "1.5", "x", "", "-1", None],
    "Resources.memory": ["4Gi", "4G", "4 Gi", None],
    "Source.content": ["", "aGk="],
    "Source.filename": ["a.py", "a/b", ""],
    "Source.directory": ["/a", "a", None],
}
SECTIONS = {
    "ProviderFilter": "providerFilter",
    "RendezvousSpec": "rendezvous",
    "Resources": "resources",
    "Source": "source",
}


@pytest.mark.parametrize("rule", sorted({f"{schema}.{field}" for schema, field, _ in RULES}))
def test_the_rules_of_texts_in_a_spec(rule: str) -> None:
    schema, _, field = rule.partition(".")
    for value in VALUES[rule]:
        body = changed(".".join(filter(None, (SECTIONS.get(schema), field))), value)
        if schema == "Source":
            del body["command"]
            body["source"] = {"kind": "script", "content": "aGk=", **body["source"]}
        assert is_taken(body) == is_documented(body), (rule, value)


def query_cases() -> list[tuple[Operation, dict[str, Any]]]:
    return [
        (row, parameter)
        for row in app.NATIVE
        for parameter in DOCUMENT["paths"][row.path][row.method.lower()]["parameters"]
        if parameter["in"] == "query"
    ]


def is_read(row: Operation, name: str, value: Any) -> bool:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    needed = [
        field.encode_name
        for field in msgspec.structs.fields(row.query)
        if field.required and field.encode_name != name
    ]
    query = "&".join([f"{name}={text}", *(f"{other}=a" for other in needed)])
    scope = {"type": "http", "query_string": query.encode(), "headers": []}
    try:
        read_query(Request(scope), row.query)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("row", "parameter"), query_cases(), ids=lambda case: getattr(case, "path", None)
)
def test_the_bounds_of_options(row: Operation, parameter: dict[str, Any]) -> None:
    rule = parameter["schema"]
    rule = rule["items"] if rule.get("type") == "array" else rule
    values: list[Any] = ["a", "A", "", "a" * 64, "a" * 201, "1:2", "1:2,", "ready", "x y"]
    if "minimum" in rule:
        whole = rule["type"] == "integer"
        values = list(around(rule["minimum"], rule["maximum"], is_integer=whole))
    elif rule.get("type") == "boolean":
        values = [True, False]
    for value in values:
        is_valid = jsonschema_rs.is_valid(rule, value)
        assert is_read(row, parameter["name"], value) == is_valid, (parameter, value)


def test_headers_are_checked_by_the_patterns_in_the_document() -> None:
    patterns = {
        parameter["name"]: parameter["schema"]["pattern"]
        for path in DOCUMENT["paths"].values()
        for operation in path.values()
        for parameter in operation["parameters"]
        if parameter["in"] == "header"
    }
    assert patterns["Idempotency-Key"] == trainings._KEY.pattern
    assert patterns["Last-Event-ID"] == trainings.EVENT_ID_PATTERN


def test_every_number_in_the_document_of_a_spec_is_checked_by_a_bound() -> None:
    def numbers(schema: Any) -> Iterator[dict[str, Any]]:
        for choice in schema.get("anyOf", [schema]):
            if choice.get("type") in ("integer", "number"):
                yield choice

    names = ("TrainingSpec", "WorldSize", "Resources", "BenchSpec")
    schemas = [DOCUMENT["components"]["schemas"][name] for name in names]
    found = [
        number
        for schema in schemas
        for field in schema["properties"].values()
        for number in numbers(field)
    ]
    assert len(found) == len(option_bounds())
    assert all({"minimum", "maximum"} <= set(number) for number in found)
    assert msgspec.json.schema(TrainingSpec)


def test_the_document_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may ask for it, as often as they like."""
    made = []
    monkeypatch.setattr(openapi, "document", lambda *words: made.append(words) or {})
    app = create_app(store=MemoryStore(), tokens=Any, executors={})  # type: ignore[arg-type]

    async def ask() -> int:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return [(await http.get("/openapi.json")).status_code for _ in range(3)].count(200)

    assert asyncio.run(ask()) == 3
    assert len(made) == 1
