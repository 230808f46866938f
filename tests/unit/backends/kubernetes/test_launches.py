"""What a Job tells of its launch."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.launches import as_launch, training_of
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.backends.kubernetes.render import render_job
from atoll.core.errors import NotFound, Permanent, ValidationError
from atoll.core.model import encode
from atoll.core.spec import Source, TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Exit, Observation, ObservedRank, Training
from atoll.replicas.plane import without_gang

SPEC = TrainingSpec(
    name="replicas-1",
    world_size=WorldSize(min=1, target=3, max=3),
    source=Source(kind="script", content=b"print(1)"),
    env={"LR": "0.1", "ATOLL_RESULTS": "pickle"},
    deadline_s=600,
    max_restarts=2,
    stop_grace_s=5.0,
    executor="kubernetes",
)
TRAINING = Training(namespace="team", uid="0123", spec=SPEC, created_at=0.0)


def job(desired: DesiredState, *finished: str, **annotations: str) -> dict[str, Any]:
    body = as_launch(render_job(TRAINING, DesiredState(version=1, size=3), OPTIONS), SPEC)
    body["metadata"]["annotations"] |= {
        "atoll.dev/desired": encode(desired).decode(),
        **annotations,
    }
    body["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Failed", "status": "True", "reason": reason} for reason in finished]
    return {**body, "status": {"conditions": conditions}}


OPTIONS = KubernetesOptions(image="image:1")


def test_a_launch_is_read_back_from_its_job() -> None:
    body = job(DesiredState(version=1, size=3))
    assert body["spec"]["template"]["spec"]["containers"][0]["name"] == "replica"
    training = training_of(Job(body))
    assert training is not None
    assert (training.uid, training.key) == (TRAINING.uid, TRAINING.key)
    spec = training.spec
    assert spec.world_size == SPEC.world_size
    assert (spec.deadline_s, spec.max_restarts, spec.stop_grace_s) == (600, 2, 5.0)
    assert spec.env == {"ATOLL_RESULTS": "pickle"}
    assert spec.source is not None
    assert spec.source.is_digest
    assert not spec.cancel
    assert training.status.desired == DesiredState(version=1, size=3)


def test_one_that_was_stopped_says_why() -> None:
    cancelled = training_of(Job(job(DesiredState(version=2, size=0), "DeadlineExceeded")))
    assert cancelled is not None
    assert cancelled.spec.cancel
    assert cancelled.status.failing == ""
    told = {"atoll.dev/stop-cause": '["DeadlineExceeded","still running"]'}
    failed = training_of(Job(job(DesiredState(version=2, size=0), **told)))
    assert failed is not None
    assert not failed.spec.cancel
    assert (failed.status.failing, failed.status.failing_message) == (
        "DeadlineExceeded",
        "still running",
    )
    late = training_of(Job(job(DesiredState(version=1, size=3), "DeadlineExceeded")))
    assert late is not None
    assert late.status.failing_message == "still running 600 s after the start"


def test_another_job_is_no_launch() -> None:
    plain = render_job(TRAINING, DesiredState(version=1, size=3), OPTIONS)
    assert training_of(Job(plain)) is None
    leaving = job(DesiredState(version=1, size=3))
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert training_of(Job(leaving)) is None
    renamed = job(DesiredState(version=1, size=3))
    renamed["metadata"]["name"] = "another"
    assert training_of(Job(renamed)) is None
    newer = job(DesiredState(version=1, size=3), **{"atoll.dev/launch": '{"later": 1}'})
    with pytest.raises(Permanent, match="cannot be followed"):
        training_of(Job(newer))


def test_a_namespace_that_does_not_exist_is_refused_at_once() -> None:
    class Elsewhere:
        async def patch(self, *_: Any, **__: Any) -> None:
            raise NotFound("namespaces", "team")

    cluster = cast(Cluster, Elsewhere())
    jobs = KubernetesBackend(cluster, KubernetesOptions(image="image:1", namespace="team"))
    jobs.is_shared = True
    with pytest.raises(ValidationError, match="namespace: 'team' is not valid: .* that exists"):
        asyncio.run(jobs.dry_run(SPEC, "team"))


@pytest.mark.parametrize(("reason", "is_stopped"), [("Error", False), ("Deleted", True)])
def test_of_a_gang_that_somebody_deleted_what_ended_by_itself_was_not_stopped(
    reason: str, is_stopped: bool
) -> None:
    ended = ObservedRank(rank=0, state="exited", exit=Exit(code=3, at=1.0, reason=reason))
    training = Training(namespace="x", uid="x", spec=SPEC)
    (rank,) = without_gang(training, Observation(ranks=[ended]), 2.0).ranks
    assert rank.exit is not None
    assert rank.exit.is_stopped == is_stopped
