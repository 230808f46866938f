"""What is made of records and of a backend's word, each case written out by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from atoll.agent.records import BY_EXECUTOR, Facts
from atoll.backends.records import (
    AT_GATE,
    Ages,
    DueAttempt,
    Fold,
    JobState,
    OpenStartGate,
    StopJobs,
    Timing,
    WriteExit,
    fold,
)
from atoll.core.phase import ExitReason
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import ObservedRank, Training

Json = dict[str, Any]
NOW = 1000.0
TIMING = Timing()
PENDING, RUNNING = JobState("pending", message="Priority"), JobState("running", host="n1")
ENDED = JobState("ended")
CLAIM = {"at": 900.0, "host": "n1"}
START = {"at": 910.0, "host": "n1"}


class AttemptRecord(NamedTuple):
    claim: Json | None = None
    start: Json | None = None
    exit: Json | None = None
    idle_s: float = 0.0
    beaten_at: float | None = None


def training(low: int = 1, target: int = 2, **spec: Any) -> Training:
    world = WorldSize(min=low, target=target, max=8)
    given = TrainingSpec(name="t", command=["x"], world_size=world, **spec)
    return Training(namespace="n", uid="u", spec=given)


def desired(size: int = 2, **more: Any) -> Json:
    return {"t": "desired", "version": 3, "size": size, "discarded": {}, "at": 990.0, **more}


def ended(code: int | None = 0, signal: str | None = None, **more: Any) -> Json:
    reason = "Completed" if code == 0 else "Error"
    return {"code": code, "signal": signal, "reason": reason, "at": 950.0, "host": "n1", **more}


def observed(
    attempts: dict[tuple[int, int], AttemptRecord] | None = None,
    jobs: dict[tuple[int, int], JobState] | None = None,
    *,
    document: Json | None = None,
    of: Training | None = None,
    is_away: bool = False,
    ended_for_s: float = 0.0,
    gate: Json | None = None,
) -> Fold:
    facts = Facts([document or desired()])
    for (rank, attempt), one in (attempts or {}).items():
        for kind in ("claim", "start", "exit"):
            if record := getattr(one, kind):
                facts.add({**record, "t": kind, "rank": rank, "attempt": attempt})
    if gate is not None:
        facts.add({"t": "gate", **gate})
    known, asked = attempts or {}, jobs or {}
    ages = Ages(
        {key: one.idle_s for key, one in known.items()},
        dict.fromkeys(asked, ended_for_s),
        {key: one.beaten_at for key, one in known.items() if one.beaten_at is not None},
    )
    states = None if is_away else asked
    return fold(of or training(), facts, states, now=NOW, timing=TIMING, ages=ages)


def only(view: Fold) -> ObservedRank:
    (rank,) = view.observation.ranks
    return rank


def claimed(idle_s: float = 0.0) -> AttemptRecord:
    return AttemptRecord(CLAIM, idle_s=idle_s)


def started(idle_s: float = 0.0) -> AttemptRecord:
    return AttemptRecord(CLAIM, START, idle_s=idle_s)


def over(exit: Json, idle_s: float = 0.0) -> AttemptRecord:
    return AttemptRecord(CLAIM, START, exit, idle_s)


def concluded(view: Fold) -> list[Json]:
    return [
        followup.record
        for followup in view.observation.followups
        if isinstance(followup, WriteExit)
    ]


def stopped(view: Fold) -> list[tuple[int, int]]:
    return [key for followup in view.observation.followups if isinstance(followup, StopJobs)
            for key in followup.attempts]  # fmt: skip


def test_without_a_wish_there_is_nothing() -> None:
    view = fold(training(), Facts(), {}, now=NOW, timing=TIMING)
    assert (view.observation.desired, view.observation.ranks, view.due) == (None, [], [])


def test_an_attempt_goes_from_the_queue_to_the_gate_to_its_run_to_its_end() -> None:
    key = (0, 0)
    waiting = only(observed(jobs={key: PENDING}))
    assert (waiting.state, waiting.message) == ("waiting", "Priority")
    at_gate = only(observed({key: claimed()}, {key: RUNNING}))
    assert (at_gate.state, at_gate.host) == ("waiting", "n1")
    assert "start gate" in at_gate.message
    runs = only(observed({key: started()}, {key: RUNNING}))
    assert (runs.state, runs.started_at, runs.message, runs.is_stopping) == (
        "running", 910.0, "", False,
    )  # fmt: skip
    done = only(observed({key: over(ended(3))}, {key: ENDED}))
    assert done.exit is not None
    assert (done.state, done.exit.code, done.exit.at, done.exit.reason) == (
        "exited", 3, 950.0, "Error",
    )  # fmt: skip
    assert not done.exit.is_from_backend


def test_a_paused_rank_is_no_silent_one() -> None:
    paused = JobState("running", is_paused=True)
    view = observed({(0, 0): started(idle_s=500.0)}, {(0, 0): paused})
    assert (only(view).state, only(view).message) == ("running", "paused by its backend")
    assert view.observation.followups == ()


@pytest.mark.parametrize(
    ("job", "patience_s"),
    [
        (RUNNING, TIMING.heartbeat_timeout_s),
        (ENDED, TIMING.settle_s),
        (JobState("ended", reason=ExitReason.HOST_LOST), TIMING.heartbeat_timeout_s),
        (None, TIMING.heartbeat_timeout_s),
    ],
)
def test_a_wrapper_that_is_silent_is_concluded_after_its_time(
    job: JobState | None, patience_s: float
) -> None:
    jobs = {} if job is None else {(0, 0): job}
    assert concluded(observed({(0, 0): started(patience_s - 0.1)}, jobs)) == []
    view = observed({(0, 0): started(patience_s)}, jobs)
    (record,) = concluded(view)
    assert (record["code"], record["ran"], record["stopped"]) == (None, True, False)
    assert record["at"] == max(NOW - patience_s, 910.0)
    assert stopped(view) == ([(0, 0)] if job is RUNNING else [])
    assert concluded(observed({(0, 0): started(patience_s)}, is_away=True)) == []


@pytest.mark.parametrize(
    ("job", "reason", "code"),
    [
        (JobState("ended", reason=ExitReason.OOM_KILLED, message="oom"), "OOMKilled", 137),
        (JobState("ended", reason=ExitReason.PREEMPTED, message="oom"), "Preempted", None),
        (JobState("running", reason=ExitReason.PREEMPTED, message="oom"), "SupervisorLost", None),
    ],
)
def test_the_backend_names_the_end_of_a_silent_wrapper_once_it_has_ended(
    job: JobState, reason: str, code: int | None
) -> None:
    (record,) = concluded(observed({(0, 0): claimed(idle_s=60.0)}, {(0, 0): job}))
    assert (record["reason"], record["code"], record["ran"]) == (reason, code, False)
    assert record["message"] == "its wrapper left no record; oom"


@pytest.mark.parametrize(("size", "unsettled"), [(2, 0), (0, 1)])
def test_whether_a_silent_rank_ran_is_open_only_if_it_has_to_stop_and_did_not_start(
    size: int, unsettled: int
) -> None:
    ranks = {(0, 0): claimed(60.0), (1, 0): started(60.0)}
    assert observed(ranks, document=desired(size)).observation.unsettled == unsettled


def test_only_a_silent_rank_that_has_not_started_is_said_to_wait_at_the_gate() -> None:
    ranks = observed({(0, 0): claimed(60.0), (1, 0): started(60.0)}).observation.ranks
    assert [(rank.state, rank.message) for rank in ranks] == [("waiting", AT_GATE), ("running", "")]


@pytest.mark.parametrize(
    ("beaten_at", "at"), [(920.0, 920.0), (900.0, 910.0), (2000.0, 940.0), (None, 940.0)]
)
def test_a_silence_before_the_first_look_is_dated_by_the_last_beat(
    beaten_at: float | None, at: float
) -> None:
    """The clock of the place may be behind the rank's, or ahead of the reader's."""
    silent = started(idle_s=60.0)._replace(beaten_at=beaten_at)
    (record,) = concluded(observed({(0, 0): silent}, {(0, 0): ENDED}))
    assert record["at"] == at


def test_a_job_that_the_backend_ended_before_it_began_is_concluded_after_a_while() -> None:
    job = JobState("ended", message="no such partition", host="n9")
    view = observed(jobs={(0, 0): job}, ended_for_s=TIMING.settle_s - 0.1)
    assert (only(view).state, concluded(view)) == ("waiting", [])
    (record,) = concluded(observed(jobs={(0, 0): job}, ended_for_s=TIMING.settle_s))
    assert (record["reason"], record["ran"], record["stopped"]) == ("Rejected", False, False)
    assert (record["message"], record["host"]) == ("no such partition", "n9")
    assert record["at"] == NOW - TIMING.settle_s


def test_what_the_backend_gave_up_by_itself_is_asked_for_again() -> None:
    view = observed(jobs={(0, 0): JobState("ended", is_withdrawn=True)}, ended_for_s=60.0)
    assert (view.observation.ranks, concluded(view)) == ([], [])
    assert DueAttempt(0, 0, 0.0) in view.due


def test_a_rank_scaled_away_stops_and_is_ended_once_its_grace_is_over() -> None:
    shrunk = desired(1, at=NOW - 10.0 - TIMING.stop_wait_s)
    patient = training(stop_grace_s=10.1)
    view = observed({(1, 0): started()}, {(1, 0): RUNNING}, document=shrunk, of=patient)
    assert (only(view).is_stopping, stopped(view)) == (True, [])
    prompt = training(stop_grace_s=10.0)
    view = observed({(1, 0): started()}, {(1, 0): RUNNING}, document=shrunk, of=prompt)
    assert stopped(view) == [(1, 0)]
    queued = observed(jobs={(1, 0): PENDING}, document=shrunk)
    assert (stopped(queued), queued.observation.unsettled) == ([(1, 0)], 1)
    gone = observed(jobs={(1, 0): ENDED}, document=shrunk, ended_for_s=60.0)
    assert (gone.observation.ranks, gone.observation.followups, gone.observation.unsettled) == (
        [],
        (),
        0,
    )


def test_the_backends_word_on_an_end_keeps_its_place_until_nothing_runs() -> None:
    document = ended(None, by=BY_EXECUTOR)
    view = observed({(0, 0): over(document)}, {(0, 0): RUNNING})
    assert (only(view).state, stopped(view)) == ("running", [(0, 0)])
    done = only(observed({(0, 0): over(document)}, {(0, 0): ENDED})).exit
    assert done is not None
    assert done.is_from_backend


def test_why_a_rank_was_killed_is_waited_for_and_then_named() -> None:
    killed = ended(137, "SIGKILL")
    view = observed({(0, 0): over(killed, TIMING.cause_wait_s - 0.1)}, {(0, 0): RUNNING})
    assert (only(view).state, only(view).message) == ("running", "it has ended")
    assert (
        only(observed({(0, 0): over(killed, TIMING.cause_wait_s)}, {(0, 0): RUNNING})).state
        == "exited"
    )
    job = JobState("ended", reason=ExitReason.PREEMPTED, message="preempted by 7")
    named = only(observed({(0, 0): over(killed)}, {(0, 0): job})).exit
    assert named is not None
    assert (named.reason, named.message, named.code) == ("Preempted", "preempted by 7", 137)


@pytest.mark.parametrize(
    ("document", "job", "reason"),
    [
        (ended(1), JobState("ended", reason=ExitReason.PREEMPTED), "Error"),  # its own exit
        (ended(143, "SIGTERM"), JobState("ended", reason=ExitReason.OOM_KILLED), "Error"),
        (ended(137, "SIGKILL"), JobState("ended", reason=ExitReason.OOM_KILLED), "OOMKilled"),
        (ended(143, "SIGTERM"), JobState("ended", is_repeated=True), "Evicted"),
        (ended(1, signalled=True), JobState("ended", reason=ExitReason.PREEMPTED), "Preempted"),
        (ended(143, "SIGTERM", stopped=True), JobState("ended", reason="Preempted"), "Error"),
        (ended(139, "SIGSEGV"), JobState("ended", reason="Preempted"), "Error"),
    ],
)
def test_the_backend_names_only_what_it_may_have_done(
    document: Json, job: JobState, reason: str
) -> None:
    named = only(observed({(0, 0): over(document)}, {(0, 0): job})).exit
    assert named is not None
    assert named.reason == reason


def test_the_words_of_a_backend_are_added_once() -> None:
    def message(text: str) -> str:
        document = ended(137, "SIGKILL", message=text)
        found = only(observed({(0, 0): over(document)}, {(0, 0): JobState("ended", message="why")}))
        assert found.exit is not None
        return found.exit.message

    assert [message(text) for text in ("", "x", "it is why")] == ["why", "x; why", "it is why"]


def test_a_job_that_outlives_its_record_or_begins_again_is_ended() -> None:
    def must_stop(idle_s: float, **job: Any) -> bool:
        jobs = {(0, 0): JobState("running", **job)}
        return bool(stopped(observed({(0, 0): over(ended(1), idle_s)}, jobs)))

    assert [must_stop(TIMING.stop_wait_s - 0.1), must_stop(TIMING.stop_wait_s)] == [False, True]
    assert must_stop(0.0, is_repeated=True)


def test_an_attempt_stopped_before_it_ran_is_none() -> None:
    never = ended(None, ran=False, stopped=True)
    assert observed({(0, 0): over(never)}, {(0, 0): ENDED}).observation.ranks == []
    refused = ended(None, ran=False)
    assert only(observed({(0, 0): over(refused)}, {(0, 0): ENDED})).state == "exited"


def test_the_newest_attempt_tells_of_those_before_it() -> None:
    attempts = {(0, 0): over(ended(1)), (0, 1): over(ended(2)), (0, 2): started()}
    rank = only(observed(attempts, {(0, 2): RUNNING}))
    assert (rank.attempt, rank.restarts, rank.metered_s) == (2, 2, 80.0)
    assert rank.previous_exit is not None
    assert rank.previous_exit.code == 2
    assert [past.attempt for past in rank.attempts] == [0, 1]
    assert (
        only(observed(attempts, {(0, 2): RUNNING}, document=desired(stops={"0": [1]}))).restarts
        == 0
    )


def test_the_backend_names_the_end_of_the_attempt_before_and_of_no_other() -> None:
    attempts = {(0, 0): over(ended(137, "SIGKILL")), (0, 1): started()}
    jobs = {(0, 0): JobState("ended", reason=ExitReason.PREEMPTED), (0, 1): RUNNING}
    rank = only(observed(attempts, jobs))
    assert rank.previous_exit is not None
    assert rank.previous_exit.reason == "Preempted"
    assert [past.reason for past in rank.attempts] == ["Preempted"]


def test_an_attempt_that_only_the_backend_knows_tells_of_those_before_it() -> None:
    rank = only(observed({(0, 0): over(ended(1))}, {(0, 1): PENDING}))
    assert (rank.state, rank.attempt, rank.metered_s) == ("waiting", 1, 40.0)
    assert [past.attempt for past in rank.attempts] == [0]


def due(*codes: int | None, max_restarts: int = 1, idle_s: float = 0.0, **more: Any) -> list[Any]:
    """What is to be started of rank 0 after attempts that ended so; None is one that runs."""
    attempts = {
        (0, number): started() if code is None else over(ended(code), idle_s)
        for number, code in enumerate(codes)
    }
    return observed(
        attempts, document=desired(1, **more), of=training(max_restarts=max_restarts)
    ).due


def test_attempts_are_due_within_the_budget_and_no_sooner() -> None:
    assert due() == [DueAttempt(0, 0, 0.0)]
    assert due(None) == due(0) == []
    assert due(1) == [DueAttempt(0, 1, 0.0)]
    assert due(1, 1) == []
    assert due(1, 1, max_restarts=2, idle_s=0.25) == [DueAttempt(0, 2, 0.75)]
    assert due(1, 1, discarded={"0": 1}, stops={"0": [1]}) == [DueAttempt(0, 2, 0.0)]
    assert due(0, discarded={"0": 0}, stops={"0": [0]}) == [DueAttempt(0, 1, 0.0)]


def test_nothing_is_due_while_the_backend_does_not_answer() -> None:
    assert observed(is_away=True).due == []


def test_the_gate_opens_for_all_or_for_the_minimum_after_the_grace() -> None:
    def at_gate(ranks: int, grace_s: float, **more: Any) -> Fold:
        attempts = {(rank, 0): claimed() for rank in range(ranks)}
        jobs = dict.fromkeys(attempts, RUNNING)
        return observed(attempts, jobs, of=training(start_grace_s=grace_s), **more)

    def opened(view: Fold) -> list[int]:
        return [c.together for c in view.observation.followups if isinstance(c, OpenStartGate)]

    assert opened(at_gate(2, 500.0)) == [2]
    assert opened(at_gate(1, 500.0)) == []
    assert at_gate(1, 100.25).observation.again_in_s == 0.25
    assert opened(at_gate(1, 100.0)) == [1]  # claimed 100 s ago
    assert opened(at_gate(0, 0.0)) == []
    assert opened(at_gate(2, 500.0, gate={"at": 905.0})) == []
    assert at_gate(2, 500.0, gate={"at": 905.0}).observation.gate_opened_at == 905.0
    ended_there = {(0, 0): claimed(), (1, 0): AttemptRecord(CLAIM, None, ended(143, "SIGTERM"))}
    view = observed(
        ended_there, dict.fromkeys(ended_there, RUNNING), of=training(start_grace_s=500.0)
    )
    assert opened(view) == []


def test_the_host_of_a_rank_is_the_records_before_the_backends() -> None:
    job = JobState("running", host="n2")
    assert only(observed(jobs={(0, 0): job})).host == "n2"
    assert only(observed({(0, 0): started()}, {(0, 0): job})).host == "n1"
    assert only(observed({(0, 0): started()}, is_away=True)).host == "n1"


def test_ranks_that_are_scaled_away_do_not_open_the_gate() -> None:
    attempts = {(rank, 0): claimed() for rank in (0, 2)}
    view = observed(attempts, dict.fromkeys(attempts, RUNNING), of=training(start_grace_s=500.0))
    assert [c for c in view.observation.followups if isinstance(c, OpenStartGate)] == []


def test_a_rank_that_exited_by_itself_has_no_words_of_the_backend() -> None:
    job = JobState("ended", message="NonZeroExitCode")
    found = only(observed({(0, 0): over(ended(1))}, {(0, 0): job})).exit
    assert found is not None
    assert found.message == ""
