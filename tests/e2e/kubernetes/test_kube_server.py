"""The SDK against the server in the cluster: the same calls as on a laptop."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

import atoll
from tests.e2e.kubernetes.conftest import Operator, Space
from tests.e2e.kubernetes.control_plane import free_port, wait_for
from tests.e2e.kubernetes.nodes import IMAGE

pytestmark = pytest.mark.usefixtures("pods")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def operator(start_operator: Callable[..., Operator], port: int) -> Operator:
    return start_operator("one", "--host", "127.0.0.1", "--port", str(port))


@pytest.fixture
def client(space: Space, operator: Operator, port: int) -> Iterator[atoll.Client]:
    made = subprocess.run(
        [
            *(sys.executable, "-m", "atoll.operator", "token"),
            *("--namespace", space.name, "--home", space.name),
        ],
        env=operator.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    url = f"http://127.0.0.1:{port}"
    wait_for("the server is ready", lambda: _is_ready(url))
    with atoll.Client(url=url, token=made.stdout.strip()) as connected:
        yield connected


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def test_a_training_runs_scales_and_ends_through_the_sdk(
    client: atoll.Client, space: Space
) -> None:
    training = client.deploy_distributed(
        name="tiny",
        command=["sh", "-c", "echo rank $RANK; [ $RANK -lt 3 ] || exit 0; sleep 12"],
        image=IMAGE,
        world_size=atoll.WorldSize(min=1, target=2, max=4),
    )
    training.wait_until_min_world(timeout=60)
    assert training.scale(target=3).target == 3
    assert training.wait_until_target_world(timeout=60).ready == 3
    assert space.status("tiny")["world"]["ready"] == 3
    world = training.wait_until_complete(timeout=60)
    assert (world.ready, training.phase) == (3, "succeeded")
    assert [e.exit_code for e in training.rank_exits] == [0, 0, 0]
    lines = {(line.rank, line.text) for line in training.logs()}
    assert lines == {(0, "rank 0"), (1, "rank 1"), (2, "rank 2")}
    with pytest.raises(atoll.UDTerminalState):
        training.scale(target=2)
    training.delete()
    wait_for("it is gone", lambda: not space.json("get", "trainings")["items"])


def test_a_failure_names_the_rank_and_its_last_words(client: atoll.Client) -> None:
    training = client.deploy_distributed(
        name="tiny",
        command=["sh", "-c", "[ $RANK = 1 ] && { echo no such file; exit 9; }; sleep 100"],
        image=IMAGE,
        executor="kubernetes",
        world_size=atoll.WorldSize(min=2, target=2, max=2),
    )
    with pytest.raises(atoll.BelowMinimumWorld, match="rank 1: exit_code=9"):
        training.wait_until_complete(timeout=60)
    assert training.root_cause is not None
    assert training.root_cause.log_tail == ["no such file"]


def test_what_the_cluster_will_never_run_is_refused_at_once(
    client: atoll.Client, space: Space
) -> None:
    with pytest.raises(atoll.ValidationError, match="image"):
        client.deploy_distributed(
            name="tiny",
            command=["true"],
            world_size=atoll.WorldSize(min=1, target=1, max=1),
        )
    assert space.json("get", "trainings")["items"] == []


def test_followed_logs_go_on_when_the_server_is_killed(
    client: atoll.Client, space: Space, operator: Operator
) -> None:
    """With a tail too: a line that was given is not given again, and none is left out."""
    go = "until [ -e /tmp/go ]; do sleep 0.1; done"
    training = client.deploy_distributed(
        name="tiny",
        command=["sh", "-c", f"for i in 1 2 3; do echo line $i; done; {go}; echo line 4"],
        image=IMAGE,
        world_size=1,
    )
    training.wait_until_target_world(timeout=60)
    wait_for("it has spoken", lambda: len(training.logs()) == 3)
    tailed, whole = training.logs(tail=2, follow=True), training.logs(follow=True)
    assert [next(tailed).text for _ in range(2)] == ["line 2", "line 3"]
    assert [next(whole).text for _ in range(3)] == ["line 1", "line 2", "line 3"]
    operator.kill()
    operator.start()
    (pod,) = space.pods(0)
    space.kubectl("exec", pod["metadata"]["name"], "--", "sh", "-c", "echo > /tmp/go")
    assert [line.text for line in tailed] == ["line 4"]
    assert [line.text for line in whole] == ["line 4"]


def test_attempts_and_times_of_lines_are_listed_and_it_runs_again(client: atoll.Client) -> None:
    script = "echo attempt $ATOLL_ATTEMPT; [ $RANK = 0 ] || [ $ATOLL_ATTEMPT = 1 ] || exit 5"
    training = client.deploy_distributed(
        name="tiny",
        command=["sh", "-c", script],
        image=IMAGE,
        world_size=2,
        max_restarts=2,
        env={"SECRET": "kept"},
        code=False,
    )
    training.wait_until_complete(timeout=60)
    attempts = training.attempts()
    assert [(a.rank, a.attempt, a.exit_code) for a in attempts] == [(0, 0, 0), (1, 0, 5), (1, 1, 0)]
    assert all(a.started_at and a.ended_at and a.host for a in attempts)
    lines = training.logs()
    assert [line.text for line in lines if line.rank == 1] == ["attempt 0", "attempt 1"]
    times = [line.time for line in lines if line.time is not None]
    assert len(times) == len(lines)
    assert times == sorted(times)
    assert [line.text for line in training.logs(search="attempt 1")] == ["attempt 1"]
    assert training.logs(since=times[-1]) == [line for line in lines if line.time == times[-1]]
    still = client.deploy_distributed(
        name="idle_s", command=["true"], image=IMAGE, world_size=1, stall_s=5, code=False
    )
    (event,) = [e for e in still.events() if e.reason == "UnsupportedFields"]
    assert "stall_s 5.0: ranks report nowhere" in event.message
    again = training.rerun()
    assert again.name == "tiny-r2"
    again.wait_until_complete(timeout=60)
    assert again.spec.env == {"SECRET": "***"}
