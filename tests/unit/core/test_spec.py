"""Bad input is refused with the field, the value and what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.core.errors import TooLarge, ValidationError, abbreviate
from atoll.core.model import decode, encode
from atoll.core.spec import (
    MAX_SPEC_BYTES,
    BenchSpec,
    ProviderFilter,
    RendezvousSpec,
    Resources,
    Source,
    TrainingSpec,
    WorldSize,
    check_spec_size,
)
from atoll.core.status import Training

WORLD = WorldSize(min=1, target=2, max=3)


def spec(**changes: Any) -> TrainingSpec:
    return TrainingSpec(**{"name": "a", "command": ["true"], "world_size": WORLD, **changes})


BAD: list[tuple[str, Any]] = [
    ("name", lambda: spec(name="ä")),
    ("name", lambda: spec(name="a/b")),
    ("name", lambda: spec(name="..")),
    ("name", lambda: spec(name="-a")),
    ("name", lambda: spec(name="a" * 201)),
    ("display_name", lambda: spec(display_name="a\n")),
    ("labels", lambda: spec(labels=["a"])),
    ("labels", lambda: spec(labels={"a=b": "c"})),
    ("labels.a", lambda: spec(labels={"a": 1})),
    ("settings", lambda: spec(settings={"": 1})),
    ("settings", lambda: spec(settings={str(n): n for n in range(201)})),
    ("settings.lr", lambda: spec(settings={"lr": float("nan")})),
    ("settings.lr", lambda: spec(settings={"lr": [1]})),
    ("settings.n", lambda: spec(settings={"n": 10**30})),
    ("name", lambda: spec(name="")),
    ("name", lambda: spec(name="a\n")),
    ("name", lambda: spec(name=7)),
    ("world_size", lambda: spec(world_size=4)),
    ("world_size.min", lambda: WorldSize(min=0, target=1, max=1)),
    ("world_size.min", lambda: WorldSize(min=2, target=1, max=3)),
    ("world_size.target", lambda: WorldSize(min=1, target=4, max=3)),
    ("world_size.target", lambda: WorldSize(min=1, target=True, max=3)),
    ("world_size.max", lambda: WorldSize(min=1, target=1, max=10**9)),
    ("command", lambda: spec(command=None)),
    ("command", lambda: spec(command=[])),
    ("command", lambda: spec(command=[""])),
    ("command", lambda: spec(command="true")),
    ("command[1]", lambda: spec(command=["a", 1])),
    ("command[0]", lambda: spec(command=["a\0"])),
    ("command[1]", lambda: spec(command=["a", "\udcff"])),
    ("env.A", lambda: spec(env={"A": "\udcff"})),
    ("working_dir", lambda: spec(working_dir="/\udcff")),
    ("image", lambda: spec(image="\udcff")),
    ("source.filename", lambda: Source(kind="script", content=b"x", filename="\udcff")),
    ("source.directory", lambda: Source(kind="script", content=b"x", directory="/\udcff")),
    ("command", lambda: spec(source=Source(kind="script", content=b"x"))),
    ("source", lambda: Source(kind="script", content=b"")),
    ("source.filename", lambda: Source(kind="script", content=b"x", filename="../x")),
    ("args", lambda: spec(args="x")),
    ("env", lambda: spec(env={"1A": "x"})),
    ("env.A", lambda: spec(env={"A": 1})),
    ("env.RANK", lambda: spec(env={"RANK": "1"})),
    ("env.ATOLL_X", lambda: spec(env={"ATOLL_X": "1"})),
    ("nccl_env", lambda: spec(nccl_env=[])),
    ("working_dir", lambda: spec(working_dir="relative")),
    ("image", lambda: spec(image="")),
    ("cpu", lambda: Resources(cpu="lots")),
    ("memory", lambda: Resources(memory="4 GB")),
    ("gpu_count", lambda: Resources(gpu_count=-1)),
    ("min_gpu_memory_gb", lambda: Resources(min_gpu_memory_gb=0)),
    ("provider_filter.include", lambda: ProviderFilter(include=[])),
    ("provider_filter.exclude", lambda: ProviderFilter(include=["a"], exclude=["a"])),
    ("topology_spread", lambda: spec(topology_spread="everywhere")),
    ("bench", lambda: BenchSpec(mode="always")),
    ("bench_placement", lambda: BenchSpec(mode="on-start", placement="loose")),
    ("bench_require_gbps", lambda: BenchSpec(mode="on-start", require_gbps=-1.0)),
    ("rendezvous_backend", lambda: RendezvousSpec(backend="zookeeper")),
    ("rendezvous_uri", lambda: RendezvousSpec(uri="ftp://x")),
    ("run_id", lambda: spec(run_id="")),
    ("run_id", lambda: spec(run_id="../other")),
    ("run_id", lambda: spec(run_id="a" * 81)),
    ("run_id", lambda: spec(run_id=7)),
    ("rendezvous_uri", lambda: RendezvousSpec(uri="memory://x")),
    ("max_restarts", lambda: spec(max_restarts=-1)),
    ("max_restarts", lambda: spec(max_restarts=1.5)),
    ("start_grace_s", lambda: spec(start_grace_s=float("nan"))),
    ("stop_grace_s", lambda: spec(stop_grace_s=1e9)),
    ("deadline_s", lambda: spec(deadline_s=0)),
    ("ttl_seconds", lambda: spec(ttl_seconds=-1)),
    ("executor", lambda: spec(executor="a b")),
    ("mesh", lambda: spec(mesh="yes")),
]


@pytest.mark.parametrize(("field", "make"), BAD, ids=[f"{i}-{f}" for i, (f, _) in enumerate(BAD)])
def test_bad_values_are_named(field: str, make: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        make()
    assert caught.value.field == field
    assert caught.value.expected


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"name":"a","worldSize":{"min":1,"target":1,"max":1},"comand":["x"]}', "comand"),
        (b'{"name":"a","command":["x"]}', "worldSize"),
        (b'{"name":"a","worldSize":{"min":1,"target":"1","max":1}}', "worldSize.target"),
        (
            b'{"name":"a","worldSize":{"min":2,"target":1,"max":1},"command":["x"]}',
            "world_size.min",
        ),
        (b"[1]", "body"),
        (b"{", "body"),
    ],
)
def test_bad_json_is_named(body: bytes, field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        decode(body, TrainingSpec)
    assert caught.value.field == field


def test_the_wire_is_camel_case_with_defaults_left_out() -> None:
    assert encode(spec(max_restarts=2)) == (
        b'{"name":"a","worldSize":{"min":1,"target":2,"max":3},"command":["true"],"maxRestarts":2}'
    )


def test_a_placement_is_not_looked_at_while_bench_is_off() -> None:
    assert BenchSpec(mode="off", placement="anything").mode == "off"


def test_only_a_strict_placement_is_on_the_wire() -> None:
    assert b"placement" not in encode(BenchSpec(mode="on-start"))
    assert b'"placement":"strict"' in encode(BenchSpec(mode="on-start", placement="strict"))


def test_a_record_that_names_no_executor_was_made_for_this_machine() -> None:
    spec = TrainingSpec(name="a", world_size=WorldSize(min=1, target=1, max=1), command=["true"])
    old = Training(namespace="n", uid="u", spec=spec)
    assert b"executor" not in encode(old)
    assert decode(encode(old), Training).executor == "local"


def test_the_size_of_a_spec_is_bounded_without_its_source() -> None:
    world = WorldSize(min=1, target=1, max=1)
    large = Source(kind="script", content=b"#" * 2 * MAX_SPEC_BYTES)
    check_spec_size(TrainingSpec(name="a", world_size=world, source=large))
    few = TrainingSpec(name="a", world_size=world, command=["x"], args=["x" * (2**20 - 2000)])
    check_spec_size(few)
    many = TrainingSpec(name="a", world_size=world, command=["x"], env={"A": "x" * 2**20})
    with pytest.raises(TooLarge) as refused:
        check_spec_size(many)
    assert refused.value.field == "env"
    assert "1048576" in str(refused.value)


def test_a_refusal_of_a_huge_value_shows_its_beginning_only() -> None:
    class Huge(str):
        def __repr__(self) -> str:
            raise AssertionError("all of it was shown")

    for value in (Huge("x" * 1000), [Huge("y" * 1000)] * 1000, {"a": Huge("z" * 1000)}):
        assert len(abbreviate(value)) <= 80
    assert abbreviate([1, 2]) == "[1, 2]"
