"""The answers of squeue, as 22.05 and 24.11 print them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.backends.records import JobState
from atoll.backends.slurm.read import best_of, exit_status, expand, job_of, read_queue
from atoll.core.errors import Temporary


def old(**more: Any) -> dict[str, Any]:
    """A task as 22.05 prints it."""
    return {
        "job_id": 62, "array_job_id": 60, "array_task_id": 1, "array_task_string": "",
        "name": "atoll-abc-0-0", "job_state": "RUNNING", "state_reason": "None", "exit_code": 0,
        "nodes": "n1", "partition": "main", "restart_cnt": 0, **more,
    }  # fmt: skip


def _set(number: int | None) -> dict[str, Any]:
    return {"set": number is not None, "infinite": False, "number": number or 0}


def new(**more: Any) -> dict[str, Any]:
    """A task as 24.11 prints it."""
    return {
        "job_id": 62, "array_job_id": _set(60), "array_task_id": _set(1), "array_task_string": "",
        "name": "atoll-abc-0-0", "job_state": ["RUNNING"], "state_reason": "None",
        "exit_code": {"status": ["SUCCESS"], "return_code": _set(0), "signal": {"id": _set(None)}},
        "nodes": "n1", "partition": "main", "restart_cnt": 0, **more,
    }  # fmt: skip


def asked(*jobs: dict[str, Any], **more: Any) -> Any:
    return read_queue(0, json.dumps({"errors": [], "jobs": list(jobs), **more}), "")


@pytest.mark.parametrize("shape", [old, new])
def test_a_running_task(shape: Any) -> None:
    (task,) = asked(shape())
    assert (task.uid, task.key, task.array, task.task) == ("abc", (1, 0), 60, 1)
    assert task.job == JobState("running", "", "Slurm: RUNNING", "n1")


@pytest.mark.parametrize("none", [None, _set(None)])
def test_a_pending_array_is_one_entry(none: Any) -> None:
    tasks = asked(
        old(
            array_task_id=none, array_task_string="0-2,7%2", name="atoll-abc-1-1000", nodes="",
            job_state="PENDING", state_reason="Resources",
        )
    )  # fmt: skip
    assert [task.key for task in tasks] == [(1000, 1), (1001, 1), (1002, 1), (1007, 1)]
    assert tasks[0].job == JobState("pending", "", "in the queue of main: Resources")


def test_jobs_of_others_are_left_out() -> None:
    assert asked(old(name="bash"), new(name="atoll")) == []


@pytest.mark.parametrize(
    ("status", "out", "trouble"),
    [
        (
            0,
            '{"errors": [{"description": "Unable to contact"}], "jobs": []}',
            "",
        ),
        (1, "", "slurm_load_jobs error: Unable to contact slurm controller"),
        (0, "", ""),
        (0, '{"errors": [], "jobs": [{"name": "atoll-a', ""),
        (0, '{"errors": []}', ""),
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
    for job in (old(job_state=state), new(job_state=[state])):
        assert (job_of(job).state, job_of(job).reason) == ("ended", reason)


@pytest.mark.parametrize("states", ["COMPLETING", ["COMPLETED", "COMPLETING"], "SUSPENDED"])
def test_what_may_still_run_has_not_ended(states: Any) -> None:
    assert job_of(old(job_state=states)).state == "running"


def test_a_job_that_its_host_could_not_launch_was_given_up() -> None:
    assert job_of(old(job_state="CANCELLED")).is_withdrawn
    assert not job_of(old(job_state="CANCELLED", nodes="")).is_withdrawn  # it waited


def test_a_requeued_job_is_started_again() -> None:
    assert job_of(old(job_state="PENDING", restart_cnt=1)).is_repeated
    assert job_of(new(job_state=["PENDING", "REQUEUED"])).is_repeated
    assert job_of(old(job_state="SUSPENDED")).is_paused


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, ""),
        (768, "exit status 3"),
        (11, "signal 11"),
        (9, "signal 9"),
        (36608, "exit status 143"),
        (4021, "error 4021 of Slurm"),
        ({"return_code": _set(3), "signal": {"id": _set(None)}}, "exit status 3"),
        ({"return_code": _set(None), "signal": {"id": _set(9)}}, "signal 9"),
    ],
)
def test_exit_states_of_scripts(value: Any, words: str) -> None:
    assert exit_status(value) == words


def test_tasks_of_an_array() -> None:
    assert expand("0-2,5%3") == [0, 1, 2, 5]
    assert expand("0-8:4") == [0, 4, 8]
    assert expand("") == []


def test_of_two_jobs_for_one_attempt_the_active_one_counts() -> None:
    ended, running = old(job_state="FAILED"), old(job_state="RUNNING")
    for pair in ((ended, running), (running, ended)):
        assert best_of(asked(*pair))[1, 0].state == "running"
    named = old(job_state="PREEMPTED")
    assert best_of(asked(ended, named))[1, 0].reason == "Preempted"
    given_up = old(job_state="CANCELLED")
    for pair in ((given_up, ended), (ended, given_up)):
        assert best_of(asked(*pair))[1, 0].reason == ""
