"""The control plane dies, and another user of the machine takes its port: who waits for a training
goes on through the next control plane, and that user is sent nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import atoll
from atoll.core.status import WorldStatus
from atoll.main import PORT_FILE
from atoll.sdk.endpoint import read_announcement
from tests.e2e.conftest import PATIENCE_S, until
from tests.support.foreign_listener import listening_on

WAITS = (
    ("wait", "besieged"),
    ("logs", "-f", "besieged"),
    ("run", "--name", "besieged-too", "--"),
)


def test_nothing_is_sent_to_another_user_who_took_the_port(
    lone_atoll: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, received = tmp_path / "go", tmp_path / "received"
    script = ("sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done")
    monkeypatch.setenv("ATOLL_STATE_DIR", str(lone_atoll.state))
    monkeypatch.delenv("ATOLL_URL", raising=False)
    monkeypatch.delenv("ATOLL_TOKEN", raising=False)
    assert lone_atoll("run", "-d", "--name", "besieged", "-n", "2", "--", *script).returncode == 0

    async def last_world() -> WorldStatus:
        async with atoll.Client() as own:
            training = await own.get_async("besieged")
            return await training.wait_until_complete_async(PATIENCE_S)

    with contextlib.ExitStack() as running:
        client = running.enter_context(atoll.Client())
        training = client.get("besieged")
        training.wait_until_target_world(PATIENCE_S)
        threads = running.enter_context(ThreadPoolExecutor())
        ends = [
            threads.submit(training.wait_until_complete, PATIENCE_S),
            threads.submit(asyncio.run, last_world()),
        ]
        commands = [
            running.enter_context(lone_atoll.start(*words, *(script if words[-1] == "--" else ())))
            for words in WAITS
        ]
        running.callback(go.touch)
        top = running.enter_context(lone_atoll.start("top", "--json", "--interval", "0.1"))
        running.callback(top.kill)
        until(lambda: [t.phase for t in client.list()] == ["ready", "ready"])
        endpoint = read_announcement(lone_atoll.state)
        assert endpoint is not None
        # Else the next control plane, which the commands start at once, might be faster.
        (lone_atoll.state / PORT_FILE).unlink()
        os.kill(int(endpoint["pid"]), signal.SIGKILL)
        port = urlsplit(str(endpoint["url"])).port or 0
        running.enter_context(listening_on(port, received))
        until(lambda: (read_announcement(lone_atoll.state) or endpoint)["pid"] != endpoint["pid"])
        go.touch()
        assert [end.result().ready for end in ends] == [2, 2]
        assert [command.wait(PATIENCE_S) for command in commands] == [0, 0, 0]
        assert client.get("besieged").phase == "succeeded"
    assert received.read_bytes() == b""
