"""Ranks as jobs of the stand-in, under the real controller, with a real S3 API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.backends.sagemaker.executor import SageMakerBackend
from atoll.backends.sagemaker.options import SageMakerOptions
from atoll.code.archive import pack
from atoll.controller.loop import Controller
from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.executors import PlaneContext, load
from atoll.core.spec import RendezvousSpec, Resources, Source, TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Training
from atoll.store.sqlite import MemoryStore
from tests.support.sagemaker_stand_in import ROLE, SageMakerStandIn

POLL_S = 0.15


def make_backend(**options: Any) -> SageMakerBackend:
    given = {"role": ROLE, "python": sys.executable, "poll_s": POLL_S, "image": "train:1"}
    return SageMakerBackend(SageMakerOptions(**given | options))


class World:
    def __init__(self, backend: SageMakerBackend, uri: str) -> None:
        self.backend = backend
        self.store = MemoryStore()
        self.uri = uri

    async def create(self, script: str, ranks: int = 1, **fields: Any) -> Training:
        given: dict[str, Any] = {
            "name": "t",
            "command": ["sh", "-c", script],
            "world_size": WorldSize(min=1, target=ranks, max=8),
            "rendezvous": RendezvousSpec(uri=self.uri),
            "executor": "sagemaker",
            "stop_grace_s": 5.0,
        }
        if "source" in fields:
            del given["command"]
        spec = TrainingSpec(**given | fields)
        training = Training(namespace="n", uid=uuid.uuid4().hex, spec=spec, created_at=time.time())
        return await self.store.create(training)

    async def until(self, training: Training, holds: Callable[[Training], object]) -> Training:
        deadline = time.monotonic() + 60
        while True:
            now = await self.store.get(training.key)
            if holds(now):
                return now
            assert time.monotonic() < deadline, now.status
            await asyncio.sleep(0.02)

    async def until_running(self, training: Training, ranks: int) -> Training:
        return await self.until(
            training, lambda t: sum(r.phase == "Running" for r in t.status.ranks) == ranks
        )

    async def until_over(self, training: Training) -> Training:
        return await self.until(training, lambda t: t.status.phase.is_terminal)

    async def change(self, training: Training, **spec: Any) -> None:
        now = await self.store.get(training.key)
        await self.store.update_spec(replace(now, spec=replace(now.spec, **spec)))


@contextlib.asynccontextmanager
async def world(uri: str, **options: Any) -> AsyncIterator[World]:
    made = World(make_backend(**options), uri)
    running = asyncio.create_task(Controller(made.store, {"sagemaker": made.backend}).run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.backend.close()


def play(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 90))


def test_ranks_run_with_a_real_opt_ml_and_end_with_their_own_codes(
    stand_in: SageMakerStandIn, uri: str
) -> None:
    async def body() -> None:
        async with world(uri) as here:
            script = (
                "echo rank $RANK of $WORLD_SIZE in $(ls /opt/ml | tr '\\n' ' '); "
                "[ $RANK = 1 ] && { echo no luck >&2; exit 3; }; sleep 0.5; exit 0"
            )
            made = await here.create(script, 3, rendezvous=RendezvousSpec(uri=uri))
            over = await here.until_over(made)
            codes = {e.rank: (e.exit_code, e.termination_reason) for e in over.status.rank_exits}
            done = (0, "Completed")
            assert codes == {0: done, 1: (3, "Error"), 2: done}
            assert over.status.phase == "succeeded"
            lines = [line async for line in here.backend.logs(over)]
            words = [line.text for line in lines if line.rank == 0]
            assert words == ["rank 0 of 3 in checkpoints input model output"]
            assert [line.text for line in lines if line.rank == 1][-1] == "no luck"
        failed = [job for job in stand_in.jobs.values() if job.status == "Failed"]
        assert [job.rank for job in failed] == [1]
        assert failed[0].reason.startswith("AlgorithmError: rank ended with 3: ")
        assert "no luck" in failed[0].reason

    play(body)


def test_a_start_that_is_repeated_runs_nothing_twice(
    stand_in: SageMakerStandIn, uri: str, tmp_path: Path
) -> None:
    async def body() -> None:
        backend = make_backend()
        spec = TrainingSpec(
            name="t",
            command=["sh", "-c", f"echo x >> {tmp_path}/ran; sleep 30"],
            world_size=WorldSize(min=1, target=2, max=2),
            rendezvous=RendezvousSpec(uri=uri),
            start_grace_s=0.0,
        )
        training = Training(namespace="n", uid="a" * 32, spec=spec, created_at=time.time())
        stand_in.list_lag_s = 1000  # the list has none of them
        for _ in range(3):
            await backend.apply(training, DesiredState(version=1, size=2))
        assert sorted(stand_in.jobs) == [f"atoll-{'a' * 32}-r{rank}-a0" for rank in (0, 1)]
        asked = stand_in.calls["CreateTrainingJob"]
        stand_in.list_lag_s = 0
        other = make_backend()  # as after a restart of the control plane
        await other.apply(training, DesiredState(version=1, size=2))
        assert stand_in.calls["CreateTrainingJob"] == asked
        await other.apply(training, DesiredState(version=2, size=0))

    play(body)


@pytest.mark.parametrize("again_s", [0.0, 1.0])
def test_spot_that_starts_a_rank_again_behind_our_back_harms_nothing(
    stand_in: SageMakerStandIn, uri: str, tmp_path: Path, again_s: float
) -> None:
    async def body() -> None:
        async with world(uri, is_spot=True) as here:
            script = (
                f"echo $RANK $ATOLL_ATTEMPT >> {tmp_path}/ran; [ $ATOLL_ATTEMPT = 1 ] && exit 0; "
                "sleep 60"
            )
            made = await here.create(script, 1, max_restarts=1)
            await here.until_running(made, 1)
            (job,) = stand_in.running(made.uid)
            stand_in.again_s = again_s
            job.interrupt()
            over = await here.until_over(made)
            assert over.status.phase == "succeeded"
            assert (tmp_path / "ran").read_text() == "0 0\n0 1\n"
            (rank,) = over.status.ranks
            assert rank.previous_exit is not None
            assert rank.previous_exit.code == 143
            job.wait()
            if again_s:  # there was time to see it, and to end it for good
                assert rank.previous_exit.reason == "Preempted"
            else:
                assert job.runs == 2
            assert job.request["EnableManagedSpotTraining"] is True

    play(body)


def test_a_stop_is_polite_and_a_deaf_rank_is_killed_after_its_grace_not_after_two_minutes(
    stand_in: SageMakerStandIn, uri: str
) -> None:
    async def body() -> None:
        async with world(uri) as here:
            script = "[ $RANK = 1 ] && trap '' TERM; while :; do sleep 0.1; done"
            made = await here.create(script, 2, stop_grace_s=1.0)
            await here.until_running(made, 2)
            await here.change(made, cancel=True)
            over = await here.until_over(made)
            codes = {e.rank: e.exit_code for e in over.status.rank_exits}
            assert codes == {0: 143, 1: 137}
            assert {e.termination_reason for e in over.status.rank_exits} == {"Stopped"}
            await here.until(made, lambda t: t.status.is_released)
            assert stand_in.running(made.uid) == []

    play(body)


def test_a_job_that_somebody_stops_is_not_over_while_it_stops(
    stand_in: SageMakerStandIn, uri: str
) -> None:
    async def body() -> None:
        async with world(uri) as here:
            made = await here.create("trap 'sleep 1; exit 9' TERM; while :; do sleep 0.1; done")
            await here.until_running(made, 1)
            (job,) = stand_in.running(made.uid)
            here.backend.jobs._client.stop_training_job(TrainingJobName=job.name)
            await here.until(made, lambda t: job.status == "Stopping")
            now = await here.store.get(made.key)
            assert [r.is_alive for r in now.status.ranks] == [True]
            over = await here.until_over(made)
            (ended,) = over.status.rank_exits
            assert (ended.exit_code, ended.termination_reason) == (9, "Deleted")
            # Already ended, and unknown: both are success.
            await here.backend.jobs.stop(job.name)
            await here.backend.jobs.stop("atoll-nonesuch")

    play(body)


def test_a_rank_that_ended_well_is_not_stopped_while_its_output_is_uploaded(
    stand_in: SageMakerStandIn, uri: str
) -> None:
    async def body() -> None:
        stand_in.may_upload.clear()
        async with world(uri) as here:
            made = await here.create("exit 0")
            await here.until(made, lambda t: t.status.is_released)
            (job,) = stand_in.jobs.values()
            assert (job.status, job.secondary) == ("InProgress", "Uploading")
            stand_in.may_upload.set()
            job.wait()
            assert job.status == "Completed"
            assert stand_in.calls["StopTrainingJob"] == 0

    play(body)


def test_a_lost_instance_has_no_exit_code(stand_in: SageMakerStandIn, uri: str) -> None:
    async def body() -> None:
        async with world(uri) as here:
            made = await here.create("sleep 60")
            await here.until_running(made, 1)
            (job,) = stand_in.running(made.uid)
            job.lose("InternalServerError: We encountered an internal error. Please try again.")
            over = await here.until_over(made)
            (ended,) = over.status.rank_exits
            assert (ended.exit_code, ended.termination_reason) == (None, "HostLost")
            assert "internal error" in ended.message

    play(body)


def test_the_time_limit_of_sagemaker_is_told_by_its_name(
    stand_in: SageMakerStandIn, uri: str
) -> None:
    async def body() -> None:
        async with world(uri) as here:
            made = await here.create("while :; do sleep 0.1; done")
            await here.until_running(made, 1)
            stand_in.most_runtime_s = 0.1
            over = await here.until_over(made)
            (ended,) = over.status.rank_exits
            assert (ended.exit_code, ended.termination_reason) == (143, "TimeLimit")

    play(body)


def test_no_capacity_is_waited_for_and_told(stand_in: SageMakerStandIn, uri: str) -> None:
    async def body() -> None:
        stand_in.capacity_errors = 2
        async with world(uri, capacity_pause_s=0.4) as here:
            made = await here.create("exit 0")
            await here.until(
                made, lambda t: any("no capacity" in r.message for r in t.status.ranks)
            )
            over = await here.until_over(made)
            assert over.status.phase == "succeeded"
            assert [r.restarts for r in over.status.ranks] == [0]
            names = [name.rpartition("-r0")[2] for name in stand_in.jobs]
            assert names == ["-a0", "-a0-t1", "-a0-t2"]

    play(body)


def test_an_image_that_is_not_there_fails_with_sagemakers_words(
    stand_in: SageMakerStandIn, uri: str
) -> None:
    async def body() -> None:
        stand_in.bad_images.add("nonesuch:1")
        async with world(uri) as here:
            made = await here.create("exit 0", image="nonesuch:1")
            over = await here.until_over(made)
            assert over.status.phase == "failed"
            assert "Cannot find repository: nonesuch:1" in over.status.ranks[0].message or any(
                "Cannot find repository" in e.message for e in over.status.rank_exits
            ), over.status

    play(body)


def test_scaled_up_and_down_and_followed(stand_in: SageMakerStandIn, uri: str) -> None:
    async def body() -> None:
        async with world(uri) as here:
            made = await here.create("echo hello $RANK; while :; do sleep 0.1; done", 1)
            await here.until_running(made, 1)
            await here.change(made, world_size=WorldSize(min=1, target=3, max=8))
            await here.until_running(made, 3)
            await here.change(made, world_size=WorldSize(min=1, target=2, max=8))
            gone = await here.until(made, lambda t: len(t.status.removed_ranks) == 1)
            assert gone.status.removed_ranks[0].exit is not None
            assert gone.status.removed_ranks[0].exit.is_stopped
            now = await here.store.get(made.key)
            is_over = [False, False, True]
            lines = here.backend.logs(now, ranks=[0, 1], follow=lambda: is_over.pop(0))
            assert sorted([line.text async for line in lines]) == ["hello 0", "hello 1"]
            await here.change(made, cancel=True)
            await here.until_over(made)

    play(body)


def test_one_question_answers_for_the_whole_gang(stand_in: SageMakerStandIn, uri: str) -> None:
    async def body() -> None:
        async with world(uri) as here:
            made = await here.create("sleep 60", 4)
            await here.until_running(made, 4)
            made = await here.store.get(made.key)
            stand_in.calls.clear()
            await here.backend.list_jobs(made)
            assert stand_in.calls["ListTrainingJobs"] >= 1
            assert set(stand_in.calls) == {"ListTrainingJobs"}
            here.backend.jobs.questions.clear()
            await here.backend.list_jobs(made)
            assert here.backend.jobs.questions["list_training_jobs"] >= 1
            await here.change(made, cancel=True)
            await here.until_over(made)

    play(body)


def test_a_project_and_a_source_travel(
    stand_in: SageMakerStandIn, uri: str, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text("NAME = 'a model'")
    (tmp_path / "train.py").write_text("import model; print(model.NAME)")
    code = pack(tmp_path)

    async def body() -> None:
        async with world(uri) as here:
            made = await here.create("", command=[sys.executable, "train.py"], code=code)
            script = Source(kind="script", content=b"print('shipped')", filename="a.py")
            other = await here.create("", name="u", source=script)
            for training, word in ((made, "a model"), (other, "shipped")):
                over = await here.until_over(training)
                assert over.status.phase == "succeeded", over.status
                lines = [line.text async for line in here.backend.logs(over, tail=1)]
                assert lines == [word]
            now = await here.store.get(made.key)
            await here.backend.purge(now)
            assert here.backend.record_store_of(now).entries() == {}
            assert [line async for line in here.backend.logs(now)] == []

    play(body)


def test_a_service_that_does_not_answer_is_waited_for_and_exits_are_seen_meanwhile(
    stand_in: SageMakerStandIn, uri: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"

    async def body() -> None:
        async with world(uri) as here:
            made = await here.create(f"while [ ! -e {mark} ]; do sleep 0.05; done; exit 4")
            await here.until_running(made, 1)
            stand_in.is_away = True
            with pytest.raises(Temporary, match="ServiceUnavailable"):
                await here.backend.probe()
            await asyncio.to_thread(mark.touch)
            over = await here.until(made, lambda t: any(r.exit for r in t.status.ranks))
            assert [r.exit.code for r in over.status.ranks if r.exit] == [4]
            stand_in.is_away = False
            await here.until_over(made)

    play(body)


def test_what_sagemaker_would_refuse_is_refused_before_anything_is_created(
    stand_in: SageMakerStandIn, uri: str
) -> None:
    spec = TrainingSpec(
        name="t",
        command=["x"],
        world_size=WorldSize(min=1, target=1, max=1),
        rendezvous=RendezvousSpec(uri=uri),
    )
    for options, words in (
        ({"role": "trainer"}, "role: 'trainer'"),
        ({"instance_type": "ml.p5.nonesuch"}, r"instance_type.*ml\.p5\.48xlarge"),
        ({"subnets": ["sub_net"], "security_groups": ["sg-1"]}, "subnets: 'sub_net'"),
        ({"tags": {"a": "x" * 257}}, "tags.*at most 256 characters"),
        ({"env": {"A": "x" * 513}}, "env.*at most 512 characters"),
        ({"env": {f"A{n}": "" for n in range(101)}}, "env.*at most 100 entries"),
        ({"image": "x" * 256}, "image.*at most 255"),
        ({"kms_key": "a b"}, "kms_key: 'a b'"),
    ):
        with pytest.raises(ValidationError, match=words):
            make_backend(**options).check(spec)  # type: ignore[arg-type]
    backend = make_backend()
    for field, value, words in (
        ("stop_grace_s", 121.0, "stop_grace_s: 121.0.*at most 120"),
        ("resources", Resources(gpu_count=1, gpu_models=["RTX"]), "gpu_models: 'RTX'"),
        ("mesh", True, "mesh"),
        ("rendezvous", RendezvousSpec(uri="gs://b/x"), "rendezvous_uri: 'gs://b/x'"),
        ("rendezvous", RendezvousSpec(), "rendezvous_uri.*or the executor option store"),
    ):
        with pytest.raises(ValidationError, match=words):
            backend.check(replace(spec, **{field: value}))  # type: ignore[arg-type]
    assert stand_in.calls == {}


def test_without_credentials_or_a_region_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonesuch")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonesuch")
    kind, home = load("sagemaker"), PlaneContext(Path("/tmp"), "plane")
    for options, words in (
        ({}, "needs a region: the option region, or AWS_REGION$"),
        ({"region": "eu-west-1"}, "needs AWS credentials: aws configure"),
        ({"profile": "nonesuch"}, "profile.*nonesuch.*~/.aws/config"),
    ):
        with pytest.raises(Permanent, match=words) as caught:
            kind.configured("lab", options, home)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValidationError, match="rol.*did you mean 'role'"):
        kind.configured("lab", {"rol": "x"}, home)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    with pytest.raises(Permanent, match="needs AWS credentials"):
        kind.configured("lab", {}, home)


def test_without_boto3_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("atoll.backends.sagemaker")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(Permanent, match=r"'boto3': pip install '\.\[sagemaker\]'"):
        load("sagemaker")


def test_a_wrapper_that_is_killed_takes_its_rank_with_it(
    stand_in: SageMakerStandIn, uri: str
) -> None:
    async def body() -> None:
        async with world(uri) as here:
            made = await here.create("sleep 60")
            await here.until_running(made, 1)
            (job,) = stand_in.running(made.uid)
            assert job.process is not None
            os.kill(job.process.pid, signal.SIGKILL)
            over = await here.until_over(made)
            (ended,) = over.status.rank_exits
            assert (ended.exit_code, ended.termination_reason) == (None, "SupervisorLost")
            assert job.pids() == []

    play(body)
