"""`atoll.toml` and `atoll executors`, as a user meets them: a real control plane, real ranks."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Shell, is_alive, until
from .small_cluster import SmallCluster

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: x, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: x, user: {{token: abc}}}}]
contexts: [{{name: x, context: {{cluster: x, user: x, namespace: mine}}}}]
current-context: x
"""
EU = """
[executors.eu]
kind = "kubernetes"
kubeconfig = "kube.yaml"
image = "busybox"
"""

LEFT = (
    "it is not known whether its ranks have stopped; the cancel is stored, and is carried out when "
    "the executor 'eu' answers"
)


@pytest.fixture
def shell(lone_atoll: Shell) -> Shell:
    """With a cluster in its atoll.toml that nobody answers for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lone_atoll.configure(EU)
    (lone_atoll.toml.parent / "kube.yaml").write_text(KUBECONFIG.format(port=port))
    return lone_atoll


@pytest.fixture
def cluster(shell: Shell) -> Iterator[SmallCluster]:
    """It answers for the one in the atoll.toml."""
    made = SmallCluster()
    made.start()
    (shell.toml.parent / "kube.yaml").write_text(KUBECONFIG.format(port=made.port))
    yield made
    made.stop()


def stop_server(shell: Shell) -> None:
    pid = shell.server_pid()
    os.kill(pid, signal.SIGTERM)
    until(lambda: not is_alive(pid))


def test_a_cluster_that_does_not_answer_keeps_nothing_else_from_running(shell: Shell) -> None:
    assert shell("run", "--", "true").returncode == 0
    listed = shell.json("executors")
    assert listed["config"] == str(shell.toml)
    eu, local = listed["items"]
    assert (eu["name"], eu["kind"], eu["isReachable"]) == ("eu", "kubernetes", False)
    assert eu["message"].startswith("the Kubernetes API server did not answer: ")
    assert {use["name"] for use in local.pop("resources")} == {"cpu", "memory"}
    assert local == {
        "name": "local", "kind": "local", "isReachable": True, "message": "", "isDefault": True
    }  # fmt: skip
    shown = shell("executors").stdout.splitlines()
    assert [line.split()[:3] for line in shown] == [
        ["NAME", "KIND", "REACHABLE"],
        ["eu", "kubernetes", "no"],
        ["local*", "local", "yes"],
    ]


def test_an_executor_that_is_not_there_is_refused_at_once(shell: Shell) -> None:
    refused = shell("run", "--executor", "us", "--", "true")
    assert refused.returncode == 2
    assert refused.stderr == (
        "atoll: error: --executor: 'us' is not valid: this control plane has: eu, local; it was "
        f"started with {shell.toml}; to restart it, stop it (kill "
        f"{shell.server_pid()}; ranks keep running) and run: atoll serve --config FILE\n"
    )
    assert shell.json("ps") == []
    shell.configure(EU + '[executors.us]\nkind = "kubernetes"\n')
    assert "which has changed since" in shell("run", "--executor", "us", "--", "true").stderr
    assert "has changed since the control plane was started" in shell("executors").stderr


def test_defaults_are_used_and_the_command_line_wins(shell: Shell) -> None:
    shell.configure(
        '[defaults]\nworld_size = 2\nmax_restarts = 1\nenv = { A = "file", B = "file" }\n'
    )
    words = ("-e", "B=shell", "--", "sh", "-c", "echo $RANK $A $B")
    assert sorted(shell("run", *words).stdout.splitlines()) == [
        "[0] 0 file shell",
        "[1] 1 file shell",
    ]
    assert shell("run", "-n", "1", "--name", "one", *words).stdout == "[0] file shell\n"
    assert shell.json("status", "one")["spec"]["maxRestarts"] == 1
    other = shell.cwd / "other.toml"
    other.write_text("[defaults]\nmax_restarts = 7\n")
    shell("run", "--config", str(other), "--name", "two", "--", "true")
    assert shell.json("status", "two")["spec"]["maxRestarts"] == 7


def test_a_default_executor_is_where_trainings_go(shell: Shell) -> None:
    shell.configure(EU + '[defaults]\nexecutor = "eu"\n')
    assert shell("run", "-d", "--name", "there", "--", "true").returncode == 0
    assert shell.json("status", "there")["spec"]["executor"] == "eu"
    elsewhere = Shell(shell.state, shell.state)  # no atoll.toml: the control plane's default
    assert elsewhere("run", "-d", "--name", "too", "--", "true").returncode == 0
    spec = shell.json("status", "too")["spec"]
    assert spec["executor"] == "eu"
    assert spec["workingDir"] is None  # a directory of this machine is none of a cluster's
    drop_records(shell)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[executors.eu]\n", "atoll.toml: executors.eu.kind: None is not valid: expected one of"),
        (EU + "imag = 'x'\n", "atoll.toml: executors.eu.imag: 'x' is not valid: there is no such"),
        ("[defaults]\nmax_restarts = 'x'\n", "atoll.toml: defaults.max_restarts: 'x' is not valid"),
    ],
)
def test_a_mistake_in_the_file_is_told_before_anything_happens(
    shell: Shell, text: str, words: str
) -> None:
    shell.configure(text)
    refused = shell("run", "--", "true")
    assert refused.returncode in (1, 2)
    assert words in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (shell.state / "atoll.db").exists()


def test_a_training_outlives_the_configuration_of_its_executor(shell: Shell) -> None:
    assert shell("run", "-d", "--executor", "eu", "--name", "far", "--", "true").returncode == 0
    stop_server(shell)
    shell.configure("")
    until_missing(shell, "far")
    shown = shell.json("status", "far")
    assert shown["phase"] == "pending"
    assert "the executor 'eu' is not configured" in shown["message"]
    refused = shell("rm", "-f", "far")
    assert refused.returncode == 1
    assert "'far' is not removed yet: its executor 'eu' is not configured" in refused.stderr
    assert [t["name"] for t in shell.json("ps")] == ["far"]
    drop_records(shell)


def test_a_run_that_nobody_can_stop_now_is_left_in_its_time(shell: Shell) -> None:
    """The cluster does not answer: the cancel is stored, and the command does not wait for it."""
    words = ("--executor", "eu", "--stop-grace", "0", "--", "true")
    ran = shell("run", "--deadline", "1", "--name", "far", *words)
    assert ran.returncode == 124
    assert ran.stderr.splitlines()[-1] == f"atoll: left far: {LEFT}"
    assert "the executor 'eu' cannot be reached: the Kubernetes API server did not" in ran.stderr
    stored = shell.json("status", "far")
    assert stored["spec"]["cancel"]
    assert [c["type"] for c in stored["conditions"]] == ["ExecutorUnreachable"]
    assert "new (executor unreachable)" in shell("ps").stdout
    with shell.start("run", "--rm", "--name", "too", *words) as followed:
        until(lambda: is_said_to_be_unreachable(shell, "too"))
        followed.send_signal(signal.SIGINT)
        _, told = followed.communicate(timeout=30)
    assert followed.returncode == 130
    *_, left, unremoved = told.splitlines()
    assert left == f"atoll: left too: {LEFT}"
    assert unremoved.startswith("atoll: 'too' is not removed yet: its executor 'eu' cannot be")
    refused = shell("rm", "-f", "far")
    assert refused.returncode == 1
    assert "'far' is not removed yet: its executor 'eu' cannot be reached" in refused.stderr
    drop_records(shell)


def test_an_executor_that_cannot_be_used_says_why_until_a_restart(shell: Shell) -> None:
    (shell.toml.parent / "kube.yaml").rename(shell.toml.parent / "elsewhere.yaml")
    file = shell.toml.parent / "kube.yaml"
    why = f"no usable Kubernetes configuration: Configuration file {file} not found"
    assert shell("run", "--", "true").returncode == 0
    eu, _ = shell.json("executors")["items"]
    assert (eu["isReachable"], eu["message"]) == (False, why)
    refused = shell("run", "--executor", "eu", "--", "true")
    assert refused.returncode == 2
    assert refused.stderr == (
        f"atoll: error: --executor: 'eu' is not valid: {why}; once that is put right, "
        f"stop it (kill {shell.server_pid()}; ranks keep running) and run: "
        "atoll serve --config FILE\n"
    )
    (shell.toml.parent / "elsewhere.yaml").rename(file)
    assert shell.json("executors")["items"][0]["message"] == why
    stop_server(shell)
    assert "did not answer" in shell.json("executors")["items"][0]["message"]


def test_a_training_goes_on_once_its_executor_is_there_again(
    shell: Shell, cluster: SmallCluster
) -> None:
    assert shell("run", "-d", "--executor", "eu", "--name", "far", "--", "true").returncode == 0
    until(lambda: jobs_of(cluster))
    stop_server(shell)
    shell.configure("")
    until_missing(shell, "far")
    (before,) = jobs_of(cluster)
    stop_server(shell)
    shell.configure(EU)
    until(lambda: shell.json("status", "far")["message"] == "0 of 1 ranks ready, min 1")
    assert jobs_of(cluster) == [before]
    drop_records(shell)


def test_a_cluster_that_comes_back_is_asked_for_what_was_stored(
    shell: Shell, cluster: SmallCluster
) -> None:
    cluster.stop()
    assert shell("run", "-d", "--executor", "eu", "--name", "far", "--", "true").returncode == 0
    until(lambda: is_said_to_be_unreachable(shell, "far"))
    cluster.start()
    until(lambda: jobs_of(cluster))
    until(lambda: shell.json("status", "far")["message"] == "0 of 1 ranks ready, min 1")
    reasons = [event["reason"] for event in shell.json("events", "far")]
    assert reasons.count("ExecutorUnreachable") == reasons.count("ExecutorReachable") == 1
    drop_records(shell)


def jobs_of(cluster: SmallCluster) -> list[str]:
    return [path for path in list(cluster.objects) if "/jobs/" in path]


def until_missing(shell: Shell, name: str) -> None:
    """Until its status says what became of its executor."""
    until(
        lambda: "ExecutorMissing" in [c["type"] for c in shell.json("status", name)["conditions"]]
    )


def is_said_to_be_unreachable(shell: Shell, name: str) -> bool:
    listed = {t["name"]: t for t in shell.json("ps")}
    return name in listed and "cannot be reached" in listed[name]["message"]


def drop_records(shell: Shell) -> None:
    """The records of trainings that no cluster will ever end are no matter for this test."""
    stop_server(shell)
    for path in Path(shell.state).glob("atoll.db*"):
        path.unlink()
