"""Operations at the edge of what may be asked, with scripted answers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.core.errors import BelowMinimumWorld, NotFound, ResultError, Temporary
from atoll.core.model import encode
from atoll.core.rounds import RoundItem, RoundList, RoundSummary
from atoll.core.status import Event, RankStatus, TrainingList
from atoll.sdk import flows
from atoll.sdk.effects import Reply, Send
from tests.unit.sdk.test_flows import WHO, Script, refused, training


@pytest.mark.parametrize("target", [2, 8])
def test_the_bounds_themselves_may_be_asked_for(target: int) -> None:
    script = Script([training("ready", 4), training("ready", 4, target=target, generation=2)])
    assert script.play(flows.scale(training("ready", 4), target)).world.target == target
    assert script.requests()[-1] == "POST /v1/trainings/t/scale"


def test_a_rerun_is_never_one_of_another_training_of_the_same_name() -> None:
    script = Script([training(uid="uid-2")])
    with pytest.raises(NotFound):
        script.play(flows.rerun(training("failed"), {}, "key"))
    assert script.requests() == ["GET /v1/trainings/t"]


def test_a_rerun_asks_for_what_is_changed_and_leaves_the_rest() -> None:
    script = Script([training("failed"), training()])
    script.play(flows.rerun(training("failed"), {"name": "u", "target": None}, "key"))
    sent = script.sent[-1]
    assert isinstance(sent, Send)
    assert (sent.path, sent.body) == ("/v1/trainings/t/rerun", encode({"name": "u"}))
    assert dict(sent.headers or {}) == {"Idempotency-Key": "key"}


def test_a_list_has_the_trainings_of_all_pages() -> None:
    pages = [
        TrainingList(items=[training(uid="uid-1")], resource_version=1, continue_="next"),
        TrainingList(items=[training(uid="uid-2")], resource_version=1),
    ]
    script = Script([Reply(200, encode(page)) for page in pages])
    found = script.play(flows.list_all("ready", "t"))
    assert [each.uid for each in found] == ["uid-1", "uid-2"]
    first, second = [effect.query for effect in script.sent if isinstance(effect, Send)]
    assert {name: value for name, value in first.items() if value is not None} == {
        "limit": 500,
        "phase": "ready",
        "prefix": "t",
    }
    assert second == {**first, "continue": "next"}


def test_a_delete_that_takes_longer_than_it_may_says_what_is_still_there() -> None:
    alive = training("ready", 2)
    ranks = [RankStatus(rank=rank, phase="Running", attempt=0, started_at=1.0) for rank in (0, 1)]
    alive = replace(alive, status=replace(alive.status, ranks=ranks))
    script = Script([alive, Reply(202, b"{}"), alive])
    with pytest.raises(Temporary, match=r"'t' is not removed after 1 s") as caught:
        script.play(flows.delete(WHO, 1, clock=script.clock))
    assert "still being stopped" in str(caught.value)


def test_a_delete_that_waits_for_nothing_has_only_asked() -> None:
    script = Script([training("ready", 4), Reply(202, b"{}")])
    script.play(flows.delete(WHO, 0, clock=script.clock))
    assert script.requests() == ["GET /v1/trainings/t", "DELETE /v1/trainings/t"]


def test_events_are_asked_for_by_uid_and_come_as_they_are() -> None:
    event = Event(type="Normal", reason="Ready", message="it is ready", at=5.0)
    script = Script([Reply(200, encode({"items": [event]}))])
    assert script.play(flows.events(WHO, 3.0)) == [event]
    (sent,) = script.sent
    assert isinstance(sent, Send)
    assert (sent.path, sent.query) == ("/v1/trainings/t/events", {"since": 3.0, "uid": "uid-1"})


def test_what_is_over_has_its_final_world_only_if_it_succeeded() -> None:
    assert flows.check_success(training("succeeded", 4), None).ready == 4
    with pytest.raises(BelowMinimumWorld) as caught:
        flows.check_success(training("failed", 1), 7.0)
    assert (caught.value.ready, caught.value.timeout) == (1, 7.0)


def test_a_result_is_what_the_rank_set_or_nothing() -> None:
    def result(reply: Reply) -> object:
        return Script([reply]).play(flows.result(WHO, 0))

    assert result(Reply(200, encode({"encoding": "json", "value": [1]}))) == [1]
    assert result(refused(NotFound("result", "rank 0"), 404)) is None
    with pytest.raises(NotFound):
        result(refused(NotFound("training", "t"), 404))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"encoding": "none", "error": "it is 2 GB large"}, "2 GB"),
        ({"encoding": "pickle", "payload": "gAROLg=="}, "allow_pickle"),
    ],
)
def test_a_result_that_cannot_be_read_says_why(answer: dict[str, str], why: str) -> None:
    with pytest.raises(ResultError, match=why):
        Script([Reply(200, encode(answer))]).play(flows.result(WHO, 0))


def item(number: int, fragment: int = 0, joined: tuple[int, ...] = ()) -> RoundItem:
    return RoundItem(
        round=number, fragment=fragment, attempt=0, at=None, source="store", members=[0],
        weights=[1.0], missing=[], late=[], rejected=[], bad=[], joined=list(joined), left=[],
        tokens=1.0, steps=1, bytes_up=None, bytes_down=None, requests=None, hidden_s=None,
        blocked_s=None, bits_up=None, bits_per_parameter=None, error="",
    )  # fmt: skip


SUMMARY = RoundSummary(
    run="run-2", source="store", round=3, rounds=4, fragments=2, members=[0], behind=[],
    uploaded=[], waited_for=[], tokens=8.0, moved_at=None, observed_at=None,
)  # fmt: skip


def page(*items: RoundItem, summary: RoundSummary | None = SUMMARY) -> Reply:
    return Reply(200, encode(RoundList(items=list(items), summary=summary)))


def asked_rounds(script: Script) -> list[tuple[object, object, object]]:
    queries = [effect.query or {} for effect in script.sent if isinstance(effect, Send)]
    return [(query["from"], query["to"], query["run"]) for query in queries]


def test_rounds_of_many_pages_are_those_of_one_run_each_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flows, "ROUNDS_A_PAGE", 3)
    script = Script(
        [
            # The first of a page is compared with nothing, so all its members seem to have joined.
            page(item(2, 1, joined=(0,)), item(3, 0), item(3, 1)),
            page(item(1, 1, joined=(0,)), item(2, 0), item(2, 1), summary=None),
            page(item(1, 0), item(1, 1), summary=None),
        ]
    )
    answer = script.play(flows.rounds(WHO, 0, None, has_costs=False))
    keys = [(each.round, each.fragment) for each in answer.items]
    assert keys == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert [each.joined for each in answer.items] == [[]] * 6
    assert answer.summary == SUMMARY
    assert asked_rounds(script) == [(0, None, None), (0, 2, "run-2"), (0, 1, "run-2")]


@pytest.mark.parametrize("first", [2, 3])
def test_no_page_is_asked_for_before_the_first_round_that_is_wanted(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "ROUNDS_A_PAGE", 2)
    script = Script([page(item(2), item(3))])
    assert len(script.play(flows.rounds(WHO, first, 3, has_costs=False)).items) == 2
    assert asked_rounds(script) == [(first, 3, None)]


def test_a_training_without_rounds_has_an_empty_page() -> None:
    script = Script([page(summary=None)])
    assert script.play(flows.rounds(WHO, 0, None, has_costs=True)).items == []
    (sent,) = script.sent
    assert isinstance(sent, Send)
    assert (sent.query or {})["costs"] == "true"
