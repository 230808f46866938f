"""Who runs a training that names no executor, and what is refused by both APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.core.errors import ValidationError
from atoll.core.spec import TrainingSpec

from .conftest import PrintedLogs, Served


class Cluster(PrintedLogs):
    """Runs nothing, like its base; has an opinion on what it would run."""

    name = "kubernetes"

    def check(self, spec: TrainingSpec) -> None:
        if spec.image is None:
            raise ValidationError("image", None, "expected an image")


Serve = Callable[[dict[str, Any]], Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    opened: list[Served] = []

    def begin(executors: dict[str, Any]) -> Served:
        opened.append(Served(tmp_path, executors))
        return opened[-1]

    yield begin
    for server in opened:
        server.close()


def test_a_script_that_names_no_executor_runs_on_the_one_there_is(serve: Serve) -> None:
    served = serve({"kubernetes": Cluster()})
    with served.sdk() as client:
        training = client.deploy_distributed("a", command=["python", "train.py"], image="x")
    stored = served.do(served.store.get(("one", "a"))).spec
    assert (training.last.spec.executor, stored.executor) == ("kubernetes", "kubernetes")
    # The caller's directory and PATH mean nothing in a pod, though the server's address is local.
    assert (stored.working_dir, stored.env) == (None, {})


def test_where_ranks_run_beside_the_caller_they_start_in_its_directory(serve: Serve) -> None:
    served = serve({"kubernetes": Cluster(), "local": PrintedLogs()})
    with served.sdk() as client:
        client.deploy_distributed("a", command=["true"])
    stored = served.do(served.store.get(("one", "a"))).spec
    assert (stored.executor, stored.working_dir) == ("local", str(Path.cwd()))
    assert "PATH" in stored.env


@pytest.mark.parametrize("executors", [{"kubernetes": Cluster()}, {}])
def test_an_executor_that_is_not_there_is_refused_before_anything_is_stored(
    serve: Serve, executors: dict[str, Any]
) -> None:
    served = serve(executors)
    before = served.do(served.store.version())
    known = ", ".join(executors) or "none"
    with served.sdk() as client, pytest.raises(atoll.ValidationError, match=known) as refused:
        client.deploy_distributed("a", command=["true"], image="x", executor="local")
    assert (refused.value.field, served.do(served.store.version())) == ("executor", before)


def test_without_any_executor_nothing_is_stored(serve: Serve) -> None:
    served = serve({})
    with served.sdk() as client, pytest.raises(atoll.ValidationError, match="none"):
        client.deploy_distributed("a", command=["true"])
    assert served.do(served.store.version()) == 0


WORLD = {"min": 1, "target": 2, "max": 4}
FACES = {
    "/v1/trainings": {"name": "a", "worldSize": WORLD, "command": ["true"]},
    "/deployments": {
        "instanceName": "a",
        "distributed": {"worldSize": WORLD, "command": "true"},
    },
}


@pytest.mark.parametrize("face", FACES)
def test_what_the_executor_will_never_run_is_refused_by_every_api(serve: Serve, face: str) -> None:
    served = serve({"kubernetes": Cluster()})
    answer = served.http.post(face, json=FACES[face])
    assert (answer.status_code, "expected an image" in answer.text) == (400, True)
    assert served.do(served.store.version()) == 0
    assert served.http.post(face, json={**FACES[face], "image": "x"}).status_code == 201
    assert served.do(served.store.get(("one", "a"))).spec.executor == "kubernetes"
