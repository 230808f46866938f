"""One look at a gang: the Job and its pods in, `Seen` out. Pure.

A rank may have several pods one after another. They are told one at a time, oldest first, so that
every exit is stored before its successor is spoken of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from atoll.core.ends import RankEnd
from atoll.core.model import decode
from atoll.core.status import Exit, RankStatus, Seen, SeenRank, Training, Wish
from atoll.kubernetes.gate import Gate, is_gated, is_grace_unknown, read_gate
from atoll.kubernetes.names import REGION, SHRINKS, WISH
from atoll.kubernetes.options import Options
from atoll.kubernetes.patch import is_released
from atoll.kubernetes.pod import BROKEN, CLOCK_SKEW_S, HOPELESS, Pod, when
from atoll.kubernetes.render import rendezvous_endpoint

Json = dict[str, Any]


class Look(NamedTuple):
    seen: Seen
    told: list[Pod]  # leaving, and nothing more to learn of them: they may go
    leaving: list[Pod]  # taken away while they ran: their logs go with them
    lost: list[Pod]  # on nodes that do not answer, given up by the cluster
    is_more: bool  # some exits are told in the next look
    half: list[Pod]  # hold room for fewer than `min` ranks, for too long
    gate: Gate
    newest: list[Pod]  # the last one of each rank


def wish_of(job: Json | None) -> Wish | None:
    """The wish a Job carries out, or None where there is no such Job, or it is going."""
    if job is None or "deletionTimestamp" in job["metadata"] or is_released(job):
        return None
    noted = (job["metadata"].get("annotations") or {}).get(WISH)
    return decode(noted, Wish) if noted else None


def is_told_by_pods(job: Json, manifests: Iterable[Json]) -> bool:
    """Whether a Job read earlier must still be as it was: each rank has its pod, and no other."""
    wish = wish_of(job)
    if wish is None or job["spec"].get("suspend") or is_grace_unknown(job):
        return False
    there = [p.rank for p in map(Pod, manifests) if not p.is_leaving and p.rank >= 0]
    return set(there) == set(range(wish.size))


def finished(job: Json) -> str:
    """The reason a Job gives for being over, or nothing."""
    for condition in job.get("status", {}).get("conditions") or ():
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return condition.get("reason") or str(condition["type"])
    return ""


def look(
    training: Training,
    job: Json | None,
    manifests: Iterable[Json],
    options: Options,
    now: float,
    trouble: str = "",
    silent: Collection[str] = (),
) -> Look:
    """`trouble` is what the Job controller says when it cannot make pods.

    `silent` are addresses of nodes that have stopped answering.
    """
    pods: defaultdict[int, list[Pod]] = defaultdict(list)
    for manifest in () if is_released(job) else manifests:
        pod = Pod(manifest)
        if pod.rank >= 0:
            pods[pod.rank].append(pod)
    known = {r.rank: r for r in (*training.status.ranks, *training.status.retired)}
    wish = wish_of(job)
    shrinks = _shrinks(job)
    newest = [_newest(mine) for rank, mine in pods.items() if wish is None or rank < wish.size]
    gate = read_gate(training, job, wish, newest, now)
    ranks, told, leaving, lost, is_more = [], [], [], [], False
    for rank, mine in sorted(pods.items()):
        mine.sort(key=_age)
        untold = [p for p in mine if not _is_recorded(p, known.get(rank))]
        told += [p for p in mine if p not in untold and _may_go(p, now)]
        leaving += [p for p in mine if p.is_leaving and p.has_run and not p.is_lost(now)]
        lost += [p for p in mine if p.is_lost(now)]
        news = [p for p in untold if not _is_nothing(p, now)]
        told += [p for p in untold if _is_nothing(p, now) and _may_go(p, now)]
        ended = [p for p in news if p.is_over or p.is_lost(now)]
        shown = ended[0] if ended else (news or mine)[-1]
        is_more = is_more or (bool(ended) and shown is not news[-1])
        if not _is_nothing(shown, now):
            ranks.append(_rank(shown, _is_asked(shown, job, shrinks, now), gate, now, silent))
    lost_unseen = list(given_up(training, job, wish, pods, known, now))
    ranks += lost_unseen
    for rank in {*range(wish.size if wish else 0)} - {r.rank for r in lost_unseen}:
        if rank not in pods and (rank not in known or known[rank].attempt < 0):
            ranks.append(SeenRank(rank=rank, state="waiting"))
    return Look(
        seen=Seen(
            ranks=ranks,
            wish=wish,
            is_supervised=wish is not None and not (job and finished(job)),
            is_closed=wish is not None and bool(job and finished(job)),
            message=_message(job, trouble, options),
            fault=_fault(training, newest, options, now),
            rendezvous_endpoint=rendezvous_endpoint(training, options),
        ),
        told=told,
        leaving=leaving,
        lost=lost,
        is_more=is_more,
        half=_half(training, newest, options, now, _idle_since(job, gate, newest, trouble)),
        gate=gate,
        newest=newest,
    )


def _age(pod: Pod) -> tuple[float, int]:
    return pod.created_at, pod.restarts


def _newest(mine: list[Pod]) -> Pod:
    return max(mine, key=_age)


def _rank(pod: Pod, is_asked: bool, gate: Gate, now: float, silent: Collection[str]) -> SeenRank:
    is_over = pod.is_over or pod.is_lost(now)
    is_running = "running" in pod.state and not is_over
    if is_over:
        message = ""
    elif is_running:
        is_silent = pod.is_silent or pod.address in silent
        message = f"its node {pod.node} does not answer" if is_silent else ""
    elif pod.is_at_gate:
        message = gate.message
    else:
        message = pod.waits_for or ("its container is being created" if pod.node else "")
    return SeenRank(
        rank=pod.rank,
        state="exited" if is_over else "running" if is_running else "waiting",
        attempt=pod.attempt,
        restarts=pod.restarts,
        started_at=pod.started_at,
        exit=pod.exit(is_stopped=is_asked, now=now) if is_over else None,
        pod_name=pod.name,
        host=pod.node,
        region=(pod.metadata.get("labels") or {}).get(REGION),
        message=message,
    )


def _is_recorded(pod: Pod, known: RankStatus | None) -> bool:
    """Whether the stored status has this pod's exit, or one of a later pod."""
    if known is None or known.attempt < pod.attempt:
        return False
    return known.attempt > pod.attempt or known.exit is not None


