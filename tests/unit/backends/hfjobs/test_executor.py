"""Replicas as jobs of the stand-in for Hugging Face Jobs, by the unmodified client."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from atoll import HFJobsExecutor, ReplicaHandle, ServerlessExecutor
from atoll.backends.hfjobs.client import Jobs
from atoll.backends.hfjobs.executor import HFJobsBackend
from atoll.core.errors import Denied, NotFound, Permanent, Temporary, ValidationError
from atoll.core.executors import PlaneContext, load
from tests.allreduce.s3server import S3Server
from tests.support.hfjobs_stand_in import HFJobsStandIn

IMAGE = "python:3.11"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    server.make_bucket("runs")
    yield server
    server.stop()


@pytest.fixture
def stand_in(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[HFJobsStandIn]:
    server = HFJobsStandIn()
    server.bad_images.add("nonesuch")
    for name, value in {**s3.environment, **server.environment}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def make(s3: S3Server, store: str = "", **options: Any) -> HFJobsExecutor:
    given = {"secrets": sorted(s3.environment), "python": "python", "poll_s": 0.2, "code": False}
    store = store or f"s3://runs/{uuid.uuid4().hex}"
    return HFJobsExecutor(IMAGE, store=store, **given | options)


def add(a: int, b: int, rank: int, rendezvous_uri: str = "") -> int:
    print("adding", flush=True)  # noqa: T201
    return a + b + rank


def test_replicas_run_print_and_return(stand_in: HFJobsStandIn, s3: S3Server) -> None:
    with make(s3) as executor:
        assert isinstance(executor, ServerlessExecutor)
        handles = executor.launch_replicas(2, add, {"a": 1, "b": 2}, timeout=300)
        reports = executor.collect(handles, timeout=120)
        assert [(r["status"], r["exit_code"], r["result"]) for r in reports] == [
            ("succeeded", 0, 3),
            ("succeeded", 0, 4),
        ]
        assert executor.stream_logs(handles[1]) == "adding"
    job = next(iter(stand_in.jobs.values()))
    assert job.spec["timeoutSeconds"] == 300 + 5 + 300
    assert job.spec["flavor"] == "cpu-basic"
    assert job.spec["attempts"] == 1
    assert "AWS_SECRET_ACCESS_KEY" not in json.dumps(job.spec["environment"])
    assert job.spec["secrets"]["AWS_SECRET_ACCESS_KEY"] == "test"


def test_a_code_is_the_replicas_own_and_another_process_follows(
    stand_in: HFJobsStandIn, s3: S3Server, tmp_path: Path
) -> None:
    store = f"s3://runs/{uuid.uuid4().hex}"
    script = tmp_path / "fail.py"
    script.write_text("import os, sys\nsys.exit(3 + int(os.environ['RANK']))\n")
    executor = make(s3, store)
    handles = executor.launch_replicas(2, script, timeout=300)
    code = (
        "import sys, json\nfrom atoll import HFJobsExecutor, ReplicaHandle\n"
        f"executor = HFJobsExecutor({IMAGE!r}, store={store!r}, poll_s=0.2)\n"
        "handles = [ReplicaHandle.from_json(line) for line in sys.stdin]\n"
        "reports = executor.collect(handles, timeout=120)\n"
        "print(json.dumps([(r['status'], r['exit_code']) for r in reports]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(handle.to_json() for handle in handles),
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["failed", 3], ["failed", 4]]
    executor.close()
    assert not any(job.is_running for job in stand_in.jobs.values())


def test_a_lost_answer_starts_nothing_twice(stand_in: HFJobsStandIn, s3: S3Server) -> None:
    stand_in.lost_answers = 1
    with make(s3) as executor:
        handles = executor.launch_replicas(1, add, {"a": 0, "b": 0}, timeout=300)
        (report,) = executor.collect(handles, timeout=120)
        assert (report["status"], report["result"]) == ("succeeded", 0)
        assert executor.stream_logs(handles[0]) == "adding"


def test_an_image_that_is_missing_is_told_with_the_hubs_words(
    stand_in: HFJobsStandIn, s3: S3Server
) -> None:
    with make(s3) as executor:
        executor._options = replace(executor._options, image="nonesuch:1")
        handles = executor.launch_replicas(1, add, {"a": 0, "b": 0}, timeout=300)
        (report,) = executor.collect(handles, timeout=120)
    assert (report["status"], report["reason"]) == ("failed", "Rejected")
    assert "the image could not be pulled" in report["error"]


def test_what_a_job_printed_before_its_wrapper_ran_is_told(
    stand_in: HFJobsStandIn, s3: S3Server
) -> None:
    with make(s3, python="sh") as executor:  # which knows no -m
        handles = executor.launch_replicas(1, add, {"a": 0, "b": 0}, timeout=300)
        (report,) = executor.collect(handles, timeout=120)
    assert report["status"] == "failed"
    assert "does its image have Python and atoll[store]" in report["error"]
    assert "atoll.agent.wrapper" in report["error"], "the shell's own complaint"
    assert stand_in.calls["logs"] == 1


def test_a_cancel_ends_the_jobs(stand_in: HFJobsStandIn, s3: S3Server, tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    with make(s3) as executor:
        handles = executor.launch_replicas(2, script, timeout=300)
        while {executor.poll(handle) for handle in handles} != {"running"}:
            pass
        executor.cancel(handles[0])
        assert [r["status"] for r in executor.collect(handles, timeout=60)] == ["cancelled"] * 2


def run(work: Any) -> Any:
    return asyncio.run(work)


def test_a_service_that_fails_is_named(
    stand_in: HFJobsStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = load("hfjobs").configured("hub", {"image": IMAGE}, PlaneContext(tmp_path, "p"))
    assert isinstance(backend, HFJobsBackend)
    run(backend.probe())
    request = {"image": "", "command": [], "secrets": []}
    with pytest.raises(Permanent, match="expected a command and an image"):
        run(Jobs("tester", 1).start(request))
    with pytest.raises(Permanent, match="NONE_SUCH not set"):
        run(Jobs("tester", 1).start({**request, "secrets": ["NONE_SUCH"]}))
    with pytest.raises(NotFound):  # unknown: there is nothing to cancel, and it says so
        run(Jobs("tester", 1).inspect("687fb701029421"))
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(Denied, match="HF_TOKEN"):
        run(Jobs(None, 1).find({}))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Temporary, match="Hugging Face"):
        run(Jobs("tester", 1).start({"image": "i", "command": ["x"], "secrets": []}))


def test_a_listing_does_not_wait_for_all_that_the_client_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs, has_given_up = Jobs("tester", 1), threading.Event()
    monkeypatch.setattr("atoll.backends.hfjobs.client.LIST_S", 0.1)
    monkeypatch.setattr(jobs._api, "list_jobs", lambda **_: has_given_up.wait(60))

    async def find() -> None:
        with pytest.raises(Temporary, match="list_jobs: TimeoutError"):
            await jobs.find({})
        has_given_up.set()

    run(find())


def test_without_a_token_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(Permanent, match="hf auth login"):
        load("hfjobs").configured("hub", {}, PlaneContext(tmp_path, "p"))


def test_a_bucket_of_hugging_face_is_refused_as_the_store() -> None:
    with pytest.raises(ValidationError, match="create an object only if it is absent"):
        HFJobsExecutor(IMAGE, store="hf://buckets/me/runs")
    with pytest.raises(ValidationError, match="create an object only if it is absent"):
        HFJobsExecutor(IMAGE, store="s3://b/x").launch_replicas(
            1, add, {"a": 1, "b": 2, "rendezvous_uri": "hf://buckets/me/runs"}
        )


def test_a_store_that_is_no_text_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="^store: 5 is not valid"):
        HFJobsExecutor(IMAGE, store=5)  # type: ignore[arg-type]


def test_a_handle_is_json(stand_in: HFJobsStandIn, s3: S3Server) -> None:
    with make(s3) as executor:
        (handle,) = executor.launch_replicas(1, add, {"a": 0, "b": 0}, timeout=300)
        assert ReplicaHandle.from_json(handle.to_json()) == handle
        assert handle.metadata["store"] == executor.store
