"""One vocabulary of ends: its values travel, and every end comes out in the same words."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import atoll
from atoll.cli.follow import end_report
from atoll.core.describe import (
    describe_end,
    describe_exit,
    describe_failure,
    describe_others,
    describe_phase,
    describe_status,
    exit_line,
)
from atoll.core.html import text, training_html
from atoll.core.model import decode, encode
from atoll.core.phase import (
    RULES,
    ExitReason,
    Phase,
    PhaseReason,
    describe_meaning,
    describe_reason,
    listing,
)
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Exit, RankExit, RankStatus, Status, Training, WorldStatus
from atoll.operator.crd import render_crd
from atoll.replicas.surface import error_of
from atoll.server.basilica.wire import deployment

SOURCES = Path(atoll.__file__).parent
# What programs compare with: a value may be added, none may change.
EXIT_REASONS = (
    "Completed Error Signal OOMKilled Stopped CommandNotFound CannotRun Frozen SupervisorLost "
    "Evicted Preempted Rejected HostLost Deleted InitFailed StartGateFailed DeadlineExceeded "
    "TimeLimit Vanished Unknown"
).split()
PHASE_REASONS = (
    "RankFailed DeadlineExceeded ExecutorRefused ExecutorLost BenchNotMeasured LinkTooSlow "
    "InvalidSpec AllRanksExited CancelRequested Failing Cancelling QuorumReached "
    "WaitingForCapacity BelowMinimum"
).split()


def ended(
    code: int | None,
    reason: str,
    signal: str | None = None,
    message: str = "",
    *,
    rank: int = 1,
    collateral: bool = False,
) -> RankExit:
    return RankExit(
        rank=rank,
        exit_code=code,
        termination_reason=reason,
        signal=signal,
        message=message,
        collateral=collateral,
    )


def failed(cause: RankExit | None = None, **status: Any) -> Training:
    size = WorldSize(min=1, target=1, max=1)
    spec = TrainingSpec(name="t", world_size=size, command=["true"])
    exits = [] if cause is None else [cause]
    now = Status(phase=Phase.FAILED, root_cause=cause, rank_exits=exits, **status)
    return Training(namespace="default", uid="u", spec=spec, status=now)


def test_the_values_that_travel_stay() -> None:
    assert list(ExitReason) == EXIT_REASONS
    assert list(PhaseReason) == PHASE_REASONS
    assert {rule.reason for rule in RULES} <= set(PhaseReason)


def test_a_reason_travels_as_its_value() -> None:
    made = Exit(code=1, at=0.0, reason=ExitReason.ERROR)
    assert encode(made) == b'{"code":1,"at":0.0,"reason":"Error"}'
    assert decode(encode(made), Exit) == made
    assert f"{ExitReason.ERROR}" == "Error"


def test_what_supervises_ranks_can_import_the_names_without_any_package() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from atoll.core.phase import ExitReason"
    told = "print(ExitReason.STOPPED, 'msgspec' in sys.modules)"
    words = [sys.executable, "-I", "-S", "-c", f"{code}; {told}", str(SOURCES.parent)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "Stopped False\n"


@pytest.mark.parametrize(
    ("rank_exit", "words", "line"),
    [
        (
            ended(3, "Error"),
            "exited with code 3",
            "rank 1: exit_code=3 reason=Error",
        ),
        (
            ended(3, "Error", message="ValueError: no"),
            "exited with code 3: ValueError: no",
            "rank 1: exit_code=3 reason=Error: ValueError: no",
        ),
        (
            ended(137, "OOMKilled", "SIGKILL"),
            "was killed by SIGKILL, exit code 137: out of memory",
            "rank 1: exit_code=137 reason=OOMKilled signal=SIGKILL: out of memory",
        ),
        (
            ended(None, "Vanished"),
            "ended with an exit code that could not be learned: it disappeared",
            "rank 1: exit_code=unknown reason=Vanished: it disappeared",
        ),
        (
            ended(127, "CommandNotFound", message="x: no"),
            "exited with code 127: no such command (x: no)",
            "rank 1: exit_code=127 reason=CommandNotFound: no such command (x: no)",
        ),
        (
            ended(200, "Signal", "SIGNEW"),
            "was killed by SIGNEW, exit code 200",
            "rank 1: exit_code=200 reason=Signal signal=SIGNEW",
        ),
        (
            ended(1, "EatenByABear", message="twice"),
            "exited with code 1: EatenByABear (twice)",
            "rank 1: exit_code=1 reason=EatenByABear: twice",
        ),
        (
            ended(None, "EatenByABear"),
            "ended with an exit code that could not be learned: EatenByABear",
            "rank 1: exit_code=unknown reason=EatenByABear",
        ),
        (ended(0, "Completed"), "exited with code 0", "rank 1: exit_code=0 reason=Completed"),
    ],
)
def test_an_exit_in_words(rank_exit: RankExit, words: str, line: str) -> None:
    assert describe_exit(rank_exit) == words
    assert exit_line(1, rank_exit) == line
    attempt = Exit(
        code=rank_exit.exit_code,
        at=0.0,
        reason=rank_exit.termination_reason,
        signal=rank_exit.signal,
        message=rank_exit.message,
    )
    assert describe_exit(attempt) == words
    assert exit_line(1, attempt) == line


@pytest.mark.parametrize("reason", [*EXIT_REASONS, "EatenByABear", ""])
def test_every_end_is_told_by_everybody_in_the_same_words(reason: str) -> None:
    cause = ended(7, reason, message="so it says")
    training = failed(cause, reason="RankFailed")
    line, words = exit_line(1, cause), describe_exit(cause)
    assert describe_status(training.status) == line
    assert line in describe_failure(training)
    assert describe_end(training) == f"t failed: rank 1 failed first: it {words}"
    attempt = Exit(code=7, at=0.0, reason=reason, message="so it says")
    rank = RankStatus(rank=1, phase="Failed", exit=attempt)
    assert error_of(training, rank, "failed") == words
    told = replace(training, status=replace(training.status, message=line))
    assert deployment(told)["message"] == f"RankFailed: {line}"


def oops(rank: int, **fields: Any) -> RankExit:
    fields = {"message": "ValueError: oops", "collateral": rank != 1, **fields}
    return RankExit(rank=rank, exit_code=1, termination_reason="Error", **fields)


@pytest.mark.parametrize(
    ("exits", "cause", "others"),
    [
        ([oops(0), oops(1)], "both ranks failed the same way: ValueError: oops (rank 1 first)", []),
        (
            [oops(0), oops(1, restart_count=2), oops(2)],
            "all 3 ranks failed the same way: ValueError: oops (rank 1 first, after 2 restarts)",
            [],
        ),
        (
            [
                oops(0),
                oops(1),
                oops(2, message="ConnectionError: peer"),
                ended(143, "Stopped", rank=3, signal="SIGTERM", collateral=True),
                ended(143, "Stopped", rank=4, signal="SIGTERM", collateral=True),
                ended(0, "Completed", rank=5),
            ],
            "ranks 0-1 failed the same way: ValueError: oops (rank 1 first)",
            ["rank 2 failed after it: ConnectionError: peer", "ranks 3-4 were stopped by atoll"],
        ),
        (
            [oops(1), ended(139, "Signal", rank=2, signal="SIGSEGV", collateral=True)],
            "rank 1 failed first: it exited with code 1: ValueError: oops",
            ["rank 2 failed after it: was killed by SIGSEGV (segmentation fault), exit code 139"],
        ),
    ],
)
def test_ranks_that_failed_alike_are_told_together(
    exits: list[RankExit], cause: str, others: list[str]
) -> None:
    """By `atoll run`, the errors, the page and the notebook, from the same function."""
    training = failed(next(e for e in exits if e.rank == 1), reason="RankFailed")
    training = replace(training, status=replace(training.status, rank_exits=exits))
    assert describe_end(training) == f"t failed: {cause}"
    assert describe_others(training.status) == others
    assert end_report(training).split("\n")[: 1 + len(others)] == [
        f"t failed: {cause}",
        *(f"  {line}" for line in others),
    ]
    shown = training_html(training)
    assert all(text(line) in shown for line in (cause, *others))
    if "the same way" in cause:
        assert describe_failure(training).startswith(f"training 't' failed: {cause}; rank 1: exit")
        assert describe_status(training.status) == cause


@pytest.mark.parametrize("reason", PHASE_REASONS)
def test_a_training_without_words_of_its_own_has_those_of_its_reason(reason: str) -> None:
    training = failed(reason=reason)
    meaning = describe_meaning(reason, PhaseReason)
    assert meaning != reason
    assert describe_phase(training.status) == meaning
    assert describe_end(training) == f"t failed: {meaning}"
    assert describe_failure(training) == f"training 't' failed: {meaning}"
    assert deployment(training)["message"] == f"{reason}: {meaning}"


def test_a_reason_of_a_newer_release_is_shown_as_it_is() -> None:
    assert describe_meaning("EatenByABear", PhaseReason) == "EatenByABear"
    assert describe_reason("EatenByABear") == "EatenByABear"
    assert describe_end(failed(reason="EatenByABear")) == "t failed: EatenByABear"
    assert describe_end(failed()) == "t failed: failed"


def test_the_custom_resource_describes_every_reason() -> None:
    (version,) = render_crd()["spec"]["versions"]
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]
    fields = status["properties"]
    assert listing(PhaseReason) in fields["reason"]["description"]
    for exit in (fields["rootCause"], fields["rankExits"]["items"]):
        assert listing(ExitReason) in exit["properties"]["terminationReason"]["description"]


def test_no_reason_is_a_bare_string() -> None:
    """Where an exit is made, its reason comes from the vocabulary."""
    bare = [
        f"{path.name}:{node.lineno}"
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("Exit", "RankExit", "Rule")
        for argument in [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg)]
        if isinstance(argument, ast.Constant) and argument.value in {*EXIT_REASONS, *PHASE_REASONS}
    ]
    assert bare == []


def test_the_world_is_ready_as_seen_and_the_rest_as_wished() -> None:
    size = WorldSize(min=2, target=3, max=4)
    assert WorldStatus.of(1, size) == WorldStatus(
        ready=1, target=3, min=2, max=4, below_minimum=True
    )
    seen = WorldStatus(ready=2, target=9, min=9, max=9, below_minimum=True)
    training = failed()
    spec = replace(training.spec, world_size=size)
    scaled = replace(training, spec=spec, status=Status(world=seen))
    assert scaled.world == WorldStatus(ready=2, target=3, min=2, max=4, below_minimum=False)
