"""Keeps pods until their exit is stored, and lets them go after that."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable

from atoll.core.errors import NotFound
from atoll.kubernetes.client import Cluster, gather
from atoll.kubernetes.gate import render_start
from atoll.kubernetes.names import PLANE, SELECTOR, UID
from atoll.kubernetes.patch import LET_GO, render_lost, render_stopped
from atoll.kubernetes.pod import Pod

AT_ONCE = 20  # requests under way at a time where every pod needs one


class Keeper:
    """Every verb may be repeated; a pod that is gone already is success."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def let_go(self, pods: Iterable[Pod]) -> None:
        """Their exits are stored, or there are none."""
        await gather(AT_ONCE, [self._let_go(pod) for pod in pods if pod.is_held])

    async def let_all_go(self, namespace: str, labels: str) -> None:
        listed = await self._cluster.list("pods", namespace, labels=labels)
        await self.let_go(map(Pod, listed.items))

    async def sweep(
        self,
        namespace: str | None,
        known: Callable[[], Awaitable[set[str]]],
        plane: str | None = None,
    ) -> None:
        """Pods of trainings that are no more are let go; without this they would never leave.

        Those of another control plane are left to it: their trainings are not known here.
        """
        own = f"!{PLANE}" if plane is None else f"{PLANE}={plane}"
        listed = await self._cluster.list("pods", namespace, labels=f"{SELECTOR},{own}")
        held = [pod for pod in map(Pod, listed.items) if pod.is_held]
        if held:
            # Asked after the pods, so that none of a new training is taken for a stray.
            kept = await known()
            await self.let_go(p for p in held if p.metadata["labels"].get(UID) not in kept)

    async def give_up(self, pods: Iterable[Pod]) -> None:
        """Failed on record, as the cluster does once a node is removed; then they are replaced."""
        await gather(AT_ONCE, [self._patch_status(p, render_lost(p.node)) for p in pods])

    async def mark_stopped(self, pods: Iterable[Pod], now: float) -> None:
        """Their end will not count as a failure of the rank."""
        await gather(AT_ONCE, [self._patch_status(p, render_stopped(now)) for p in pods])

    async def let_start(self, pods: Iterable[Pod]) -> None:
        """They pass the start gate."""
        await gather(AT_ONCE, [self._let_start(pod) for pod in pods])

    async def _let_start(self, pod: Pod) -> None:
        with contextlib.suppress(NotFound):
            await self._cluster.patch("pods", pod.metadata["namespace"], pod.name, render_start())

    async def _let_go(self, pod: Pod) -> None:
        with contextlib.suppress(NotFound):
            await self._cluster.patch(
                "pods", pod.metadata["namespace"], pod.name, LET_GO, type="strategic"
            )

    async def _patch_status(self, pod: Pod, patch: dict[str, object]) -> None:
        with contextlib.suppress(NotFound):
            await self._cluster.patch(
                "pods", pod.metadata["namespace"], pod.name, patch, type="strategic", part="status"
            )
