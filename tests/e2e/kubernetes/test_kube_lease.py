"""Leader election: never two at once, and a dead leader is followed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from atoll.operator.lease import Lease
from tests.e2e.kubernetes.conftest import Operator, Space
from tests.e2e.kubernetes.control_plane import wait_for


def test_of_many_one_leads_at_a_time_and_each_gets_its_turn(
    space: Space, run: Callable[..., Any]
) -> None:
    leading: set[str] = set()
    led: list[str] = []

    async def inside() -> None:
        cluster = space.site.connect()

        async def one(identity: str) -> None:
            lease = Lease(cluster, space.name, identity, duration_s=3.0, renew_s=0.5, retry_s=0.1)

            async def work() -> None:
                assert not leading, f"{identity} beside {leading}"
                leading.add(identity)
                led.append(identity)
                await asyncio.sleep(0.3)
                leading.discard(identity)

            await lease.lead(work)

        await asyncio.gather(*(one(f"op-{n}") for n in range(5)))
        await cluster.close()

    run(inside())
    assert sorted(led) == [f"op-{n}" for n in range(5)]


def test_an_operator_without_rights_says_so_and_waits_for_them(
    space: Space, start_operator: Callable[..., Operator]
) -> None:
    kept = space.json("get", "role", "atoll-operator")
    space.kubectl("delete", "role", "atoll-operator")
    operator = start_operator()
    wait_for("it is told", lambda: 'cannot list resource "trainings"' in operator.log.read_text())
    assert "Traceback" not in operator.log.read_text()
    assert operator.process.poll() is None
    rules = {field: kept[field] for field in ("apiVersion", "kind", "rules")}
    space.site.apply(rules | {"metadata": {"name": "atoll-operator", "namespace": space.name}})
    space.submit("it", command=["true"])
    space.until("it", "it is seen", lambda s: s.get("phase"))


def test_a_lease_that_is_taken_away_ends_the_work(space: Space, run: Callable[..., Any]) -> None:
    async def inside() -> bool:
        cluster = space.site.connect()
        lease = Lease(cluster, space.name, "one", duration_s=2.0, renew_s=0.2, retry_s=0.1)
        is_cancelled = False

        async def work() -> None:
            nonlocal is_cancelled
            found = await cluster.get("leases", space.name, "atoll-operator")
            stolen = {**found["spec"], "holderIdentity": "thief", "leaseDurationSeconds": 60}
            await cluster.replace("leases", space.name, "atoll-operator", {**found, "spec": stolen})
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                is_cancelled = True
                raise

        await lease.lead(work)
        kept = await cluster.get("leases", space.name, "atoll-operator")
        await cluster.close()
        assert kept["spec"]["holderIdentity"] == "thief"
        return is_cancelled

    assert run(inside())
