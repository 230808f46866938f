"""One observation of a gang: from the Job and its pods to `Observation`, with its followups. Pure.

A rank may have several pods, one after another. Each observation reports one of them, the oldest
first, so that every exit is stored before its successor is reported.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from atoll.backends.kubernetes.deleted_pods import DeletedState, is_stored
from atoll.backends.kubernetes.followups import (
    DropFinalizer,
    FailLostPods,
    KeepLogs,
    MarkStopped,
    OpenGate,
    PatchJob,
    RestoreObjects,
)
from atoll.backends.kubernetes.gate import (
    StartGate,
    is_gated,
    is_grace_unknown,
    read_gate,
    render_opened,
)
from atoll.backends.kubernetes.names import DESIRED, REGION, SHRINKS
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.backends.kubernetes.patch import (
    is_released,
    render_deadline,
    render_return,
    render_size_restored,
    render_yield,
    yielded_at,
)
from atoll.backends.kubernetes.pod import BROKEN, CLOCK_SKEW_S, HOPELESS, LATE_S, Pod, when
from atoll.backends.kubernetes.render import gang_name, rendezvous_endpoint
from atoll.core.model import decode
from atoll.core.reasons import ExitReason
from atoll.core.status import (
    DesiredState,
    Exit,
    Followup,
    Observation,
    ObservedRank,
    RankStatus,
    Training,
    sooner,
)

Json = dict[str, Any]

NOBODY = DeletedState()
DELETED = ExitReason.DELETED.meaning
RECORD_SKEW_S = 0.1  # between clocks of nodes that are kept by NTP

WAITING_EVERY_S = 30.0  # changes come with the watch; this only checks timeouts of minutes
LOST_EVERY_S, LEAVING_EVERY_S = 1.0, 5.0  # `is_lost` depends on the time alone, see `LATE_S`


class GangView(NamedTuple):
    """One observation of a gang, and the pods that its followups concern."""

    observation: Observation
    may_go: list[Pod]  # being deleted, with nothing to report that is not in `observation`
    leaving: list[Pod]  # being deleted while they run: their logs are lost with them
    lost: list[Pod]  # on nodes that do not answer, given up by the cluster
    has_more: bool  # the next observation reports more exits
    half: list[Pod]  # they hold nodes for fewer than `min` ranks, for too long
    gate: StartGate
    newest: list[Pod]  # the last pod of each rank


def desired_of(job: Json | None) -> DesiredState | None:
    """The desired state of the Job; None if there is no Job or it is being deleted."""
    if job is None or "deletionTimestamp" in job["metadata"] or is_released(job):
        return None
    text = (job["metadata"].get("annotations") or {}).get(DESIRED)
    return decode(text, DesiredState) if text else None


def is_unchanged(job: Json, pods: Iterable[Pod]) -> bool:
    """Whether a Job read earlier is still the same, as its pods show: each rank has exactly one."""
    desired = desired_of(job)
    if desired is None or job["spec"].get("suspend") or is_grace_unknown(job):
        return False
    there = [p.rank for p in pods if not p.is_leaving and p.rank >= 0]
    return set(there) == set(range(desired.size))


def finished(job: Json) -> str:
    """The reason the Job states for being over; empty if it is not."""
    for condition in job.get("status", {}).get("conditions") or ():
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return condition.get("reason") or str(condition["type"])
    return ""


def observe_gang(
    training: Training,
    job: Json | None,
    pods: Iterable[Pod],
    options: KubernetesOptions,
    now: float,
    pod_error: str = "",
    silent: Collection[str] = (),
    deleted: DeletedState = NOBODY,
) -> GangView:
    """Observes the ranks of a training from its Job and its pods.

    `pod_error` is the Job controller's message when it cannot create pods. `silent` are addresses
    of nodes that have stopped answering. `deleted` is what is known of pods that no longer exist.
    """
    by_rank: defaultdict[int, list[Pod]] = defaultdict(list)
    deleted_pods = [p for p in deleted.pods if not _is_unreportable(p, now)]
    for pod in () if is_released(job) else (*pods, *deleted_pods):
        if pod.rank >= 0:
            by_rank[pod.rank].append(pod)
    known = {r.rank: r for r in (*training.status.ranks, *training.status.removed_ranks)}
    desired = desired_of(job)
    shrinks = _shrinks(job)
    newest = [
        own[0] if len(own) == 1 else max(own, key=_age)
        for rank, own in by_rank.items()
        if desired is None or rank < desired.size
    ]
    gate = read_gate(training, job, desired, newest, now)
    ranks, may_go, leaving, lost, has_more = [], [], [], [], False
    unsettled: list[Pod] = []
    unknown = _alive(known, deleted.unknown)
    searching = _alive(known, deleted.searching)
    deleted_names = {p.name for p in deleted_pods}
    for rank, own in sorted({**dict.fromkeys((*unknown, *searching), []), **by_rank}.items()):
        if len(own) == 1 and own[0].is_steady and rank not in unknown and rank not in searching:
            is_beyond = desired is not None and rank >= desired.size
            ranks.append(_running_rank(own[0], is_beyond, silent))
            continue
        own.sort(key=_age)
        there = [p for p in own if p.name not in deleted_names]
        unsettled += [p for p in there if _is_unsettled(p, gate, desired, now)]
        if rank in unknown:
            ranks.append(_unknown_end(unknown[rank], job, shrinks, now, is_last=not there))
            has_more = has_more or bool(there)
            continue
        if rank in searching:
            ranks.append(_searched_rank(searching[rank]))
            continue
        pod, later = _pod_to_report(own, known.get(rank), now)
        is_done = [p for p in there if p not in later and p not in unsettled]
        may_go += [p for p in there if p.has_finalizer and not options.has_exit_finalizer]
        may_go += [p for p in is_done if options.has_exit_finalizer and _may_go(p, now)]
        leaving += [p for p in there if p.is_leaving and p.has_run and not p.is_lost(now)]
        lost += [p for p in there if p.is_lost(now)]
        has_more = has_more or bool(later)
        if not _is_unreportable(pod, now):
            is_leaving = pod.is_leaving or (desired is not None and rank >= desired.size)
            is_over = pod.is_over or pod.is_lost(now)
            exit = _exit(pod, job, shrinks, now) if is_over else None
            ranks.append(_rank(pod, exit, is_leaving, gate, silent))
        elif pod in unsettled:
            ranks.append(
                ObservedRank(rank=rank, state="waiting", attempt=pod.attempt, is_stopping=True)
            )
    covered = {*unknown, *searching, *deleted.searching_ranks}
    covered |= {r for r, own in by_rank.items() if any(not is_stored(p, known.get(r)) for p in own)}
    lost_unseen = {r.rank: r for r in vanished_ranks(training, job, covered, known, now)}
    ranks = [rank for rank in ranks if rank.rank not in lost_unseen] + [*lost_unseen.values()]
    for rank in {*range(desired.size if desired else 0)} - lost_unseen.keys():
        if rank not in by_rank and (rank not in known or known[rank].attempt < 0):
            ranks.append(ObservedRank(rank=rank, state="waiting"))
    started_at = min((r.started_at for r in ranks if r.started_at is not None), default=None)
    if started_at is None and lost_unseen and job is not None:
        started_at = when(job.get("status", {}).get("startTime")) or now
    observation = Observation(
        ranks=ranks,
        desired=desired,
        is_supervised=desired is not None and not (job and finished(job)),
        is_closed=desired is not None and bool(job and finished(job)),
        message=_message(job, pod_error, options),
        rendezvous_endpoint=rendezvous_endpoint(training, options),
        has_gate=True,
        # Without a gate, a rank is let go when its container starts.
        gate_opened_at=started_at if gate.opened_at is None else gate.opened_at,
        unsettled=len(unsettled),
        again_in_s=LATE_S if unsettled else None,
    )
    fault = _fault(training, newest, options, now) or _unstarted(training, job, observation)
    view = GangView(
        observation=replace(observation, fault=fault),
        may_go=may_go,
        leaving=leaving,
        lost=lost,
        has_more=has_more,
        half=_half(training, newest, options, now, _idle_since(job, gate, newest, pod_error)),
        gate=gate,
        newest=newest,
    )
    view = view._replace(observation=_giving_way(view.observation, job, options, now))
    followups = (*_followups_of_pods(view), *_followups_of_job(training, job, view, options, now))
    again_in_s = sooner(view.observation.again_in_s, _again_in_s(view, options))
    return view._replace(
        observation=replace(view.observation, followups=followups, again_in_s=again_in_s)
    )


def _followups_of_pods(view: GangView) -> Iterator[Followup]:
    if view.leaving:
        yield KeepLogs(pods=tuple(view.leaving), ranks=len(view.observation.ranks))
    if view.lost:
        yield FailLostPods(pods=tuple(view.lost))
    if view.may_go:
        yield DropFinalizer(pods=tuple(view.may_go))


def _followups_of_job(
    training: Training, job: Json | None, view: GangView, options: KubernetesOptions, now: float
) -> Iterator[Followup]:
    """The followups for a Job that exists and must go on."""
    desired = view.observation.desired
    if job is None or desired is None:
        return
    if view.half and yielded_at(job) is None:
        yield MarkStopped(pods=tuple(view.half))
        yield PatchJob(why="half a gang gives way", patch=render_yield(job, now))
    if view.gate.is_due and view.gate.together is not None:
        # The decision comes first: if the rest fails, the next observation asks for it again.
        patch = render_opened(now, view.gate.together)
        yield PatchJob(why="the start gate opens", patch=patch)
    if view.gate.to_start:
        yield OpenGate(pods=tuple(view.gate.to_start), together=view.gate.together)
    if finished(job):
        return
    if patch := _deadline(training, job, view.observation.gate_opened_at, options):
        yield PatchJob(why="its deadline counts from when ranks were let go", patch=patch)
    name = gang_name(training)
    # The source, if there is one, is loaded only while the controller applies a desired state.
    if training.spec.source is None and any(pod.misses(name) for pod in view.newest):
        yield RestoreObjects(desired=desired, job=job)
    if not view.half and (patch := render_size_restored(job, desired)):
        yield PatchJob(why="somebody has changed its size", patch=patch)
    if _waits_for_room(job, options, now) == 0.0 and desired.size > 0:
        yield PatchJob(why="a gang that gave way tries again", patch=render_return(job))


def _again_in_s(view: GangView, options: KubernetesOptions) -> float | None:
    """When to observe again for timeouts, which pass without a change in the cluster."""
    times = [view.gate.due_in_s]
    if view.has_more:
        times.append(0.0)
    if any(rank.state == "waiting" for rank in view.observation.ranks):
        limits = (options.image_timeout_s, options.gang_timeout_s or WAITING_EVERY_S)
        times.append(min(*limits, WAITING_EVERY_S))
    if view.lost or view.leaving:
        times.append(LOST_EVERY_S if view.lost else LEAVING_EVERY_S)
    return sooner(*times)


def _waits_for_room(job: Json | None, options: KubernetesOptions, now: float) -> float | None:
    """Seconds until a gang that gave way may try again; None if it did not give way."""
    since = None if job is None else yielded_at(job)
    return None if since is None else max(since + options.gang_backoff_s - now, 0.0)


def _giving_way(
    observation: Observation, job: Json | None, options: KubernetesOptions, now: float
) -> Observation:
    left_s = _waits_for_room(job, options, now)
    if not left_s:
        return observation
    message = f"too few nodes for min ranks at once; gave way, next try in {left_s:.0f} s"
    return replace(observation, capacity=0, message=message, again_in_s=left_s)


def _deadline(
    training: Training, job: Json, opened_at: float | None, options: KubernetesOptions
) -> Json:
    """A patch of a Job whose own deadline would come before the training's; else {}."""
    deadline_s = training.spec.deadline_s
    since = when(job.get("status", {}).get("startTime"))
    if deadline_s is None or opened_at is None or since is None:
        return {}
    waited_s = max(opened_at - since, 0.0)
    return render_deadline(job, math.ceil(waited_s + deadline_s) + options.deadline_margin_s)


