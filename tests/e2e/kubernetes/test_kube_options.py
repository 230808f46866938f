"""A dry run refuses options exactly where the API server refuses the Job that they lead to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.backends.kubernetes.render import render_job
from atoll.core.errors import ValidationError
from atoll.core.status import DesiredState
from tests.e2e.kubernetes.conftest import Space
from tests.unit.backends.kubernetes.kube import training

Json = dict[str, Any]

TEXTS = [
    *("", "a", "A", "1", "a b", "-a", "a-", "a_b", "a.b", "_a", "a..b", "a/b", "A/b", "a.b/c"),
    *("a/b/c", "/a", "a/", "é", "a\n", "x" * 63, "x" * 64, "b" * 253, "b" * 254),
    *("Exists", "Equal", "In", "Gt", "NoSchedule", "NoExecute", "noSchedule"),
]
AMOUNTS: list[Any] = [
    *("1", "1.5", ".5", "1.", "500m", "1Ki", "1ki", "1K", "1k", "1GB", "1 Gi", "-1", "+1", "1e3"),
    *("1E3", "1E", "1e", "", "Gi", "0x10", "1u", "1n", "1mi", "01", "1e-3", "--1"),
    *(1, 0, 1.5, -1),
]


def _rule(how: str, key: str = "a") -> Json:
    term = {"matchExpressions": [{"key": key, "operator": how, "values": ["a"]}]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"affinity": {"nodeAffinity": {required: {"nodeSelectorTerms": [term]}}}}


def _rank(**fields: Any) -> Json:
    return {"pod": {"containers": [{"name": "rank", **fields}]}}


def _init(**fields: Any) -> Json:
    return {"pod": {"initContainers": [{"name": "i", "image": "i", **fields}]}}


# What each value is tried as.
PLACES: dict[str, tuple[list[Any], Callable[[Any], Json]]] = {
    "label": (TEXTS, lambda v: {"labels": {"k": v}}),
    "label key": (TEXTS, lambda v: {"labels": {v: "v"}}),
    "annotation key": (TEXTS, lambda v: {"annotations": {v: "any thing"}}),
    "selector": (TEXTS, lambda v: {"node_selector": {"k": v}}),
    "selector key": (TEXTS, lambda v: {"node_selector": {v: "v"}}),
    "toleration key": (TEXTS, lambda v: {"tolerations": [{"key": v}]}),
    "toleration value": (TEXTS, lambda v: {"tolerations": [{"key": "k", "value": v}]}),
    "toleration effect": (TEXTS, lambda v: {"tolerations": [{"key": "k", "effect": v}]}),
    "toleration operator": (TEXTS, lambda v: {"tolerations": [{"key": "k", "operator": v}]}),
    "toleration of everything": (TEXTS, lambda v: {"tolerations": [{"operator": v}]}),
    "toleration that exists": (
        TEXTS,
        lambda v: {"tolerations": [{"key": "k", "operator": "Exists", "value": v}]},
    ),
    "toleration for a time": (
        TEXTS,
        lambda v: {"tolerations": [{"key": "k", "effect": v, "tolerationSeconds": 3}]},
    ),
    "service account": (TEXTS, lambda v: {"pod": {"serviceAccountName": v}}),
    "priority": (TEXTS, lambda v: {"priority_class_name": v}),
    "runtime class": (TEXTS, lambda v: {"runtime_class_name": v}),
    "secret of variables": (TEXTS, lambda v: {"env_from_secrets": [v]}),
    "volume": (TEXTS, lambda v: {"volumes": [{"name": v, "emptyDir": {}}]}),
    "claim": (
        TEXTS,
        lambda v: {"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": v}}]},
    ),
    "shared memory": ([a for a in AMOUNTS if isinstance(a, str)], lambda v: {"shm_size": v}),
    "size": (AMOUNTS, lambda v: {"volumes": [{"name": "d", "emptyDir": {"sizeLimit": v}}]}),
    "cpu": (AMOUNTS, lambda v: _rank(resources={"limits": {"cpu": v}})),
    "request": (AMOUNTS, lambda v: _rank(resources={"requests": {"memory": v}})),
    "resource": (TEXTS, lambda v: _rank(resources={"limits": {v: "1"}})),
    "node rule": ([*TEXTS, "NotIn", "Lt", "DoesNotExist"], _rule),
    "node rule key": (TEXTS, lambda v: _rule("In", v)),
    "init container": (TEXTS, lambda v: _init(name=v)),
    "pull policy": ([*TEXTS, "Always"], lambda v: _init(imagePullPolicy=v)),
    "restart policy": ([*TEXTS, "Always", "Never"], lambda v: _init(restartPolicy=v)),
    "spread": (
        [-1, 0, 1, 5],
        lambda v: {
            "pod": {
                "topologySpreadConstraints": [
                    {"maxSkew": v, "topologyKey": "a", "whenUnsatisfiable": "ScheduleAnyway"}
                ]
            }
        },
    ),
    "port": (
        [-1, 0, 1, 65_535, 65_536],
        lambda v: _rank(ports=[{"containerPort": v}]),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_dry_run_refuses_what_the_api_server_refuses_and_names_the_field(
    space: Space, place: str
) -> None:
    values, options_of = PLACES[place]
    ours: dict[int, ValidationError] = {}
    jobs: dict[str, Json] = {}

    async def ask() -> None:
        cluster = space.site.connect()
        for number, value in enumerate(values):
            try:
                options = KubernetesOptions(**options_of(value))
            except ValidationError:  # of no use to any server, such as a list that is none
                continue
            job = render_job(training(), DesiredState(version=1, size=3), options)
            name = f"try-{number}"
            jobs[name] = {**job, "metadata": {**job["metadata"], "name": name}}
            backend = KubernetesBackend(cluster, options)
            try:
                await backend.dry_run(training().spec, space.name)
            except ValidationError as error:
                ours[number] = error
        await cluster.close()

    asyncio.run(ask())
    theirs = _dry_run(space, jobs)
    assert {f"try-{number}" for number in ours} == set(theirs)
    assert [error for error in ours.values() if not error.field] == []
    assert space.json("get", "jobs,services,configmaps", "-l", "atoll.dev/uid")["items"] == []


def _dry_run(space: Space, jobs: dict[str, Json]) -> dict[str, str]:
    """What the server says against each, by name; absent if it takes it."""
    verdicts = {}

    async def ask() -> None:
        cluster = space.site.connect()
        path = f"/apis/batch/v1/namespaces/{space.name}/jobs"
        params = {"dryRun": "All", "fieldValidation": "Strict"}
        for name, job in jobs.items():
            answer = await cluster._http.post(path, params=params, json=job)
            if answer.is_error:
                verdicts[name] = str(answer.json().get("message"))
        await cluster.close()

    asyncio.run(ask())
    return verdicts
