"""Events of trainings reach the outbox of whichever operator leads, each once for each file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import Temporary
from atoll.core.status import Event
from atoll.core.webhooks import Webhook
from atoll.operator.resource import with_events
from atoll.operator.webhooks import EVENTS_BACK_S, WebhookEvents
from tests.unit.operator.cluster import Objects

Json = dict[str, Any]
WEBHOOK = Webhook("w", "http://x/", ["*"], None, b"k" * 16)


class Life:
    """One operator that leads, with its file."""

    def __init__(self, cluster: Any, folder: Path, *webhooks: Webhook) -> None:
        folder.mkdir(exist_ok=True)
        self.events = WebhookEvents(cluster, None, folder / "outbox.db", webhooks or (WEBHOOK,))
        self.outbox = self.events.outbox

    def waiting(self) -> list[str]:
        return self.outbox.waiting(WEBHOOK)

    def reasons(self) -> list[str]:
        found = [self.outbox.get(id) for id in self.waiting()]
        return [d.body.split(b'"')[3].decode() for d in found if d is not None]

    def deliver(self) -> None:
        for id in self.waiting():
            self.outbox.remove(id)


def training(uid: str = "u", namespace: str = "n") -> Json:
    return {"metadata": {"namespace": namespace, "name": f"t-{uid}", "uid": uid}, "status": {}}


def happened(raw: Json, *reasons: str, ago_s: float = 0.0) -> Json:
    at = time.time() - ago_s
    events = [Event(type="Warning", reason=r, message="m", at=at) for r in reasons]
    return {**raw, "status": {"events": with_events(raw["status"], events)}}


def played(story: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story(Objects()))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_an_event_is_told_once_however_often_its_training_is_seen(tmp_path: Path) -> None:
    life = Life(Objects(), tmp_path)
    raw = happened(training(), "Accepted", "Failed")
    life.events.note(raw)
    life.events.note(raw)
    assert life.reasons() == ["Accepted", "Failed"]
    life.deliver()
    life.events.note(raw)
    assert life.waiting() == []
    life.events.note(happened(raw, "Failed"))  # again: a count, and told again
    assert life.reasons() == ["Failed"]


def test_the_next_leader_on_the_same_volume_continues_and_tells_nothing_twice(
    tmp_path: Path,
) -> None:
    first = Life(Objects(), tmp_path)
    raw = happened(training(), "Accepted")
    first.events.note(raw)
    first.deliver()
    raw = happened(raw, "Failed")
    first.events.note(raw)
    (waiting,) = first.waiting()
    first.events.close()  # as a killed one leaves it
    second = Life(Objects(), tmp_path)
    second.events.note(raw)
    assert second.waiting() == [waiting]
    second.deliver()
    second.events.note(raw)
    assert second.waiting() == []


def test_a_leader_with_another_file_tells_the_newest_events_with_the_same_ids(
    tmp_path: Path,
) -> None:
    first, second = (Life(Objects(), tmp_path / name) for name in ("one", "two"))
    raw = happened(training(), "Old", ago_s=EVENTS_BACK_S + 60)
    raw = happened(raw, "Failed", ago_s=EVENTS_BACK_S - 60)
    for life in (first, second):
        life.events.note(raw)
    assert first.reasons() == ["Failed"]
    assert second.waiting() == first.waiting()


def test_the_leader_follows_trainings_until_they_are_gone(tmp_path: Path) -> None:
    async def story(cluster: Objects) -> None:
        life = Life(cluster, tmp_path)
        cluster.put("trainings", happened(training(), "Accepted"))
        await life.events.begin()
        assert life.reasons() == ["Accepted"]
        running = asyncio.create_task(life.events.run())
        await until(lambda: cluster.is_watched)
        raw = happened(cluster.kept["trainings", "n", "t-u"], "Deleted")
        cluster.put("trainings", raw, "DELETED")
        await until(lambda: life.reasons() == ["Accepted", "Deleted"])
        running.cancel()
        await asyncio.wait({running})
        assert life.events._noted == {}, "nothing is remembered of what is gone"

    played(story)


def test_what_was_deleted_while_nobody_led_is_forgotten(tmp_path: Path) -> None:
    async def story(cluster: Objects) -> None:
        life = Life(cluster, tmp_path)
        life.events.note(happened(training("gone"), "Accepted"))
        life.events.close()
        again = Life(cluster, tmp_path)
        await again.events.begin()
        assert again.events._noted == {}
        assert again.reasons() == ["Accepted"], "what waits is delivered all the same"

    played(story)


def test_a_training_that_was_removed_right_after_the_lead_changed_has_told_all(
    tmp_path: Path,
) -> None:
    async def story(cluster: Objects) -> None:
        raw = happened(training(), "Failed")
        cluster.put("trainings", raw)  # the last leader is killed here
        second = Life(cluster, tmp_path)
        await second.events.begin()
        cluster.put("trainings", raw, "DELETED")
        assert second.reasons() == ["Failed"]

    played(story)


def test_without_webhooks_nobody_asks_for_events(tmp_path: Path) -> None:
    async def story(cluster: Objects) -> None:
        cluster.put("trainings", happened(training(), "Accepted"))
        events = WebhookEvents(cluster, None, tmp_path / "outbox.db", ())  # type: ignore[arg-type]
        await events.begin()
        await events.run()  # returns
        assert events._noted == {}

    played(story)


def test_a_cluster_that_does_not_answer_does_not_keep_the_leader_from_its_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent(Objects):
        async def page(self, *_: Any, **__: Any) -> Any:
            raise Temporary("no answer")

    asyncio.run(Life(Silent(), tmp_path).events.begin())
    assert "events for webhooks cannot be read: no answer" in caplog.text
