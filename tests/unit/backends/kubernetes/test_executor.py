"""What the API server would refuse is refused at create, with its field, and nothing is created."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

from atoll.backends.kubernetes import executor as module
from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.launches import training_of
from atoll.core.errors import Denied, ValidationError
from atoll.core.spec import TrainingSpec
from atoll.core.status import DesiredState
from tests.unit.backends.kubernetes.kube import Json, Options, pod, running, training

SPEC: TrainingSpec = training().spec


class Server:
    """Answers as an API server; `refuse` returns a code and a Status for what it does not take."""

    def __init__(self, refuse: Callable[[str, Json], tuple[int, Json] | None]) -> None:
        self.requests: list[httpx2.Request] = []
        self._refuse = refuse

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        if request.url.path.endswith("/pods"):
            return httpx2.Response(200, json={"metadata": {"resourceVersion": "7"}, "items": []})
        if request.method == "GET":
            return httpx2.Response(404, json={"code": 404})
        body = msgspec.json.decode(request.content)
        code, answer = self._refuse(request.url.path.split("/")[-1], body) or (200, body)
        stored = {"resourceVersion": "7", "uid": "u", "namespace": "team-a"}
        answer["metadata"] = {**answer.get("metadata", {}), **stored}
        return httpx2.Response(code, json=answer)

    def backend(self, **options: Any) -> Any:
        transport = httpx2.MockTransport(self)
        client = httpx2.AsyncClient(transport=transport, base_url="http://cluster")
        return KubernetesBackend(Cluster(client), Options(**options))


def invalid(field: str, reason: str) -> tuple[int, Json]:
    """A Status in the published form of the API; written by hand, not recorded from a server."""
    return 422, {
        "kind": "Status",
        "reason": "Invalid",
        "message": f'Job.batch "x" is invalid: {field}: {reason}',
        "details": {"causes": [{"field": field, "message": reason}]},
        "code": 422,
    }


POD = "spec.template.spec"
REFUSALS = {
    "unsupported": (
        *(f"{POD}.tolerations[0].effect", 'Unsupported value: "NoRun": supported: "NoExecute"'),
        *("pod.tolerations[0].effect", "NoRun", 'Kubernetes: supported: "NoExecute"'),
    ),
    "invalid": (
        *(f"{POD}.containers[0].resources.requests", 'Invalid value: "4": at most cpu limit 2'),
        *("pod.containers[0].resources.requests", "4", "Kubernetes: at most cpu limit 2"),
    ),
    "required": (
        *(f"{POD}.initContainers[0].image", "Required value"),
        *("pod.initContainers[0].image", None, "Kubernetes: Required value"),
    ),
    "escape": (
        *(f"{POD}.schedulerName", r'Invalid value: "a\x00": a lowercase name'),
        *("pod.schedulerName", r'"a\x00"', "Kubernetes: a lowercase name"),
    ),
    "label": (
        *("metadata.labels", 'Invalid value: "a b": a valid label must be an empty string or'),
        *("labels", "a b", "Kubernetes: a valid label must be an empty string or"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_api_server_refuses_is_refused_with_field_value_and_reason(case: str) -> None:
    path, reason, field, value, expected = REFUSALS[case]
    server = Server(lambda kind, body: invalid(path, reason) if kind == "jobs" else None)
    with pytest.raises(ValidationError) as refused:
        asyncio.run(server.backend().dry_run(SPEC, "team-a"))
    error = refused.value
    assert (error.field, error.value, error.expected) == (field, value, expected)


def test_a_field_that_it_does_not_know_is_refused_with_its_words() -> None:
    words = 'strict decoding error: unknown field "spec.template.spec.novel"'
    server = Server(lambda kind, body: (400, {"message": words}) if kind == "jobs" else None)
    with pytest.raises(ValidationError, match="novel"):
        asyncio.run(server.backend().dry_run(SPEC, "team-a"))


def test_a_dry_run_creates_nothing_and_asks_for_the_job_that_would_be_created() -> None:
    server = Server(lambda kind, body: None)
    backend = server.backend(labels={"team": "x"})
    asyncio.run(backend.dry_run(SPEC, "team-a"))
    assert [r.url.params.get("dryRun") for r in server.requests] == ["All"] * 3
    assert all("/namespaces/team-a/" in r.url.path for r in server.requests)
    tried = msgspec.json.decode(server.requests[-1].content)
    del server.requests[:]
    asyncio.run(backend.apply(training(), DesiredState(version=1, size=3)))
    created = next(r for r in server.requests if r.method == "POST" and "jobs" in r.url.path)
    job = msgspec.json.decode(created.content)
    assert "dryRun" not in created.url.params
    assert job["spec"].keys() == tried["spec"].keys()
    assert job["metadata"]["labels"]["team"] == tried["metadata"]["labels"]["team"] == "x"


@pytest.mark.parametrize("code", [403, 500, 503])
def test_a_quota_or_a_server_that_is_away_refuses_no_training_and_stops_a_launch(code: int) -> None:
    server = Server(lambda kind, body: (code, {"message": "exceeded quota", "code": code}))
    asyncio.run(server.backend().dry_run(SPEC, "team-a"))
    if code == 403:
        launch = server.backend(image="i:1")
        launch.is_shared = True
        with pytest.raises(Denied, match="exceeded quota"):
            asyncio.run(launch.dry_run(SPEC, "team-a"))


def test_a_server_that_hangs_holds_no_create_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "DRY_RUN_S", 0.01)
    backend = Server(lambda kind, body: None).backend()
    backend.cluster.patch = hang
    asyncio.run(asyncio.wait_for(backend.dry_run(SPEC, "team-a"), 5))


def test_a_job_is_rendered_once_in_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []
    render = module.render_job

    def count(*given: Any) -> Json:
        rendered.append(given)
        return render(*given)

    monkeypatch.setattr(module, "render_job", count)
    backend = Server(lambda kind, body: None).backend()

    async def work() -> None:
        await backend.apply(training(), DesiredState(version=1, size=3))
        job = render(training(), DesiredState(version=1, size=3), backend.options)
        job["metadata"] |= {"resourceVersion": "7", "uid": "u"}

        async def stored(*_: Any) -> Json:
            return job

        backend.cluster.get = stored
        for version in range(2, 6):
            await backend.apply(training(), DesiredState(version=version, size=version))

    asyncio.run(work())
    assert len(rendered) == 1


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_job_of_a_launch_carries_what_others_need_to_follow_it(is_shared: bool) -> None:
    server = Server(lambda kind, body: None)
    backend = server.backend(image="i:1")
    backend.is_shared = is_shared
    asyncio.run(backend.apply(training(), DesiredState(version=1, size=3)))
    created = next(r for r in server.requests if r.method == "POST" and "jobs" in r.url.path)
    job = Job(msgspec.json.decode(created.content))
    followed = training_of(job)
    assert (followed is not None and followed.uid == training().uid) == is_shared


@pytest.mark.parametrize("size", [module.FEW, module.FEW + 2])
def test_the_pods_of_a_large_steady_gang_are_listed_by_their_versions_alone(size: int) -> None:
    is_large = size > module.FEW
    pods = [pod(rank, running()) for rank in range(size)]
    for version, item in enumerate(pods, 10):
        item["metadata"]["resourceVersion"] = str(version)
    was_whole: list[bool] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        if not request.url.path.endswith("/pods"):
            return httpx2.Response(404, json={"code": 404})
        was_whole.append("PartialObjectMetadata" not in request.headers["Accept"])
        items = pods if was_whole[-1] else [{"metadata": item["metadata"]} for item in pods]
        return httpx2.Response(200, json={"metadata": {"resourceVersion": "9"}, "items": items})

    client = httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://cluster")
    backend = KubernetesBackend(Cluster(client), Options())

    def look() -> tuple[list[bool], list[str]]:
        was_whole.clear()
        _, seen = asyncio.run(backend._job_and_pods(training()))
        return was_whole[:], [one.status["phase"] for one in seen]

    lean, then_whole = ([False], [False, True]) if is_large else ([True], [True])
    assert look() == ([True], ["Running"] * size)
    assert look() == ([True], ["Running"] * size)  # nothing has changed since
    assert look() == (lean, ["Running"] * size)
    pods[1]["status"]["phase"] = "Failed"
    pods[1]["metadata"]["resourceVersion"] = "200"
    assert look() == (then_whole, ["Running", "Failed", *["Running"] * (size - 2)])
    assert look()[0] == [True]
    assert look()[0] == lean
    del pods[2]
    assert look() == (then_whole, ["Running", "Failed", *["Running"] * (size - 3)])
