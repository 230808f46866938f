"""A second command while a server is on its way: it joins that server and does not fail."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from atoll.backends.local.state import ENDPOINT
from atoll.core.errors import Permanent
from atoll.sdk import endpoint


def refuse(where: Path) -> None:
    raise Permanent("in use by another process")


def announce(where: Path) -> None:
    start_ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    endpoint = {"url": "http://here", "pid": os.getpid(), "startTime": start_ticks}
    (where / ENDPOINT).write_text(json.dumps(endpoint))


@pytest.fixture
def lock(tmp_path: Path) -> int:
    lock = os.open(tmp_path / "atoll.db.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def test_a_server_that_is_on_its_way_is_joined(
    tmp_path: Path, lock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "start", refuse)
    joined = threading.Thread(target=endpoint.start_or_join, args=(tmp_path,))
    joined.start()
    announce(tmp_path)
    joined.join(30)
    assert not joined.is_alive()
    assert endpoint.running(tmp_path) == "http://here"
    os.close(lock)


def test_a_server_that_cannot_start_is_an_error(
    tmp_path: Path, lock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "start", refuse)
    os.close(lock)
    with pytest.raises(Permanent, match="in use"):
        endpoint.start_or_join(tmp_path)
