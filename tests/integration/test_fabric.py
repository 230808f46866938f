"""Agents in network namespaces, a real etcd, links that are cut and healed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.netns import Network

SRC = Path(__file__).parents[2] / "src"
WATCH = """
import asyncio, json, sys
from pathlib import Path
from atoll.mesh.watch import MeshWatch
from atoll.mesh.etcd import EtcdKeys
from atoll.backends.local.etcd_server import start_etcd, stop_etcd

def say(**what): print(json.dumps(what), flush=True)

async def main(address, directory, deadline_s, hosts):
    server = start_etcd(Path(directory), address)
    say(endpoint=server.endpoint)
    async with EtcdKeys(server.endpoint) as keys:
        watch = MeshWatch(keys, lambda v: say(state=v.state, message=v.message),
                          deadline_s=deadline_s)
        running = asyncio.create_task(watch.run(hosts))
        while (line := (await asyncio.to_thread(sys.stdin.readline)).strip()):
            if line == "keys":
                say(keys=(await keys.list("basilica"))[0])
            if line == "clear":
                running.cancel()
                await watch.clear()
                say(keys=(await keys.list(""))[0])
    stop_etcd(server)

asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:]))
"""


class Scene:
    """A network, the controller's side on its hub, and agents as they are started."""

    def __init__(self, net: Network, directory: Path, deadline_s: float, stack: Any) -> None:
        self.net = net
        self._stack = stack
        self._watch = self._start(
            "hub", sys.executable, "-c", WATCH, net.hub_address, str(directory), str(deadline_s),
            *net.hosts,
        )  # fmt: skip
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.endpoint = self.heard(lambda said: "endpoint" in said)["endpoint"]

    def _start(self, where: str, *command: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(SRC)}
        process = self.net.popen(
            where, *command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    def _read(self) -> None:
        assert self._watch.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self._watch.stdout:
                self._lines.put(json.loads(line))

    def agent(self, host: str) -> subprocess.Popen[str]:
        return self._start(
            host, sys.executable, "-m", "atoll.mesh.fabric",
            "--host", host, "--address", self.net.address(host), "--etcd", self.endpoint,
        )  # fmt: skip

    def heard(self, wanted: Callable[[dict[str, Any]], bool], within: float = 40) -> dict[str, Any]:
        deadline, said = time.monotonic() + within, []
        while True:
            try:
                said.append(self._lines.get(timeout=max(deadline - time.monotonic(), 0)))
            except queue.Empty:
                pytest.fail(f"not heard in {within} s; heard {said}")
            if wanted(said[-1]):
                return said[-1]

    def becomes(self, state: str, message: str = "") -> str:
        """The message of the verdict waited for; `message` is a part of it."""
        return self.heard(lambda said: said.get("state") == state and message in said["message"])[
            "message"
        ]

    def ask(self, what: str) -> dict[str, str]:
        assert self._watch.stdin is not None
        self._watch.stdin.write(what + "\n")
        self._watch.stdin.flush()
        return self.heard(lambda said: "keys" in said)["keys"]

    def gate_keys(self) -> set[str]:
        return {key.removeprefix("basilica/mesh-") for key in self.ask("keys")}


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    if reason := Network.why_not():
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    hosts, deadline_s = request.param
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(Network(hosts))
        yield Scene(net, tmp_path / "etcd", deadline_s, stack)


def keys(kind: str, net: Network) -> set[str]:
    return {f"{kind}/{host}" for host in net.hosts}


@pytest.mark.parametrize("scene", [(4, 600.0)], indirect=True)
def test_ready_when_all_can_talk_then_a_cut_pair_is_named_then_it_heals(scene: Scene) -> None:
    net = scene.net
    for host in net.hosts:
        scene.agent(host)
    scene.becomes("Ready")
    assert scene.gate_keys() == keys("ready", net)

    net.cut_pair("host-2", "host-4")
    message = scene.becomes("Degraded", "host-2 <-> host-4")
    assert message == "cannot talk: host-2 <-> host-4"
    assert scene.gate_keys() == keys("degraded", net)

    net.heal_pair("host-2", "host-4")
    scene.becomes("Ready")
    assert scene.gate_keys() == keys("ready", net)
    assert scene.ask("clear") == {}


@pytest.mark.parametrize("scene", [(3, 2.5)], indirect=True)
def test_fails_open_at_the_deadline_naming_the_host_nobody_reaches(scene: Scene) -> None:
    net = scene.net
    net.cut_host("host-3")  # before anything starts: its packets vanish, nothing is refused
    for host in net.hosts:
        scene.agent(host)
    message = scene.becomes("Degraded", "host-2 <-> host-3")
    assert "host-1 <-> host-3" in message
    assert "host-1 <-> host-2" not in message
    assert scene.gate_keys() == keys("degraded", net)
    net.heal_host("host-3")
    scene.becomes("Ready")
    assert scene.gate_keys() == keys("ready", net)


@pytest.mark.parametrize("scene", [(3, 2.0)], indirect=True)
def test_a_host_without_an_agent_is_told_as_missing_and_may_come_later(scene: Scene) -> None:
    for host in ("host-1", "host-2"):
        scene.agent(host)
    message = scene.becomes("Degraded")
    assert message == "not all hosts have come up: no agent on host-3"
    late = scene.agent("host-3")
    scene.becomes("Ready")
    late.kill()
    scene.becomes("Degraded", "host-1 -> host-3")
    scene.agent("host-3")  # the same host again, on another port
    scene.becomes("Ready")