def _unstarted(training: Training, job: Json | None, observation: Observation) -> str:
    """The fault of a Job whose deadline passed before a rank was let go; empty if there is none."""
    was_let_go = (
        observation.gate_opened_at is not None or training.status.gate_opened_at is not None
    )
    if job is None or was_let_go or finished(job) != "DeadlineExceeded":
        return ""
    return f"no rank could start within {job['spec'].get('activeDeadlineSeconds')} s"


def _pod_to_report(pods: list[Pod], known: RankStatus | None, now: float) -> tuple[Pod, list[Pod]]:
    """The pod of a rank to report in this observation, and those for later ones."""
    news = [p for p in pods if not is_stored(p, known) and not _is_unreportable(p, now)]
    for at, pod in enumerate(news):
        if pod.is_over or pod.is_lost(now):
            return pod, news[at + 1 :]
    return (news or pods)[-1], []


def _age(pod: Pod) -> tuple[float, int]:
    return pod.created_at, pod.restarts


def _alive(known: Mapping[int, RankStatus], pods: Collection[str]) -> dict[int, RankStatus]:
    """The ranks that were alive at the last observation, in one of these pods."""
    if not pods:
        return {}
    return {n: rank for n, rank in known.items() if rank.is_alive and rank.pod_name in pods}


