"""The faults that can befall a training, and what must come out: one table for every executor.

Nothing here knows a backend. A row is a world of ranks that run until told otherwise, what is done
to it, and the verdict. Where backends may honestly differ (the code of a command that cannot be
run), the row lists what is allowed.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Codes = frozenset[int | None]


class End(NamedTuple):
    """How a rank may have ended. No reasons or signals given: any will do."""

    codes: Codes
    reasons: frozenset[str] = frozenset()
    signals: frozenset[str | None] = frozenset()
    restarts: int = 0


class Row(NamedTuple):
    fault: str
    phase: Literal["succeeded", "failed", "cancelled"]
    struck: End
    others: End
    at: int | None = 1  # the rank that is struck; None for all of them
    root: int | Literal["none", "any"] = 1  # any: whichever was struck first
    others_are_collateral: bool = True
    detail: Any = None  # an exit code, a signal, a step of the controller
    min: int = 3
    options: dict[str, Any] = {}
    runs_first: bool = True  # struck when all ranks run, not from the start
    end: Literal["", "before", "after"] = ""  # every rank is told to exit 0, when
    reason: str = ""  # of the training

    @property
    def name(self) -> str:
        return self.fault if self.detail is None else f"{self.fault} {self.detail}"


def end(*codes: int | None, reason: str = "", signal: str | None = "any", restarts: int = 0) -> End:
    signals: frozenset[str | None] = frozenset() if signal == "any" else frozenset({signal})
    return End(frozenset(codes), frozenset(reason.split()), signals, restarts)


RANKS = 3
GOOD = end(0, reason="Completed", signal=None)
STOPPED = end(143, reason="Stopped", signal="SIGTERM")
KILLED = end(137, reason="Stopped", signal="SIGKILL")
LOST = end(None, 137, reason="SupervisorLost HostLost Vanished")
UNRECORDED = end(None, 137, reason="SupervisorLost HostLost Vanished Deleted")

# Where the controller may be killed: before and after each call that it makes.
STEPS = [
    f"{when} {call} {nth}"
    for call, times in (("get", 2), ("observe", 2), ("update_status", 3), ("apply", 1))
    for nth in range(1, times + 1)
    for when in ("before", "after")
]
LAST_STEPS = [f"{when} {call} 1" for call in ("apply", "release") for when in ("before", "after")]

ROWS = (
    Row("none", "succeeded", GOOD, GOOD, None, "none", False, end="after"),
    Row("exit", "failed", end(3, reason="Error", signal=None), STOPPED, detail=3),
    Row("exit", "failed", end(1, reason="Error", signal=None), STOPPED, detail=1, at=0, root=0),
    Row(
        "exit", "succeeded", end(5, reason="Error", signal=None), GOOD, root="none",
        others_are_collateral=False, detail=5, min=2, end="after",
    ),
    Row(
        "exit", "succeeded", end(0, reason="Completed", restarts=1), GOOD, root="none",
        others_are_collateral=False, detail=7, options={"max_restarts": 1}, end="after",
    ),
    Row("signal", "failed", end(137, reason="Signal", signal="SIGKILL"), STOPPED, detail="SIGKILL"),
    Row("signal", "failed", end(139, reason="Signal", signal="SIGSEGV"), STOPPED, detail="SIGSEGV"),
    Row("signal", "failed", end(143, reason="Signal", signal="SIGTERM"), STOPPED, detail="SIGTERM"),
    Row("out of memory", "failed", end(137, reason="OOMKilled"), STOPPED),
    Row(
        "command not found", "failed", end(127, 128, reason="CommandNotFound StartError"),
        end(127, 128, 143, None), None, "any", False, runs_first=False,
    ),
    Row(
        "working dir missing", "failed", end(126, 128, reason="CannotRun StartError"),
        end(126, 128, 143, None), None, "any", False, runs_first=False,
    ),
    Row(
        "image error", "failed", end(None, reason="ImagePullBackOff ErrImagePull InvalidImageName"),
        end(None), None, "none", False, runs_first=False,
    ),
    Row("host lost", "failed", LOST, LOST, None, "any", False),
    Row("preempted", "failed", end(None, 137, 143, reason="Preempted Evicted"), STOPPED),
    Row(
        "preempted and requeued", "failed", end(None, 137, 143, reason="Preempted Evicted"),
        STOPPED,
    ),
    Row(
        "deadline", "failed", STOPPED, STOPPED, None, "none", options={"deadline_s": 1.0},
        others_are_collateral=False,
        reason="DeadlineExceeded",
    ),
    Row("cancel", "cancelled", STOPPED, STOPPED, None, "none", False),
    Row(
        "cancel of ranks that ignore SIGTERM", "cancelled", KILLED, KILLED, None, "none", False,
        options={"stop_grace_s": 0.3},
    ),
    Row("rank frozen", "failed", end(137, reason="Frozen", signal="SIGKILL"), STOPPED),
    Row("supervisor killed", "failed", LOST, LOST, None, "any", False),
    Row("supervisor frozen", "failed", LOST, LOST, None, "any", False),
    # The backend's own daemons, between the ranks and the controller.
    Row(
        "control daemon killed before it told", "failed", end(9, reason="Error"),
        end(None, 137, 143), detail=9,
    ),
    Row(
        "control daemon killed after it took a start", "succeeded", GOOD, GOOD, None, "none", False,
        runs_first=False, end="after",
    ),
    Row("step daemon killed", "failed", end(None, 137, reason="SupervisorLost"), STOPPED),
    Row(
        "listing that fails halfway", "succeeded", GOOD, GOOD, None, "none", False, end="after",
    ),
    # What the backend lists is ended, though nothing is left that says so.
    Row(
        "records lost", "failed", UNRECORDED, UNRECORDED, None, "none", False,
        reason="ExecutorLost",
    ),
    Row("attempt started twice", "succeeded", GOOD, GOOD, None, "none", False, end="after"),
    Row("exit while the controller is down", "failed", end(9, reason="Error"), STOPPED, detail=9),
    *(
        Row(
            "controller killed", "succeeded", GOOD, GOOD, None, "none", False, detail=step,
            runs_first=False, end="before",
        )
        for step in STEPS
    ),
    *(
        Row("exit, then controller killed", "failed", end(3, reason="Error"), STOPPED, detail=step)
        for step in LAST_STEPS
    ),
)  # fmt: skip
