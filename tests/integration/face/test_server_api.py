"""The native API over real HTTP; the test writes the statuses."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from atoll.core.errors import NotFound
from atoll.core.phase import Phase
from atoll.core.status import Status, Training, WorldStatus
from atoll.server.http.operations import MAX_BODY_BYTES

from .conftest import Served

SIZE = {"min": 1, "target": 2, "max": 4}
GOOD = {"name": "good", "worldSize": SIZE, "command": ["true"]}
HUGE = 10**30


def body(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not None}


def world(**changes: Any) -> dict[str, Any]:
    return body(worldSize={**SIZE, **changes})


# method, path, JSON body, status, field named in the answer
BAD_INPUT: list[tuple[str, str, Any, int, str | None]] = [
    ("POST", "/v1/trainings", body(surprise=1), 400, "surprise"),
    ("POST", "/v1/trainings", world(middle=1), 400, "worldSize.middle"),
    ("POST", "/v1/trainings", body(name="a/b"), 400, "name"),
    ("POST", "/v1/trainings", body(name=".."), 400, "name"),
    ("POST", "/v1/trainings", body(name="ä"), 400, "name"),
    ("POST", "/v1/trainings", body(name="a" * 201), 400, "name"),
    ("POST", "/v1/trainings", body(name=""), 400, "name"),
    ("POST", "/v1/trainings", body(name="a\n"), 400, "name"),
    ("POST", "/v1/trainings", {"worldSize": SIZE, "command": ["true"]}, 400, "name"),
    ("POST", "/v1/trainings", world(min=3), 400, "worldSize.min"),
    ("POST", "/v1/trainings", world(target=5), 400, "worldSize.target"),
    ("POST", "/v1/trainings", world(min=-1), 400, "worldSize.min"),
    ("POST", "/v1/trainings", world(min=0), 400, "worldSize.min"),
    ("POST", "/v1/trainings", world(max=10**9), 400, "worldSize.max"),
    ("POST", "/v1/trainings", world(max=HUGE), 400, "worldSize.max"),
    ("POST", "/v1/trainings", world(min="2"), 400, "worldSize.min"),
    ("POST", "/v1/trainings", world(min=1.5), 400, "worldSize.min"),
    ("POST", "/v1/trainings", body(command=None), 400, "command"),
    ("POST", "/v1/trainings", body(command=[]), 400, "command"),
    ("POST", "/v1/trainings", body(command="true"), 400, "command"),
    ("POST", "/v1/trainings", body(env={"RANK": "1"}), 400, "env.RANK"),
    ("POST", "/v1/trainings", body(executor="nowhere"), 400, "executor"),
    ("POST", "/v1/trainings", body(workingDir="../x"), 400, "workingDir"),
    ("POST", "/v1/trainings", body(resources={"gpuCount": -1}), 400, "resources.gpuCount"),
    ("POST", "/v1/trainings", body(bench={"mode": "ever"}), 400, "bench.mode"),
    ("POST", "/v1/trainings", body(bench={"surprise": 1}), 400, "bench.surprise"),
    ("POST", "/v1/trainings", body(rendezvous={"uri": "ftp://x"}), 400, "rendezvous.uri"),
    ("POST", "/v1/trainings", body(ncclEnv={"A_B": "\0"}), 400, "ncclEnv.A_B"),
    ("POST", "/v1/trainings", body(pipPackages=["\0"]), 400, "pipPackages[0]"),
    ("POST", "/v1/trainings", body(maxRestarts=-1), 400, "maxRestarts"),
    ("POST", "/v1/trainings", body(source={"kind": "script"}), 400, "source.content"),
    ("POST", "/v1/trainings", [], 400, "body"),
    ("POST", "/v1/trainings", None, 400, "body"),
    ("POST", "/v1/trainings", body(name="there"), 409, None),
    ("POST", "/v1/trainings/there/scale", {"target": 9}, 400, None),
    ("POST", "/v1/trainings/there/scale", {"target": 0}, 400, None),
    ("POST", "/v1/trainings/there/scale", {"target": -5}, 400, None),
    ("POST", "/v1/trainings/there/scale", {"target": HUGE}, 400, "target"),
    ("POST", "/v1/trainings/there/scale", {"target": "2"}, 400, "target"),
    ("POST", "/v1/trainings/there/scale", {}, 400, "target"),
    ("POST", "/v1/trainings/there/scale", {"target": 2, "now": True}, 400, "now"),
    ("POST", "/v1/trainings/missing/scale", {"target": 2}, 404, None),
    ("POST", "/v1/trainings/over/scale", {"target": 2}, 409, None),
    ("POST", "/v1/trainings/missing/cancel", None, 404, None),
    ("DELETE", "/v1/trainings/missing", None, 404, None),
    ("GET", "/v1/trainings/missing", None, 404, None),
    ("GET", "/v1/trainings/theirs", None, 404, None),
    ("GET", "/v1/trainings/theirs/logs", None, 404, None),
    ("GET", "/v1/trainings/theirs/events", None, 404, None),
    ("GET", "/v1/trainings/theirs?watch", None, 404, None),
    ("DELETE", "/v1/trainings/theirs", None, 404, None),
    ("GET", "/v1/trainings/-a", None, 400, "name"),
    ("GET", "/v1/trainings/" + "a" * 201, None, 400, "name"),
    ("GET", "/v1/trainings?setting==1", None, 400, "setting"),
    ("GET", "/v1/trainings?metric=loss", None, 400, "metric"),
    ("GET", "/v1/trainings?sort=-", None, 400, "sort"),
    ("GET", "/v1/trainings?watch=true&label=a", None, 400, "label"),
    ("GET", "/v1/trainings/%2e%2e", None, 400, "name"),
    ("GET", "/v1/trainings/a%2Fb", None, 404, None),
    ("GET", "/v1/trainings/there?wacht=1", None, 400, "wacht"),
    ("GET", "/v1/trainings/there?after=1", None, 400, "after"),
    ("GET", "/v1/trainings/there?watch&after=-1", None, 400, "after"),
    ("GET", "/v1/trainings/there?watch&after=x", None, 400, "after"),
    ("GET", f"/v1/trainings/there?watch&after={HUGE}", None, 400, "after"),
    ("GET", "/v1/trainings/there?watch&after=4000000", None, 410, None),
    ("GET", "/v1/trainings?watch&after=4000000", None, 410, None),
    ("GET", "/v1/trainings?watch&phase=ready", None, 400, "phase"),
    ("GET", "/v1/trainings?limit=0", None, 400, "limit"),
    ("GET", "/v1/trainings?limit=501", None, 400, "limit"),
    ("GET", "/v1/trainings?limit=2&limit=3", None, 400, "limit"),
    ("GET", "/v1/trainings?phase=done", None, 400, "phase"),
    ("GET", "/v1/trainings?continue=a/b", None, 400, "continue"),
    ("GET", "/v1/trainings/there/logs?rank=-1", None, 400, "rank[0]"),
    ("GET", "/v1/trainings/there/logs?tail=-1", None, 400, "tail"),
    ("GET", "/v1/trainings/there/logs?follow=maybe", None, 400, "follow"),
    ("GET", "/v1/trainings/there/events?since=yesterday", None, 400, "since"),
    ("GET", "/v1/trainings/there/events?since=nan", None, 400, "since"),
    ("PUT", "/v1/trainings/there", None, 405, None),
    ("GET", "/v2/trainings", None, 404, None),
]


def test_bad_input_has_a_clear_answer_and_changes_nothing(served: Served) -> None:
    served.create("there")
    served.create("over")
    served.see("over", "failed")
    with served.client("two") as theirs:
        theirs.post("/v1/trainings", json=body(name="theirs")).raise_for_status()
    before = served.do(served.store.version())
    wrong = []
    for method, path, sent, status, field in BAD_INPUT:
        answer = served.http.request(method, path, json=sent)
        told = answer.json() if "json" in answer.headers.get("content-type", "") else {}
        if (
            answer.status_code != status
            or answer.headers["content-type"] != "application/problem+json"
            or told.get("field") != field
            or told.get("status") != status
            or not told.get("detail")
        ):
            wrong.append((method, path, sent, answer.status_code, answer.text))
    assert wrong == []
    assert served.do(served.store.version()) == before


def test_the_words_of_an_error_have_the_names_of_the_wire_too(served: Served) -> None:
    told = served.http.post("/v1/trainings", json=world(min=3)).json()
    assert told["detail"] == (
        "worldSize.min: 3 is not valid: expected at most worldSize.target (2)"
    )


@pytest.mark.parametrize(
    "sent", [b"", b"{", b"\xff\xfe", b"null", b"[" * 100_000, b'{"name": NaN}', b'"text"']
)
def test_a_body_that_is_not_json_is_refused(served: Served, sent: bytes) -> None:
    answer = served.http.post("/v1/trainings", content=sent)
    assert (answer.status_code, answer.json()["field"]) == (400, "body")


def test_a_body_of_100_mb_is_refused_before_it_is_read(served: Served) -> None:
    answer = served.http.post("/v1/trainings", content=b"x" * 100_000_000)
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES // 2**20) in answer.json()["detail"]

    def endless() -> Any:  # no length is announced
        for _ in range(100):
            yield b"x" * 2**20

    assert served.http.post("/v1/trainings", content=endless()).status_code == 413
    assert served.http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Basic dG9rZW4=", "token-one"]
)
def test_without_a_known_token_nothing_is_said(served: Served, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    served.create("there")
    for method, path in (
        ("GET", "/v1/trainings"),
        ("GET", "/v1/trainings/there"),
        ("GET", "/v1/trainings/missing"),
        ("GET", "/v1/trainings/there/logs"),
        ("POST", "/v1/trainings"),
        ("DELETE", "/v1/trainings/there"),
    ):
        answer = httpx2.request(method, served.url + path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "there" not in answer.text


def test_namespaces_do_not_see_each_other(served: Served) -> None:
    served.create("shared")
    with served.client("two") as theirs:
        theirs.post("/v1/trainings", json=body(name="shared")).raise_for_status()
        theirs.post("/v1/trainings", json=body(name="only-theirs")).raise_for_status()
        mine = {t["uid"] for t in served.http.get("/v1/trainings").json()["items"]}
        other = {t["uid"] for t in theirs.get("/v1/trainings").json()["items"]}
        assert (len(mine), len(other), mine & other) == (1, 2, set())
        theirs.delete("/v1/trainings/shared").raise_for_status()
    assert "deletionRequestedAt" not in served.http.get("/v1/trainings/shared").json()


def test_a_watch_of_all_shows_only_the_own_namespace(served: Served) -> None:
    start = served.do(served.store.version())
    with served.client("two") as theirs:
        theirs.post("/v1/trainings", json=body(name="theirs")).raise_for_status()
    served.create("mine")
    url = f"/v1/trainings?watch&after={start}&timeout=0.5"
    text = served.http.get(url).text
    assert '"mine"' in text
    assert "theirs" not in text


def test_a_create_repeated_with_its_key_makes_one_training(served: Served) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = served.http.post("/v1/trainings", json=GOOD, headers=headers)
    again = served.http.post("/v1/trainings", json=GOOD, headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["uid"] == again.json()["uid"]
    other = served.http.post("/v1/trainings", json=body(maxRestarts=1), headers=headers)
    assert other.status_code == 409
    with served.client("two") as theirs:  # a key is good in its namespace only
        assert theirs.post("/v1/trainings", json=GOOD, headers=headers).status_code == 201


def test_one_key_sent_by_many_at_once_makes_one_training(served: Served) -> None:
    def send(_: int) -> str:
        with served.client("one") as http:
            answer = http.post("/v1/trainings", json=GOOD, headers={"Idempotency-Key": "k"})
            return str(answer.json()["uid"])

    uids: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: uids.append(send(n)))  # type: ignore[misc]
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(uids), len(set(uids))) == (8, 1)


def test_a_list_comes_in_pages_and_can_be_filtered(served: Served) -> None:
    for number in range(7):
        served.create(f"run-{number}")
    served.create("other")
    served.see("run-3", "failed")
    found: list[str] = []
    query: dict[str, Any] = {"limit": 3, "prefix": "run-"}
    while True:
        page = served.http.get("/v1/trainings", params=query).json()
        assert len(page["items"]) <= 3
        found += [item["spec"]["name"] for item in page["items"]]
        if "continue" not in page:
            break
        query["continue"] = page["continue"]
    assert found == [f"run-{number}" for number in range(7)]
    failed = served.http.get("/v1/trainings?phase=failed").json()["items"]
    assert [item["spec"]["name"] for item in failed] == ["run-3"]


def test_scale_bumps_the_generation_once(served: Served) -> None:
    served.create("a")
    scaled = served.http.post("/v1/trainings/a/scale", json={"target": 4}).json()
    assert (scaled["generation"], scaled["spec"]["worldSize"]["target"]) == (2, 4)
    again = served.http.post("/v1/trainings/a/scale", json={"target": 4}).json()
    assert again["generation"] == 2
    assert again["resourceVersion"] == scaled["resourceVersion"]


def test_scale_of_a_training_that_is_over_leaves_a_warning(served: Served) -> None:
    served.create("a")
    served.see("a", "cancelled")
    answer = served.http.post("/v1/trainings/a/scale", json={"target": 4})
    told = answer.json()
    assert (answer.status_code, told["phase"], told["requestedTarget"]) == (409, "cancelled", 4)
    events = served.http.get("/v1/trainings/a/events").json()["items"]
    assert (events[0]["type"], events[0]["reason"]) == ("Warning", "UDTerminalState")


def test_cancel_and_delete_are_idempotent(served: Served) -> None:
    served.create("a")
    versions = {
        served.http.post("/v1/trainings/a/cancel").json()["resourceVersion"] for _ in range(3)
    }
    assert len(versions) == 1
    answers = [served.http.delete("/v1/trainings/a") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]


def test_changes_made_while_the_controller_writes_are_not_lost(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of the first three writes somebody else writes: a real conflict each time."""
    served.create("a")
    write = served.store.update_spec
    others = [1, 2, 0]

    async def late(training: Training) -> Training:
        if others:
            now = await served.store.get(training.key)
            status = Status(phase=Phase.READY, world=WorldStatus(ready=others.pop()))
            await served.store.update_status(now, status)
        return await write(training)

    monkeypatch.setattr(served.store, "update_spec", late)
    scaled = served.http.post("/v1/trainings/a/scale", json={"target": 4}).json()
    assert scaled["spec"]["worldSize"]["target"] == 4
    assert (scaled["generation"], scaled["status"]["world"]["ready"]) == (2, 1)
    assert others == []


