"""The basilica dialect over HTTP, where its clients cannot look: bodies, namespaces, limits."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import pytest
from tests.integration.face.conftest import Served

from atoll.backends.launch import (
    TORCHRUN_VARIABLES,
    WORLD_VARIABLES,
    Meeting,
    RankLayout,
    render_launch,
)
from atoll.core.phase import Phase
from atoll.core.status import Status
from atoll.server.basilica import deployments


def body(name: str, **distributed: Any) -> dict[str, Any]:
    world = {"min": 1, "target": 2, "max": 4}
    block = {"worldSize": world, "command": "true", "rendezvous": {"backend": "c10d"}}
    return {"instanceName": name, "image": "x", "distributed": {**block, **distributed}}


def test_a_followed_log_ends_before_the_client_gives_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert deployments.FOLLOW_LIMIT_S < 1200
    monkeypatch.setattr(deployments, "FOLLOW_LIMIT_S", 0.5)
    served.create("a")
    served.see("a", "ready", 2)
    answer = served.http.get("/deployments/a/logs?follow=true&tail=3")
    assert answer.status_code == 200
    assert answer.text.splitlines()[0] == "[rank 0] line 0"


def test_an_error_has_the_body_that_the_client_reads(served: Served) -> None:
    for method, path, status in [
        ("GET", "/deployments/nobody", 404),
        ("POST", "/deployments/nobody/scale-distributed", 400),
        ("POST", "/rentals", 501),
        ("GET", "/v2/secure-cloud/gpu-prices", 501),
    ]:
        answer = served.http.request(method, path)
        error = answer.json()["error"]
        assert answer.status_code == status
        assert set(error) == {"code", "message", "timestamp", "retryable"}
        assert error["code"].startswith("BASILICA_API_")
        assert datetime.fromisoformat(error["timestamp"]).utcoffset() is not None
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"worldSize": {"min": 3, "target": 2, "max": 4}}, "distributed.worldSize.min: 3"),
        ({"worldSize": {"min": "3", "target": 2, "max": 4}}, "distributed.worldSize.min: "),
        ({"nccl": {"env": {"RANK": "1"}}}, "distributed.nccl.env.RANK: '1'"),
        ({"bench": {"mode": "ever"}}, "distributed.bench.mode: 'ever'"),
    ],
)
def test_a_refused_field_has_the_name_that_was_sent(
    served: Served, changes: dict[str, Any], told: str
) -> None:
    answer = served.http.post("/deployments", json=body("a", **changes))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(told)


def test_ranks_that_do_not_meet_are_deployed_as_such(served: Served) -> None:
    answer = served.http.post("/deployments", json=body("a", rendezvous={"backend": "none"}))
    assert answer.status_code == 201
    told = served.http.get("/deployments/a").json()["distributed"]["rendezvous"]
    assert told["backend"] == "none"
    training = served.do(served.store.get(("one", "a")))
    assert training.spec.rendezvous.backend == "none"
    place = RankLayout("python", "sh", "/code", None, True, "file:///run", Meeting("host", 1))
    launch = render_launch(training, place)
    known = {*launch.env, *launch.rank_variables, *launch.size_variables}
    assert not {*WORLD_VARIABLES, *TORCHRUN_VARIABLES} & known
    assert not launch.env["BASILICA_RDZV_ENDPOINT"]
    assert {"REPLICA_RANK", "ATOLL_RANK", "ATOLL_RENDEZVOUS_URI", "ATOLL_WORLD_MAX"} <= known


def test_a_namespace_sees_only_its_own_deployments(served: Served) -> None:
    served.create("mine")
    with served.client("two") as other:
        assert other.get("/deployments").json() == {"deployments": [], "total": 0}
        for path in ("", "/logs", "/events"):
            assert other.get(f"/deployments/mine{path}").status_code == 404
        assert other.delete("/deployments/mine").status_code == 404
    assert served.http.get("/deployments").json()["total"] == 1


def test_create_answers_as_soon_as_the_ranks_are_there(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "SETTLE_S", 30.0)
    answers: list[Any] = []

    def create() -> None:
        answers.append(served.http.post("/deployments", json=body("a")))

    thread = threading.Thread(target=create)
    thread.start()
    served.wait_for(lambda: bool(served.do(served.store.list("one"))))
    served.see("a", "ready", 2)
    thread.join(60)
    assert answers[0].status_code == 201
    assert answers[0].json()["distributed"]["worldSize"]["ready"] == 2


def test_a_name_that_is_being_given_up_is_waited_for(served: Served) -> None:
    served.create("a")
    assert served.http.delete("/deployments/a").json()["state"] == "Terminating"
    timer = threading.Timer(0.3, served.remove, ["a"])
    timer.start()
    answer = served.http.post("/deployments", json=body("a"))
    timer.join()
    assert answer.status_code == 201
    assert answer.json()["phase"] == "pending"


def test_a_restart_keeps_the_spec_and_starts_anew(served: Served) -> None:
    served.http.post("/deployments", json=body("a", nccl={"env": {"NCCL_DEBUG": "INFO"}}))
    before = served.do(served.store.get(("one", "a")))
    code = served.do(served.store.source(before))
    served.http.post("/v1/trainings/a/cancel").raise_for_status()
    timer = threading.Timer(0.3, served.remove, ["a"])
    timer.start()
    assert served.http.post("/deployments/a/restart", json={}).status_code == 200
    timer.join()
    after = served.do(served.store.get(("one", "a")))
    assert after.spec == before.spec
    assert after.uid != before.uid
    assert b"true" in code
    assert served.do(served.store.source(after)) == code


def test_a_scale_is_in_the_answer_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments, "SETTLE_S", 0.0)
    served.create("a")
    served.see("a", "ready", 2)
    answer = served.http.post("/deployments/a/scale-distributed", json={"target": 1}).json()
    assert answer["distributed"]["worldSize"] == {
        "ready": 0, "target": 1, "min": 1, "max": 4, "belowMinimum": False
    }  # fmt: skip


def test_an_executor_that_is_not_there_may_come_back(served: Served) -> None:
    served.create("a")

    async def move() -> None:
        from msgspec.structs import replace

        found = await served.store.get(("one", "a"))
        await served.store.update_spec(replace(found, spec=replace(found.spec, executor="gone")))

    served.do(move())
    answer = served.http.get("/deployments/a/logs")
    assert answer.status_code == 503
    assert answer.json()["error"]["retryable"] is True


def test_what_is_being_deleted_is_neither_restarted_nor_scaled(served: Served) -> None:
    served.create("a")
    served.see("a", "ready", 2)
    served.http.delete("/deployments/a").raise_for_status()
    for path, sent in (("restart", {}), ("scale-distributed", {"target": 3})):
        answer = served.http.post(f"/deployments/a/{path}", json=sent)
        assert answer.status_code == 409
        assert "'a' is being deleted" in answer.json()["error"]["message"]
    assert served.do(served.store.get(("one", "a"))).spec.world_size.target == 2


@pytest.mark.parametrize("command", ["", " \n"])
def test_a_command_that_would_run_nothing_is_refused(served: Served, command: str) -> None:
    answer = served.http.post("/deployments", json=body("a", command=command))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("distributed.command: ")
    assert served.http.get("/deployments").json()["total"] == 0


@pytest.mark.parametrize(
    ("method", "path", "what"),
    [
        ("POST", "/deployments/a/share-token", "share links"),
        ("GET", "/deployments/a/share-token", "share links"),
        ("POST", "/deployments/a/enroll-metadata", "public metadata"),
        ("GET", "/public/deployments/a/metadata", "public metadata"),
    ],
)
def test_a_part_that_there_is_not_says_so(
    served: Served, method: str, path: str, what: str
) -> None:
    answer = served.http.request(method, path, json={})
    assert answer.status_code == 501
    assert answer.json()["error"]["message"].startswith(f"atoll does not support {what}")


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ({"ttlSeconds": "5"}, "ttlSeconds: '5' is not valid"),
        ({"args": ["a", 2]}, "args[1]: 2 is not valid"),
        ({"env": {"A": "b", "C": 1}}, "env[...]: {'A': 'b', 'C': 1} is not valid"),
        ({"distributed": {"worldSize": {"min": 1.5}}}, "distributed.worldSize.min: 1.5 is not"),
        ({"resources": {"gpus": {"count": "1"}}}, "resources.gpus.count: '1' is not valid"),
    ],
)
def test_a_refusal_shows_the_value_that_was_sent(
    served: Served, sent: dict[str, Any], told: str
) -> None:
    answer = served.http.post("/deployments", json={**body("a"), **sent})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(told)


@pytest.mark.parametrize("before", ['{"distributed":', '{"other":', "["])
def test_json_that_is_nested_too_deep_is_refused(served: Served, before: str) -> None:
    answer = served.http.post("/deployments", content=before + "[" * 100_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("body: ")


def test_a_command_with_a_nul_byte_is_refused(served: Served) -> None:
    answer = served.http.post("/deployments", json=body("a", command="true\0 x"))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("distributed.command: 'true\\x00 x'")


def test_logs_are_plain_text_by_their_type(served: Served) -> None:
    served.create("a")
    served.see("a", "ready", 2)
    answer = served.http.get("/deployments/a/logs")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


def test_a_failure_has_its_reason_in_the_message(served: Served) -> None:
    served.create("a")
    training = served.do(served.store.get(("one", "a")))
    over = Status(phase=Phase.FAILED, reason="DeadlineExceeded", message="still running after 2 s")
    served.do(served.store.update_status(training, over))
    found = served.http.get("/deployments/a").json()
    assert found["message"] == "DeadlineExceeded: still running after 2 s"


@pytest.mark.parametrize(("is_cancelled", "phase"), [(False, "terminating"), (True, "cancelled")])
def test_what_is_deleted_was_not_cancelled_by_anybody(
    served: Served, is_cancelled: bool, phase: str
) -> None:
    """The controller stops both in the same way; a wait must not take one for the other."""
    served.create("a")
    if is_cancelled:
        served.http.post("/v1/trainings/a/cancel").raise_for_status()
    served.http.delete("/deployments/a").raise_for_status()
    served.see("a", "cancelled")
    found = served.http.get("/deployments/a").json()
    assert (found["phase"], found["state"]) == (phase, "Terminating")


def test_a_mistake_of_the_server_is_told_as_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a secret of the server")

    monkeypatch.setattr(served.store, "list", broken)
    answer = served.http.get("/deployments")
    error = answer.json()["error"]
    assert (answer.status_code, answer.headers["connection"]) == (500, "close")
    assert set(error) == {"code", "message", "timestamp", "retryable"}
    assert "secret" not in answer.text


def test_a_time_to_live_out_of_bounds_is_told_as_it_was_sent(served: Served) -> None:
    answer = served.http.post("/deployments", json={**body("a"), "ttlSeconds": 2**32 - 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "ttlSeconds: 4294967295 is not valid: expected a whole number from 0 to 315360000"
    )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/deployments/a/nothing", 404), ("DELETE", "/deployments/", 405)],
)
def test_a_path_that_there_is_not_is_refused_in_the_same_words(
    served: Served, method: str, path: str, status: int
) -> None:
    answer = served.http.request(method, path)
    assert (answer.status_code, answer.headers.get("connection")) == (status, "close")
    assert answer.json()["error"]["message"].startswith(f"{method} {path.rstrip('/')}: ")
