"""A page is made on the server, names the first failure, and is bounded for thousands of ranks."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from atoll.core.clock import Now
from atoll.core.html import training_html
from atoll.core.model import encode
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import (
    Exit,
    RankExit,
    RankStatus,
    Resize,
    Status,
    Training,
    WorldPoint,
    WorldStatus,
)
from atoll.server.ui.page import page_of

NOW = 2_000_000.0


def world(count: int, **status: object) -> Training:
    size = WorldSize(min=1, target=count, max=count)
    spec = TrainingSpec(name="a", command=["true"], world_size=size, env={"KEY": "secret"})
    ranks = [
        RankStatus(rank=n, phase="Running", node=f"node-{n % 4}", started_at=NOW - 50, attempt=0)
        for n in range(count)
    ]
    base = Status(phase=Phase.READY, world=WorldStatus.of(count, size), ranks=ranks)
    return Training(
        namespace="n", uid="u", spec=spec, status=msgspec.structs.replace(base, **status)
    )


def test_a_failure_is_told_in_order_with_the_first_one_marked() -> None:
    first = RankExit(
        rank=2,
        exit_code=7,
        termination_reason="Error",
        host="node-2",
        started_at=NOW - 50,
        ended_at=NOW - 5,
        log_tail=["\x1b[31mboom"],
    )
    others = [
        RankExit(
            rank=n, exit_code=143, termination_reason="Stopped", collateral=True, ended_at=NOW - 4
        )
        for n in (0, 1, 3)
    ]
    bad = world(
        4,
        phase=Phase.FAILED,
        root_cause=first,
        rank_exits=[first, *others],
        started_at=NOW - 50,
        last_resize=Resize(from_target=2, to_target=4, at=NOW - 45),
    )
    page = page_of(bad, Now.at(NOW))
    assert page.cause is not None
    assert page.cause.headline == "Rank 2 exited with code 7"
    assert page.cause.before == "scaled 2 → 4, 40s earlier"
    assert page.cause.tail == ["\\x1b[31mboom"]
    assert [line.text for line in page.timeline][-1] == "Ranks 0-1, 3 were stopped by atoll"
    assert page.ranks[0].message == "exited with code 143: stopped by atoll"
    assert [line.is_first for line in page.timeline] == [False, False, True, False]
    assert page.tally == {"failed": 1, "stopped by atoll": 3, "exited 0": 0, "unknown": 0}
    assert [line.is_first for line in page.ranks] == [False, False, True, False]


def test_ranks_that_failed_alike_are_not_called_stopped() -> None:
    exits = [
        RankExit(
            rank=rank,
            exit_code=1,
            termination_reason="Error",
            message="ValueError: oops",
            collateral=rank == 0,
            ended_at=NOW - 5,
        )
        for rank in range(2)
    ]
    ranks = [RankStatus(rank=rank, phase="Failed", attempt=0) for rank in range(2)]
    bad = world(2, phase=Phase.FAILED, root_cause=exits[1], rank_exits=exits, ranks=ranks)
    page = page_of(bad, Now.at(NOW))
    assert page.cause is not None
    assert page.cause.headline == "Both ranks failed the same way: ValueError: oops (rank 1 first)"
    assert [line.text for line in page.timeline] == [page.cause.headline]
    assert [line.phase for line in page.ranks] == ["Failed", "Failed"]
    assert {line.message for line in page.ranks} == {"exited with code 1: ValueError: oops"}
    assert page.tally == {"failed": 2, "stopped by atoll": 0, "exited 0": 0, "unknown": 0}
    assert "stopped" not in encode(page.ranks).decode().lower()
    assert "stopped" not in training_html(bad).lower()


def test_lists_of_ranks_that_are_cut_say_how_many_more() -> None:
    ranks = [
        RankStatus(rank=rank, phase="Failed", node="one", attempt=0, message=f"m{rank}")
        for rank in range(200)
    ]
    first = RankExit(rank=0, exit_code=1, termination_reason="Error", host="one", ended_at=NOW)
    exits = [
        first,
        *(replace(first, rank=n, exit_code=n, collateral=True) for n in range(2, 120, 2)),
    ]
    bad = world(200, phase=Phase.FAILED, root_cause=first, rank_exits=exits, ranks=ranks)
    page = page_of(bad, Now.at(NOW))
    assert page.cause is not None
    assert page.cause.neighbours == "ranks 1-199"
    assert (len(page.ranks), page.odd_ranks) == (50, 200)
    assert page.timeline[-1].text == "and 52 more: see the events"


def test_an_exit_that_nobody_knows_is_unknown_and_not_zero() -> None:
    lost = RankExit(rank=0, exit_code=None, termination_reason="HostLost", ended_at=NOW)
    page = page_of(world(1, phase=Phase.FAILED, root_cause=lost, rank_exits=[lost]), Now.at(NOW))
    assert page.tally["unknown"] == 1
    assert page.cause is not None
    assert page.cause.exit.startswith("unknown")


def test_a_thousand_ranks_are_cells_and_their_exceptions() -> None:
    large = world(1_000)
    odd = Exit(code=1, at=NOW, reason="Error")
    ranks = list(large.status.ranks)
    ranks[700] = msgspec.structs.replace(ranks[700], phase="Failed", exit=odd)
    ranks[3] = msgspec.structs.replace(ranks[3], restarts=2, previous_exit=odd)
    page = page_of(
        msgspec.structs.replace(large, status=msgspec.structs.replace(large.status, ranks=ranks)),
        Now.at(NOW),
    )
    assert len(page.cells) == 1_000
    assert page.cells[700] == "F"
    assert [line.rank for line in page.ranks] == [700, 3]
    assert len(encode(page)) < 30_000


def test_no_value_of_a_variable_is_sent() -> None:
    assert b"secret" not in encode(page_of(world(2), Now.at(NOW)))


def test_resizes_are_told_and_restarted_ranks_have_a_letter_of_their_own() -> None:
    points = [WorldPoint(at=float(at), target=t, ready=0) for at, t in enumerate((2, 2, 4, 3))]
    ranks = [RankStatus(rank=r, phase="Running", restarts=int(r == 3)) for r in range(200)]
    page = page_of(world(200, ranks=ranks, world_size_history=points), Now.at(NOW, NOW))
    assert [(each.from_target, each.to_target) for each in page.resizes] == [(2, 4), (4, 3)]
    assert page.cells[:5] == "RRRrR"


def test_several_ranks_were_killed_and_a_narrow_column_says_it_short() -> None:
    killed = Exit(code=137, at=NOW - 9, reason="OOMKilled", signal="SIGKILL")
    ranks = [
        RankStatus(rank=r, phase="Failed", exit=killed, previous_exit=killed, restarts=1)
        for r in range(3)
    ]
    page = page_of(world(3, ranks=ranks), Now.at(NOW, NOW))
    assert [line.short for line in page.ranks] == ["exit 137 OOMKilled"] * 3
    [again] = [each.text for each in page.timeline if "again" in each.text]
    assert again.startswith("Ranks 0-2 were killed by SIGKILL")
    assert again.endswith("and were started again")
