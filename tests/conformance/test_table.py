"""Every executor runs the same table. A row that a backend cannot provoke is listed with why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.conformance.backend import Backend
from tests.conformance.local_backend import LocalBackend
from tests.conformance.modal_backend import MODAL_QUICK, ModalBackend, modal_plane
from tests.conformance.results import keep, recorded
from tests.conformance.sagemaker_backend import SAGEMAKER_QUICK, SageMakerJobs, sagemaker_plane
from tests.conformance.table import RANKS, ROWS, End, Row
from tests.support.control_plane import serving
from tests.support.sagemaker_stand_in import why_no_mounts

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


def quick_rows(quick: frozenset[str]) -> list[Any]:
    """All rows; those that are not named here take longer than every run of the tests may."""
    slow = pytest.mark.soak
    return [pytest.param(r, id=r.name, marks=() if r.name in quick else slow) for r in ROWS]


@pytest.fixture(scope="module")
def modal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModalBackend]:
    with modal_plane(tmp_path_factory.mktemp("conformance")) as backend:
        yield backend


@pytest.mark.parametrize("row", quick_rows(MODAL_QUICK))
def test_modal(modal: ModalBackend, row: Row) -> None:
    run(modal, row)


@pytest.fixture(scope="module")
def sagemaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SageMakerJobs]:
    if why := why_no_mounts():
        pytest.skip(f"jobs need a /opt/ml of their own: {why}")
    with sagemaker_plane(tmp_path_factory.mktemp("conformance")) as backend:
        yield backend


@pytest.mark.parametrize("row", quick_rows(SAGEMAKER_QUICK))
def test_sagemaker(sagemaker: SageMakerJobs, row: Row) -> None:
    run(sagemaker, row)


def run(backend: Backend, row: Row) -> None:
    """The row's fault is provoked, and what comes out is what the row says."""
    if why := backend.cannot(row):
        keep(backend.name, row, {"outcome": "cannot", "why": why})
        pytest.skip(f"{backend.name} cannot provoke {row.name!r}: {why}")
    with recorded(backend.name, row):
        _run(backend, row)


def _run(backend: Backend, row: Row) -> None:
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
