"""A training is started again from what the server has of it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import atoll

from .conftest import Served


def test_a_script_runs_again_though_its_file_is_gone(client: atoll.Client, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print('says', os.environ['SECRET'], os.environ.get('MORE'))")
    first = client.deploy_distributed(
        "first", source=str(script), world_size=2, env={"SECRET": "s3cret"}
    )
    first.result(60)
    script.unlink()
    again = first.rerun()
    assert again.name == "first-r2"
    again.result(60)
    assert [line.text for line in again.logs()] == ["says s3cret None"] * 2
    other = again.rerun(world_size=1, env={"MORE": "x"})
    assert other.name == "first-r3"
    other.result(60)
    assert [line.text for line in other.logs()] == ["says s3cret x"]
    named = first.rerun("named")
    with pytest.raises(atoll.Conflict, match="named"):
        first.rerun("named")
    assert named.spec.world_size.target == 2
    assert {t.name for t in client.list()} == {"first", "first-r2", "first-r3", "named"}


def test_a_function_and_a_cancelled_training_run_again(client: atoll.Client) -> None:
    def train() -> int:
        return 7

    first = client.deploy_distributed("f", source=train, world_size=1)
    first.result(60)
    assert first.rerun().result(60) == 7
    assert client.get("f-r2").result() == 7
    stopped = client.deploy_distributed("c", command=["sleep", "100"], world_size=1)
    stopped.wait_until_min_world(60)
    stopped.cancel()
    again = stopped.rerun()
    again.wait_until_min_world(60)
    assert again.phase == "ready"


def test_a_cell_that_runs_again_replaces_its_training(client: atoll.Client) -> None:
    running = client.deploy_distributed("cell", command=["sleep", "100"])
    with pytest.raises(atoll.Conflict, match="cell"):
        client.deploy_distributed("cell", command=["true"])
    with pytest.raises(atoll.ValidationError):  # the one that runs is not removed for nothing
        client.deploy_distributed("cell", command=[], replace=True)
    assert client.get("cell").uid == running.uid
    new = client.deploy_distributed("cell", command=["true"], replace=True)
    new.wait_until_complete(60)
    assert new.phase == "succeeded"
    assert [t.uid for t in client.list()] == [new.uid] != [running.uid]


def test_cells_that_run_at_once_replace_each_other(client: atoll.Client) -> None:
    def deploy(_: int) -> str:
        return client.deploy_distributed("cell", command=["sleep", "100"], replace=True).uid

    with ThreadPoolExecutor(4) as threads:
        uids = list(threads.map(deploy, range(4)))
    assert len(set(uids)) == 4
    assert [t.uid for t in client.list()] in [[uid] for uid in uids]


def test_what_is_gone_is_named(client: atoll.Client, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("")
    command = [sys.executable, "train.py"]
    first = client.deploy_distributed("w", command=command, world_size=1, working_dir=folder)
    first.result(60)
    (folder / "train.py").unlink()
    with pytest.raises(atoll.Conflict, match=r"'w' cannot be run again: .*/work/train.py is gone"):
        first.rerun()
    folder.rmdir()
    with pytest.raises(atoll.Conflict, match=r"/work is gone"):
        first.rerun()
    assert [t.name for t in client.list()] == ["w"]


def test_the_command_prints_the_new_name(
    client: atoll.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.deploy_distributed("a", command=["echo", "hello"], world_size=1).result(60)
    url = client.wire.endpoint.address()
    monkeypatch.setenv("ATOLL_URL", url.url)
    monkeypatch.setenv("ATOLL_TOKEN", url.token)
    command = [sys.executable, "-m", "atoll.cli", "rerun", "a"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    assert made.stdout == "a-r2\n"
    bad = subprocess.run([*command, "--name", "no/such"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert "name" in bad.stderr
    followed = subprocess.run([*command, "--follow"], capture_output=True, text=True)
    assert followed.returncode == 0
    assert "hello" in followed.stdout


def test_a_repeated_request_makes_one_training(served: Served) -> None:
    served.create("a")
    served.create("a-r2")
    key = {"Idempotency-Key": "k"}
    first = served.http.post("/v1/trainings/a/rerun", json={}, headers=key)
    again = served.http.post("/v1/trainings/a/rerun", json={}, headers=key)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["uid"] == again.json()["uid"]
    assert first.json()["spec"]["name"] == "a-r3"
    with served.client("two") as other:
        assert other.post("/v1/trainings/a/rerun", json={}).status_code == 404
    assert served.http.post("/v1/trainings/a/rerun", json={"typo": 1}).status_code == 400
