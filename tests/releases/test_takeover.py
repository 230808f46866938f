"""Gangs that the release before has started go on under the new one, with all that was stored."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import atoll
from atoll.local import processes
from atoll.sdk.training import DistributedTraining
from atoll.server.encoded import shown
from tests.support.control_plane import wait_for
from tests.support.release import (
    NEW,
    NEW_SERVE,
    OLD_SERVE,
    Plane,
    Site,
    cleared,
    left,
    supervisor,
    unpack,
    upgrade,
)
from tests.unit.rank.test_prepare import make_wheel

DEPLOY = Path(__file__).with_name("deploy.py")
FINISHED = ("done", "broken", "stopped")
RUNNING = ("shell", "brief", "cancelled", "deleted", "function", "packages")
SAID = re.compile(r"rank (\d+) attempt (\d+) pid (\d+)")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    with cleared(tmp_path / "state"):
        yield tmp_path / "state"


class Ranks:
    """What the ranks of a training have written: the pid of each attempt."""

    def __init__(self, training: DistributedTraining) -> None:
        self.training = training

    def pids(self) -> dict[tuple[int, int], int]:
        lines = [line.text for line in self.training.logs()]
        words = [found.groups() for line in lines if (found := SAID.fullmatch(line))]
        return {(int(rank), int(attempt)): int(pid) for rank, attempt, pid in words}

    def until_begun(self, rank: int, attempt: int) -> int:
        wait_for(lambda: (rank, attempt) in self.pids())
        return self.pids()[rank, attempt]


def both_begun(training: DistributedTraining) -> dict[tuple[int, int], int]:
    ranks = Ranks(training)
    wait_for(lambda: len(ranks.pids()) == 2)
    return ranks.pids()


def record(client: atoll.Client, name: str) -> dict[str, Any]:
    """All that is known of a training, in the form in which a user sees it."""
    training = client.get(name)
    return {
        "status": training.last.status,
        "spec": shown(training.last).spec,
        "uid": training.uid,
        "created_at": training.last.created_at,
        "exits": training.rank_exits,
        "events": training.events(),
        "logs": [(line.rank, line.text) for line in training.logs()],
        "usage": training.usage,
    }


@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "beside it"])
def test_everything_is_there_and_ranks_go_on(
    is_in_place: bool, state: Path, tmp_path: Path
) -> None:
    steps = tmp_path / "steps"
    steps.mkdir()
    old = Site(unpack(tmp_path / "site"), state)
    before = old.start(*OLD_SERVE)
    uids = old.script(DEPLOY, str(steps), str(make_wheel(tmp_path)))
    token = old.atoll("token", "create", "--namespace", "research").stdout.strip()
    key = {"Idempotency-Key": "once"}
    with atoll.Client(before.url, before.token) as client:
        _, keyed = create(before, key)
        records = {name: record(client, name) for name in FINISHED}
        pids = {name: both_begun(client.get(name)) for name in RUNNING}
        shims = {name: supervisor(state, uids[name]) for name in (*RUNNING, "orphan")}
    before.stop(signal.SIGKILL if is_in_place else signal.SIGTERM)
    for pid in shims["orphan"][1 if is_in_place else 0 :]:
        processes.kill(pid)
    if is_in_place:
        upgrade(old.path)
        site = old
    else:
        site = Site(NEW, state)
    after = site.start(*NEW_SERVE)
    with atoll.Client(after.url, after.token) as client:
        again = create(after, key)
        assert again == (200, keyed)
        assert {t.name: t.uid for t in client.list()} == uids | {"keyed": keyed}
        for name in FINISHED:
            assert record(client, name) == records[name], name
        with atoll.Client(after.url, token) as other:
            assert other.list() == []
        assert client.get("waiting").phase == "pending"
        for name in RUNNING:
            assert Ranks(client.get(name)).pids() == pids[name], name
            assert supervisor(state, uids[name]) == shims[name], name
            assert all(Path(f"/proc/{pid}").exists() for pid in pids[name].values())
        live_on(client, steps)
        assert supervisor(state, uids["shell"]) == shims["shell"]
        end(client, steps, state, uids)
    after.stop()
    assert left(state) == []


KEYED = {"name": "keyed", "command": ["true"], "worldSize": {"min": 1, "target": 1, "max": 1}}


def create(plane: Plane, headers: dict[str, str]) -> tuple[int, str]:
    """The status and the uid, as a program reads them that has no SDK."""
    headers = headers | {"Authorization": f"Bearer {plane.token}"}
    answer = httpx2.post(f"{plane.url}/v1/trainings", json=KEYED, headers=headers)
    return answer.status_code, answer.json()["uid"]


def live_on(client: atoll.Client, steps: Path) -> None:
    """Ranks are restarted, scaled, cancelled and removed under a supervisor of the old release."""
    for name in ("shell", "function", "packages"):
        (steps / f"fail.{name}.1.0").touch()
        Ranks(client.get(name)).until_begun(1, 1)
    for name in ("shell", "function"):
        training = client.get(name)
        training.scale(3)
        training.wait_until_target_world(timeout=60)
        Ranks(training).until_begun(2, 0)
    training = client.get("shell")
    training.scale(1)
    wait_for(lambda: [r.rank for r in training.refresh().status.ranks if r.is_alive] == [0])
    training.scale(2)
    training.wait_until_target_world(timeout=60)
    (steps / "fail.shell.0.0").touch()
    Ranks(training).until_begun(0, 1)
    orphans = Ranks(client.get("orphan"))
    assert orphans.until_begun(0, 1) != orphans.pids()[0, 0]
    client.get("cancelled").cancel()
    with pytest.raises(atoll.BelowMinimumWorld):
        client.get("cancelled").result(timeout=60)
    client.get("deleted").delete()


def end(client: atoll.Client, steps: Path, state: Path, uids: dict[str, str]) -> None:
    """The trainings that are left succeed, say all they have to say, and leave nothing."""
    (steps / "end").touch()
    for name in ("shell", "function", "packages", "orphan"):
        training = client.get(name)
        training.result(timeout=60)
        lines = [line.text for line in training.logs()]
        assert lines.count("bye") == training.world.target, (name, lines)
    assert "water" in [line.text for line in client.get("packages").logs()]
    wait_for(lambda: "brief" not in {training.name for training in client.list()})
    client.get("waiting").delete()
    for training in client.list():
        training.delete()
    wait_for(lambda: not any((state / "ranks" / uid).exists() for uid in uids.values()))
