"""One replica, as a script is told of it. Pure."""

from __future__ import annotations

from typing import Literal

from atoll.core.checks import check_int
from atoll.core.errors import ValidationError
from atoll.core.narrate import exit_in_words
from atoll.core.spec import MAX_GPUS, Resources
from atoll.core.status import RankStatus, Training

ReplicaState = Literal["pending", "running", "succeeded", "failed", "cancelled"]

FINAL = frozenset({"succeeded", "failed", "cancelled"})
STATES: dict[str, ReplicaState] = {
    "Pending": "pending",
    "Running": "running",
    "Succeeded": "succeeded",
    "Failed": "failed",
}


def rank_of(training: Training, rank: int) -> RankStatus:
    found = (r for r in training.status.ranks if r.rank == rank)
    return next(found, RankStatus(rank=rank))


def state_of(training: Training, rank: int) -> ReplicaState:
    """A rank that was stopped, or never came to run, ended the way its gang did."""
    found = rank_of(training, rank)
    is_unfinished = found.phase == "Pending" and not training.status.phase.is_terminal
    if found.phase in ("Running", "Succeeded", "Failed") or is_unfinished:
        return STATES[found.phase]
    is_cancelled = training.spec.cancel and not training.status.failing
    return "cancelled" if is_cancelled else "failed"


def error_of(training: Training, found: RankStatus, state: ReplicaState) -> str:
    """Why it failed, in one line; empty if it did not."""
    if state != "failed":
        return ""
    status, ended = training.status, found.exit
    why = status.failing_message or status.message
    if ended is None:
        return why or "it was never started"
    words = exit_in_words(ended)
    if ended.is_stopped:
        return f"{why}; it {words}" if why else words
    last = next((line.strip() for line in reversed(ended.log_tail) if line.strip()), "")
    return words if ended.message or not last else f"{words}: {last}"


def read_gpu(gpu: str | int | None) -> Resources:
    """`2`, `"H100"` or `"H100:2"`, for each replica."""
    if gpu is None:
        return Resources()
    if isinstance(gpu, int):
        check_int("gpu", gpu, 1, MAX_GPUS)
        return Resources(gpu_count=gpu)
    model, _, count = str(gpu).partition(":")
    if not isinstance(gpu, str) or not model or (":" in gpu and not count.isdigit()):
        raise ValidationError("gpu", gpu, "expected a count, 'H100' or 'H100:2'")
    return Resources(gpu_count=int(count or 1), gpu_models=[model])
