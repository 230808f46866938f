"""The Kubernetes backend: the ranks of a training are the pods of one elastic Indexed Job.

The Job controller starts, replaces and stops pods. This module creates the Job, resizes it, and
observes each rank. One watch covers all ranks of all trainings. Without it, an observation is one
request, however many ranks there are; another when ranks come or go, or when a large gang changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from atoll.backends.kubernetes.client import Cluster, Mirror, Rejected
from atoll.backends.kubernetes.companions import Companions
from atoll.backends.kubernetes.deleted_pods import DeletedPods
from atoll.backends.kubernetes.diagnosis import Diagnosis, NodeProbes
from atoll.backends.kubernetes.followups import GangWriter
from atoll.backends.kubernetes.job import RELEASE, Job
from atoll.backends.kubernetes.launches import as_launch, cause_of, training_of
from atoll.backends.kubernetes.logs import Archive, LogSource, follow_logs, read_logs, tail_offsets
from atoll.backends.kubernetes.names import CONTAINER, NAMESPACE, PLANE, STOP_CAUSE, TRAINING, UID
from atoll.backends.kubernetes.options import SUPPORTS, ClusterOptions, KubernetesOptions
from atoll.backends.kubernetes.pod import Pod, parsed
from atoll.backends.kubernetes.read import observe_gang, unexplained_failures
from atoll.backends.kubernetes.render import (
    gang_name,
    owner_of,
    rank_layout,
    render_gang,
    render_job,
)
from atoll.backends.kubernetes.results import read_without_results, result_in_log, strip_results
from atoll.backends.launch import store_uri_of
from atoll.backends.metrics_token import key_at
from atoll.core.config import options_of
from atoll.core.errors import Conflict, Denied, NotFound, Permanent, Temporary, ValidationError
from atoll.core.executors import PlaneContext
from atoll.core.model import encode
from atoll.core.ports import Executor, Key, StopCause
from atoll.core.rank_access import ExecRequest, ExecResult, ExecTarget
from atoll.core.spec import TrainingSpec
from atoll.core.status import (
    DesiredState,
    Followup,
    LogLine,
    Observation,
    RankStatus,
    Training,
    sooner,
)

Json = dict[str, Any]

DRY_RUN_S = 5.0  # a deploy must not hang on an API server that is away
DRY_RUN_UID = "dry-run"
# The API server's name for a field of the Job, and the option that it comes from.
FIELDS = {"spec.template.spec.": "pod.", "spec.template.": "", "metadata.": ""}
CATCH_UP_S = 1.0  # the mirror shows this process's own last write sooner; else it is stale
# Gangs of more ranks are observed less often than their pods change, and for less.
FEW = 16
SHARED_POLL_S = 2.0  # between observations of a launch from a script that cannot watch its pods
PAUSE_A_RANK_S = 0.002  # 500 ranks and more are observed once a second


class PodList(NamedTuple):
    """The pods of a gang, as they were last listed."""

    pods: list[Pod] = []
    versions: list[str] = []
    is_steady: bool = False  # there are many, and the list before was the same


class KubernetesBackend(Executor):
    """The Executor of a cluster.

    With `is_owner`, the Job belongs to a Training object of the same cluster, and Kubernetes
    deletes it with that object.
    """

    name = "kubernetes"
    options_type = ClusterOptions
    SUPPORTS = SUPPORTS

    def __init__(
        self, cluster: Cluster, options: KubernetesOptions, *, is_owner: bool = False
    ) -> None:
        self.cluster = cluster
        self.options = options
        self._is_owner = is_owner
        self._kubectl_flags: list[str] = []  # with which kubectl reaches this cluster
        self._archive = Archive(self.cluster)
        self._writer = GangWriter(
            cluster, options, self._archive, self._patch_job, is_owner=is_owner
        )
        self._object_key = self._writer.object_key
        self._changed: asyncio.Queue[Key | BaseException] = asyncio.Queue()
        self._jobs: Mirror[Job] = Mirror(cluster, "jobs", options.namespace, Job, self._note)
        self._deleted = DeletedPods(self.cluster, self.options.namespace, self._changed.put_nowait)
        self._pods: Mirror[Pod] = Mirror(
            *(self.cluster, "pods", self.options.namespace, Pod.shared, self._note),
            lambda pod, is_final: self._deleted.note(pod, is_final=is_final),
        )
        # By training: the newest version of its Job that this process wrote, and the Job as it was
        # last read from the API server.
        self._written: dict[str, int] = {}
        self._last: dict[str, Job] = {}
        self._listed: dict[str, PodList] = {}  # the pods of the same
        self._node_probes = NodeProbes(self.options.kubelet_port, self._changed.put_nowait)
        self._watching: list[asyncio.Task[None]] = []
        self._delayed: set[Key] = set()  # large gangs whose next observation is scheduled
        self._diagnosis = Diagnosis(self.cluster)
        self._companions = Companions(
            self.cluster, self.options, self._changed.put_nowait, is_owner=is_owner
        )

    @classmethod
    def configured(
        cls, name: str, options: dict[str, Any], home: PlaneContext
    ) -> KubernetesBackend:
        """Built from `[executors.NAME]`; the default namespace is the kubeconfig context's."""
        table = options_of(ClusterOptions, options)
        file = table.kubeconfig and str(home.directory / Path(table.kubeconfig).expanduser())
        cluster = Cluster.connect(table.context, file)
        key = table.report_key if table.reports_uri is None else key_at(home.state_dir).hex()
        namespace = table.namespace or cluster.namespace
        labels = {**table.labels, PLANE: home.plane}
        executor = cls(cluster, replace(table, namespace=namespace, labels=labels, report_key=key))
        executor.name = name
        flags = {"--kubeconfig": file, "--context": table.context}
        executor._kubectl_flags = [f"{flag}={value}" for flag, value in flags.items() if value]
        return executor

    def store_uri(self, training: Training) -> str:
        return store_uri_of(training.spec, rank_layout(training, self.options))

    def metrics_uri(self, training: Training) -> str:
        return rank_layout(training, self.options).metrics_uri

    @classmethod
    def preview(cls, options: ClusterOptions, home: PlaneContext, training: Training) -> str:
        """The objects of the ranks, as `kubectl create -f` takes them; needs no cluster."""
        options.check(training.spec)
        desired = DesiredState(version=1, size=training.spec.world_size.target)
        objects = render_gang(training, desired, options)
        for item in objects:
            item["metadata"]["namespace"] = options.namespace or "default"
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"

    async def probe(self) -> None:
        await self.cluster.version()

    def check(self, spec: TrainingSpec) -> None:
        """Raises ValidationError if this training cannot run here with these options."""
        self.options.check(spec)

    async def dry_run(self, spec: TrainingSpec, namespace: str = "default") -> None:
        """Asks the API server with `dryRun=All`, which checks everything and writes nothing.

        A quota that is used up or a missing right refuses nothing here: both can change, and the
        status of the training says what it waits for. They refuse a launch from a script.
        """
        untried = Training(namespace=namespace, uid=DRY_RUN_UID, spec=spec)
        if self.is_shared:
            await self.rehearse(untried)
            return
        with contextlib.suppress(Denied, Temporary, TimeoutError):
            async with asyncio.timeout(DRY_RUN_S):
                await self.rehearse(untried)

    async def rehearse(self, training: Training) -> None:
        """Raises ValidationError, naming the field, if the cluster refuses what `apply` would
        create. Also raises Denied, Temporary. Creates nothing."""
        namespace, name = self._object_key(training)
        desired = DesiredState(version=1, size=training.spec.world_size.target)
        try:
            *named, job = render_gang(training, desired, self.options)
            if self.is_shared:
                as_launch(job, training.spec)
            for kind, item in zip(("configmaps", "services"), named, strict=True):
                await self.cluster.patch(kind, namespace, name, item, type="apply", is_dry_run=True)
            await self.cluster.create("jobs", namespace, job, is_dry_run=True)
        except NotFound as error:  # nothing else has to exist
            expected = "expected a namespace that exists in the cluster"
            raise ValidationError("namespace", namespace, expected) from error
        except Rejected as error:
            raise _refusal(error) from error

    async def close(self) -> None:
        await self.stop()
        await self.cluster.close()

    async def stop(self) -> None:
        """Ends its tasks. The connection to the cluster stays open for others."""
        for task in self._watching:
            task.remove_done_callback(self._note_end)
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._companions.close()
        await self._archive.close()
        await self._node_probes.close()
        await self._deleted.close()

    async def apply(self, training: Training, desired: DesiredState) -> None:
        try:
            self.check(training.spec)
        except ValidationError as error:
            raise Permanent(str(error)) from error
        if self.is_shared and desired.size == 0 and training.status.failing:
            cause = encode([training.status.failing, training.status.failing_message]).decode()
            with contextlib.suppress(NotFound):
                await self._patch_job(training, {"metadata": {"annotations": {STOP_CAUSE: cause}}})
        job = await self._job(training)
        if job is not None:
            await self._resize(training, desired, job)
        elif desired.size > 0:
            if training.status.has_run:
                raise Permanent(
                    f"the Job {gang_name(training)} is gone, and what its ranks did is lost"
                )
            with self._diagnosis.watch_refusal(training.uid):
                await self._create(training, desired)

    async def observe(self, training: Training) -> Observation:
        job, pods = await self._job_and_pods(training)
        now = self.cluster.time()
        companions = [pod for pod in pods if pod.part != CONTAINER]
        ranks = len(pods) - len(companions)
        pod_error, asks_in_s = await self._diagnosis.of(training, job, ranks, now)
        silent = self._node_probes.follow(training.key, pods)
        failed: Collection[int] = ()
        if job is not None and job.has_ended_ranks:
            failed = unexplained_failures(training, job, pods)
        deleted = self._deleted.deleted(training, pods, failed)
        view = observe_gang(training, job, pods, self.options, now, pod_error, silent, deleted)
        again_in_s = sooner(view.observation.again_in_s, asks_in_s)
        if self.is_shared and not (self._jobs.is_live and self._pods.is_live):
            again_in_s = sooner(again_in_s, SHARED_POLL_S)
        observation = replace(view.observation, again_in_s=again_in_s, at=now)
        observation = await self._diagnosis.explain(training, observation, view.newest, now)
        return self._companions.observe(training, job, view.newest, companions, observation, now)

    async def perform(self, training: Training, followup: Followup) -> None:
        await self._writer.perform(training, followup)
        await self._companions.perform(
            training, self._object_key(training)[0], followup, self.cluster.time()
        )

    async def exec_target(self, training: Training, rank: RankStatus) -> ExecTarget:
        namespace, _ = self._object_key(training)
        kubectl = [*self._kubectl_flags, "-n", namespace, rank.pod_name, "-c", CONTAINER]
        return ExecTarget(rank=rank.rank, host=rank.node, pid=None, kubectl=kubectl)

    async def exec(self, training: Training, rank: RankStatus, request: ExecRequest) -> ExecResult:
        target = await self.exec_target(training, rank)
        raise Conflict(
            "this control plane has no right to enter pods: use 'atoll exec', which runs "
            f"kubectl with your own rights, or kubectl exec {' '.join(target.kubectl)} -- …"
        )

    async def measure(self, training: Training) -> None:
        job = await self._job(training)
        await self._companions.measure(
            training, self._object_key(training)[0], job, self.cluster.time()
        )

    async def release(self, training: Training) -> None:
        """Ends the Job for good. It and its pods stay for their logs until `purge`."""
        await (self._end_job(training) if self.is_shared else self._release(training))

    async def _end_job(self, training: Training) -> None:
        """Ends a Job that was stopped, as it would not end by itself. Nothing is removed."""
        namespace, name = self._object_key(training)
        try:
            job = Job(await self.cluster.get("jobs", namespace, name))
        except NotFound:
            return
        if job.desired is None or job.desired.size or job.end_reason:
            return
        await self._check_ended(training)
        with contextlib.suppress(NotFound, Conflict):
            if job.is_suspended:  # it never ran
                await self.cluster.delete("jobs", namespace, name)
            else:
                patch = {"spec": {"parallelism": 0, "activeDeadlineSeconds": 1}}
                await self._patch_job(training, patch)

    async def _check_ended(self, training: Training) -> None:
        """Raises Temporary while a pod ends: the Job would count it as running, and delete it with
        its log."""
        _, pods = await self._job_and_pods(training)
        if any(pod.is_ending(self.cluster.time()) for pod in pods):
            raise Temporary("the last pods are about to end", retry_after_s=0.2)

    async def _release(self, training: Training) -> None:
        namespace, name = self._object_key(training)
        await self._check_ended(training)
        with contextlib.suppress(NotFound):
            job = await self.cluster.patch("jobs", namespace, name, RELEASE)
            if job["spec"].get("suspend"):  # it never ran, and would not end by itself
                await self.cluster.delete("jobs", namespace, name)
        await self.cluster.drop(("services", "configmaps"), namespace, name)
        await self._companions.release(training, namespace)
        await self._writer.drop_all_finalizers(namespace, _labels(training))
        self._node_probes.follow(training.key, ())
        self._diagnosis.forget(training.uid)
        self._deleted.forget(training.uid)
        for memory in (self._written, self._last, self._listed):
            memory.pop(training.uid, None)

    async def purge(self, training: Training) -> None:
        if self.is_shared:
            await self._release(training)
        namespace, name = self._object_key(training)
        await self.cluster.drop(("jobs",), namespace, name)
        await self._companions.release(training, namespace)
        await self.cluster.delete_all("pods", namespace, labels=_labels(training))
        await self._archive.drop(namespace, training.uid)
        await self._writer.drop_all_finalizers(namespace, _labels(training))

    async def find(self, job_name: str, uid: str | None) -> Training | None:
        try:
            manifest = await self.cluster.get("jobs", self.options.namespace, job_name)
        except NotFound:
            return None
        training = training_of(Job(manifest))
        if training is None or uid not in (None, training.uid):
            return None
        training = replace(training, spec=replace(training.spec, executor=self.name))
        self._note_job(training, manifest)
        return training

    async def stop_cause(self, training: Training) -> StopCause:
        job = await self._job(training)
        if job is None or job.desired is None:
            return StopCause()
        return cause_of(job, training.spec, job.desired)

    async def changes(self) -> AsyncIterator[Key]:
        tasks = [asyncio.create_task(mirror.run()) for mirror in (self._jobs, self._pods)]
        self._watching = tasks
        for task in tasks:
            task.add_done_callback(self._note_end)
        try:
            while True:
                change = await self._changed.get()
                if isinstance(change, BaseException):
                    raise change
                yield change
        finally:
            for task in tasks:
                task.remove_done_callback(self._note_end)
                task.cancel()
            await self._companions.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    def logs(
        self,
        training: Training,
        *,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        source = self._log_source(training)
        if follow is not None:
            return strip_results(read_logs(source, ranks=ranks, tail=tail, follow=follow))
        return read_without_results(
            lambda last: read_logs(source, ranks=ranks, tail=last, follow=None), tail
        )

    async def result(self, training: Training, rank: int) -> tuple[str, bytes] | None:
        source = self._log_source(training)
        return await result_in_log(
            lambda last: read_logs(source, ranks=[rank], tail=last, follow=None), training.uid
        )

    async def log_offsets(
        self, training: Training, tail: int, *, ranks: Sequence[int] | None = None
    ) -> dict[int, int]:
        return await tail_offsets(self._log_source(training), ranks=ranks, tail=tail)

    def logs_after(
        self,
        training: Training,
        offsets: Mapping[int, int],
        *,
        ranks: Sequence[int] | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        is_over = follow or (lambda: True)
        source = self._log_source(training)
        return strip_results(follow_logs(source, offsets, ranks=ranks, is_over=is_over))

    def _log_source(self, training: Training) -> LogSource:
        namespace, _ = self._object_key(training)
        return LogSource(
            *(self.cluster, training, namespace, self._pods, self._archive, self.is_shared)
        )

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        """Drops the finalizers of pods of deleted trainings; `known` has the uids of all others."""
        await self._writer.sweep(known)
        await self._companions.sweep(known)
        await self._deleted.sweep(known)

    async def _job(self, training: Training) -> Job | None:
        if await self._jobs.reach(self._written.get(training.uid, 0), CATCH_UP_S):
            return self._jobs.of(training.uid).get(gang_name(training))
        return await self._read_job(training)

    async def _read_job(self, training: Training) -> Job | None:
        try:
            job = Job(await self.cluster.get("jobs", *self._object_key(training)))
        except NotFound:
            self._last.pop(training.uid, None)
            return None
        self._last[training.uid] = job
        return job

    async def _job_and_pods(self, training: Training) -> tuple[Job | None, list[Pod]]:
        """The Job and its pods, from the mirrors if those are up to date."""
        version = self._written.get(training.uid, 0)
        if await self._jobs.reach(version, CATCH_UP_S) and self._pods.is_live:
            job = self._jobs.of(training.uid).get(gang_name(training))
            return job, list(self._pods.of(training.uid).values())
        pods = await self._list_pods(training)
        last = self._last.get(training.uid)
        if last is not None and last.is_current(pods):
            return last, pods
        return await self._read_job(training), pods

    async def _list_pods(self, training: Training) -> list[Pod]:
        """The pods of a large gang that has been steady are listed whole once one changes, which
        then is a second request."""
        namespace, _ = self._object_key(training)
        list_pods = partial(self.cluster.list, "pods", namespace, labels=_labels(training))
        last = self._listed.get(training.uid, PodList())
        if last.is_steady:
            metadata = [item["metadata"] for item in (await list_pods(is_metadata=True)).items]
            if [item["resourceVersion"] for item in metadata] == last.versions:
                return last.pods
        pods = parsed((await list_pods()).items, last.pods)
        versions = [pod.metadata["resourceVersion"] for pod in pods]
        is_steady = len(pods) > FEW and versions == last.versions
        self._listed[training.uid] = PodList(pods, versions, is_steady=is_steady)
        return pods

    async def _create(self, training: Training, desired: DesiredState) -> None:
        namespace, name = self._object_key(training)
        await self._writer.make(training, desired)
        owner = owner_of(training) if self._is_owner else None
        body = render_job(training, desired, self.options, owner)
        if self.is_shared:
            as_launch(body, training.spec)
        try:
            job = await self.cluster.create("jobs", namespace, body)
        except Conflict as error:
            raise Temporary(f"the Job {name} exists or is still being deleted: {error}") from error
        except Permanent:
            await self._writer.drop_code(training)
            raise
        await self._writer.tie(training, self._note_job(training, job))

    async def _resize(self, training: Training, desired: DesiredState, job: Job) -> None:
        namespace, name = self._object_key(training)
        if job.desired is None:
            raise Temporary(f"the Job {name} is being deleted", retry_after_s=0.5)
        if desired.version < job.desired.version:
            return
        if desired.size > job.size:
            if job.end_reason:  # the next observation reports it as closed
                raise Temporary(
                    f"the Job {name} is over ({job.end_reason}) and cannot grow to {desired.size}"
                )
            await self._check_room_above(training, job.size, desired.size)
        elif desired.size < job.size:
            _, pods = await self._job_and_pods(training)
            stopping = [p for p in pods if p.rank >= desired.size and p.is_running]
            await self._archive.begin(stopping, len(pods))
        await self._writer.resize(training, desired, job)
        try:
            await self._patch_job(training, job.resize(desired, self.cluster.time()))
        except Conflict:  # its status has changed; its desired state may have, too
            newer = Job(await self.cluster.get("jobs", namespace, name))
            await self._resize(training, desired, newer)

    async def _check_room_above(self, training: Training, before: int, size: int) -> None:
        """Raises Temporary while a rank to be added is still being stopped.

        Its end would count as a failure if the rank were wanted again now.
        """
        _, pods = await self._job_and_pods(training)
        leaving = [p.rank for p in pods if before <= p.rank < size and not p.is_over]
        if leaving:
            ranks = ", ".join(map(str, sorted(leaving)))
            raise Temporary(f"ranks {ranks} are still being stopped", retry_after_s=0.3)

    async def _patch_job(self, training: Training, patch: Json) -> None:
        try:
            job = await self.cluster.patch("jobs", *self._object_key(training), patch)
        except (Conflict, NotFound):
            self._last.pop(training.uid, None)  # it has changed since it was read
            raise
        self._note_job(training, job)

    def _note_job(self, training: Training, manifest: Json) -> Job:
        job = self._last[training.uid] = Job(manifest)
        self._written[training.uid] = job.version
        return job

    def _note(self, labels: Json) -> None:
        """Asks for another observation of the training with these labels.

        A large gang is observed after a pause, because each observation writes a status.
        """
        if NAMESPACE not in labels or TRAINING not in labels:
            return
        key = (labels[NAMESPACE], labels[TRAINING])
        ranks = len(self._pods.of(labels.get(UID, "")))
        if ranks <= FEW:
            self._changed.put_nowait(key)
        elif key not in self._delayed:
            self._delayed.add(key)
            pause_s = min(ranks * PAUSE_A_RANK_S, 1.0)
            asyncio.get_running_loop().call_later(pause_s, self._end_pause, key)

    def _end_pause(self, key: Key) -> None:
        self._delayed.discard(key)
        self._changed.put_nowait(key)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._changed.put_nowait(error)


def _labels(training: Training) -> str:
    return f"{UID}={training.uid}"


def _refusal(error: Rejected) -> ValidationError:
    """The first thing that the API server finds wrong, with the field as options name it."""
    field, reason = error.causes[0] if error.causes else ("", str(error))
    for path, option in FIELDS.items():
        if field.startswith(path):
            field = option + field.removeprefix(path)
            break
    # `Invalid value: "x": must be ...`; a required value that is missing has none.
    match = re.match(r'\w+ value: ("(?:[^"\\]|\\.)*"|[^:]*): (.*)', reason, re.DOTALL)
    value, expected = match.groups() if match else (None, reason)
    if value is not None and value.startswith('"'):
        with contextlib.suppress(ValueError):  # Go has escapes that JSON lacks, such as \x00
            value = json.loads(value)
    return ValidationError(field or "pod", value, f"Kubernetes: {expected}")
