"""An error names a field as its reader does."""

from __future__ import annotations

import msgspec
import pytest

from atoll.core.errors import ValidationError
from atoll.core.model import decode, encode
from atoll.core.problem import ON_WIRE, Problem, error_of, problem_of, rename_fields
from atoll.core.spec import TrainingSpec
from atoll.sdk.options import DeployOptions


@pytest.mark.parametrize(
    ("field", "wire"),
    [
        ("world_size.min", "worldSize.min"),
        ("worldSize.target", "worldSize.target"),
        ("gpu_count", "resources.gpuCount"),
        ("gpu_models[1]", "resources.gpuModels[1]"),
        ("env.A_B", "env.A_B"),
        ("nccl_env.a_b.c", "ncclEnv.a_b.c"),
        ("bench", "bench.mode"),
        ("bench.surprise", "bench.surprise"),
        ("bench.placement", "bench.placement"),
        ("tail", "tail"),
        ("Idempotency-Key", "Idempotency-Key"),
        ("body", "body"),
    ],
)
def test_a_field_has_its_own_name_on_the_wire(field: str, wire: str) -> None:
    assert problem_of(ValidationError(field, 1, "expected 2"), 400).field == wire


@pytest.mark.parametrize("option", sorted(set(DeployOptions.__annotations__) - {"wait", "timeout"}))
def test_an_error_from_the_server_names_the_option_that_was_given(option: str) -> None:
    there = problem_of(ValidationError(option, 1, f"expected more than {option} has"), 400)
    back = error_of(decode(encode(there), Problem))
    assert isinstance(back, ValidationError)
    assert (back.field, str(back.value)) == (option, "1")
    assert back.expected == f"expected more than {option} has"


def test_every_name_of_the_wire_is_a_place_in_a_spec() -> None:
    schema = msgspec.json.schema(TrainingSpec)["$defs"]
    for wire in ON_WIRE.values():
        kind = "TrainingSpec"
        for part in wire.split("."):
            found = schema[kind]["properties"][part]
            nested = [found, *found.get("anyOf", [])]
            kind = next((n["$ref"].split("/")[-1] for n in nested if "$ref" in n), "")


def test_plain_words_in_a_sentence_stay_as_they_are() -> None:
    error = ValidationError("command", None, "expected either a command or a source")
    assert rename_fields(error, {"command": "COMMAND", "source": "x.y"}).expected == error.expected
