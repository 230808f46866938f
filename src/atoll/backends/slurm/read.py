"""What `squeue` says of our jobs. Pure.

It is asked for text: `--json` has 3 kB of each job, takes 15 times as long, and differs
from release to release.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from atoll.backends.records import AttemptKey, JobState
from atoll.backends.slurm.render import read_job_name
from atoll.core.errors import Temporary
from atoll.core.phase import ExitReason

# A reason may hold anything, so it is last. A colon without a size prints a field in full.
FIELDS = "ArrayJobID ArrayTaskID State RestartCnt exit_code Partition NodeList Name Reason".split()
SQUEUE = ("squeue", "-h", "-r", "--states=all", "-O", ":|,".join(FIELDS) + ":")
PAUSED = ("SUSPENDED", "STOPPED")
REQUEUED = ("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
# What a state of Slurm means; all others are ends. Processes may run in what is `running` here,
# whatever the exit code next to it says.
STATES: dict[str, Literal["pending", "running", "ended"]] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "RESV_DEL_HOLD", "POWER_UP_NODE"), "pending"),
    **dict.fromkeys(REQUEUED, "pending"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING"), "running"),
    **dict.fromkeys(("UPDATE_DB", *PAUSED), "running"),
}
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
NO_REASON = ("", "None", "(null)")


class QueuedTask(NamedTuple):
    """One task of an array of ours. `array` and `task` are what scancel takes, with the name."""

    uid: str
    key: AttemptKey
    array: int
    task: int
    name: str
    job: JobState


def read_queue(status: int, out: str, trouble: str) -> list[QueuedTask]:
    """Every task of every training. Raises Temporary unless the answer is whole.

    One with an error beside it is none: a squeue that reaches nobody may print nothing and end
    well.
    """
    is_cut = out != "" and not out.endswith("\n")
    if status or "error" in trouble.lower() or is_cut:
        message = " ".join((trouble.strip() or out[-200:]).split()) or f"status {status}"
        raise Temporary(f"squeue does not answer: {message}")
    tasks = (_task(line) for line in out.splitlines() if "|atoll-" in line)
    return [task for task in tasks if task is not None]


def _task(line: str) -> QueuedTask | None:
    parts = [part.strip() for part in line.split("|", len(FIELDS) - 1)]
    if len(parts) < len(FIELDS):
        raise Temporary(f"squeue does not answer: {line}")
    array, number, state, restarts, code, partition, nodes, name, reason = parts
    own = read_job_name(name)
    if own is None or not number.isdigit():
        return None
    uid, attempt, offset = own
    job = job_of(state, restarts, code, partition, nodes, reason)
    return QueuedTask(uid, (offset + int(number), attempt), int(array), int(number), name, job)


def job_of(
    state: str, restarts: str, code: str, partition: str, nodes: str, reason: str
) -> JobState:
    kind, host = STATES.get(state, "ended"), nodes if nodes not in NO_REASON else None
    why = "" if reason in NO_REASON else reason
    message = f"Slurm: {state}" + (f" ({why})" if why else "")
    if kind == "pending":
        host, message = (
            None,
            f"in the queue of {partition or 'Slurm'}" + (f": {why}" if why else ""),
        )
    elif kind == "ended" and (detail := exit_status(code)):
        message += f", {detail}"
    return JobState(
        kind,
        str(CAUSES.get(state, "")),
        message,
        host,
        is_paused=state in PAUSED,
        is_repeated=restarts not in ("", "0") or state in REQUEUED,
        # A host that could not launch it has it cancelled, as one does that knows another job of
        # the same id. Somebody else's scancel of a job that waits finds it without a host.
        is_withdrawn=state == "CANCELLED" and host is not None,
    )


def exit_status(text: str) -> str:
    """The exit status of a job's script, for people: `exit status 3`, `signal 9`; may be empty.

    It is no rank's: there are raw wait states, and error numbers of Slurm's own.
    """
    if not text.isdigit() or text == "0":
        return "" if text in ("0", "0:0") else text
    raw = int(text)
    if raw & 0x7F and raw < 0x80:
        return f"signal {raw}"
    if raw & 0xFF == 0 and raw < 0x10000:
        return f"exit status {raw >> 8}"
    return f"error {raw} of Slurm"
