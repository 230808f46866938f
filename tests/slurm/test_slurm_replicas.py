"""`SlurmExecutor`: replicas launched from a script, with the real daemons."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll import LocalProcessExecutor, ReplicaHandle, ServerlessExecutor, SlurmExecutor
from atoll.core.errors import NotFound, Permanent, ValidationError
from tests.support.slurm_cluster import SlurmCluster, needs_slurm

pytestmark = [needs_slurm, pytest.mark.slurm]


@pytest.fixture
def executor(cluster: SlurmCluster, tmp_path: Path) -> Iterator[SlurmExecutor]:
    with SlurmExecutor(
        folder=str(tmp_path / "f"), conf=str(cluster.conf), heartbeat_timeout_s=20.0
    ) as made:
        yield made


def work(lr: float, rank_env: str = "") -> dict[str, Any]:
    import os

    sys.stdout.write(f"at work {os.environ['RANK']} {lr}\n")
    if os.environ["RANK"] == "1":
        raise SystemExit(7)
    return {"rank": int(os.environ["RANK"]), "lr": lr}


def test_a_launch_and_how_each_replica_ended(executor: SlurmExecutor) -> None:
    assert isinstance(executor, ServerlessExecutor)
    handles = executor.launch_replicas(3, work, {"lr": 0.5}, timeout=60)
    results = executor.collect(handles)
    assert [r["status"] for r in results] == ["succeeded", "failed", "succeeded"]
    assert [r["exit_code"] for r in results] == [0, 7, 0]
    assert [r["result"] for r in results] == [{"rank": 0, "lr": 0.5}, None, {"rank": 2, "lr": 0.5}]
    assert executor.stream_logs(handles[0]).startswith("at work 0 0.5")
    with LocalProcessExecutor() as local:
        (other,) = local.collect(local.launch_replicas(1, work, {"lr": 1.0}))
    assert list(results[0]) == list(other)  # the same keys everywhere


def test_a_project_of_many_files_travels_unless_it_is_told_not_to(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    (project / "model").mkdir(parents=True)
    (project / "model/net.py").write_text("WORD = 'of the project'")
    (project / "train.py").write_text("import model.net, os; print(model.net.WORD, os.getcwd())")
    monkeypatch.chdir(project)
    options: dict[str, Any] = {"folder": str(tmp_path / "f"), "conf": str(cluster.conf)}
    with SlurmExecutor(**options) as executor:
        handles = executor.launch_replicas(2, "train.py", timeout=60)
        (project / "model").rename(tmp_path / "away")  # what runs is what was sent
        assert [r["exit_code"] for r in executor.collect(handles, timeout=60)] == [0, 0]
        assert executor.stream_logs(handles[1]).startswith(f"of the project {tmp_path}/f/")
    with SlurmExecutor(code=False, **options) as executor:
        (report,) = executor.collect(executor.launch_replicas(1, "train.py", timeout=60))
        assert report["exit_code"] == 1
        (tmp_path / "away").rename(project / "model")
        handles = executor.launch_replicas(1, "train.py", timeout=60)
        assert executor.collect(handles)[0]["exit_code"] == 0
        assert executor.stream_logs(handles[0]) == f"of the project {project}"


def test_another_process_collects_what_this_one_launched(
    executor: SlurmExecutor, cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.05)\n"
        "print(sys.argv[1:], flush=True)\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n"
    )
    launcher = (
        "import sys, atoll\n"
        "e = atoll.SlurmExecutor(folder=sys.argv[1], conf=sys.argv[2], heartbeat_timeout_s=20.0)\n"
        "handles = e.launch_replicas(2, sys.argv[3], {'lr': 0.1}, timeout=90)\n"
        "print('\\n'.join(h.to_json() for h in handles), flush=True)\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", launcher, executor.folder, cluster.conf, script],
        capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip
    handles = [ReplicaHandle.from_json(line) for line in done.stdout.splitlines()]
    assert len(handles) == 2, done.stderr
    deadline = time.monotonic() + 40
    while executor.poll(handles[0]) != "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert executor.poll(handles[1]) in ("pending", "running")
    (tmp_path / "go").touch()
    results = executor.collect(handles)
    assert [(r["status"], r["exit_code"]) for r in results] == [("succeeded", 0), ("failed", 3)]
    assert "--lr" in executor.stream_logs(handles[0])
    assert executor.attach(handles[0].metadata["job_name"]) == handles


def test_cancel_is_idempotent_and_nothing_is_left(
    executor: SlurmExecutor, cluster: SlurmCluster
) -> None:
    handles = executor.launch_replicas(2, sleep, timeout=60)
    executor.cancel(handles[0])
    executor.cancel(handles[1])
    results = executor.collect(handles)
    assert [r["status"] for r in results] == ["cancelled"] * 2
    uid = handles[0].metadata["uid"]
    executor.close()
    states = [job["job_state"] for job in cluster.jobs() if uid in job["name"]]
    assert not {"PENDING", "RUNNING"} & set(states)
    assert not (executor.folder / uid).exists()


def sleep() -> None:
    time.sleep(300)


def test_what_does_not_exist(executor: SlurmExecutor) -> None:
    with pytest.raises(NotFound):
        executor.attach("replicas-nonesuch")
    handle = ReplicaHandle(0, "slurm", {"job_name": "replicas-abc", "uid": "abc", "rank": 0})
    assert executor.poll(handle) == "cancelled"
    executor.cancel(handle)


def test_bad_input_launches_nothing(
    executor: SlurmExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match="partiton"):
        SlurmExecutor(partiton="main")
    with pytest.raises(ValueError, match="n_replicas"):
        executor.launch_replicas(0, work)
    with pytest.raises(ValidationError, match="gpu_models|gpu"):
        executor.launch_replicas(1, work, {"lr": 1.0}, gpu="H100:0")
    monkeypatch.setenv("PATH", "/nonesuch")
    with pytest.raises(Permanent, match="sbatch not found"):
        executor.launch_replicas(1, work, {"lr": 1.0})
    assert not executor.folder.exists() or list(executor.folder.iterdir()) == []


def test_a_handle_is_json(executor: SlurmExecutor) -> None:
    handle = ReplicaHandle(1, "slurm", {"job_name": "replicas-a", "directory": "/elsewhere"})
    assert ReplicaHandle.from_json(json.loads(handle.to_json())) == handle
    with pytest.raises(ValidationError, match="directory"):
        executor.poll(handle)


def test_what_the_cluster_does_not_have_is_refused_before_anything_is_made(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "f"
    with (
        SlurmExecutor(folder=str(folder), conf=str(cluster.conf), partition="nope") as executor,
        pytest.raises(ValidationError, match="partition: 'nope'"),
    ):
        executor.launch_replicas(1, work, {"lr": 1.0})
    assert not folder.exists()
