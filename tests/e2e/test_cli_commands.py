"""Every command but `run`: what it says to people, and the JSON it gives to programs."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.e2e.conftest import until

TRAINING_KEYS = {
    "name", "namespace", "uid", "generation", "resourceVersion", "createdAt", "phase", "reason",
    "message", "observedGeneration", "world", "ranks", "rankExits", "rootCause", "conditions",
    "startedAt", "endedAt", "worldSizeHistory", "lastResize", "rendezvousEndpoint", "bench", "spec",
}  # fmt: skip
RANK_KEYS = {"rank", "phase", "podName", "node", "provider", "region", "restarts", "message"}
EXIT_KEYS = {
    "rank", "exitCode", "terminationReason", "restartCount", "signal", "startedAt", "endedAt",
    "host", "collateral", "message", "logTail", "stack",
}  # fmt: skip
EVENT_KEYS = {"type", "reason", "message", "at", "count", "id"}
FOREVER = "echo line one; echo line two; trap 'exit 0' TERM; while :; do sleep 0.05; done"


def test_a_training_from_up_to_rm_in_json(atoll: Any) -> None:
    words = ("--name", "life", "-n", "2", "--min", "1", "--max", "4")
    made = atoll("run", "-d", "--json", *words, "--", "sh", "-c", FOREVER)
    assert set(json.loads(made.stdout)) >= TRAINING_KEYS

    ready = atoll.json("wait", "life", "--for", "target", "--timeout", "30")
    assert (ready["goal"], ready["exitCode"], ready["phase"]) == ("target", 0, "ready")
    scaled = atoll.json("scale", "life", "3", "--wait", "--timeout", "30")
    assert (scaled["previousTarget"], scaled["target"], scaled["ready"]) == (2, 3, 3)

    listed = {training["name"]: training for training in atoll.json("ps", "--prefix", "li")}
    assert listed["life"]["world"] == {
        "ready": 3, "target": 3, "min": 1, "max": 4, "belowMinimum": False,
    }  # fmt: skip
    status = atoll.json("status", "life")
    assert set(status) >= TRAINING_KEYS
    assert all(set(rank) >= RANK_KEYS for rank in status["ranks"])
    assert status["rankExits"] == []

    until(lambda: len(atoll("logs", "life").stdout.splitlines()) == 6)
    lines = [json.loads(line) for line in atoll("logs", "life", "--json").stdout.splitlines()]
    assert {(line["rank"], line["text"]) for line in lines} == {
        (rank, text) for rank in range(3) for text in ("line one", "line two")
    }
    assert atoll("logs", "life", "--rank", "1", "--tail", "1").stdout == "line two\n"
    assert any(t["name"] == "life" for t in atoll.json("top"))

    assert [t["name"] for t in atoll.json("cancel", "life")] == ["life"]
    ended = atoll.json("wait", "life", code=1)
    assert ended["phase"] == "cancelled"
    assert all(set(ended_rank) == EXIT_KEYS for ended_rank in ended["rankExits"])
    assert "was already cancelled" in atoll("cancel", "life").stdout
    told = atoll("wait", "life", "--for", "min")
    assert (told.returncode, told.stdout, told.stderr) == (1, "", "life was cancelled\n")

    events = atoll.json("events", "life")
    assert all(set(event) == EVENT_KEYS for event in events)
    assert events[0]["reason"] == "Cancelled"
    assert {"Accepted", "RanksStarted", "Scaled"} <= {event["reason"] for event in events}
    assert atoll.json("events", "life", "--since", str(events[0]["at"] + 1)) == []
    assert atoll.json("status", "life", "--bench")["phase"] == "Skipped"

    assert atoll.json("rm", "life") == {"removed": ["life"]}
    assert atoll.json("rm", "-f", "life") == {"removed": []}
    assert atoll("status", "life").returncode == 1


def test_people_see_tables(atoll: Any) -> None:
    failed = atoll("run", "--name", "sad", "-n", "2", "--", "sh", "-c", "echo oh; exit $RANK")
    assert failed.returncode == 1
    assert atoll("ps", "--phase", "failed").stdout.splitlines()[0].split() == [
        "NAME", "PHASE", "READY", "RAN", "AGE", "COMMAND",
    ]  # fmt: skip
    status = atoll("status", "sad").stdout
    assert "rank 1 failed first: it exited with code 1" in status
    assert "| oh" in status
    assert ["RANK", "EXIT", "REASON", "RESTARTS", "COLLATERAL"] in map(
        str.split, status.split("\n")
    )
    assert "RankLost" in atoll("events", "sad", "--since", "1h").stdout
    assert "no result: bench is off for this training" in atoll("status", "sad", "--bench").stdout
    waited = atoll("wait", "sad", "--timeout", "60")
    assert waited.returncode == 1
    assert "last lines of rank 1:" in waited.stderr
    assert "sad: removed" in atoll("rm", "-f", "sad").stdout


def test_up_prints_only_the_name_and_wait_follows_it(atoll: Any) -> None:
    name = atoll("run", "-d", "-n", "2", "--", sys.executable, "-c", "pass").stdout.strip()
    assert name.startswith("python")
    done = atoll("wait", name)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{name} succeeded: 2 of 2 ranks exited 0\n"
    assert atoll("wait", name, "--for", "min").returncode == 0


def test_wait_times_out_with_124_and_says_what_was_missing(atoll: Any) -> None:
    assert atoll("run", "-d", "--name", "sleeper", "--", "sleep", "60").returncode == 0
    done = atoll("wait", "sleeper", "--timeout", "0.2")
    assert done.returncode == 124
    assert "after 0.2 s" in done.stderr
    assert atoll.json("wait", "sleeper", "--timeout", "0", code=124)["exitCode"] == 124
    refused = atoll("rm", "sleeper")
    assert refused.returncode == 1
    assert "sleeper is running: --force stops and removes it" in refused.stderr
    assert atoll.json("status", "sleeper")["phase"] in ("pending", "ready")
    assert atoll("rm", "-f", "sleeper").returncode == 0


def test_logs_f_ends_with_the_training(atoll: Any) -> None:
    assert atoll(
        "run", "-d", "--name", "talker", "--", "sh", "-c", "echo a; sleep 0.5; echo b"
    ).stdout
    done = atoll("logs", "-f", "talker")
    assert (done.returncode, done.stdout) == (0, "[0] a\n[0] b\n")


def test_status_w_without_a_terminal_is_a_line_for_each_change(atoll: Any, tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"while [ ! -e {go} ]; do sleep 0.05; done; exit 4"
    assert atoll("run", "-d", "--name", "changing", "--", "sh", "-c", script).stdout
    with atoll.start("status", "-w", "changing") as watching:
        assert watching.stdout
        line = ""
        while line != "changing ready 1/1\n":
            line = watching.stdout.readline()
            assert line.startswith("changing ")
        go.touch()
        rest = watching.stdout.read()
        assert watching.wait() == 0
    assert "it exited with code 4" in rest
    states = atoll("status", "-w", "--json", "changing").stdout.splitlines()
    assert json.loads(states[-1])["phase"] == "failed"


def test_rm_finished_keeps_what_runs(lone_atoll: Any) -> None:
    assert lone_atoll("run", "--name", "over", "--", "true").returncode == 0
    assert lone_atoll("run", "-d", "--name", "alive", "--", "sleep", "60").returncode == 0
    assert lone_atoll.json("rm", "-f", "--finished") == {"removed": ["over"]}
    assert [t["name"] for t in lone_atoll.json("ps")] == ["alive"]


def test_a_token_opens_its_namespace_only_and_can_be_removed(atoll: Any) -> None:
    assert atoll("run", "-d", "--name", "mine", "--", "sleep", "60").returncode == 0
    url = json.loads((atoll.state / "endpoint.json").read_bytes())["url"]
    made = atoll.json("token", "create", "--namespace", "other", "--label", "ci")
    other = {"ATOLL_URL": url, "ATOLL_TOKEN": made["token"]}
    assert atoll.json("ps", **other) == []
    assert atoll("status", "mine", **other).returncode == 1
    listed = {token["id"]: token for token in atoll.json("token", "list")}
    assert (listed[made["id"]]["namespace"], listed[made["id"]]["label"]) == ("other", "ci")
    assert made["token"] not in atoll("token", "list").stdout
    assert atoll("rm", "-f", "mine", **other).returncode == 0
    assert atoll.json("token", "revoke", made["id"]) == {"removed": [made["id"]]}
    refused = atoll("ps", **other)
    assert refused.returncode == 1
    assert "atoll token create" in refused.stderr
    assert atoll("rm", "-f", "mine").returncode == 0


def test_tokens_are_made_before_and_while_a_server_starts(lone_atoll: Any) -> None:
    """In any order, at the same time: nobody finds the file locked or half made."""
    early = lone_atoll.json("token", "create")["token"]
    with lone_atoll.start("serve", "--port", "0") as server:
        makers = [lone_atoll.start("token", "create") for _ in range(3)]
        made = [maker.communicate(timeout=60)[0].strip() for maker in makers]
        assert server.stdout
        url = json.loads(server.stdout.readline())["url"]
        for token in (early, *made):
            assert lone_atoll("ps", ATOLL_URL=url, ATOLL_TOKEN=token).returncode == 0
        server.send_signal(signal.SIGINT)
        assert server.wait() == 0


def test_ranks_outlive_serve_and_the_next_one_takes_them_up(
    lone_atoll: Any, tmp_path: Path
) -> None:
    with lone_atoll.start("serve", "--port", "0") as server:
        assert server.stdout
        server.stdout.readline()
        go = tmp_path / "go"
        script = f"echo up; while [ ! -e {go} ]; do sleep 0.05; done; echo done"
        assert lone_atoll(
            "run", "-d", "--name", "lasting", "-n", "2", "--", "sh", "-c", script
        ).stdout
        assert lone_atoll("wait", "lasting", "--for", "target").returncode == 0
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    go.touch()
    assert lone_atoll("wait", "lasting", "--timeout", "30").returncode == 0
    assert lone_atoll("logs", "lasting").stdout.count("done") == 2


def test_the_shell_completes_commands_and_names(atoll: Any) -> None:
    assert "_ATOLL_COMPLETE" in atoll("completion", "bash").stdout
    assert "#compdef atoll" in atoll("completion", "zsh").stdout
    assert "complete" in atoll("completion", "fish").stdout
    assert atoll("run", "-d", "--name", "completed", "--", "true").returncode == 0

    def completed(*words: str) -> str:
        asked = {"COMP_WORDS": " ".join(["atoll", *words]), "COMP_CWORD": str(len(words))}
        return str(atoll(_ATOLL_COMPLETE="bash_complete", **asked).stdout)

    assert "plain,status\n" in completed("st")
    assert "plain,--max-restarts\n" in completed("run", "--max-r")
    assert "plain,completed\n" in completed("status", "comp")


def test_estimate_needs_no_control_plane(lone_atoll: Any) -> None:
    words = ("--parameters", "1.3B", "--step-s", "0.5", "--link-gbps", "1", "-n", "8")
    told = lone_atoll.json("estimate", *words, "--codec", "int8")
    assert told["bytesUp"] > 0
    assert 0 < told["utilisation"] < 1
    assert 0 < told["extraRounds"] < 20  # of the ramp that a run has by default
    assert "utilisation" in lone_atoll("estimate", *words).stdout
    assert not lone_atoll.state.exists()


def test_manifests_for_a_cluster_are_printed_as_yaml_and_json(lone_atoll: Any) -> None:
    words = ("k8s", "manifests", "--image", "registry.example/atoll:1")
    listed = lone_atoll.json(*words)
    assert listed["kind"] == "List"
    kinds = [item["kind"] for item in listed["items"]]
    assert {"CustomResourceDefinition", "Deployment", "ServiceAccount"} <= set(kinds)
    told = lone_atoll(*words).stdout
    assert told.count("\n---\n") == len(kinds) - 1
    assert "registry.example/atoll:1" in told


def test_events_since_takes_ages_and_times(atoll: Any) -> None:
    assert atoll("run", "--name", "recent", "--", "true").returncode == 0
    then = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 600))
    for since in ("10m", "1.5h", "2d", then, str(time.time() - 600)):
        assert len(atoll.json("events", "recent", "--since", since)) > 2, since


def test_ps_into_a_closed_pipe_is_silent(atoll: Any) -> None:
    with atoll.start("ps") as it:
        assert it.stdout
        assert it.stderr
        it.stdout.close()
        assert it.wait() == 128 + signal.SIGPIPE
        assert it.stderr.read() == ""


def test_the_server_is_found_not_started_again(atoll: Any) -> None:
    assert atoll("ps").returncode == 0
    before = atoll.server_pid()
    runs = [atoll.start("run", "--", "true") for _ in range(4)]
    assert [run.wait() for run in runs] == [0] * 4
    for run in runs:
        run.communicate()
    assert atoll.server_pid() == before
    assert os.stat(atoll.state / "token").st_mode & 0o777 == 0o600


def test_the_result_of_a_rank(atoll: Any) -> None:
    program = "import atoll; print('said'); atoll.set_result({'loss': 0.5, 'pair': (1, b'x')})"
    done = atoll("run", "--name", "valued", "--", sys.executable, "-c", program)
    assert done.stdout.split() == ["[0]", "said"]
    assert json.loads(atoll("result", "valued").stdout) == {"loss": 0.5, "pair": [1, "b'x'"]}
    assert atoll.json("result", "valued", "--rank", "0")["result"]["loss"] == 0.5
    missing = atoll("result", "valued", "--rank", "1")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "valued has rank 0 only" in missing.stderr
    atoll("run", "--name", "broken", "--", "false")
    failed = atoll("result", "broken")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "exit_code=1" in failed.stderr
    atoll("run", "-d", "--name", "endless", "--", "sleep", "600")
    assert atoll("result", "endless", "--timeout", "0").returncode == 124
