"""The OpenAPI document is true: schemathesis holds the server to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from atoll.server import app
from atoll.server.http.openapi import document

from .conftest import Served

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    ignored_auth,
    unsupported_method,
]


@pytest.fixture(scope="module")
def document_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("openapi"))
    server.create("there")
    server.create("over")
    server.see("over", "failed")
    yield server
    server.close()


ROWS = app.NATIVE
DOCUMENT = document(ROWS, app.STREAMED)
schema = schemathesis.openapi.from_dict(DOCUMENT)


schema.config.generation.update(with_security_parameters=False)


@schemathesis.deserializer("application/x-ndjson")
def lines_of(context: Any, response: Any) -> Any:
    """The first line that breaks the schema, else the first: each has to be as documented."""
    kinds = DOCUMENT["paths"]["/v1/trainings/{name}/logs"]["get"]["responses"]["200"]["content"]
    rule = {**kinds["application/x-ndjson"]["schema"], "components": DOCUMENT["components"]}
    lines = [json.loads(line) for line in response.content.splitlines() if line]
    wrong = (line for line in lines if not jsonschema_rs.is_valid(rule, line))
    return next(wrong, lines[0] if lines else {"rank": 0, "text": ""})


def is_true(case: Any, option: str) -> bool:
    return str((case.query or {}).get(option, "false")).lower() in ("true", "1", "")


@schema.parametrize()
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_server_does_what_its_document_says(case: Any, document_server: Served) -> None:
    if is_true(case, "watch") and case.meta.generation.mode.is_positive:
        case.query["timeout"] = 0.05  # else the stream would not end
    elif is_true(case, "watch") and "timeout" not in case.query:
        case.query["timeout"] = 0.05
    if is_true(case, "follow"):
        case.path_parameters["name"] = "over"
    elif case.meta.generation.mode.is_positive and "name" in (case.path_parameters or {}):
        name = case.path_parameters["name"]
        case.path_parameters["name"] = ("there", "over", name)[len(name) % 3]
    case.call_and_validate(
        base_url=document_server.url,
        headers={"Authorization": "Bearer token-one"},
        checks=CHECKS,
        timeout=100,
    )


@pytest.mark.parametrize(
    "query",
    ["", "?tail=1", "?follow=true&tail=1", "?follow&rank=0&rank=1", "?rank=0&tail=0"],
)
def test_every_line_of_a_log_is_as_documented(document_server: Served, query: str) -> None:
    answer = document_server.http.get(f"/v1/trainings/over/logs{query}")
    kinds = DOCUMENT["paths"]["/v1/trainings/{name}/logs"]["get"]["responses"]["200"]["content"]
    rule = {**kinds["application/x-ndjson"]["schema"], "components": DOCUMENT["components"]}
    lines = [json.loads(line) for line in answer.content.splitlines() if line]
    assert lines
    assert all(jsonschema_rs.is_valid(rule, line) for line in [*lines, {"cut": True}])
    assert not jsonschema_rs.is_valid(rule, {"line": 1})


def test_every_row_is_a_route_and_every_route_is_documented(document_server: Served) -> None:
    told = document_server.http.get("/openapi.json").json()
    assert told == document(ROWS, app.STREAMED)
    rows = {(op.method, op.path) for op in ROWS}
    found = {(method.upper(), path) for path, item in told["paths"].items() for method in item}
    assert found == rows
    for method, path in rows:
        answer = document_server.http.request(method, path.replace("{name}", "missing"))
        assert answer.status_code not in (405, 500)


def test_operation_ids_are_unique(document_server: Served) -> None:
    told = document_server.http.get("/openapi.json").json()
    ids = [op["operationId"] for item in told["paths"].values() for op in item.values()]
    assert len(ids) == len(set(ids))