def test_logs_are_lines_of_json_with_the_true_rank(served: Served) -> None:
    served.create("a")
    answer = served.http.get("/v1/trainings/a/logs")
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines() if line]
    assert lines == [{"rank": r, "text": f"line {n}"} for n in range(3) for r in (0, 1)]
    one = served.http.get("/v1/trainings/a/logs?rank=1").text
    assert {json.loads(line)["rank"] for line in one.splitlines()} == {1}


def test_shipped_code_is_answered_by_its_digest(served: Served) -> None:
    source = {"kind": "script", "content": "cHJpbnQo" * 10_000}
    made = served.create("a", command=None, source=source)
    assert len(made["spec"]["source"]["content"]) < 200
    kept = served.do(served.store.get(("one", "a")))
    assert len(kept.spec.source.content) < 100  # a status write does not carry it along
    assert len(served.do(served.store.source(kept))) == 60_000
    served.remove("a")
    with pytest.raises(NotFound):
        served.do(served.store.source(kept))


def test_a_repeated_create_is_compared_by_its_code_too(served: Served) -> None:
    def send(code: str) -> int:
        source = {"kind": "script", "content": code}
        answer = served.http.post(
            "/v1/trainings",
            json=body(command=None, source=source),
            headers={"Idempotency-Key": "k"},
        )
        return answer.status_code

    assert [send("cHJpbnQo"), send("cHJpbnQo"), send("cHJpbnQp")] == [201, 200, 409]