def _running_rank(pod: Pod, is_beyond: bool, silent: Collection[str]) -> ObservedRank:
    """The rank of a steady pod: the same in every observation while nothing changes."""
    if pod.observed is None:
        pod.observed = _rank(pod, None, False, StartGate(), ())
    if not is_beyond and pod.address not in silent:
        return pod.observed
    return _rank(pod, None, is_beyond, StartGate(), silent)


def _rank(
    pod: Pod,
    exit: Exit | None,
    is_leaving: bool,
    gate: StartGate,
    silent: Collection[str],
) -> ObservedRank:
    """`exit` is None while it is not over."""
    is_over = exit is not None
    is_running = pod.is_running and not is_over
    if is_over:
        message = ""
    elif is_running:
        is_silent = pod.is_silent or pod.address in silent
        message = f"its node {pod.node} does not answer" if is_silent else ""
    elif pod.is_at_gate:
        message = gate.message
    else:
        message = pod.waits_for or ("its container is being created" if pod.node else "")
    return ObservedRank(
        rank=pod.rank,
        state="exited" if is_over else "running" if is_running else "waiting",
        attempt=pod.attempt,
        restarts=pod.restarts,
        started_at=pod.started_at,
        exit=exit,
        is_stopping=is_running and is_leaving,
        pod_name=pod.name,
        host=pod.node,
        region=(pod.metadata.get("labels") or {}).get(REGION),
        message=message,
    )


