"""What a training shows of itself where the operator is the control plane.

Tests with `pods` in their fixtures run ranks in real pods. The others need no node: they start a
process of this machine with the environment that the pod was given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.core.errors import BackendError
from tests.e2e.kubernetes.conftest import REPOSITORY, Operator, Space
from tests.e2e.kubernetes.control_plane import free_port, wait_for
from tests.e2e.kubernetes.images import ATOLL
from tests.e2e.kubernetes.nodes import IMAGE

Json = dict[str, Any]
# Tells figures and rounds of itself, as DiLoCo does.
RANK = """
import os, sys
import atoll
from atoll.agent import metrics

rank, first, last = int(os.environ["ATOLL_RANK"]), int(sys.argv[1]), int(sys.argv[2])
for at in range(first, last):
    atoll.report(step=at, loss=1.0 / (at + 1) + rank)
    facts = {"run": "r", "round": at, "members": [0, 1], "weights": [1, 2], "tokens": 5.0}
    cost = [rank, 10, 20, 3, 0.0, 0.5]
    word = {"run": "r", "fragment": 0, "round": at, "cost": cost, "facts": facts}
    metrics.report_round(word)
"""


class Operators:
    """Operators of one namespace, each with an API on a port of its own."""

    def __init__(self, space: Space, start: Callable[..., Operator]) -> None:
        self.space = space
        self._start = start
        self.ports: dict[str, int] = {}
        self.running: dict[str, Operator] = {}
        self.token = ""

    def start(self, name: str, *options: str, pods_reach: str = "") -> None:
        """`pods_reach`: the address of this machine, as pods see it."""
        port = self.ports[name] = free_port()
        first = self.ports[next(iter(self.ports))]
        self.running[name] = self._start(
            name,
            *("--host", "0.0.0.0" if pods_reach else "127.0.0.1", "--port", str(port)),
            *("--reports-uri", f"http://{pods_reach or '127.0.0.1'}:{first}", *options),
        )
        wait_for("the server answers", lambda: self.status(name, "/healthz") == 200)
        if not self.token:
            self.token = self._new_token(self.running[name])

    def _new_token(self, operator: Operator) -> str:
        command = [sys.executable, "-m", "atoll.operator", "token"]
        names = ["--namespace", self.space.name, "--home", self.space.name]
        made = subprocess.run(
            [*command, *names],
            env=operator.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return made.stdout.strip()

    def status(self, name: str, path: str) -> int:
        """What it answers; 0 if it does not."""
        try:
            url = f"http://127.0.0.1:{self.ports[name]}{path}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return int(error.code)
        except OSError:
            return 0

    def client(self, name: str) -> atoll.Client:
        return atoll.Client(url=f"http://127.0.0.1:{self.ports[name]}", token=self.token)

    def leader(self) -> str:
        lease = self.space.json("get", "lease", "atoll-operator")
        return str(lease["spec"].get("holderIdentity") or "")


@pytest.fixture
def operators(space: Space, start_operator: Callable[..., Operator]) -> Operators:
    return Operators(space, start_operator)


def environment_of(pod: Json) -> dict[str, str]:
    """What the rank's container would have, as far as it is about reports."""
    (container,) = [c for c in pod["spec"]["containers"] if c["name"] == "rank"]
    found = {}
    for variable in container["env"]:
        if "valueFrom" not in variable:
            found[variable["name"]] = variable.get("value", "").replace("$$", "$")
            continue
        path = variable["valueFrom"].get("fieldRef", {}).get("fieldPath", "")
        if path.startswith("metadata.annotations['"):
            name = path.removeprefix("metadata.annotations['").removesuffix("']")
            found[variable["name"]] = pod["metadata"]["annotations"].get(name, "0")
    return found


def report_as(pod: Json, first: int, last: int) -> None:
    """A process with the environment of the pod reports these steps."""
    environment = environment_of(pod)
    assert environment["ATOLL_REPORTS_TOKEN"].startswith("atollr_")
    subprocess.run(
        [sys.executable, "-c", RANK, str(first), str(last)],
        env={**os.environ, **environment, "PYTHONPATH": str(REPOSITORY / "src")},
        check=True,
        timeout=100,
    )


