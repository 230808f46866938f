"""What travels comes back as it was, and what is refused is refused with a name."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core import errors
from atoll.core.errors import ValidationError
from atoll.core.model import decode, encode
from atoll.core.phase import Phase
from atoll.core.problem import Problem, error_of, problem_of
from atoll.core.spec import (
    BenchSpec,
    ProviderFilter,
    RendezvousSpec,
    Resources,
    Source,
    TrainingSpec,
    WorldSize,
)
from atoll.core.status import RankExit, RankStatus, Status, Training, WorldStatus

words = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)
names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
env = st.dictionaries(st.from_regex(r"[XYZ][A-Z0-9_]{0,8}", fullmatch=True), words, max_size=3)
sizes = st.tuples(*[st.integers(1, 10_000)] * 3).map(sorted)
finite = st.floats(0, 1e9, allow_nan=False)


@st.composite
def specs(draw: st.DrawFn) -> TrainingSpec:
    low, middle, high = draw(sizes)
    is_shipped = draw(st.booleans())
    return TrainingSpec(
        name=draw(names),
        world_size=WorldSize(min=low, target=middle, max=high),
        command=None if is_shipped else ["x", *draw(st.lists(words, max_size=3))],
        source=Source(kind="script", content=draw(st.binary(min_size=1))) if is_shipped else None,
        args=draw(st.lists(words, max_size=3)),
        image=draw(st.none() | words.filter(bool)),
        env=draw(env),
        nccl_env=draw(env),
        resources=Resources(
            cpu=draw(st.none() | st.sampled_from(["1", "500m", "1.5"])),
            gpu_count=draw(st.integers(0, 1024)),
            gpu_models=draw(st.lists(words, max_size=2)),
        ),
        provider_filter=ProviderFilter(
            include=draw(st.none() | st.just(["a", "b"])), exclude=draw(st.just(["c"]))
        ),
        topology_spread=draw(st.sampled_from(["pack", "provider-aware", "region-aware", "none"])),
        bench=BenchSpec(
            mode=draw(st.sampled_from(["off", "on-start"])),
            placement=draw(st.sampled_from(["preferred", "strict"])),
        ),
        rendezvous=RendezvousSpec(
            backend=draw(st.sampled_from(["etcd-v2", "c10d", "static"])),
            uri=draw(st.none() | st.just("s3://bucket/run")),
        ),
        mesh=draw(st.booleans()),
        max_restarts=draw(st.integers(0, 1_000_000)),
        stop_grace_s=draw(st.floats(0, 3600)),
        ttl_seconds=draw(st.none() | st.integers(0, 10**6)),
        executor=draw(names),
    )


ranks = st.builds(
    RankStatus,
    rank=st.integers(0, 9999),
    phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Stopped"]),
    message=words,
    restarts=st.integers(0, 99),
    started_at=st.none() | finite,
)
exits = st.builds(
    RankExit,
    rank=st.integers(0, 9999),
    exit_code=st.none() | st.integers(-255, 255),
    termination_reason=words,
    collateral=st.booleans(),
    log_tail=st.lists(words, max_size=3),
)
statuses = st.builds(
    Status,
    phase=st.sampled_from(list(Phase)),
    message=words,
    observed_generation=st.integers(0, 10**9),
    world=st.builds(WorldStatus, ready=st.integers(0, 99), below_minimum=st.booleans()),
    ranks=st.lists(ranks, max_size=3),
    rank_exits=st.lists(exits, max_size=3),
    root_cause=st.none() | exits,
)
trainings = st.builds(
    Training,
    namespace=names,
    uid=names,
    spec=specs(),
    status=statuses,
    generation=st.integers(1, 10**9),
    resource_version=st.integers(0, 2**53),
    created_at=finite,
)


@settings(deadline=None)
@given(trainings)
def test_a_training_comes_back_as_it_was(training: Training) -> None:
    assert decode(encode(training), Training) == training


@settings(deadline=None)
@given(trainings)
def test_the_wire_is_camel_case_with_defaults_left_out(training: Training) -> None:
    raw = msgspec.json.decode(encode(training))
    for name in _keys(raw, user_named={"env", "nccl_env", "nccEnv", "nccl", "ncclEnv"}):
        assert "_" not in name
    assert ("rootCause" in raw.get("status", {})) == (training.status.root_cause is not None)


@settings(deadline=None)
@given(specs(), st.sampled_from(["", "bench", "worldSize", "resources", "rendezvous"]))
def test_an_unknown_field_of_a_spec_is_refused_by_name(spec: TrainingSpec, where: str) -> None:
    raw = msgspec.json.decode(encode(spec))
    (raw.setdefault(where, {}) if where else raw)["surprise"] = 1
    with pytest.raises(ValidationError) as caught:
        decode(msgspec.json.encode(raw), TrainingSpec)
    assert caught.value.field.endswith("surprise") or where in ("bench", "rendezvous")


@settings(deadline=None)
@given(trainings)
def test_an_unknown_field_of_a_status_is_accepted(training: Training) -> None:
    raw = msgspec.json.decode(encode(training))
    raw.setdefault("status", {})["surprise"] = {"a": 1}
    raw["surprise"] = 1
    assert decode(msgspec.json.encode(raw), Training) == training


@settings(deadline=None)
@given(st.binary(max_size=200) | words.map(str.encode))
def test_rubbish_is_refused_and_nothing_else_happens(body: bytes) -> None:
    with pytest.raises(ValidationError):
        decode(body, TrainingSpec)


made_errors = st.one_of(
    st.builds(errors.ValidationError, words, st.integers() | words, words),
    st.builds(errors.NotFound, words, words),
    st.builds(errors.Gone, st.integers(0, 10**9), st.integers(0, 10**9)),
    st.builds(errors.Conflict, words),
    st.builds(errors.Denied, words),
    st.builds(errors.UDTerminalState, st.sampled_from(["failed"]), st.none() | st.integers(1, 9)),
    st.builds(errors.WorldSizeOutOfBounds, *[st.integers(-9, 99)] * 3),
    st.builds(errors.Temporary, words, st.floats(0, 100)),
    st.builds(errors.Permanent, words),
)


@given(made_errors, st.integers(400, 599))
def test_an_error_comes_back_as_the_same_error(error: errors.AtollError, status: int) -> None:
    back = error_of(decode(encode(problem_of(error, status)), Problem))
    assert type(back) is type(error)
    assert str(back) == str(error)
    for name in set(vars(error)) - {"value"}:
        assert getattr(back, name) == getattr(error, name)


def _keys(value: object, user_named: set[str]) -> list[str]:
    if isinstance(value, dict):
        own = list(value)
        return own + [
            key
            for name, inner in value.items()
            if name not in user_named
            for key in _keys(inner, user_named)
        ]
    if isinstance(value, list):
        return [key for inner in value for key in _keys(inner, user_named)]
    return []