def _exit(pod: Pod, job: Json | None, shrinks: list[tuple[int, float]], now: float) -> Exit:
    is_stopped = _is_stopped(pod, job, shrinks, now)
    exit = pod.exit(is_stopped=is_stopped, now=now)
    is_explained = is_stopped or exit.reason not in (
        ExitReason.ERROR,
        ExitReason.SIGNAL,
        ExitReason.UNKNOWN,
    )
    is_ours = any(pod.rank >= n and pod.created_at <= at + CLOCK_SKEW_S for n, at in shrinks)
    # A Job whose deadline has passed deletes its pods.
    if is_explained or is_ours or not pod.is_leaving or (job is not None and finished(job)):
        return exit
    # The kubelet's last report moves the time of the deletion to just after the end.
    if (pod.left_at or now) > exit.at + CLOCK_SKEW_S:
        return exit
    message = f"{DELETED}; {exit.message}" if exit.message else DELETED
    return replace(exit, reason=ExitReason.DELETED, message=message)


def _unknown_end(
    rank: RankStatus,
    job: Json | None,
    shrinks: list[tuple[int, float]],
    now: float,
    *,
    is_last: bool,
) -> ObservedRank:
    """A rank whose pod was deleted without a trace. Only the Job may know that it exited with 0."""
    exit = Exit(code=None, at=now, reason=ExitReason.DELETED, message=f"{DELETED} unseen")
    since = rank.started_at or 0.0
    if is_last and rank.rank in indexes((job or {}).get("status", {}).get("completedIndexes", "")):
        exit = Exit(code=0, at=now, reason=ExitReason.COMPLETED)
    elif any(rank.rank >= size and at >= since - CLOCK_SKEW_S for size, at in shrinks):
        exit = replace(exit, reason=ExitReason.STOPPED, is_stopped=True, message="")
    return ObservedRank(
        rank=rank.rank,
        state="exited",
        attempt=rank.attempt,
        restarts=rank.restarts,
        started_at=rank.started_at,
        exit=exit,
        pod_name=rank.pod_name,
        host=rank.node,
    )


