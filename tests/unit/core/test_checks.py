"""Bounds are written once, in the types; all that refuses or describes a number says the same."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from atoll.backends.kubernetes import options as kubernetes
from atoll.cli.options import FloatField, IntField
from atoll.cli.run import SPEC_OPTIONS
from atoll.core.checks import Bounds, Pattern, bounds_of, check_as, check_fields, field_bounds
from atoll.core.errors import ValidationError
from atoll.core.model import Model, decode
from atoll.core.problem import ON_WIRE, option_bounds, rename_fields
from atoll.core.spec import BenchSpec, RankCount, Resources, TrainingSpec, WorldSize
from atoll.operator.crd import spec_schema
from atoll.server.app import NATIVE, STREAMED
from atoll.server.handlers.trainings import ListQuery
from atoll.server.http.openapi import document

TEN_YEARS = 315_360_000
TABLE: dict[str, tuple[float, float]] = {
    "world_size.min": (1, 10_000),
    "world_size.target": (1, 10_000),
    "world_size.max": (1, 10_000),
    "gpu_count": (0, 1024),
    "min_gpu_memory_gb": (1, 100_000),
    "bench_require_gbps": (0, 1_000_000),
    "max_restarts": (0, 1_000_000),
    "start_grace_s": (0, TEN_YEARS),
    "stop_grace_s": (0, 3600),
    "deadline_s": (0.001, TEN_YEARS),
    "stall_s": (1, TEN_YEARS),
    "ttl_seconds": (0, TEN_YEARS),
}
WORLD = {"min": 1, "target": 1, "max": 10_000}


def outside(field: str) -> list[float]:
    bounds = option_bounds()[field]
    step = 1 if bounds.is_integer else 0.0005
    return [bounds.low - step, bounds.high + 1]


def in_python(field: str, value: float) -> object:
    section, _, part = field.rpartition(".")
    if section:
        return WorldSize(**{**WORLD, part: value})
    if field in Resources.__struct_fields__:
        return Resources(**{field: value})
    if field == "bench_require_gbps":
        return BenchSpec(mode="on-start", require_gbps=value)
    size = WorldSize(min=1, target=1, max=1)
    return TrainingSpec(name="a", command=["true"], world_size=size, **{field: value})


def on_wire(field: str, value: float) -> bytes:
    body: dict[str, Any] = {"name": "a", "command": ["true"], "worldSize": dict(WORLD)}
    place = body
    *sections, last = ON_WIRE[field].split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    return msgspec.json.encode(body)


def test_the_table_has_every_bound_there_is() -> None:
    assert {field: (b.low, b.high) for field, b in option_bounds().items()} == TABLE


@pytest.mark.parametrize("field", TABLE)
def test_just_outside_is_refused_in_python_and_over_http_in_the_same_words(field: str) -> None:
    for value in outside(field):
        with pytest.raises(ValidationError) as here:
            in_python(field, value)
        with pytest.raises(ValidationError) as there:
            decode(on_wire(field, value), TrainingSpec)
        assert (here.value.field, here.value.value) == (field, value)
        assert str(there.value) == str(here.value)
        assert here.value.expected == option_bounds()[field].expected
        assert rename_fields(there.value, ON_WIRE).field == ON_WIRE[field]


@pytest.mark.parametrize("field", TABLE)
def test_both_ends_are_accepted(field: str) -> None:
    ends = TABLE[field]
    for value in (ends[0], ends[1]) if not field.startswith("world_size") else (ends[0],):
        in_python(field, value)
        decode(on_wire(field, value), TrainingSpec)


@pytest.mark.parametrize("field", TABLE)
def test_both_schemas_say_the_same_numbers(field: str) -> None:
    low, high = TABLE[field]
    crd: Any = spec_schema()
    for part in ON_WIRE[field].split("."):
        crd = crd["properties"][part]
    parts = document(NATIVE, STREAMED)["components"]["schemas"]
    node: Any = {"$ref": "/TrainingSpec"}
    for part in ON_WIRE[field].split("."):
        node = parts[node["$ref"].rpartition("/")[2]]["properties"][part]
        node = next((kind for kind in node.get("anyOf", []) if kind != {"type": "null"}), node)
    assert (node["minimum"], node["maximum"]) == (low, high)
    assert crd["maximum"] == high
    assert crd["minimum"] == (0 if field == "deadline_s" else low)
    assert crd.get("exclusiveMinimum", False) == (field == "deadline_s")


def test_a_number_on_the_command_line_has_the_bounds_of_its_field() -> None:
    for _, option, kind, *_ in (row for rows in SPEC_OPTIONS.values() for row in rows):
        if kind not in (int, float):
            continue
        number = (IntField if kind is int else FloatField)(option)
        low, high = TABLE[option]
        assert number.convert(str(kind(high)), None, None) == high
        with pytest.raises(Exception, match="not in the range"):
            number.convert(str(kind(low - 1)), None, None)
        if high < 1_000_000:
            assert number._describe_range() == f"{low}<=x<={high}"


@pytest.mark.parametrize("field", field_bounds(kubernetes.KubernetesOptions))
def test_options_of_the_cluster_have_theirs(field: str) -> None:
    bounds = field_bounds(kubernetes.KubernetesOptions)[field]
    wire = dict(
        zip(
            kubernetes.KubernetesOptions.__struct_fields__,
            kubernetes.KubernetesOptions.__struct_encode_fields__,
            strict=True,
        )
    )
    for value in (bounds.low - 1, bounds.high + 1):
        with pytest.raises(ValidationError) as here:
            kubernetes.KubernetesOptions(**{field: value})
        with pytest.raises(ValidationError) as there:
            decode(msgspec.json.encode({wire[field]: value}), kubernetes.KubernetesOptions)
        assert str(there.value) == str(here.value)
        assert here.value.field == field


def test_a_query_is_refused_in_the_same_words() -> None:
    with pytest.raises(ValidationError, match="limit: 501 is not valid: expected a whole number"):
        decode(b'{"limit": 501}', ListQuery)


class Box(msgspec.Struct):
    sizes: list[Annotated[int, Meta(ge=1, le=3)]] = []
    named: dict[str, Annotated[int, Meta(ge=1, le=3)]] = {}
    open_ended: Annotated[int, Meta(ge=1)] = 1


def test_numbers_in_lists_are_named_and_others_have_the_words_of_the_decoder() -> None:
    with pytest.raises(ValidationError, match=r"sizes\[1\]: 4 is not valid: expected a whole numb"):
        decode(b'{"sizes": [1, 4]}', Box)
    with pytest.raises(ValidationError, match="expected `int` <= 3"):
        decode(b'{"named": {"a": 4}}', Box)
    with pytest.raises(ValidationError, match="expected `int` >= 1"):
        decode(b'{"open_ended": 0}', Box)


def test_bounds_of_annotations() -> None:
    assert bounds_of(int) is None
    assert bounds_of(RankCount) == Bounds(1, 10_000, is_integer=True)
    assert bounds_of(RankCount | None) == Bounds(1, 10_000, is_integer=True, is_optional=True)
    check_as("n", None, RankCount | None)
    for value in (None, True, 1.5, "1", float("nan")):
        with pytest.raises(ValidationError, match="n: .* expected a whole number from 1 to 10000"):
            check_as("n", value, RankCount)


class Inner(Model, frozen=True):
    mode: Literal["a", "b"] = "a"


class Options(Model, frozen=True):
    name: Annotated[str, Pattern("[a-z]+", "expected letters")] | None = None
    many: Annotated[str, Pattern("[a-z]+", "expected letters")] | list[str] = "x"
    size: Annotated[int, Meta(ge=1, le=9)] = 1
    words: dict[Annotated[str, Pattern("[A-Z]+", "expected capitals")], str] = {}
    inner: dict[str, Inner] = {}
    is_on: bool = False


@pytest.mark.parametrize(
    ("fields", "field", "expected"),
    [
        ({"name": "a b"}, "name", "expected letters"),
        ({"name": 7}, "name", "expected letters"),
        ({"name": "a\n"}, "name", "expected letters"),
        ({"many": "A"}, "many", "expected letters"),
        ({"many": ["a", 7]}, "many[1]", "expected text"),
        ({"size": 10}, "size", "from 1 to 9"),
        ({"words": {"a": "x"}}, "words", "expected capitals"),
        ({"words": {"A": 1}}, "words.A", "expected text"),
        ({"words": []}, "words", "expected names and values"),
        ({"inner": {"x": 1}}, "inner.x", "expected the fields of Inner: mode"),
        ({"inner": {"x": Inner(mode="c")}}, "inner.x.mode", "expected 'a' or 'b'"),  # type: ignore[arg-type]
        ({"is_on": 1}, "is_on", "expected True or False"),
    ],
)
def test_each_field_is_checked_against_its_type(
    fields: dict[str, Any], field: str, expected: str
) -> None:
    check_fields(Options())
    with pytest.raises(ValidationError, match=expected) as refused:
        check_fields(Options(**fields))
    assert refused.value.field == field