def _is_nothing(pod: Pod, now: float) -> bool:
    """Taken away before it ran: there is nothing to tell of it.

    But for one whose node was lost: that has cost it a restart.
    """
    is_lost = pod.is_lost(now) or pod.status.get("reason") == "NodeLost"
    is_gone = pod.is_turned_away or (pod.is_leaving and not is_lost)
    return is_gone and not pod.has_run and "terminated" not in pod.state


def _may_go(pod: Pod, now: float) -> bool:
    is_over = pod.is_over or pod.is_lost(now) or (_is_nothing(pod, now) and not pod.is_gate_up)
    return pod.is_held and pod.is_leaving and is_over


def _shrinks(job: Json | None) -> list[tuple[int, float]]:
    noted = ((job or {}).get("metadata", {}).get("annotations") or {}).get(SHRINKS, "[]")
    return [(size, at) for size, at in msgspec.json.decode(noted)]


def _is_asked(pod: Pod, job: Json | None, shrinks: list[tuple[int, float]], now: float) -> bool:
    """Whether it was stopped on purpose, and did not end on its own before that.

    The pod does not tell when: its deletion time is moved to the kubelet's last word.
    """
    if not pod.is_leaving or not pod.is_over:
        return False
    ended = pod.exit(is_stopped=False, now=now)
    if job is not None and _is_suspended(pod, job, ended.at):
        return True
    # Clocks differ a little. One that died of a signal while leaving is not to blame.
    slack_s = CLOCK_SKEW_S if ended.signal in ("SIGTERM", "SIGKILL") else 2.0
    return any(
        pod.rank >= size and pod.created_at <= at + CLOCK_SKEW_S and ended.at >= at - slack_s
        for size, at in shrinks
    )


def _is_suspended(pod: Pod, job: Json, ended_at: float) -> bool:
    """Whether it went because its Job was suspended: Kueue took the quota back, or a user did."""
    conditions = job.get("status", {}).get("conditions") or ()
    told: Json = next((c for c in conditions if c["type"] == "Suspended"), {})
    since = when(told.get("lastTransitionTime")) or 0.0
    if job["spec"].get("suspend"):
        return told.get("status") != "True" or ended_at >= since - CLOCK_SKEW_S
    return pod.created_at < since  # of resuming: it is from before the pause


def _message(job: Json | None, trouble: str, options: Options) -> str:
    if trouble and job is None:
        return trouble
    if trouble:
        return f"Kubernetes cannot make the pod: {trouble}"
    if job is not None and job["spec"].get("suspend"):
        if options.kueue_queue is not None:
            return f"waits in the Kueue queue {options.kueue_queue} until the whole gang fits"
        return "the Job is suspended"
    return ""


def _fault(training: Training, newest: list[Pod], options: Options, now: float) -> str:
    """What no waiting will mend, once it leaves fewer than `min` ranks possible."""
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


def _idle_since(job: Json | None, gate: Gate, newest: list[Pod], trouble: str) -> float | None:
    """When a gang began to wait that holds room to no end; None if it does not."""
    if gate.is_open:
        return None
    waiting = [p for p in newest if p.waiting_reason == "Unschedulable" and not p.is_leaving]
    if not waiting and trouble and job is not None and is_gated(job):
        waiting = [p for p in newest if p.is_at_gate]  # a quota keeps the others from being made
    return min((p.created_at for p in waiting), default=None)


def _half(
    training: Training, newest: list[Pod], options: Options, now: float, since: float | None
) -> list[Pod]:
    """A plain Job is not gang-scheduled: some ranks may hold nodes that help nobody."""
    holding = [p for p in newest if p.node is not None and not p.is_over]
    if options.gang_timeout_s is None or since is None:
        return []
    if len(holding) >= training.spec.world_size.min:
        return []
    return holding if now - since > options.gang_timeout_s else []


def indexes(text: str) -> set[int]:
    """`1,3-5` is 1, 3, 4, 5."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def given_up(
    training: Training,
    job: Json | None,
    wish: Wish | None,
    there: Collection[int],
    known: Mapping[int, RankStatus],
    now: float,
) -> Iterator[SeenRank]:
    """`there` are ranks that have pods, which tell more."""
    if job is None or wish is None:
        return
    for rank in sorted(indexes(job.get("status", {}).get("failedIndexes") or "")):
        before = known.get(rank) or RankStatus(rank=rank)
        if rank < wish.size and rank not in there and before.phase != "Failed":
            yield SeenRank(
                rank=rank,
                state="exited",
                attempt=before.attempt + 1,
                restarts=training.spec.max_restarts,
                exit=Exit(
                    code=None,
                    at=now,
                    reason=RankEnd.DELETED,
                    message="its pod was taken away unseen",
                ),
            )
