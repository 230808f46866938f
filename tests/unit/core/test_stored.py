"""A status comes back from its stored form as it was, and the form is small for 10,000 ranks."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import ValidationError
from atoll.core.model import encode
from atoll.core.phase import Phase
from atoll.core.ranks import final_exits
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Exit, RankPhase, RankStatus, Status, Training, Wish
from atoll.core.stored import decode_status, decode_training, encode_training, fold

replace = msgspec.structs.replace
BEGIN = 1_800_000_000.0
NODE = "ip-10-{}-{}-{}.eu-west-1.compute.internal"
SCATTER = random.Random(1)


def suffix() -> str:
    return "".join(SCATTER.choices(string.ascii_lowercase + string.digits, k=5))


def rank_of(number: int, phase: RankPhase, **changes: Any) -> RankStatus:
    """As a cluster with a node for every rank shows it."""
    place = NODE.format(number // 65_536, number // 256 % 256, number % 256)
    known = RankStatus(
        rank=number,
        phase=phase,
        pod_name=f"big-training-5f1c3b1e-{number}-{suffix()}",
        node=place,
        region="eu-west-1",
        attempt=int(BEGIN) + number // 100,
        started_at=BEGIN + SCATTER.randrange(60),
    )
    return replace(known, **changes)


def scattered_s() -> float:
    return BEGIN + SCATTER.randrange(100_000_000) / 1000


def failed(number: int, *, is_each_different: bool) -> RankStatus:
    if not is_each_different:
        typo = Exit(code=127, at=BEGIN + 60, reason="CommandNotFound", message="pyhton")
        return rank_of(number, "Failed", exit=typo, message="x")
    ended = Exit(code=number, at=scattered_s(), reason="Error", failed_at=scattered_s())
    before = Exit(code=-number, at=scattered_s(), reason="Signal", signal=f"SIG{number % 64}")
    return rank_of(
        number,
        "Failed",
        exit=ended,
        previous=before,
        restarts=number,
        attempt=int(scattered_s()),
        started_at=scattered_s(),
        metered_s=scattered_s(),
    )


def over(ranks: list[RankStatus]) -> Status:
    status = Status(phase=Phase.FAILED, ranks=ranks)
    exits = final_exits(status, ranks[0])
    return replace(status, rank_exits=exits, root_cause=exits[0])


SIZES = {  # status, ranks, bytes at the most
    "running": (lambda n: Status(ranks=[rank_of(r, "Running") for r in range(n)]), 25),
    "ended alike": (lambda n: over([failed(r, is_each_different=False) for r in range(n)]), 25),
    "each different": (lambda n: over([failed(r, is_each_different=True) for r in range(n)]), 90),
}


@pytest.mark.parametrize("ranks", [2_000, 10_000])
@pytest.mark.parametrize("case", SIZES)
def test_every_rank_fits_and_comes_back(
    case: str, ranks: int, record_property: Callable[[str, object], None]
) -> None:
    make, bytes_a_rank = SIZES[case]
    status = make(ranks)
    stored = encode(fold(status))
    record_property("bytes", len(stored))
    record_property("bytes_in_a_list", len(encode(status)))
    assert len(stored) < ranks * bytes_a_rank + 1000
    assert decode_status(stored) == status


def test_an_end_is_stored_once() -> None:
    ended = Exit(code=127, at=5.0, reason="CommandNotFound", message="no pyhton here")
    ranks = [RankStatus(rank=n, phase="Failed", attempt=0, exit=ended) for n in range(2_000)]
    stored = encode(fold(over(ranks)))
    # Once for rank 0, once for those that fell after it, once in the root cause.
    assert stored.count(b"no pyhton here") == 3
    assert stored.count(b"CommandNotFound") == 3


def test_a_person_reads_which_ranks_ended_how() -> None:
    ended = Exit(code=127, at=5.0, reason="CommandNotFound")
    ranks = [
        RankStatus(rank=n, phase="Failed", attempt=0, exit=ended if n != 7 else None)
        for n in range(10)
    ]
    stored = msgspec.json.decode(encode(fold(over(ranks))))
    assert stored["ranks"][0]["ranks"] == "0-6, 8-9"
    assert stored["rankExits"] == [
        {"ranks": "0", "exitCode": 127, "terminationReason": "CommandNotFound"},
        {
            "ranks": "1-6, 8-9",
            "exitCode": 127,
            "terminationReason": "CommandNotFound",
            "collateral": True,
        },
    ]


def exits() -> st.SearchStrategy[Exit]:
    times = st.floats(0, 2e9) | st.integers(0, 10**12).map(lambda n: n / 1000)
    return st.builds(
        Exit,
        code=st.none() | st.integers(),
        at=times,
        reason=st.text(max_size=3),
        signal=st.none() | st.text(max_size=3),
        is_stopped=st.booleans(),
        failed_at=st.none() | times,
        message=st.text(max_size=3),
        log_tail=st.lists(st.text(max_size=3), max_size=2),
        is_backends_word=st.booleans(),
    )


def ranks_of(numbers: set[int]) -> st.SearchStrategy[list[RankStatus]]:
    text = st.text(max_size=3)
    rows = [
        st.builds(
            RankStatus,
            rank=st.just(number),
            phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Stopped"]),
            pod_name=text,
            node=st.none() | text,
            provider=st.none() | text,
            region=st.none() | text,
            restarts=st.integers(0, 3),
            message=text,
            attempt=st.integers(-1, 3),
            started_at=st.none() | st.floats(0, 2e9),
            exit=st.none() | exits(),
            previous=st.none() | exits(),
            metered_s=st.floats(0, 2e9),
            missing_since=st.none() | st.floats(0, 2e9),
        )
        for number in sorted(numbers)
    ]
    return st.tuples(*rows).map(list)


@st.composite
def statuses(draw: st.DrawFn) -> Status:
    ranks = draw(ranks_of(draw(st.sets(st.integers(0, 9), max_size=5))))
    retired = draw(ranks_of(draw(st.sets(st.integers(5, 14), max_size=4))))
    redo = draw(st.dictionaries(st.integers(0, 9), st.integers(0, 3)))
    status = Status(
        ranks=ranks, retired=retired, redo=redo, asked=Wish(version=1, size=3, redo=redo)
    )
    kind = draw(st.sampled_from(["goes on", "over", "of another release"]))
    if kind == "goes on":
        return status
    exits = final_exits(status, next((r for r in ranks if r.exit), None))
    changed = [replace(e, host="elsewhere") for e in exits]
    return replace(status, rank_exits=exits if kind == "over" else changed)


@given(statuses())
@settings(max_examples=40)
def test_a_status_comes_back_as_it_was(status: Status) -> None:
    assert decode_status(encode(fold(status))) == status


@given(statuses())
@settings(max_examples=40)
def test_a_list_of_ranks_that_an_older_release_wrote_is_read(status: Status) -> None:
    assert decode_status(encode(status)) == status


def test_a_training_comes_back_as_it_was() -> None:
    spec = TrainingSpec(name="a", command=["x"], world_size=WorldSize(min=1, target=2, max=3))
    one = Training(
        namespace="n",
        uid="u",
        spec=spec,
        status=over([failed(0, is_each_different=True)]),
        generation=4,
        resource_version=5,
        created_at=6.5,
        deletion_requested_at=7.5,
    )
    assert decode_training(encode_training(one)) == one
    assert decode_training(encode(one)) == one


def test_columns_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="rankColumns"):
        decode_status(b'{"ranks":[{"ranks":"0-99999999"}],"exits":[],"rankColumns":{}}')
