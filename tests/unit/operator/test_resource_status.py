"""The status of an object is read back as it was, fits, and tells a person which ranks did what."""

from __future__ import annotations

import base64
import random
import string
import zlib
from typing import Any

import msgspec
import pytest

from atoll.core.errors import ValidationError
from atoll.core.model import encode
from atoll.core.phase import Phase
from atoll.core.ranks import final_exits
from atoll.core.status import DesiredState, Exit, RankPhase, RankStatus, Status
from atoll.operator.resource import (
    MAX_GROUPS,
    MAX_RANK_BYTES,
    fold_status,
    unfold_status,
)

replace = msgspec.structs.replace
BEGIN = 1_800_000_000.0
NODE = "ip-10-{}-{}-{}.eu-west-1.compute.internal"
SCATTER = random.Random(1)


def suffix() -> str:
    return "".join(SCATTER.choices(string.ascii_lowercase + string.digits, k=5))


def rank_of(number: int, phase: RankPhase, **changes: Any) -> RankStatus:
    """As a cluster with a node for every rank shows it."""
    record_store = NODE.format(number // 65_536, number // 256 % 256, number % 256)
    known = RankStatus(
        rank=number,
        phase=phase,
        pod_name=f"big-training-5f1c3b1e-{number}-{suffix()}",
        node=record_store,
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
        previous_exit=before,
        restarts=number,
        attempt=int(scattered_s()),
        started_at=scattered_s(),
        metered_s=scattered_s(),
    )


def over(ranks: list[RankStatus]) -> Status:
    status = Status(phase=Phase.FAILED, ranks=ranks)
    exits = final_exits(status, ranks[0])
    return replace(status, rank_exits=exits, root_cause=exits[0])


def stored_form(status: Status) -> dict[str, Any]:
    return msgspec.json.decode(encode(fold_status(status)))  # type: ignore[no-any-return]


STATUSES = {
    "running": lambda n: Status(ranks=[rank_of(r, "Running") for r in range(n)]),
    "ended alike": lambda n: over([failed(r, is_each_different=False) for r in range(n)]),
    "each different": lambda n: over([failed(r, is_each_different=True) for r in range(n)]),
}


# etcd takes 1.5 MiB, in which spec, events and attempts need room, too.
MAX_BYTES = {"running": 300_000, "ended alike": 400_000, "each different": 1_300_000}


@pytest.mark.parametrize("case", STATUSES)
def test_ten_thousand_ranks_fit_into_an_object_and_are_read_back(case: str) -> None:
    status = STATUSES[case](10_000)
    stored = stored_form(status)
    assert len(encode(stored)) < MAX_BYTES[case]
    assert unfold_status(stored) == status


def test_a_person_reads_which_ranks_ended_how() -> None:
    ended = Exit(code=127, at=5.0, reason="CommandNotFound")
    ranks = [
        RankStatus(rank=n, phase="Failed", attempt=0, exit=ended if n != 7 else None)
        for n in range(10)
    ]
    stored = stored_form(over(ranks))
    assert stored["ranks"] == [{"ranks": "0-9", "phase": "Failed"}]
    alike = {"exitCode": 127, "terminationReason": "CommandNotFound"}
    assert stored["rankExits"] == [
        {"ranks": "0", **alike},
        {"ranks": "1-6, 8-9", **alike, "collateral": True},
    ]


def test_a_summary_of_many_different_ranks_names_the_rest_together() -> None:
    ranks = [rank_of(n, "Pending", message=f"waits for {n}") for n in range(MAX_GROUPS + 5)]
    groups = stored_form(Status(ranks=ranks))["ranks"]
    assert len(groups) == MAX_GROUPS + 1
    assert groups[-1] == {
        "ranks": f"{MAX_GROUPS}-{MAX_GROUPS + 4}",
        "message": "others: see `atoll status`",
    }


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
        stack=dice.choice([[], ["train.py:3 in f"]]),
        is_from_backend=dice.random() < 0.3,
    )


def scattered_rank(number: int, dice: random.Random) -> RankStatus:
    return RankStatus(
        rank=number,
        phase=dice.choice(["Pending", "Running", "Succeeded", "Failed", "Stopped"]),
        pod_name=dice.choice(["", f"a-{number}-x", "a-1-y", "-", "*", "{rank}", "a b"]),
        node=dice.choice([None, "", "node-1", "node-11", "-"]),
        pid=dice.choice([None, 1, 4711]),
        provider=dice.choice([None, "", "aws"]),
        region=dice.choice([None, "eu"]),
        restarts=dice.randrange(3),
        message=dice.choice(["", "starting", "exited with code 1"]),
        attempt=dice.randrange(-1, 3),
        started_at=dice.choice([None, dice.random() * 2e9, 0.0]),
        exit=scattered_exit(dice),
        previous_exit=scattered_exit(dice),
        metered_s=dice.choice([0.0, dice.random() * 100]),
        missing_since=dice.choice([None, 1.25]),
        is_stopping=dice.random() < 0.3,
    )


def scattered_status(seed: int) -> Status:
    dice = random.Random(seed)
    numbers, beyond = (
        [n for n in range(a, b) if dice.random() < 0.6] for a, b in ((0, 9), (6, 14))
    )
    discarded_attempts = {n: dice.randrange(3) for n in numbers}
    status = Status(
        ranks=[scattered_rank(n, dice) for n in numbers],
        removed_ranks=[scattered_rank(n, dice) for n in beyond],
        discarded_attempts=discarded_attempts,
        desired=dice.choice(
            [None, DesiredState(version=1, size=3, discarded_attempts=discarded_attempts)]
        ),
    )
    exits = final_exits(status, next((r for r in status.ranks if r.exit), None))
    changed = [replace(e, host="elsewhere") for e in exits]
    return replace(status, rank_exits=dice.choice([[], exits, changed]))


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_a_status_comes_back_as_it_was(first: int) -> None:
    for seed in range(first, first + 100):
        status = scattered_status(seed)
        assert unfold_status(stored_form(status)) == status, seed


def test_every_field_of_a_rank_and_of_an_end_is_stored() -> None:
    """A field that is added has to be added to the stored form, and to the scattered statuses."""
    ranks = [r for seed in range(100) for r in scattered_status(seed).ranks]
    ends = [r.exit for r in ranks if r.exit is not None]
    for rows in (ranks, ends):
        kind = type(rows[0])
        for field in msgspec.structs.fields(kind):
            values = {repr(getattr(row, field.name)) for row in rows}
            assert len(values) > 1, f"{kind.__name__}.{field.name} does not vary here"


@pytest.mark.parametrize(
    "data", ["rubbish", "AAAA", "eJw=", base64.b64encode(zlib.compress(b"[]")).decode()]
)
def test_rank_data_that_cannot_be_read_is_refused_by_name(data: str) -> None:
    with pytest.raises(ValidationError, match="rankData"):
        unfold_status({"phase": "failed", "rankData": data})


def test_rank_data_that_inflates_without_end_is_refused() -> None:
    bomb = base64.b64encode(zlib.compress(b" " * (MAX_RANK_BYTES + 1))).decode()
    with pytest.raises(ValidationError, match="more than"):
        unfold_status({"rankData": bomb})
