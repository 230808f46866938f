"""Rows say what matters, are filtered and sorted on the server, and are cheap for thousands."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from atoll.controller.informer import Informer
from atoll.core.errors import ValidationError
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import RankExit, RankStatus, Status, Training, WorldStatus
from atoll.server.ui.page import cause_card
from atoll.server.ui.rows import RowPage, Rows, row_of
from atoll.store.sqlite import MemoryStore

NOW = 2_000_000.0


def training(
    name: str, phase: Phase = Phase.READY, labels: dict[str, str] | None = None, **status: object
) -> Training:
    size = WorldSize(min=1, target=2, max=4)
    spec = TrainingSpec(name=name, command=["true"], world_size=size, labels=labels or {})
    return Training(
        namespace="team",
        uid=f"uid-{name}",
        spec=spec,
        created_at=NOW - 100,
        status=Status(phase=phase, world=WorldStatus.of(2, size), started_at=NOW - 90, **status),  # type: ignore[arg-type]
    )


def failed(name: str, *, ended_at: float = NOW - 10) -> Training:
    cause = RankExit(rank=1, exit_code=137, termination_reason="OOMKilled", signal="SIGKILL")
    return training(name, Phase.FAILED, root_cause=cause, rank_exits=[cause], ended_at=ended_at)


def rows_of(*trainings: Training) -> Rows:
    rows = Rows(MemoryStore())
    for each in trainings:
        rows._put(each)
    return rows


def names(rows: Rows, **wanted: object) -> list[str]:
    asked = {"q": "", "phase": "", "sort": "", "offset": 0, "limit": 60, "now": NOW, **wanted}
    return [row.name for row in rows.page("team", **asked).items]  # type: ignore[arg-type]


def test_the_cause_of_a_failure_comes_first() -> None:
    row = row_of(failed("a"))
    assert row.cause == "out of memory"
    assert row.sentence.startswith("rank 1 failed first")


def test_an_exception_that_ended_a_rank_is_its_cause() -> None:
    end = RankExit(rank=1, exit_code=1, termination_reason="Error", message="ValueError: bad shape")
    ended = training("a", Phase.FAILED, root_cause=end, rank_exits=[end], ended_at=NOW - 10)
    assert row_of(ended).cause == "ValueError: bad shape"
    assert row_of(ended).sentence == "rank 1 failed first: it exited with code 1"
    card = cause_card(ended)
    assert card is not None
    assert card.headline == "Rank 1: ValueError: bad shape"


def test_what_runs_is_on_top_then_recent_failures_then_what_has_ended() -> None:
    waiting = replace(
        training("waits", Phase.PENDING), created_at=NOW - 9_000, status=Status(phase=Phase.PENDING)
    )
    rows = rows_of(
        training("done", Phase.SUCCEEDED, ended_at=NOW - 1),
        failed("old", ended_at=NOW - 200_000),
        training("runs"),
        failed("bad"),
        waiting,
    )
    assert names(rows) == ["waits", "runs", "bad", "done", "old"]
    assert names(rows, phase="attention") == ["waits", "bad"]


def test_a_stalled_training_needs_attention_and_is_on_top() -> None:
    rows = rows_of(training("runs"), training("hangs", stalled={0: NOW - 60}))
    assert names(rows) == ["hangs", "runs"]
    assert names(rows, phase="attention") == ["hangs"]


def test_a_group_is_one_row_however_many_trainings_it_has_until_it_is_opened() -> None:
    sweep = [
        training(f"lr-{n:03}", Phase.SUCCEEDED, {"group": "lrs"}, ended_at=NOW - 10 - n)
        for n in range(100)
    ]
    bad = replace(failed("lr-bad"), spec=replace(sweep[0].spec, name="lr-bad"))
    alone = training("alone", labels={"group": "one"})
    rows = rows_of(*sweep, bad, alone, training("other", Phase.SUCCEEDED, ended_at=NOW - 50))

    def page(**wanted: object) -> RowPage:
        query = {"q": "", "phase": "", "sort": "", "offset": 0, "limit": 60, "now": NOW, **wanted}
        return rows.page("team", **query)  # type: ignore[arg-type]

    closed = page()
    assert [row.name for row in closed.items] == ["alone", "lr-bad", "other"]
    assert closed.matched == 3
    assert closed.totals.all == 103
    assert list(closed.groups) == ["lrs"]
    assert closed.groups["lrs"].by_phase == {"failed": 1, "succeeded": 100}
    assert closed.groups["lrs"].failed == [bad.uid]
    opened = page(opened=["lrs"])
    assert opened.matched == 103
    assert [row.name for row in opened.items[:3]] == ["alone", "lr-bad", "lr-000"]
    assert page(opened=["lrs"], offset=60).items[-1].name == "other"
    assert page(group="lrs", limit=200).matched == 101
    assert page(q="lr-09").groups == {}
    assert page(sort="name").matched == 103


def test_words_and_typed_filters_are_matched_together() -> None:
    rows = rows_of(failed("gpt-a"), failed("gpt-b"), training("gpt-c"))
    assert names(rows, q="memory", sort="name") == ["gpt-a", "gpt-b"]
    assert names(rows, q="phase:failed gpt-b") == ["gpt-b"]
    assert names(rows, q="where:local phase:ready") == ["gpt-c"]
    assert names(rows, q="where:slurm") == []


def test_a_sort_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValidationError, match="sort"):
        names(rows_of(training("a")), sort="colour")


def test_other_namespaces_see_nothing() -> None:
    page = rows_of(training("a")).page(
        "others", q="", phase="", sort="", offset=0, limit=60, now=NOW
    )
    assert page.items == []
    assert page.totals.all == 0


def test_a_removed_training_goes_and_its_successor_of_the_same_name_stays() -> None:
    rows = rows_of(training("a"))
    old = replace(training("a"), uid="older")
    rows._drop(old)
    assert names(rows) == ["a"]
    rows._drop(training("a"))
    assert names(rows) == []


def test_a_rank_that_waits_says_for_what() -> None:
    status = Status(
        phase=Phase.PENDING, ranks=[RankStatus(rank=0, message="waits for a node with 8 H100")]
    )
    row = row_of(replace(training("a"), status=status))
    assert row.sentence == "rank 0: waits for a node with 8 H100"


def test_control_characters_of_ranks_do_not_reach_the_page() -> None:
    cause = RankExit(rank=0, exit_code=1, termination_reason="Error", message="\x1b[2J<b>")
    bad = training("a", Phase.FAILED, root_cause=cause, rank_exits=[cause], ended_at=NOW)
    assert "\x1b" not in row_of(bad).cause + row_of(bad).sentence


def test_rows_are_made_when_somebody_looks_and_then_follow() -> None:
    async def check() -> None:
        store = MemoryStore()
        informer, rows = Informer(store), Rows(store)
        gone = await store.create(training("gone"))
        for name in ("ended", "runs"):
            one = await store.create(training(name))
            phase = Phase.SUCCEEDED if name == "ended" else Phase.READY
            await store.update_status(one, Status(phase=phase, is_released=name == "ended"))
        following = asyncio.gather(informer.run(), rows.follow(informer))
        assert names(rows) == []
        async with asyncio.timeout(30):
            await asyncio.gather(rows.read("team"), rows.read("team"))
            assert sorted(names(rows)) == ["ended", "gone", "runs"]
            while rows.version < await store.version():  # noqa: ASYNC110
                await asyncio.sleep(0)
            await store.remove(gone)
            await store.create(training("new"))
            await rows.wait(await store.version() - 1)
            assert sorted(names(rows)) == ["ended", "new", "runs"]
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(check())
