"""What runs beside the ranks of a training: its etcd, the watch over its mesh, its link bench.

All of it is found in the same list or watch as the ranks' pods, so a look costs no request more.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from msgspec.structs import replace

from atoll.core.bench import LIMIT_S
from atoll.core.errors import Conflict, NotFound
from atoll.core.mesh import MeshState
from atoll.core.ports import Key
from atoll.core.status import BenchSeen, MeshStatus, Seen, Training
from atoll.kubernetes.bench import (
    bench_name,
    is_over,
    read_bench,
    render_bench,
    render_bench_service,
)
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.etcd import (
    address,
    answering,
    render_etcd,
    render_etcd_service,
    trouble_of,
    words,
)
from atoll.kubernetes.fabric import members
from atoll.kubernetes.mesh import Meshes
from atoll.kubernetes.names import BENCH, ETCD
from atoll.kubernetes.options import Options
from atoll.kubernetes.patch import is_held
from atoll.kubernetes.pod import BROKEN, HOPELESS, Pod
from atoll.kubernetes.render import etcd_name, owner_of, reference_to

Json = dict[str, Any]

ASK_AGAIN_S = 5.0  # for an etcd of which there is no pod
CLEAR_S = 1.0  # after what is to be stored was told


class Beside:
    """`ring` asks for another look at a training, now; `ring_in` in so many seconds."""

    def __init__(
        self,
        cluster: Cluster,
        options: Options,
        ring: Callable[[Key], None],
        ring_in: Callable[[Key, float], None],
        *,
        is_owner: bool,
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._ring_in = ring_in
        self._is_owner = is_owner
        self._meshes = Meshes(ring, options.mesh_deadline_s)
        # When each was last asked for, by training; and what stood in the way of the etcd's pod.
        self._etcds: dict[str, tuple[float, str]] = {}
        self._benches: dict[str, float] = {}

    async def close(self) -> None:
        await self._meshes.close()

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        await self._meshes.sweep(known)

    async def observe(
        self,
        training: Training,
        namespace: str,
        job: Json | None,
        newest: list[Pod],
        pods: list[Pod],
        seen: Seen,
        now: float,
    ) -> Seen:
        """`seen` with what is beside the ranks in it; `newest` is the last pod of each rank."""
        etcd = [pod for pod in pods if pod.part == ETCD]
        bench = [pod for pod in pods if pod.part == BENCH]
        if self._options.has_own_etcd(training.spec) and seen.is_supervised:
            seen = await self._keep_etcd(training, namespace, job, etcd, seen, now)
        seen = replace(seen, mesh=await self._mesh(training, newest, etcd, seen, now))
        if training.spec.bench.mode == "off":
            return seen
        return replace(seen, bench=await self._bench(training, namespace, newest, bench, seen, now))

    def may_begin(self, job: Json, pods: Iterable[Pod]) -> bool:
        """Whether a Job that is held need be no longer."""
        return is_held(job) and answering([p for p in pods if p.part == ETCD]) is not None

    async def measure(
        self, training: Training, namespace: str, job: Json | None, now: float
    ) -> None:
        owner, name = self._owner(training, job), bench_name(training)
        service = render_bench_service(training, self._options, owner)
        await self._cluster.patch("services", namespace, name, service, type="apply")
        body = render_bench(training, self._options, owner, secrets.token_hex(16))
        with contextlib.suppress(Conflict):  # made already, by us or by whom we follow
            await self._cluster.create("jobs", namespace, body)
        self._benches.setdefault(training.uid, now)
        self._ring_in(training.key, self._options.image_timeout_s)

    async def release(self, training: Training, namespace: str) -> None:
        """Nothing of it is left. May be repeated."""
        spec, options = training.spec, self._options
        if options.has_own_etcd(spec):
            for kind in ("deployments", "services"):
                with contextlib.suppress(NotFound):
                    await self._cluster.delete(kind, namespace, etcd_name(training))
        self._etcds.pop(training.uid, None)
        if options.has_gate(spec):
            await self._meshes.drop(training, options.etcd_endpoint)
        if spec.bench.mode != "off":
            await self._clear_bench(training, namespace)

    async def _keep_etcd(
        self,
        training: Training,
        namespace: str,
        job: Json | None,
        pods: list[Pod],
        seen: Seen,
        now: float,
    ) -> Seen:
        """It is there or being started; and what of it holds up the Job is told."""
        if not pods:
            await self._start_etcd(training, namespace, job, now)
        if not is_held(job):
            return seen
        limit_s = self._options.image_timeout_s
        self._ring_in(training.key, min(limit_s, 30.0))
        for pod in pods:
            is_late = now - pod.created_at > limit_s
            if pod.waiting_reason in HOPELESS or (is_late and pod.waiting_reason in BROKEN):
                return replace(seen, fault=f"its etcd: {pod.waits_for}")
        _, trouble = self._etcds.get(training.uid, (now, ""))
        return replace(seen, message=words(pods, trouble))

    async def _start_etcd(
        self, training: Training, namespace: str, job: Json | None, now: float
    ) -> None:
        """Asked for again where it is not to be seen: somebody may have removed it."""
        asked_at, _ = self._etcds.get(training.uid, (now - ASK_AGAIN_S, ""))
        if now - asked_at >= ASK_AGAIN_S:
            owner, name = self._owner(training, job), etcd_name(training)
            service = render_etcd_service(training, self._options, owner)
            await self._cluster.patch("services", namespace, name, service, type="apply")
            body = render_etcd(training, self._options, owner)
            made = await self._cluster.patch("deployments", namespace, name, body, type="apply")
            self._etcds[training.uid] = (now, trouble_of(made))
        self._ring_in(training.key, ASK_AGAIN_S)

    async def _mesh(
        self, training: Training, newest: list[Pod], etcd: list[Pod], seen: Seen, now: float
    ) -> MeshStatus | None:
        if not self._options.has_gate(training.spec):
            return None
        if seen.wish is None or seen.wish.size == 0:
            return None
        pod = answering(etcd)
        endpoint = self._options.etcd_endpoint or (address(pod) if pod else "")
        found = await self._meshes.follow(training, endpoint, members(newest, seen.wish), now)
        if found is None and training.status.mesh is None:
            return MeshStatus(state=MeshState.PENDING, message="its ranks are being placed")
        return found

    async def _bench(
        self,
        training: Training,
        namespace: str,
        newest: list[Pod],
        pods: list[Pod],
        seen: Seen,
        now: float,
    ) -> BenchSeen:
        placed = None if seen.wish is None else members(newest, seen.wish)
        made_at = self._benches.get(training.uid)
        if is_over(training) and (made_at is not None or any(not p.is_leaving for p in pods)):
            await self._clear_bench(training, namespace)
        found = read_bench(
            training,
            pods,
            newest,
            self._options,
            now,
            made_at=made_at,
            are_ranks_placed=placed is not None,
        )
        since = training.status.bench.started_at
        is_late = since is not None and now >= since + LIMIT_S
        if not is_over(training) and (is_late or found.state in ("done", "failed")):
            self._ring_in(training.key, CLEAR_S)  # to clear it away, once that is stored
        return found

    async def _clear_bench(self, training: Training, namespace: str) -> None:
        for kind in ("jobs", "services"):
            with contextlib.suppress(NotFound):
                await self._cluster.delete(kind, namespace, bench_name(training))
        self._benches.pop(training.uid, None)

    def _owner(self, training: Training, job: Json | None) -> Json | None:
        """What takes it along when it goes."""
        if self._is_owner:
            return owner_of(training)
        return reference_to("batch/v1", "Job", job["metadata"]) if job else None
