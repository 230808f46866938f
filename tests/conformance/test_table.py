"""Every executor runs the same table. A row that a backend cannot provoke is listed with why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.conformance.backend import Backend
from tests.conformance.local_backend import LocalBackend
from tests.conformance.table import RANKS, ROWS, End, Row
from tests.support.control_plane import serving

from atoll.core.status import RankExit, Training


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    folder = tmp_path_factory.mktemp("conformance")
    (folder / "scratch").mkdir()
    with serving(folder / "state") as plane:
        backend = LocalBackend(plane, folder / "scratch")
        yield backend
        backend.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_local(local: LocalBackend, row: Row) -> None:
    run(local, row)


def run(backend: Backend, row: Row) -> None:
    """The row's fault is provoked, and what comes out is what the row says."""
    if why := backend.cannot(row):
        pytest.skip(f"{backend.name} cannot provoke {row.name!r}: {why}")
    name = backend.deploy(row)
    if row.runs_first:
        backend.until_running(name)
    if row.end == "before":
        backend.end(name)
    backend.strike(row, name)
    if row.end == "after":
        backend.end(name)
    training = backend.until_over(name)
    check(row, training)
    attempts = backend.attempts(name)
    assert len(attempts) == len(set(attempts)), f"run twice: {sorted(attempts)}"
    assert backend.left(name) == []


def check(row: Row, training: Training) -> None:
    status = training.status
    assert status.phase == row.phase, status
    if row.reason:
        assert status.reason == row.reason
    root = status.root_cause
    exits = {e.rank: e for e in status.rank_exits}
    assert len(exits) == len(status.rank_exits), "one final record for a rank"
    # Ranks that cannot be started may be taken back before they were tried.
    must_have_run = row.runs_first or row.phase == "succeeded"
    if must_have_run:
        assert sorted(exits) == list(range(RANKS)), "a record for every rank that ran"
    for rank, ended in exits.items():
        is_struck = rank == root.rank if row.root == "any" and root else row.at in (None, rank)
        check_end(row.struck if is_struck else row.others, ended)
    if row.root == "none":
        assert root is None
    elif row.root == "any":
        assert root is not None
    else:
        assert root is not None
        assert root.rank == row.root
    for rank, ended in exits.items():
        if row.root == "any":  # it is one of them, and never said to have fallen after another
            assert ended.collateral == (root is not None and rank != root.rank)
        else:
            is_other = row.at is None or rank != row.at
            assert ended.collateral == (row.others_are_collateral and is_other), ended


def check_end(expected: End, ended: RankExit) -> None:
    assert ended.exit_code in expected.codes, ended
    assert not expected.reasons or ended.termination_reason in expected.reasons, ended
    assert not expected.signals or ended.signal in expected.signals, ended
    assert ended.restart_count == expected.restarts, ended
    assert ended.host, ended
    assert ended.started_at is not None, ended
    assert ended.ended_at is not None, ended
    assert ended.started_at <= ended.ended_at, ended
