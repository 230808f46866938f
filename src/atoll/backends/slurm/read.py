"""What `squeue --json` says, in the shapes of 22.05 and of 24.11."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from atoll.backends.records import AttemptKey, JobState
from atoll.backends.slurm.render import read_job_name
from atoll.core.errors import Temporary
from atoll.core.reasons import ExitReason

Json = dict[str, Any]

PENDING = frozenset(
    {
        *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"),
        *("SPECIAL_EXIT", "POWER_UP_NODE"),
    }
)
# Processes may run in all of these, whatever the exit code next to it says.
RUNNING = frozenset(
    {
        *("RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING"),
        "UPDATE_DB",
    }
)
PAUSED = frozenset({"SUSPENDED", "STOPPED"})
REQUEUED = frozenset({"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
# What Slurm did to a job, by its name for it. Everything else that ended, ended by itself.
CAUSES = {
    "NODE_FAIL": ExitReason.HOST_LOST,
    "BOOT_FAIL": ExitReason.HOST_LOST,
    "OUT_OF_MEMORY": ExitReason.OOM_KILLED,
    "PREEMPTED": ExitReason.PREEMPTED,
    "TIMEOUT": ExitReason.TIME_LIMIT,
    "DEADLINE": ExitReason.TIME_LIMIT,
    "CANCELLED": ExitReason.DELETED,
    "REVOKED": ExitReason.DELETED,
}
NO_REASON = ("", "None")


class QueuedTask(NamedTuple):
    """One task of an array of ours. `id` is what scancel takes, together with the job's name."""

    uid: str
    key: AttemptKey
    array: int
    task: int
    name: str
    job: JobState


def read_queue(status: int, out: str, trouble: str) -> list[QueuedTask]:
    """Every task of every training. Raises Temporary unless the answer is whole.

    An answer without jobs is none: a squeue that reaches nobody may print an empty list with its
    trouble beside it, and end well.
    """
    try:
        answer = json.loads(out) if out.strip() else {}
    except ValueError:
        answer = {}
    errors = answer.get("errors") or []
    if status or errors or not isinstance(answer.get("jobs"), list):
        message = "; ".join(_describe(error) for error in errors) or trouble.strip() or out[:200]
        raise Temporary(
            f"squeue does not answer: {' '.join(message.split()) or f'status {status}'}"
        )
    return [task for job in answer["jobs"] for task in _tasks(job)]


def _describe(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    parts = (error.get("description"), error.get("error"), error.get("source"))
    return ": ".join(str(part) for part in parts if part)


def _tasks(job: Json) -> Iterator[QueuedTask]:
    name = read_job_name(str(job.get("name", "")))
    if name is None:
        return
    uid, attempt, offset = name
    task = number(job.get("array_task_id"))
    text = str(job.get("array_task_string") or "")
    tasks = expand(text) if task is None or text else [task]
    array = number(job.get("array_job_id")) or number(job.get("job_id")) or 0
    for each in tasks:
        yield QueuedTask(uid, (offset + each, attempt), array, each, job["name"], job_of(job))


def number(value: Any) -> int | None:
    """22.05 has plain numbers, later ones `{set, infinite, number}`."""
    if isinstance(value, dict):
        return value["number"] if value.get("set") and not value.get("infinite") else None
    return None if value is None else int(value)


def states_of(job: Json) -> list[str]:
    """22.05 has one state, later ones a list of a state and its flags."""
    states = job.get("job_state") or "UNKNOWN"
    return [states] if isinstance(states, str) else [str(state) for state in states]


def expand(text: str) -> list[int]:
    """The tasks of `0-2,5%3`; steps as in `0-8:4`."""
    tasks: list[int] = []
    for part in text.split("%")[0].split(","):
        if part:
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            tasks += range(int(first), int(last or first) + 1, int(step or 1))
    return tasks


def job_of(job: Json) -> JobState:
    states = states_of(job)
    is_repeated = bool(number(job.get("restart_cnt"))) or any(s in REQUEUED for s in states)
    reason = str(job.get("state_reason") or "")
    message = f"Slurm: {' '.join(states)}" + (f" ({reason})" if reason not in NO_REASON else "")
    host = str(job.get("nodes") or "") or None
    if any(state in RUNNING for state in states):
        is_paused = any(state in PAUSED for state in states)
        return JobState("running", "", message, host, is_paused=is_paused, is_repeated=is_repeated)
    if any(state in PENDING for state in states):
        waits = f"in the queue of {job.get('partition') or 'Slurm'}"
        message = f"{waits}: {reason}" if reason not in NO_REASON else waits
        return JobState("pending", "", message, None, is_repeated=is_repeated)
    cause = next((CAUSES[state].value for state in states if state in CAUSES), "")
    status = exit_status(job.get("exit_code"))
    if status:
        message += f", {status}"
    # A host that could not launch it has it cancelled, as one does that knows another job of the
    # same id. Somebody else's scancel of a job that waits finds it without a host.
    is_withdrawn = "CANCELLED" in states and host is not None
    return JobState(
        "ended", cause, message, host, is_repeated=is_repeated, is_withdrawn=is_withdrawn
    )


def exit_status(value: Any) -> str:
    """The exit status of a job's script, for people: `exit status 3`, `signal 9`; may be empty.

    It is no rank's: 22.05 has raw wait states beside error numbers of its own, 24.11 an object.
    """
    if isinstance(value, dict):
        code = number(value.get("return_code"))
        signal = number((value.get("signal") or {}).get("id")) if value.get("signal") else None
        raw = ((code or 0) << 8) | (signal or 0)
    else:
        raw = int(value or 0)
    if raw == 0:
        return ""
    if raw & 0x7F and raw < 0x80:
        return f"signal {raw}"
    if raw & 0xFF == 0 and raw < 0x10000:
        return f"exit status {raw >> 8}"
    return f"error {raw} of Slurm"


def best_of(tasks: list[QueuedTask]) -> dict[AttemptKey, JobState]:
    """One word for each attempt: an attempt may have been submitted twice."""
    jobs: dict[AttemptKey, JobState] = {}
    for task in tasks:
        before = jobs.get(task.key)
        if before is None or _weight(task.job) > _weight(before):
            jobs[task.key] = task.job
    return jobs


def _weight(job: JobState) -> tuple[bool, bool, bool, bool]:
    """What was given up says nothing once the attempt was submitted again."""
    return job.is_active, job.state == "running", not job.is_withdrawn, bool(job.reason)