def _searched_rank(rank: RankStatus) -> ObservedRank:
    """A rank whose pod was deleted, as it last was, while its end is being searched for."""
    return ObservedRank(
        rank=rank.rank,
        state="running",
        attempt=rank.attempt,
        restarts=rank.restarts,
        started_at=rank.started_at,
        pod_name=rank.pod_name,
        host=rank.node,
        message=f"its pod {rank.pod_name} is gone; reading how it ended",
    )


def _is_unreportable(pod: Pod, now: float) -> bool:
    """Whether the pod was deleted before it ran, so that there is nothing to report.

    A pod whose node was lost is reported: it used up a restart.
    """
    is_lost = pod.is_lost(now) or pod.status.get("reason") == "NodeLost"
    was_deleted = pod.is_turned_away or (pod.is_leaving and not is_lost)
    return was_deleted and not pod.has_run and "terminated" not in pod.state


def _is_unsettled(pod: Pod, gate: StartGate, desired: DesiredState | None, now: float) -> bool:
    """Whether a rank that is being stopped may have run, though its kubelet has not reported it.

    It passed the gate, and its container may have started and ended since the last report.
    """
    is_stopping = pod.is_leaving or (desired is not None and pod.rank >= desired.size)
    is_through = gate.opened_at is not None and (pod.has_passed or pod.is_gate_up)
    is_explained = pod.is_over or pod.has_run or pod.is_turned_away or pod.waiting_reason in BROKEN
    return is_stopping and is_through and not is_explained and not pod.is_late(now)


def _may_go(pod: Pod, now: float) -> bool:
    is_over = pod.is_over or pod.is_lost(now) or (_is_unreportable(pod, now) and not pod.is_gate_up)
    return pod.has_finalizer and pod.is_leaving and is_over


def _shrinks(job: Json | None) -> list[tuple[int, float]]:
    text = ((job or {}).get("metadata", {}).get("annotations") or {}).get(SHRINKS, "[]")
    return [(size, at) for size, at in msgspec.json.decode(text)]


def _is_stopped(pod: Pod, job: Json | None, shrinks: list[tuple[int, float]], now: float) -> bool:
    """Whether the pod was stopped on purpose, and did not end on its own before that.

    Its deletion time does not say when: the kubelet's last report moves it.
    """
    if not pod.is_leaving or not pod.is_over:
        return False
    ended = pod.exit(is_stopped=False, now=now)
    if job is not None and _is_suspended(pod, job, ended.at):
        return True
    # Clocks differ a little. A rank that a signal ended during deletion is not the culprit.
    # The rank's own record is exact: its failure just before a stop is its own.
    slack_s = RECORD_SKEW_S if ended.at % 1 else RECORD_SKEW_S + 1.0  # a kubelet cuts seconds off
    if ended.signal in ("SIGTERM", "SIGKILL"):
        slack_s = CLOCK_SKEW_S
    return any(
        pod.rank >= size and pod.created_at <= at + CLOCK_SKEW_S and ended.at >= at - slack_s
        for size, at in shrinks
    )


def _is_suspended(pod: Pod, job: Json, ended_at: float) -> bool:
    """Whether the pod ended because Kueue (which reclaims quota) or a user suspended its Job."""
    conditions = job.get("status", {}).get("conditions") or ()
    suspension: Json = next((c for c in conditions if c["type"] == "Suspended"), {})
    since = when(suspension.get("lastTransitionTime")) or 0.0
    if job["spec"].get("suspend"):
        return suspension.get("status") != "True" or ended_at >= since - CLOCK_SKEW_S
    return (
        pod.created_at < since
    )  # `since` is when the Job was resumed: the pod is from before the pause


def _message(job: Json | None, pod_error: str, options: KubernetesOptions) -> str:
    if pod_error and job is None:
        return pod_error
    if pod_error:
        return f"Kubernetes cannot create the pod: {pod_error}"
    if job is not None and job["spec"].get("suspend"):
        if options.kueue_queue is not None:
            return f"waits in the Kueue queue {options.kueue_queue} until the whole gang fits"
        return "the Job is suspended"
    return ""


