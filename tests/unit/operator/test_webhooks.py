"""Webhooks outlive an operator: the next leader tells what the last one left, and no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from atoll.core.errors import Denied
from atoll.core.status import Event
from atoll.core.webhooks import Delivery, new_secret
from atoll.kubernetes.names import WEBHOOKS
from atoll.kubernetes.resource import with_events
from atoll.operator import webhooks
from atoll.operator.webhooks import ClusterWebhooks
from atoll.store.outbox import Outbox, outbox_in_memory
from tests.unit.operator.cluster import Objects

Json = dict[str, Any]
HOME = "atoll-system"


class Life:
    """One operator that leads."""

    def __init__(self, cluster: Any) -> None:
        self.outbox: Outbox = outbox_in_memory()
        self.hooks = ClusterWebhooks(cluster, HOME, None, self.outbox)

    def due(self) -> list[Delivery]:
        return self.outbox.due(1e12)

    def reasons(self) -> list[str]:
        return [msg.body.split(b'"')[3].decode() for msg in self.due()]

    def deliver(self) -> list[str]:
        """What waits is delivered; its ids."""
        sent = self.due()
        for one in sent:
            self.outbox.delivered(one, time.time())
        return [one.id for one in sent]


def training(uid: str = "u", namespace: str = "n") -> Json:
    return {"metadata": {"namespace": namespace, "name": f"t-{uid}", "uid": uid}, "status": {}}


def happened(raw: Json, *reasons: str, ago_s: float = 0.0) -> Json:
    at = time.time() - ago_s
    events = [Event(type="Warning", reason=r, message="m", at=at) for r in reasons]
    return {**raw, "status": {"events": with_events(raw["status"], events)}}


def add(life: Life, *events: str, namespace: str = "n", ago_s: float = 100.0) -> str:
    made_at = time.time() - ago_s
    return life.outbox.add(namespace, "http://x/", list(events), new_secret(), made_at)


def played(story: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story(Objects()))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_webhooks_and_their_secrets_are_there_for_the_next_operator() -> None:
    async def story(cluster: Objects) -> None:
        first, second = Life(cluster), Life(cluster)
        await first.hooks.load()
        ids = [add(first, "Failed"), add(first, namespace="other")]
        await first.hooks.save()
        await second.hooks.load()
        assert {one.id for one, _ in second.outbox.everywhere()} == set(ids)
        (hook,) = second.outbox.all("n")
        assert hook == first.outbox.all("n")[0]
        second.outbox.remove("n", ids[0])
        await second.hooks.save()
        assert set(cluster.kept["secrets", HOME, WEBHOOKS]["data"]) == {ids[1]}
        writes = len(cluster.writes)
        await second.hooks.save()
        assert len(cluster.writes) == writes, "nothing new is not written"

    played(story)


def test_an_event_is_told_once_however_often_its_training_is_seen() -> None:
    async def story(cluster: Objects) -> None:
        life = Life(cluster)
        add(life, "*")
        raw = happened(training(), "Accepted", "Failed")
        life.hooks.note(raw)
        life.hooks.note(raw)
        assert life.reasons() == ["Accepted", "Failed"]
        life.deliver()
        life.hooks.note(raw)
        assert life.due() == []
        life.hooks.note(happened(raw, "Failed"))  # again: a count, and told again
        assert life.reasons() == ["Failed"]

    played(story)


def test_events_before_a_webhook_was_made_are_not_for_it() -> None:
    async def story(cluster: Objects) -> None:
        life = Life(cluster)
        add(life, "*", ago_s=10.0)
        life.hooks.note(happened(happened(training(), "Old", ago_s=60.0), "New"))
        assert life.reasons() == ["New"]

    played(story)


def test_what_a_killed_leader_had_not_delivered_the_next_one_does_with_the_same_id() -> None:
    async def story(cluster: Objects) -> None:
        first, second = Life(cluster), Life(cluster)
        add(first, "*", ago_s=1000.0)
        raw = happened(training(), "Accepted", ago_s=900.0)
        first.hooks.note(raw)
        assert len(first.deliver()) == 1
        raw = happened(raw, "Failed", ago_s=800.0)
        first.hooks.note(raw)
        (waiting,) = first.due()
        await first.hooks.save()
        await second.hooks.load()
        assert second.due() == []
        second.hooks.note(raw)
        assert [one.id for one in second.due()] == [waiting.id]
        second.deliver()
        await second.hooks.save()

    played(story)


def test_what_was_delivered_is_not_told_again_by_the_next_leader() -> None:
    async def story(cluster: Objects) -> None:
        first, second = Life(cluster), Life(cluster)
        add(first, "*", ago_s=1000.0)
        raw = happened(training(), "Succeeded", ago_s=100.0)
        first.hooks.note(raw)
        first.deliver()
        await first.hooks.save()
        await second.hooks.load()
        second.hooks.note(raw)
        assert second.due() == []
        second.hooks.note(happened(training("v"), "Failed"))
        assert second.reasons() == ["Failed"]

    played(story)


def test_the_leader_follows_trainings_from_the_first_webhook_on_and_until_they_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(cluster: Objects) -> None:
        life = Life(cluster)
        cluster.put("trainings", happened(training(), "Accepted"))
        await life.hooks.load()
        running = asyncio.create_task(life.hooks.run())
        await asyncio.sleep(0)
        assert not cluster.is_watched, "nobody asks for events"
        add(life, "*")
        await life.hooks.save()
        await until(lambda: cluster.is_watched)
        assert life.reasons() == ["Accepted"]
        raw = happened(cluster.kept["trainings", "n", "t-u"], "Deleted")
        cluster.put("trainings", raw, "DELETED")
        await until(lambda: life.reasons() == ["Accepted", "Deleted"])
        life.deliver()
        running.cancel()
        await asyncio.wait({running})
        again = Life(cluster)
        await again.hooks.load()
        assert again.outbox.all("n")[0].delivered == 2, "how it went is stored at the end"

    monkeypatch.setattr(webhooks, "SAVE_S", 3600.0)
    played(story)


def test_an_entry_that_somebody_has_broken_hides_no_other() -> None:
    async def story(cluster: Objects) -> None:
        first, second = Life(cluster), Life(cluster)
        kept = add(first, "*")
        await first.hooks.save()
        cluster.kept["secrets", HOME, WEBHOOKS]["data"]["wh-bad"] = "bm9uZQ=="
        await second.hooks.load()
        assert [one.id for one, _ in second.outbox.everywhere()] == [kept]

    played(story)


def test_without_the_right_to_the_secret_nothing_is_kept_in_silence() -> None:
    class Refusing(Objects):
        async def get(self, kind: str, namespace: str, name: str) -> Json:
            raise Denied("Kubernetes refused")

    async def story() -> None:
        life = Life(Refusing())
        with pytest.raises(Denied):
            await life.hooks.load()

    asyncio.run(story())


def test_a_training_that_was_removed_right_after_the_lead_changed_has_told_all() -> None:
    async def story(cluster: Objects) -> None:
        first, second = Life(cluster), Life(cluster)
        add(first, "*")
        await first.hooks.save()
        raw = happened(training(), "Failed")
        cluster.put("trainings", raw)  # the first one is killed here
        await second.hooks.load()
        cluster.put("trainings", raw, "DELETED")
        assert second.reasons() == ["Failed"]

    played(story)