def deploy(client: atoll.Client, space: Space, ranks: int = 2) -> tuple[Any, list[Json]]:
    """A training, and the pods that its Job made."""
    training = client.deploy_distributed(
        name="tiny", command=["sleep", "1000"], image=IMAGE, world_size=ranks, code=False
    )
    wait_for("its pods are made", lambda: len(space.pods()) == ranks)
    return training, space.pods()


def asked(ask: Callable[[], Any]) -> Any:
    """The answer, once an operator leads."""
    answer = None

    def is_answered() -> bool:
        nonlocal answer
        try:
            answer = ask()
        except BackendError:  # nobody leads yet
            return False
        return True

    wait_for("an operator answers", is_answered)
    return answer


def test_what_a_process_with_a_pods_environment_reports_is_in_series(
    operators: Operators, space: Space
) -> None:
    operators.start("one")
    with operators.client("one") as client:
        training, pods = deploy(client, space)
        asked(training.metrics)
        for pod in pods:
            report_as(pod, 0, 5)
        table = training.metrics("loss")
        assert sorted(zip(table["rank"], table["step"], strict=True)) == [
            (rank, step) for rank in (0, 1) for step in range(5)
        ]
        assert table["value"][0] == 1.0
        assert table.missed == 0
        rounds = training.rounds()
        assert (rounds["round"], rounds["members"]) == ([0, 1, 2, 3, 4], [[0, 1]] * 5)
        assert set(rounds["source"]) == {"reports"}
        metrics = urllib.request.Request(
            f"http://127.0.0.1:{operators.ports['one']}/metrics",
            headers={"Authorization": f"Bearer {operators.token}"},
        )
        gauge = f'atoll_training_loss{{namespace="{space.name}",training="tiny"}} 0.2'
        with urllib.request.urlopen(metrics) as answer:
            assert gauge in answer.read().decode()
        other = environment_of(pods[0])
        address = other["ATOLL_REPORTS"].replace("/tiny/", "/another/")
        request = urllib.request.Request(address, b"", {"Authorization": "Bearer x"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request)


def test_the_next_leader_on_the_same_volume_has_the_series_and_only_the_leader_is_ready(
    operators: Operators, space: Space, tmp_path: Path
) -> None:
    volume = ("--data", str(tmp_path))
    operators.start("one", *volume)
    with operators.client("one") as client:
        training, pods = deploy(client, space)
        asked(training.metrics)
        report_as(pods[0], 0, 5)
    operators.start("two", *volume)
    assert (operators.leader(), operators.status("one", "/readyz")) == ("one", 200)
    assert [operators.status("two", path) for path in ("/readyz", "/v1/trainings")] == [503, 503]
    operators.running["one"].kill()
    with operators.client("two") as client:
        training = asked(lambda: client.get("tiny"))
        assert (operators.leader(), operators.status("two", "/readyz")) == ("two", 200)
        table = training.metrics("loss")
        assert (table["step"], table.missed) == ([0, 1, 2, 3, 4], 0)
        assert training.rounds()["round"] == [0, 1, 2, 3, 4]


def test_without_a_volume_the_next_leader_begins_anew_and_counts_what_it_missed(
    operators: Operators, space: Space
) -> None:
    operators.start("one")
    with operators.client("one") as client:
        training, pods = deploy(client, space)
        asked(training.metrics)
        report_as(pods[0], 0, 5)
    operators.running["one"].process.terminate()
    operators.running["one"].process.wait(30)
    operators.running["one"].start()
    with operators.client("one") as client:
        training = client.get("tiny")
        assert asked(lambda: training.metrics("loss"))["step"] == []
        report_as(pods[0], 5, 8)
        assert training.metrics("loss")["step"] == [5, 6, 7]


class Receiver:
    """An address that keeps what it was sent."""

    def __init__(self) -> None:
        self.status = 200
        self.messages: list[tuple[str, str]] = []  # id and reason
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.messages.append((self.headers["webhook-id"], json.loads(body)["type"]))
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def ids(self, reason: str) -> set[str]:
        return {id for id, each in self.messages if each == reason}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_a_webhook_is_told_by_the_leader_and_after_its_death_by_the_next(
    operators: Operators, space: Space, receiver: Receiver, tmp_path: Path
) -> None:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    (tmp_path / "atoll.toml").write_text(
        f"""
        [[webhooks]]
        url = "{receiver.url}"
        events = ["Accepted", "Cancelled"]
        secret_file = "key"
        private = true
        """
    )
    options = ("--config", str(tmp_path / "atoll.toml"), "--data", str(tmp_path / "data"))
    operators.start("one", *options)
    with operators.client("one") as client:
        training, _ = asked(lambda: deploy(client, space))
        wait_for("it was told", lambda: receiver.ids("Accepted"))
        receiver.status = 503
        training.cancel()
        wait_for("it is tried", lambda: receiver.ids("Cancelled"))
    operators.running["one"].kill()
    receiver.status, before = 200, len(receiver.messages)
    operators.start("two", *options)
    wait_for("it was told again", lambda: len(receiver.messages) > before)
    assert [reason for _, reason in receiver.messages[before:]] == ["Cancelled"]
    assert len(receiver.ids("Cancelled")) == 1, "the same message"
    assert len(receiver.ids("Accepted")) == 1


SCRIPT = """
import os, time
import atoll
for step in range(20):
    atoll.report(step=step, loss=1.0 / (step + 1))
print("reported", flush=True)
time.sleep(3)
"""


@pytest.mark.usefixtures("pods")
def test_ranks_in_pods_report_and_what_they_use_is_measured(
    operators: Operators, space: Space
) -> None:
    operators.start("one", pods_reach=space.site.nodes[0].gateway)
    with operators.client("one") as client:
        training = client.deploy_distributed(
            name="tiny",
            command=["python", "-c", SCRIPT],
            image=ATOLL,
            world_size=2,
            code=False,
        )
        training.wait_until_complete(timeout=100)
        table = asked(lambda: training.metrics("loss"))
        for rank in (0, 1):
            own = [s for r, s in zip(table["rank"], table["step"], strict=True) if r == rank]
            assert own == list(range(20))
        names = set(training.metrics()["name"])
        assert {"machine/memory", "machine/threads"} <= names


# Rank 1 does nothing at all until it is told to go on; rank 0 goes on printing.
STILL = """
[ $RANK = 0 ] || while [ ! -e /tmp/go ]; do sleep 5; done
while [ ! -e /tmp/end ]; do echo on; sleep 0.5; done
"""


@pytest.mark.usefixtures("pods")
def test_a_rank_in_a_pod_that_does_not_move_is_told_of_until_it_does(
    operators: Operators, space: Space
) -> None:
    def do(rank: int, path: str) -> None:
        (pod,) = space.pods(rank)
        space.kubectl("exec", pod["metadata"]["name"], "--", "sh", "-c", f"echo > {path}")

    operators.start("one", pods_reach=space.site.nodes[0].gateway)
    with operators.client("one") as client:
        training = client.deploy_distributed(
            name="tiny",
            command=["sh", "-c", STILL],
            image=ATOLL,
            world_size=2,
            stall_s=8,
            code=False,
        )
        assert "UnsupportedFields" not in [e.reason for e in training.events()]
        space.until("tiny", "told", lambda s: "1" in s.get("stalled", {}), timeout=120)
        do(1, "/tmp/go")
        space.until("tiny", "it moves", lambda s: "1" not in s.get("stalled", {}), timeout=120)
        do(0, "/tmp/end")
        do(1, "/tmp/end")
        training.wait_until_complete(timeout=100)
        told = [e.message for e in training.events() if e.reason in ("RankStalled", "RankMoves")]
        assert any(words.startswith("rank 1 has reported nothing") for words in told)
        assert "rank 1 moves again" in told
