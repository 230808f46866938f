"""A status comes back from its stored form as it was, and the form is small for 10,000 ranks."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

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


def scattered_exit(dice: random.Random) -> Exit | None:
    if dice.random() < 0.3:
        return None
    return Exit(
        code=dice.choice([None, 0, 1, -9, 2**31]),
        at=dice.choice([dice.random() * 2e9, 1.5, BEGIN]),
        reason=dice.choice(["", "Error", "é"]),
        signal=dice.choice([None, "SIGKILL"]),
        is_stopped=dice.random() < 0.3,
        failed_at=dice.choice([None, dice.random() * 2e9]),
        message=dice.choice(["", "out of memory", "a b*2"]),
        log_tail=dice.choice([[], ["x"], ["", "-"]]),
        is_backends_word=dice.random() < 0.3,
    )


def scattered_rank(number: int, dice: random.Random) -> RankStatus:
    return RankStatus(
        rank=number,
        phase=dice.choice(["Pending", "Running", "Succeeded", "Failed", "Stopped"]),
        pod_name=dice.choice(["", f"a-{number}-x", "a-1-y", "-", "*", "{rank}", "a b"]),
        node=dice.choice([None, "", "node-1", "node-11", "-"]),
        provider=dice.choice([None, "", "aws"]),
        region=dice.choice([None, "eu"]),
        restarts=dice.randrange(3),
        message=dice.choice(["", "starting", "exited with code 1"]),
        attempt=dice.randrange(-1, 3),
        started_at=dice.choice([None, dice.random() * 2e9, 0.0]),
        exit=scattered_exit(dice),
        previous=scattered_exit(dice),
        metered_s=dice.choice([0.0, dice.random() * 100]),
        missing_since=dice.choice([None, 1.25]),
        is_stopping=dice.random() < 0.3,
    )


def scattered_status(seed: int) -> Status:
    dice = random.Random(seed)
    numbers, beyond = (
        [n for n in range(a, b) if dice.random() < 0.6] for a, b in ((0, 9), (6, 14))
    )
    redo = {n: dice.randrange(3) for n in numbers}
    status = Status(
        ranks=[scattered_rank(n, dice) for n in numbers],
        retired=[scattered_rank(n, dice) for n in beyond],
        redo=redo,
        asked=dice.choice([None, Wish(version=1, size=3, redo=redo)]),
    )
    exits = final_exits(status, next((r for r in status.ranks if r.exit), None))
    changed = [replace(e, host="elsewhere") for e in exits]
    return replace(status, rank_exits=dice.choice([[], exits, changed]))


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_a_status_comes_back_as_it_was(first: int) -> None:
    for seed in range(first, first + 100):
        status = scattered_status(seed)
        assert decode_status(encode(fold(status))) == status, seed


def test_every_field_of_a_rank_and_of_an_end_is_stored() -> None:
    """A field that is added has to be added to the stored form, and to the scattered statuses."""
    ranks = [r for seed in range(100) for r in scattered_status(seed).ranks]
    ends = [r.exit for r in ranks if r.exit is not None]
    for rows in (ranks, ends):
        kind = type(rows[0])
        for field in msgspec.structs.fields(kind):
            values = {repr(getattr(row, field.name)) for row in rows}
            assert len(values) > 1, f"{kind.__name__}.{field.name} does not vary here"


def test_a_list_of_ranks_that_an_older_release_wrote_is_read() -> None:
    for seed in range(100):
        status = scattered_status(seed)
        assert decode_status(encode(status)) == status, seed


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
