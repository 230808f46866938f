"""The answers of squeue, as 22.05 prints them."""

from __future__ import annotations

import pytest

from atoll.backends.records import AttemptKey, JobState, best_jobs
from atoll.backends.slurm.read import FIELDS, SQUEUE, exit_status, read_queue
from atoll.core.errors import Temporary

TASK = {
    "ArrayJobID": "60",
    "ArrayTaskID": "1",
    "State": "RUNNING",
    "RestartCnt": "0",
    "exit_code": "0",
    "Partition": "main",
    "NodeList": "n1",
    "Name": "atoll-abc-0-0",
    "Reason": "None",
}


def line(**more: str) -> str:
    return "|".join((TASK | more)[field] for field in FIELDS) + "\n"


def job(**more: str) -> JobState:
    (task,) = read_queue(0, line(**more), "")
    return task.job


def best(out: str) -> dict[AttemptKey, JobState]:
    return best_jobs((task.key, task.job) for task in read_queue(0, out, ""))


def test_fields_are_asked_for_in_full_and_in_this_order() -> None:
    assert SQUEUE[-1].startswith("ArrayJobID:|,ArrayTaskID:|,State:|")
    assert SQUEUE[-1].endswith("|,Name:|,Reason:")


def test_a_running_task() -> None:
    (task,) = read_queue(0, line(), "")
    assert (task.uid, task.key, task.array, task.task) == ("abc", (1, 0), 60, 1)
    assert task.job == JobState("running", "", "Slurm: RUNNING", "n1")


def test_a_task_that_waits_belongs_to_its_rank() -> None:
    waits = {"State": "PENDING", "NodeList": "", "Reason": "Resources"}
    out = "".join(line(ArrayTaskID=n, Name="atoll-abc-1-1000", **waits) for n in ("0", "7"))
    tasks = read_queue(0, out, "")
    assert [task.key for task in tasks] == [(1000, 1), (1007, 1)]
    assert tasks[0].job == JobState("pending", "", "in the queue of main: Resources")


def test_a_reason_may_hold_anything() -> None:
    assert job(State="PENDING", NodeList="", Reason="a|b (c)").message.endswith(": a|b (c)")


def test_jobs_of_others_are_left_out() -> None:
    others = line(Name="bash") + line(Name="atoll-") + line(Name="atoll-a-0-0", ArrayTaskID="N/A")
    assert read_queue(0, others, "") == []
    assert read_queue(0, "", "") == []


def test_a_warning_beside_the_answer_does_no_harm() -> None:
    assert len(read_queue(0, line(), "squeue: warning: an option is deprecated\n")) == 1


@pytest.mark.parametrize(
    ("status", "out", "trouble"),
    [
        (1, "", "slurm_load_jobs error: Unable to contact slurm controller"),
        (0, "", "slurm_load_jobs error: Unable to contact slurm controller"),
        (1, "", ""),
        (0, line() + line()[:-4], ""),  # it broke off
        (0, "60|1|RUNNING|atoll-\n", ""),
    ],
)
def test_no_answer_is_not_an_empty_queue(status: int, out: str, trouble: str) -> None:
    with pytest.raises(Temporary, match="squeue does not answer"):
        read_queue(status, out, trouble)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("NODE_FAIL", "HostLost"),
        ("OUT_OF_MEMORY", "OOMKilled"),
        ("PREEMPTED", "Preempted"),
        ("TIMEOUT", "TimeLimit"),
        ("CANCELLED", "Deleted"),
        ("FAILED", ""),
        ("COMPLETED", ""),
    ],
)
def test_what_slurm_did_has_a_name(state: str, reason: str) -> None:
    assert (job(State=state).state, job(State=state).reason) == ("ended", reason)


@pytest.mark.parametrize("state", ["COMPLETING", "SUSPENDED"])
def test_what_may_still_run_has_not_ended(state: str) -> None:
    assert job(State=state).state == "running"


def test_a_job_that_its_host_could_not_launch_was_given_up() -> None:
    assert job(State="CANCELLED").is_withdrawn
    assert not job(State="CANCELLED", NodeList="").is_withdrawn  # it waited


def test_a_requeued_job_is_started_again() -> None:
    assert job(State="PENDING", RestartCnt="1").is_repeated
    assert job(State="REQUEUED").is_repeated
    assert job(State="SUSPENDED").is_paused


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0", ""),
        ("768", "exit status 3"),
        ("11", "signal 11"),
        ("9", "signal 9"),
        ("36608", "exit status 143"),
        ("4021", "error 4021 of Slurm"),
        ("0:0", ""),
        ("3:0", "3:0"),
    ],
)
def test_exit_states_of_scripts(value: str, words: str) -> None:
    assert exit_status(value) == words


def test_of_two_jobs_for_one_attempt_the_active_one_counts() -> None:
    ended, running = line(State="FAILED"), line(State="RUNNING")
    for both in (ended + running, running + ended):
        assert best(both)[1, 0].state == "running"
    named = line(State="PREEMPTED")
    assert best(ended + named)[1, 0].reason == "Preempted"
    given_up = line(State="CANCELLED")
    for both in (given_up + ended, ended + given_up):
        assert best(both)[1, 0].reason == ""