def _fault(training: Training, newest: list[Pod], options: KubernetesOptions, now: float) -> str:
    """A fault that waiting cannot mend and that leaves fewer than `min` ranks; else empty."""
    broken = [
        p
        for p in newest
        if not p.is_over
        and (
            p.waiting_reason in HOPELESS
            or (p.waiting_reason in BROKEN and now - p.created_at > options.image_timeout_s)
        )
    ]
    world = training.spec.world_size
    if not broken or world.target - len(broken) >= world.min:
        return ""
    return f"rank {broken[0].rank}: {broken[0].waits_for}"


def _idle_since(
    job: Json | None, gate: StartGate, newest: list[Pod], pod_error: str
) -> float | None:
    """Since when the gang has waited for room while it may hold some; None if it does not."""
    if gate.opened_at is not None:
        return None
    waiting = [p for p in newest if p.waiting_reason == "Unschedulable" and not p.is_leaving]
    if not waiting and pod_error and job is not None and is_gated(job):
        waiting = [
            p for p in newest if p.is_at_gate
        ]  # a quota keeps the other pods from being created
    return min((p.created_at for p in waiting), default=None)


def _half(
    training: Training,
    newest: list[Pod],
    options: KubernetesOptions,
    now: float,
    since: float | None,
) -> list[Pod]:
    """Pods of an incomplete gang that hold nodes for too long: a Job is not gang-scheduled."""
    if options.gang_timeout_s is None or since is None:
        return []
    holding = [p for p in newest if p.node is not None and not p.is_over]
    if len(holding) >= training.spec.world_size.min:
        return []
    return holding if now - since > options.gang_timeout_s else []


def indexes(text: str) -> set[int]:
    """The numbers of a list such as `1,3-5`: 1, 3, 4, 5."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


class JobIndexes(NamedTuple):
    """Ranks that have ended for good, as the Job itself counts them."""

    completed: set[int]
    failed: set[int]


def ended_ranks(job: Json | None, known: Mapping[int, RankStatus]) -> JobIndexes:
    """Of those that the Job has, the ranks whose end is not in the status."""
    desired = desired_of(job)
    if job is None or desired is None:
        return JobIndexes(set(), set())
    # A stopped Job keeps the indexes it had, and counts those it has stopped as failed.
    sizes = (desired.size or job["spec"]["completions"], desired.size)
    status = job.get("status", {})
    texts = (status.get("completedIndexes") or "", status.get("failedIndexes") or "")
    if not any(texts):
        return JobIndexes(set(), set())
    settled = {
        rank
        for rank, before in known.items()
        if before.phase == "Failed" or (before.exit is not None and before.exit.is_success)
    }
    completed, failed = (
        {rank for rank in indexes(text) if rank < size} - settled
        for text, size in zip(texts, sizes, strict=True)
    )
    return JobIndexes(completed, failed)


def unexplained_failures(training: Training, job: Json | None, pods: Iterable[Pod]) -> set[int]:
    """Ranks that the Job counts as failed, though neither the status nor a pod shows how."""
    known = {r.rank: r for r in (*training.status.ranks, *training.status.removed_ranks)}
    failed = ended_ranks(job, known).failed
    if not failed:
        return set()
    return failed - {p.rank for p in pods if not is_stored(p, known.get(p.rank))}


def vanished_ranks(
    training: Training,
    job: Json | None,
    there: Collection[int],
    known: Mapping[int, RankStatus],
    now: float,
) -> Iterator[ObservedRank]:
    """Ranks that the Job counts as completed or failed and whose pods were deleted.

    `there` are the ranks that have pods to report; those are read instead.
    """
    ended = ended_ranks(job, known)
    at = when((job or {}).get("status", {}).get("completionTime")) or now
    for rank in sorted((ended.completed | ended.failed) - set(there)):
        before = known.get(rank) or RankStatus(rank=rank)
        is_failed = rank in ended.failed
        exit = Exit(code=0, at=at, reason=ExitReason.COMPLETED)
        if is_failed:
            message = f"{DELETED} before its exit was read"
            exit = Exit(code=None, at=at, reason=ExitReason.DELETED, message=message)
        yield ObservedRank(
            rank=rank,
            state="exited",
            attempt=before.attempt + 1,
            restarts=training.spec.max_restarts if is_failed else before.restarts,
            exit=exit,
        )
