"""Reports by HTTP: through a killed control plane, by a token that can do nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

from atoll.backends.metrics_token import key_at, token_for
from tests.e2e.conftest import until

FOREVER = "trap 'exit 0' TERM; while :; do sleep 0.05; done"
RANK = """
import sys, time, atoll
for step in range(20):
    atoll.report(step=step, loss=float("nan") if step == 7 else step)
print("half", flush=True)
sys.stdin.readline()
for step in range(20, 40):
    atoll.report(step=step, loss=step)
sys.stdin.readline()
"""


def answer(url: str, token: str, body: bytes | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_ranks_report_by_http_through_a_killed_control_plane(atoll: Any) -> None:
    made = atoll("run", "-d", "--name", "far", "-n", "1", "--", "sh", "-c", FOREVER)
    assert made.returncode == 0, made.stderr
    atoll("run", "-d", "--name", "other", "-n", "1", "--", "sh", "-c", FOREVER)
    uid = atoll.json("status", "far")["uid"]
    endpoint = json.loads((atoll.state / "endpoint.json").read_text())
    port = endpoint["url"].rpartition(":")[2]
    token = token_for(key_at(atoll.state), "default", uid)
    url = f"{endpoint['url']}/v1/trainings/far/metrics"
    env = atoll.env | {
        "ATOLL_REPORTS": url, "ATOLL_REPORTS_TOKEN": token, "ATOLL_RANK": "5", "ATOLL_ATTEMPT": "2",
    }  # fmt: skip
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdout.readline()
    until(lambda: len(atoll.json("metrics", "far", "loss")["step"]) == 20)
    os.kill(atoll.server_pid(), signal.SIGKILL)
    rank.stdin.write("\n")
    rank.stdin.flush()
    serving = subprocess.Popen(
        [sys.executable, "-m", "atoll.cli", "serve", "--port", port], env=atoll.env, cwd=atoll.cwd,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert serving.stdout is not None
    assert serving.stdout.readline()
    until(lambda: len(atoll.json("metrics", "far", "loss")["step"]) == 40)
    rank.stdin.write("\n")
    rank.stdin.close()
    assert rank.wait(30) == 0
    table = atoll.json("metrics", "far", "loss")
    assert sorted(table["step"]) == list(range(40))
    assert (set(table["rank"]), set(table["attempt"])) == ({5}, {2})

    base = endpoint["url"]
    for path in ("trainings", "trainings/far", "trainings/far/metrics", "executors"):
        assert answer(f"{base}/v1/{path}", token)[0] == 401
    assert answer(f"{base}/v1/trainings/far/cancel", token, b"")[0] == 401
    assert answer(f"{base}/v1/trainings/other/metrics", token, b"{}")[0] == 404
    assert answer(url, token[:-1] + "x", b"{}")[0] == 401
    own = (atoll.state / "token").read_text().strip()
    assert answer(url, own, b"{}")[0] == 401
    code, words = answer(url, token, b"x" * 10_000_000)
    assert code == 413, words
    assert answer(url, token, b"rubbish")[0] == 400
    atoll("rm", "-f", "far", "other")
    serving.terminate()
    serving.wait(30)
    serving.stdout.close()
    rank.stdout.close()