def test_events_since(served: Served) -> None:
    served.create("a")
    served.see("a", "failed")
    for _ in range(2):
        served.http.post("/v1/trainings/a/scale", json={"target": 1})
    first = served.http.get("/v1/trainings/a/events").json()["items"][0]
    assert first["count"] == 2
    url = "/v1/trainings/a/events"
    assert served.http.get(url, params={"since": first["at"]}).json()["items"] == [first]
    assert served.http.get(url, params={"since": first["at"] + 1}).json()["items"] == []


def test_health_and_series(served: Served) -> None:
    with httpx2.Client(base_url=served.url) as nobody:
        assert nobody.get("/healthz").json() == {"status": "ok"}
        assert nobody.get("/readyz").json() == {"status": "ok"}
        served.create("a")
        served.create("b")
        served.see("b", "ready", 2)
        served.wait_for(lambda: 'phase="ready"} 1.0' in nobody.get("/metrics").text)
        text = nobody.get("/metrics").text
        assert 'atoll_trainings{phase="new"} 1.0' in text
        served.remove("b")
        served.wait_for(lambda: 'phase="ready"} 0.0' in nobody.get("/metrics").text)


def test_a_store_that_cannot_be_read_is_not_ready(served: Served) -> None:
    served.store._db.close()
    answer = httpx2.get(served.url + "/readyz")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert httpx2.get(served.url + "/healthz").status_code == 200


def test_totals_need_a_token_where_they_are_not_open(tmp_path: Path) -> None:
    served = Served(tmp_path, is_metrics_open=False)
    try:
        with httpx2.Client(base_url=served.url) as stranger:
            assert stranger.get("/metrics").status_code == 401
            assert stranger.get("/healthz").status_code == 200
            metrics = stranger.get("/openapi.json").json()["paths"]["/metrics"]["get"]
        assert ("security" in metrics, "401" in metrics["responses"]) == (False, True)
        assert b"atoll_trainings" in served.http.get("/metrics").content
    finally:
        served.close()


def test_metrics_have_the_trainings_of_a_tokens_namespace_only(served: Served) -> None:
    served.create("mine")
    served.see("mine", "ready", ready=2)
    ready = 'atoll_training_ranks_ready{namespace="one",training="mine"} 2.0'
    served.wait_for(lambda: ready in served.http.get("/metrics").text)
    with served.client("two") as other, httpx2.Client(base_url=served.url) as nobody:
        for client in (other, nobody):
            text = client.get("/metrics").text
            assert "atoll_trainings{" in text
            assert "mine" not in text
        refused = nobody.get("/metrics", headers={"Authorization": "Bearer wrong"})
        assert refused.status_code == 401
