"""One observation of a gang: from the Job and its pods to `Observation`, with its followups. Pure.

A rank may have several pods, one after another. Each observation reports one of them, the oldest
first, so that every exit is stored before its successor is reported.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

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
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.names import REGION, START
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.backends.kubernetes.pod import BROKEN, CLOCK_SKEW_S, CONFIG_ERROR, LATE_S, Pod, when
from atoll.backends.kubernetes.render import gang_name, rendezvous_endpoint
from atoll.core.phase import ExitReason
from atoll.core.spec import may_start
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
# Ends for which the deletion of a pod may be the cause.
UNEXPLAINED = (ExitReason.ERROR, ExitReason.SIGNAL, ExitReason.UNKNOWN)
RECORD_SKEW_S = 0.1  # between clocks of nodes that are kept by NTP

WAITING_EVERY_S = 30.0  # changes come with the watch; this only checks timeouts of minutes
LOST_EVERY_S, LEAVING_EVERY_S = 1.0, 5.0  # `is_lost` depends on the time alone, see `LATE_S`


class StartGate(NamedTuple):
    """The start gate in one observation: it holds pods back until enough ranks can start together.

    The Job records the decision to open it. Pods created later learn of it from the gang's
    ConfigMap, pods that already wait from an annotation. The defaults describe a gang without one.
    """

    opened_at: float | None = None
    is_due: bool = False  # the gate must be opened now
    to_start: list[Pod] = []  # waiting pods that must be let through now
    due_in_s: float | None = None  # until the start grace ends, and fewer than all ranks suffice
    message: str = ""
    together: int | None = None  # how many ranks start together, once that is decided


NO_GATE = StartGate()


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


def observe_gang(
    training: Training,
    job: Job | None,
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
    for pod in () if job is not None and job.is_released else (*pods, *deleted_pods):
        if pod.rank >= 0:
            by_rank[pod.rank].append(pod)
    known = {r.rank: r for r in (*training.status.ranks, *training.status.removed_ranks)}
    desired = None if job is None else job.desired
    newest = [
        own[0] if len(own) == 1 else max(own, key=attrgetter("age"))
        for rank, own in by_rank.items()
        if desired is None or rank < desired.size
    ]
    gate = NO_GATE
    if job is not None and job.is_gated and desired is not None:
        gate = read_gate(training, job, desired, newest, now)
    ranks, may_go, leaving, lost, has_more = [], [], [], [], False
    unsettled: list[Pod] = []
    alive = {r.pod_name: r for r in known.values() if r.is_alive} if any(deleted) else {}
    unknown = {r.rank: r for name in deleted.unknown if (r := alive.get(name))}
    searching = {r.rank: r for name in deleted.searching if (r := alive.get(name))}
    deleted_names = {p.name for p in deleted_pods}
    for rank, own in sorted({**dict.fromkeys((*unknown, *searching), []), **by_rank}.items()):
        if len(own) == 1 and own[0].is_steady and rank not in unknown and rank not in searching:
            pod, is_beyond = own[0], desired is not None and rank >= desired.size
            if pod.observed is None:
                pod.observed = _rank(pod, None, False, NO_GATE, ())
            is_same = not is_beyond and pod.address not in silent
            ranks.append(pod.observed if is_same else _rank(pod, None, is_beyond, NO_GATE, silent))
            continue
        own.sort(key=attrgetter("age"))
        there = [p for p in own if p.name not in deleted_names]
        unsettled += [p for p in there if _is_unsettled(p, gate, desired, now)]
        if rank in unknown:
            ranks.append(_unknown_end(unknown[rank], job, now, is_last=not there))
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
            exit = _exit(pod, job, now) if is_over else None
            ranks.append(_rank(pod, exit, is_leaving, gate, silent))
        elif pod in unsettled:
            ranks.append(
                ObservedRank(rank=rank, state="waiting", attempt=pod.attempt, is_stopping=True)
            )
    lost_unseen: dict[int, ObservedRank] = {}
    if job is not None and job.has_ended_ranks:
        covered = {*unknown, *searching, *deleted.searching_ranks}
        covered |= {
            r for r, own in by_rank.items() if any(not is_stored(p, known.get(r)) for p in own)
        }
        lost_unseen = {r.rank: r for r in vanished_ranks(training, job, covered, known, now)}
    ranks = [rank for rank in ranks if rank.rank not in lost_unseen] + [*lost_unseen.values()]
    for rank in {*range(desired.size if desired else 0)} - lost_unseen.keys():
        if rank not in by_rank and (rank not in known or known[rank].attempt < 0):
            ranks.append(ObservedRank(rank=rank, state="waiting"))
    started_at = min((r.started_at for r in ranks if r.started_at is not None), default=None)
    if started_at is None and lost_unseen and job is not None:
        started_at = job.started_at or now
    is_over = job is not None and bool(job.end_reason)
    half: list[Pod] = []
    if gate.opened_at is None and options.gang_timeout_s is not None:
        half = _half(training, job, newest, options.gang_timeout_s, now, pod_error)
    pause_s = None  # until a gang that gave way may try again
    if job is not None and job.yielded_at is not None:
        pause_s = max(job.yielded_at + options.gang_backoff_s - now, 0.0)
    # Without a gate, a rank is let go when its container starts.
    opened_at = started_at if gate.opened_at is None else gate.opened_at
    observation = Observation(
        ranks=ranks,
        desired=desired,
        is_supervised=desired is not None and not is_over,
        is_closed=desired is not None and is_over,
        message=_message(job, pod_error, options, pause_s),
        # Ranks keep the one that they started with.
        rendezvous_endpoint=training.status.rendezvous_endpoint
        or rendezvous_endpoint(training, options),
        has_gate=True,
        gate_opened_at=opened_at,
        fault=_fault(training, job, opened_at, newest, options, now),
        unsettled=len(unsettled),
        capacity=0 if pause_s else None,
        again_in_s=pause_s or (LATE_S if unsettled else None),
    )
    view = GangView(observation, may_go, leaving, lost, has_more, half, gate, newest)
    followups = tuple(_followups(training, job, view, options, now, pause_s))
    again_in_s = sooner(observation.again_in_s, _again_in_s(view, options))
    return view._replace(
        observation=replace(observation, followups=followups, again_in_s=again_in_s)
    )


def read_gate(
    training: Training, job: Job, desired: DesiredState, newest: Iterable[Pod], now: float
) -> StartGate:
    """`newest` is the last pod of each rank."""
    world = training.spec.world_size
    candidates = [p for p in newest if p.rank < world.target and not p.is_leaving and not p.is_over]
    unreleased = [p for p in candidates if p.is_at_gate and START not in p.annotations]
    if job.gate_opened_at is not None:
        return StartGate(
            job.gate_opened_at,
            to_start=unreleased,
            message="start gate: open, starting",
            together=job.together,
        )
    able = sum(p.is_at_gate or p.has_passed for p in candidates)
    # Time in a queue does not count: the Job's start time is when it left the queue.
    left = None if job.started_at is None else job.started_at + training.spec.start_grace_s - now
    is_grace_over = left is not None and left <= 0
    is_ending = training.is_cancelling or bool(training.status.failing)
    is_due = (
        desired.size > 0
        and not is_ending
        and job.yielded_at is None
        and not job.is_blocked
        and may_start(able, world, is_grace_over=is_grace_over)
    )
    return StartGate(
        is_due=is_due,
        to_start=unreleased if is_due else [],
        due_in_s=None if is_grace_over else left,
        message=f"start gate: {able} of {world.target} ranks are ready to start",
        together=able if is_due else None,
    )


def _followups(
    training: Training,
    job: Job | None,
    view: GangView,
    options: KubernetesOptions,
    now: float,
    pause_s: float | None,
) -> Iterator[Followup]:
    if view.leaving:
        yield KeepLogs(pods=tuple(view.leaving), ranks=len(view.observation.ranks))
    if view.lost:
        yield FailLostPods(pods=tuple(view.lost))
    if view.may_go:
        yield DropFinalizer(pods=tuple(view.may_go))
    desired = view.observation.desired
    if job is None or desired is None:
        return
    if view.half and job.yielded_at is None:
        yield MarkStopped(pods=tuple(view.half))
        yield PatchJob(why="half a gang gives way", patch=job.give_way(now))
    if view.gate.is_due and view.gate.together is not None:
        # The decision comes first: if the rest fails, the next observation asks for it again.
        patch = job.open_gate(now, view.gate.together)
        yield PatchJob(why="the start gate opens", patch=patch)
    if view.gate.to_start:
        yield OpenGate(pods=tuple(view.gate.to_start), together=view.gate.together)
    if job.end_reason:
        return
    opened_at, deadline_s = view.observation.gate_opened_at, training.spec.deadline_s
    if deadline_s is not None and opened_at is not None and job.started_at is not None:
        waited_s = max(opened_at - job.started_at, 0.0)
        deadline = math.ceil(waited_s + deadline_s) + options.deadline_margin_s
        if patch := job.set_deadline(deadline):
            yield PatchJob(why="its deadline counts from when ranks were let go", patch=patch)
    unmade = [pod for pod in view.newest if pod.waiting_reason == CONFIG_ERROR]
    # The source, if there is one, is loaded only while the controller applies a desired state.
    if training.spec.source is None and any(p.misses(gang_name(training)) for p in unmade):
        yield RestoreObjects(desired=desired, job=job)
    if not view.half and (patch := job.restore_size(desired)):
        yield PatchJob(why="somebody has changed its size", patch=patch)
    if pause_s == 0.0 and desired.size > 0:
        yield PatchJob(why="a gang that gave way tries again", patch=job.try_again())


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


def _pod_to_report(pods: list[Pod], known: RankStatus | None, now: float) -> tuple[Pod, list[Pod]]:
    """The pod of a rank to report in this observation, and those for later ones."""
    news = [p for p in pods if not is_stored(p, known) and not _is_unreportable(p, now)]
    for at, pod in enumerate(news):
        if pod.is_over or pod.is_lost(now):
            return pod, news[at + 1 :]
    return (news or pods)[-1], []


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
        region=pod.labels.get(REGION),
        message=message,
    )


def _exit(pod: Pod, job: Job | None, now: float) -> Exit:
    shrinks = [] if job is None else job.shrinks
    is_stopped = _is_stopped(pod, job, now)
    exit = pod.exit(is_stopped=is_stopped, now=now)
    is_explained = is_stopped or exit.reason not in UNEXPLAINED
    is_ours = any(pod.rank >= n and pod.created_at <= at + CLOCK_SKEW_S for n, at in shrinks)
    # A Job whose deadline has passed deletes its pods.
    is_over = job is not None and bool(job.end_reason)
    if is_explained or is_ours or not pod.is_leaving or is_over:
        return exit
    # The kubelet's last report moves the time of the deletion to just after the end.
    if (pod.deleted_at or now) > exit.at + CLOCK_SKEW_S:
        return exit
    message = f"{DELETED}; {exit.message}" if exit.message else DELETED
    return replace(exit, reason=ExitReason.DELETED, message=message)


def _unknown_end(rank: RankStatus, job: Job | None, now: float, *, is_last: bool) -> ObservedRank:
    """A rank whose pod was deleted without a trace. Only the Job may know that it exited with 0."""
    exit = Exit(code=None, at=now, reason=ExitReason.DELETED, message=f"{DELETED} unseen")
    since = rank.started_at or 0.0
    if is_last and job is not None and rank.rank in job.indexes("completedIndexes"):
        exit = Exit(code=0, at=now, reason=ExitReason.COMPLETED)
    elif job is not None and any(
        rank.rank >= size and at >= since - CLOCK_SKEW_S for size, at in job.shrinks
    ):
        exit = replace(exit, reason=ExitReason.STOPPED, is_stopped=True, message="")
    return replace(_searched_rank(rank), state="exited", exit=exit, message="")


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


def _is_stopped(pod: Pod, job: Job | None, now: float) -> bool:
    """Whether the pod was stopped on purpose, and did not end on its own before that.

    Its deletion time does not say when: the kubelet's last report moves it.
    """
    if not pod.is_leaving or not pod.is_over or job is None:
        return False
    ended = pod.exit(is_stopped=False, now=now)
    if job.has_suspended(pod, ended.at, CLOCK_SKEW_S):
        return True
    # Clocks differ a little. A rank that a signal ended during deletion is not the culprit.
    # The rank's own record is exact: its failure just before a stop is its own.
    slack_s = RECORD_SKEW_S if ended.at % 1 else RECORD_SKEW_S + 1.0  # a kubelet cuts seconds off
    if ended.signal in ("SIGTERM", "SIGKILL"):
        slack_s = CLOCK_SKEW_S
    return any(
        pod.rank >= size and pod.created_at <= at + CLOCK_SKEW_S and ended.at >= at - slack_s
        for size, at in job.shrinks
    )


def _message(
    job: Job | None, pod_error: str, options: KubernetesOptions, pause_s: float | None
) -> str:
    if pause_s:
        return f"too few nodes for min ranks at once; gave way, next try in {pause_s:.0f} s"
    if pod_error:
        return pod_error if job is None else f"Kubernetes cannot create the pod: {pod_error}"
    if job is None or not job.is_suspended:
        return ""
    if options.kueue_queue is not None:
        return f"waits in the Kueue queue {options.kueue_queue} until the whole gang fits"
    return "the Job is suspended"


def _fault(
    training: Training,
    job: Job | None,
    opened_at: float | None,
    newest: list[Pod],
    options: KubernetesOptions,
    now: float,
) -> str:
    """A fault that waiting cannot mend and that leaves fewer than `min` ranks; else empty."""
    waiting = [p for p in newest if p.waiting_reason and not p.is_over]
    broken = [p for p in waiting if p.is_hopeless(options.image_timeout_s, now)]
    world = training.spec.world_size
    if broken and world.target - len(broken) < world.min:
        return f"rank {broken[0].rank}: {broken[0].waits_for}"
    has_opened = (opened_at, training.status.gate_opened_at) != (None, None)
    if job is not None and job.end_reason == "DeadlineExceeded" and not has_opened:
        return f"no rank could start within {job.spec.get('activeDeadlineSeconds')} s"
    return ""


def _half(
    training: Training,
    job: Job | None,
    newest: list[Pod],
    timeout_s: float,
    now: float,
    pod_error: str,
) -> list[Pod]:
    """Pods of an incomplete gang that hold nodes for too long: a Job is not gang-scheduled."""
    waiting = [p for p in newest if p.waiting_reason == "Unschedulable" and not p.is_leaving]
    if not waiting and pod_error and job is not None and job.is_gated:
        # A quota keeps the other pods from being created.
        waiting = [p for p in newest if p.is_at_gate]
    since = min((p.created_at for p in waiting), default=now)
    holding = [p for p in newest if p.node is not None and not p.is_over]
    is_enough = len(holding) >= training.spec.world_size.min
    return [] if is_enough or now - since <= timeout_s else holding


def ended_ranks(job: Job, known: Mapping[int, RankStatus]) -> tuple[set[int], set[int]]:
    """Ranks that completed and ranks that failed for good, as the Job itself counts them, and whose
    end is not in the status."""
    if job.desired is None:
        return set(), set()
    settled = {
        rank
        for rank, before in known.items()
        if before.phase == "Failed" or (before.exit is not None and before.exit.is_success)
    }
    # A stopped Job keeps the indexes it had, and counts those it has stopped as failed.
    size = job.desired.size
    completed = {rank for rank in job.indexes("completedIndexes") if rank < (size or job.size)}
    failed = {rank for rank in job.indexes("failedIndexes") if rank < size}
    return completed - settled, failed - settled


def unexplained_failures(training: Training, job: Job, pods: Iterable[Pod]) -> set[int]:
    """Ranks that the Job counts as failed, though neither the status nor a pod shows how."""
    known = {r.rank: r for r in (*training.status.ranks, *training.status.removed_ranks)}
    _, failed = ended_ranks(job, known)
    return failed - {p.rank for p in pods if not is_stored(p, known.get(p.rank))}


def vanished_ranks(
    training: Training,
    job: Job,
    there: Collection[int],
    known: Mapping[int, RankStatus],
    now: float,
) -> Iterator[ObservedRank]:
    """Ranks that the Job counts as completed or failed and whose pods were deleted.

    `there` are the ranks that have pods to report; those are read instead.
    """
    completed, failed = ended_ranks(job, known)
    at = when(job.status.get("completionTime")) or now
    for rank in sorted((completed | failed) - set(there)):
        before = known.get(rank) or RankStatus(rank=rank)
        is_failed = rank in failed
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
