"""`ModalExecutor` in scripts, against the stand-in for Modal and a real S3 API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.allreduce.s3server import S3Server
from tests.support.modal_stand_in import ModalStandIn, forget_client

from atoll import ModalExecutor, ReplicaHandle, ServerlessExecutor
from atoll.core.errors import NotFound, Permanent, ValidationError

KEYS = {
    "rank", "status", "exit_code", "error", "result", "job_name",
    "signal", "reason", "host", "started_at", "ended_at",
}  # fmt: skip


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    server.make_bucket("runs")
    yield server
    server.stop()


@pytest.fixture
def stand_in(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalStandIn]:
    server = ModalStandIn()
    server.secrets["store"] = s3.environment
    for name, value in {**server.environment, **s3.environment}.items():
        monkeypatch.setenv(name, value)
    forget_client()
    yield server
    forget_client()
    server.close()


@pytest.fixture
def store() -> str:
    return f"s3://runs/{uuid.uuid4().hex}"


def make(store: str, **options: Any) -> ModalExecutor:
    given = {"secrets": ["store"], "python": "python", "poll_s": 0.2}
    return ModalExecutor("python:3.11", store=store, **given | options)


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_is_a_serverless_executor_under_both_names(stand_in: ModalStandIn, store: str) -> None:
    assert isinstance(make(store), ServerlessExecutor)
    assert not make(store).supports_inter_replica_network


def test_replicas_run_fail_apart_and_are_collected(
    stand_in: ModalStandIn, store: str, tmp_path: Path
) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        import atoll
        rank = int(os.environ["REPLICA_RANK"])
        print("lr", os.environ["LR"], sys.argv[1:], flush=True)
        if rank == 1:
            sys.exit(5)
        atoll.set_result({"rank": rank, "gpu": os.environ.get("MODAL_REGION")})
        """,
    )
    with make(store, region="eu-west-1") as executor:
        handles = executor.launch_replicas(3, path, {"lr": 0.5, "rank_env": "ME"}, timeout=120)
        reports = executor.collect(handles, timeout=100)
        assert [set(report) for report in reports] == [KEYS] * 3
        assert [r["status"] for r in reports] == ["succeeded", "failed", "succeeded"]
        assert [r["exit_code"] for r in reports] == [0, 5, 0]
        assert reports[2]["result"] == {"rank": 2, "gpu": "eu-west-1"}
        assert "lr 0.5 ['--lr', '0.5'" in executor.stream_logs(handles[1])
    assert stand_in.running() == []


def test_another_process_goes_on_with_the_handles(
    stand_in: ModalStandIn, store: str, tmp_path: Path
) -> None:
    launcher = f"""
        import os
        from atoll import ModalExecutor
        executor = ModalExecutor("python:3.11", store={store!r}, secrets=["store"],
                                 python="python", poll_s=0.2)
        def train(seconds):
            import time
            time.sleep(seconds)
            return "done"
        for handle in executor.launch_replicas(2, train, {{"seconds": 3.0}}):
            print(handle.to_json(), flush=True)
        os._exit(9)
        """
    done = subprocess.run(
        [sys.executable, script(tmp_path, launcher)],
        capture_output=True, text=True, env=os.environ, check=False,
    )  # fmt: skip
    assert done.returncode == 9, done.stderr
    handles = [ReplicaHandle.from_json(line) for line in done.stdout.splitlines()]
    assert json.loads(done.stdout.splitlines()[0])["metadata"]["store"] == store
    executor = make(store)
    assert executor.attach(handles[0].metadata["job_name"]) == handles
    reports = executor.collect(handles, timeout=100)
    assert [(r["exit_code"], r["result"]) for r in reports] == [(0, "done")] * 2
    with pytest.raises(ValidationError, match="store"):
        make("s3://runs/other").poll(handles[0])
    with pytest.raises(NotFound):
        executor.attach("replicas-nonesuch")
    assert stand_in.running() == []


def test_cancel_ends_the_gang_and_is_idempotent(
    stand_in: ModalStandIn, store: str, tmp_path: Path
) -> None:
    executor = make(store)
    handles = executor.launch_replicas(2, script(tmp_path, "import time; time.sleep(600)"))
    until(lambda: [executor.poll(handle) for handle in handles] == ["running"] * 2)
    executor.cancel(handles[0])
    executor.cancel(handles[1])
    assert [r["status"] for r in executor.collect(handles, timeout=30)] == ["cancelled"] * 2
    until(lambda: stand_in.running() == [])
    executor.close()


def test_a_command_of_the_image_runs_as_it_is(stand_in: ModalStandIn, store: str) -> None:
    with make(store, command=["sh", "-c", "exit $CODE"]) as executor:
        handles = executor.launch_replicas(1, "train.py", {"code": 6})
        (report,) = executor.collect(handles, timeout=60)
        assert report["exit_code"] == 6


def test_a_project_of_many_files_travels_unless_it_is_told_not_to(
    stand_in: ModalStandIn, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path, "import model.net, os; print(model.net.WORD, open('lr.txt').read())")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/net.py").write_text("WORD = 'of the project'")
    (tmp_path / "lr.txt").write_text("0.1")
    monkeypatch.chdir(tmp_path)
    with make(store) as executor:
        handles = executor.launch_replicas(2, "train.py", timeout=60)
        for name in ("model/net.py", "lr.txt"):  # what runs is what was sent
            (tmp_path / name).unlink()
        assert [r["exit_code"] for r in executor.collect(handles, timeout=60)] == [0, 0]
        assert executor.stream_logs(handles[1]) == "of the project 0.1"
    with make(store, code=False) as executor:
        (report,) = executor.collect(executor.launch_replicas(1, path), timeout=60)
        assert report["exit_code"] == 1
        assert "No module named 'model'" in report["error"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"store": None}, "store"),
        ({"store": "/tmp/x"}, "store"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"gpu": "V100"}, "gpu"),
        ({"code": 1}, "code"),
        ({"command": "train"}, "command"),
        ({"regions": "us"}, "regions"),
    ],
)
def test_bad_options_are_refused_by_the_constructor(options: dict[str, Any], field: str) -> None:
    given = {"store": "s3://b/x"} | options
    with pytest.raises(ValidationError) as refused:
        ModalExecutor("python:3.11", **given)
    assert refused.value.field == field


def test_bad_launches_are_refused_before_anything_is_made(
    stand_in: ModalStandIn, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path, "pass")
    executor = make(store)
    for gpu in ("V100", "H100:9"):
        with pytest.raises(ValidationError):
            executor.launch_replicas(1, path, gpu=gpu)
    with pytest.raises(ValueError, match="n_replicas"):
        executor.launch_replicas(0, path)
    assert stand_in.calls == {}
    monkeypatch.delenv("MODAL_TOKEN_ID")
    with pytest.raises(Permanent, match="modal token new"):
        executor.launch_replicas(1, path)
    assert stand_in.calls == {}


def test_without_the_client_library_it_says_what_to_install() -> None:
    code = """
        import sys
        sys.modules["modal"] = None  # as if it were not installed
        import atoll
        from atoll.core.errors import Permanent
        from atoll.core.executors import load
        for use in (lambda: atoll.ModalExecutor("i", store="s3://b"), lambda: load("modal")):
            try:
                use()
            except (RuntimeError, Permanent) as error:
                print(error)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("ModalExecutor needs modal: pip install '.[modal]' in a clone")
    assert second.startswith(
        "the kind 'modal' needs the package 'modal': pip install '.[modal]' in a clone"
    )
