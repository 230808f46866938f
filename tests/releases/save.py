"""Writes `state-0.1/` and `cluster-0.1.jsonl` anew, with the release whose wheel is here."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import httpx2

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "src")]

import atoll  # noqa: E402
from atoll.sdk.endpoint import SHARED_ENV  # noqa: E402
from tests.support.control_plane import wait_for  # noqa: E402
from tests.support.release import OLD_SERVE, Site, cleared, unpack  # noqa: E402

STATE = HERE / "state-0.1"
CLUSTER = HERE / "cluster-0.1.jsonl"
KEPT = ("atoll.db", "token", "ranks")
KEYED = {"name": "keyed", "command": ["true"], "worldSize": {"min": 1, "target": 1, "max": 1}}
SHELL = {
    "done": {"command": ["sh", "-c", "echo out; echo $RANK >&2"]},
    "broken": {
        "command": ["sh", "-c", "[ $RANK = 0 ] || { echo nan; exit 7; }; sleep 600"],
        "max_restarts": 1,
    },
    "stopped": {"command": ["sleep", "600"]},
}


def main() -> None:
    for name in SHARED_ENV:  # of this machine, and no part of the record
        os.environ.pop(name, None)
    os.environ["PATH"] = os.defpath
    with tempfile.TemporaryDirectory() as folder, cleared(Path(folder, "state")):
        old = Site(unpack(Path(folder, "site")), Path(folder, "state"))
        cluster = old.run(str(HERE / "cluster_objects.py"))
        assert cluster.returncode == 0, cluster.stderr
        CLUSTER.write_text(cluster.stdout)
        save_state(old)


def save_state(old: Site) -> None:
    plane = old.start(*OLD_SERVE)
    token = old.atoll("token", "create", "--namespace", "research", "--label", "alice")
    headers = {"Authorization": f"Bearer {plane.token}"}
    http = httpx2.Client(base_url=plane.url, headers=headers)
    with http, atoll.Client(plane.url, plane.token) as client:
        script = old.state.with_name("shipped.py")
        script.write_text("import os\nprint('shipped to rank', os.environ['RANK'])\n")
        for name, options in {**SHELL, "shipped": {"source": script}}.items():
            options = {"world_size": 2, "env": {"LANG": "C"}, "working_dir": "/", **options}
            client.deploy_distributed(name, **options)
        http.post("/v1/trainings", json=KEYED, headers={"Idempotency-Key": "once"})
        client.get("stopped").cancel()
        records = {}
        for training in client.list():
            try:
                training.result(timeout=60)
            except atoll.BelowMinimumWorld:
                assert training.name in ("broken", "stopped"), training.name
            wait_for(lambda: training.refresh().status.is_released)  # noqa: B023
            path = f"/v1/trainings/{training.name}"
            records[training.name] = {
                "training": http.get(path).json(),
                "events": http.get(f"{path}/events").json()["items"],
                "logs": [json.loads(x) for x in http.get(f"{path}/logs").text.split("\n") if x],
            }
    plane.stop()
    shutil.rmtree(STATE, ignore_errors=True)
    STATE.mkdir()
    for name in KEPT:
        source = old.state / name
        shutil.copytree(source, STATE / name) if source.is_dir() else shutil.copy(source, STATE)
    said = {"token": token.stdout.strip(), "records": records}
    (STATE / "records.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
