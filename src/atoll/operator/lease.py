"""Leader election by a Lease object: at most one of several operators acts at a time.

Clocks need not agree: each operator measures with its own how long the record of the holder has
stayed unchanged, and takes the lease over after the whole duration.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from atoll.backends.kubernetes.client import Cluster
from atoll.core.errors import AtollError, BackendError, Conflict, Denied, NotFound

Json = dict[str, Any]
log = logging.getLogger(__name__)


class Lease:
    """The right to act, while it is renewed."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        identity: str,
        *,
        name: str = "atoll-operator",
        duration_s: float = 15.0,
        renew_s: float = 3.0,
        retry_s: float = 2.0,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration_s = duration_s
        self._renew_s = renew_s
        self._retry_s = retry_s
        # The holder's record, and when this process first saw it by its own clock.
        self._observed: tuple[Any, float] = (None, 0.0)

    async def lead(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Waits until it holds the lease, then runs `work` until that ends or the lease is lost.

        `work` has ended, cancelled if necessary, before the lease is given back.
        """
        await self._acquire()
        log.info("leading as %s", self._identity)
        task = asyncio.create_task(work())
        try:
            await self._renew_during(task)
        finally:
            task.cancel()
            await asyncio.wait({task})
            await self._give_back()
        if not task.cancelled():
            task.result()

    async def _acquire(self) -> None:
        while True:
            if await self._acquire_once():
                return
            await asyncio.sleep(self._retry_s)

    async def _renew_during(self, task: asyncio.Task[None]) -> None:
        """Returns when the task ends or the lease is lost, well before others may take it over."""
        # The last third is for work to end before another operator may begin.
        deadline = time.monotonic() + self._duration_s * 2 / 3
        while not (await asyncio.wait({task}, timeout=self._renew_s))[0]:
            try:
                async with asyncio.timeout(self._renew_s):
                    is_renewed = await self._acquire_once()
            except TimeoutError:
                is_renewed = False
            if is_renewed:
                deadline = time.monotonic() + self._duration_s * 2 / 3
            elif time.monotonic() >= deadline:
                log.warning("the lease could not be renewed; this operator stops acting")
                return

    async def _acquire_once(self) -> bool:
        """Takes or renews the lease; whether this process now holds it."""
        try:
            lease = await self._cluster.get("leases", self._namespace, self._name)
        except NotFound:
            lease = {}
        except (BackendError, Denied) as error:
            log.warning("cannot read the lease: %s", error)
            return False
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        record = (holder, spec.get("renewTime"))
        if record != self._observed[0]:
            self._observed = (record, time.monotonic())
        lasts_s = float(spec.get("leaseDurationSeconds") or self._duration_s)
        if holder not in ("", self._identity) and time.monotonic() < self._observed[1] + lasts_s:
            return False
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        body = {**kind, "metadata": {"name": self._name}, **lease}
        body["spec"] = self._record(spec, is_new=holder != self._identity)
        try:
            if lease:
                await self._cluster.replace("leases", self._namespace, self._name, body)
            else:
                await self._cluster.create("leases", self._namespace, body)
        except (Conflict, NotFound) as error:
            log.info("another operator has taken the lease: %s", error)
            return False
        except (BackendError, Denied) as error:
            log.warning("the lease could not be written: %s", error)
            return False
        return True

    def _record(self, spec: Json, *, is_new: bool) -> Json:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._duration_s) or 1,
            "acquireTime": now if is_new else spec.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": int(spec.get("leaseTransitions") or 0) + is_new,
        }

    async def _give_back(self) -> None:
        """The lease is free at once; the next operator need not wait for it to expire."""
        with contextlib.suppress(AtollError, TimeoutError):
            # A process that is told to stop has ten seconds for everything.
            async with asyncio.timeout(2.0):
                lease = await self._cluster.get("leases", self._namespace, self._name)
                if lease["spec"].get("holderIdentity") == self._identity:
                    spec = {**lease["spec"], "holderIdentity": ""}
                    await self._cluster.replace(
                        "leases", self._namespace, self._name, {**lease, "spec": spec}
                    )
