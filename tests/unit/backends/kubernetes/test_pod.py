"""How a pod ended, and what is put on record for it."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.agent.process import record_line
from atoll.backends.kubernetes.names import SHRINKS
from atoll.backends.kubernetes.pod import Pod
from atoll.backends.kubernetes.render import render_job
from atoll.core.status import DesiredState, Exit
from tests.unit.backends.kubernetes.kube import (
    NOW,
    TAINTED,
    Json,
    Options,
    ended,
    job,
    observation,
    only,
    pod,
    running,
    training,
)


def init_failed(manifest: Json) -> Json:
    states = {"prepare": ended(0, "Completed"), "fetch-data": ended(3, message="no such\nbucket")}
    manifest["status"]["initContainerStatuses"] = [
        {"name": name, "state": state} for name, state in states.items()
    ]
    return manifest


# (pod, code, reason, signal, words in the message or log)
ENDS: dict[str, tuple[Json, int | None, str, str | None, str]] = {
    "exit 0": (pod(0, ended(0, "Completed"), phase="Succeeded"), 0, "Completed", None, ""),
    "exit 3": (
        pod(0, ended(3, message="Traceback\nValueError: no"), phase="Failed"),
        3,
        "Error",
        None,
        "ValueError: no",
    ),
    "SIGSEGV": (pod(0, ended(139), phase="Failed"), 139, "Signal", "SIGSEGV", ""),
    "out of memory": (
        pod(0, ended(137, "OOMKilled"), phase="Failed"),
        137,
        "OOMKilled",
        "SIGKILL",
        "",
    ),
    "out of memory, but only a child of it": (
        pod(0, ended(0, "OOMKilled"), phase="Succeeded"),
        0,
        "Completed",
        None,
        "",
    ),
    "command not found": (
        pod(
            0,
            ended(128, "StartError", 'exec: "trian": executable file not found in $PATH'),
            phase="Failed",
        ),
        127,
        "CommandNotFound",
        None,
        "executable file not found",
    ),
    "not executable": (
        pod(0, ended(126, "ContainerCannotRun", "permission denied"), phase="Failed"),
        126,
        "CannotRun",
        None,
        "permission denied",
    ),
    "evicted by the kubelet": (
        pod(0, None, phase="Failed", reason="Evicted", message="low on resource: memory"),
        None,
        "Evicted",
        None,
        "low on resource: memory",
    ),
    "found no room on its node after all": (
        pod(0, None, phase="Failed", reason="OutOfnvidia.com/gpu", message="Pod was rejected"),
        None,
        "Rejected",
        None,
        "Pod was rejected",
    ),
    "drained": (
        pod(
            0,
            ended(143),
            phase="Failed",
            deleted_at=NOW - 20,
            conditions={
                "DisruptionTarget": {
                    "status": "True",
                    "reason": "EvictionByEvictionAPI",
                    "message": "Eviction API: evicting",
                }
            },
        ),
        143,
        "Evicted",
        "SIGTERM",
        "evicting",
    ),
    "preempted": (
        pod(
            0,
            ended(137),
            phase="Failed",
            deleted_at=NOW - 20,
            conditions={"DisruptionTarget": {"status": "True", "reason": "PreemptionByScheduler"}},
        ),
        137,
        "Preempted",
        "SIGKILL",
        "",
    ),
    "node removed": (
        pod(
            0,
            running(),
            phase="Failed",
            conditions={"DisruptionTarget": {"status": "True", "reason": "DeletionByPodGC"}},
        ),
        None,
        "HostLost",
        None,
        "",
    ),
    "node silent": (
        pod(0, running(), deleted_at=NOW - 20, conditions=TAINTED),
        None,
        "HostLost",
        None,
        "does not answer",
    ),
    "a code that the kubelet made up": (
        pod(0, ended(137, "ContainerStatusUnknown", "could not be located"), phase="Failed"),
        None,
        "Unknown",
        None,
        "could not be located",
    ),
    "turned away by the node": (
        pod(0, None, phase="Failed", reason="UnexpectedAdmissionError", message="no device"),
        None,
        "Rejected",
        None,
        "no device",
    ),
    "an init container of the option pod failed": (
        init_failed(pod(0, None, phase="Failed")),
        None,
        "InitFailed",
        None,
        "fetch-data: exit code 3: no such bucket",
    ),
    "kubectl delete pod": (
        pod(0, ended(143, at=NOW - 12), phase="Failed", deleted_at=NOW - 20),
        143,
        "Deleted",
        "SIGTERM",
        "it was deleted by somebody",
    ),
    "kubectl delete pod, and it had code of its own for that": (
        pod(0, ended(7, at=NOW - 19), phase="Failed", deleted_at=NOW - 20),
        7,
        "Deleted",
        None,
        "it was deleted by somebody",
    ),
    "kubectl delete pod of one that was done": (
        pod(0, ended(0, "Completed", at=NOW - 19), phase="Succeeded", deleted_at=NOW - 20),
        0,
        "Completed",
        None,
        "",
    ),
    "a pod that was tidied away long after it had failed": (
        pod(0, ended(3, at=NOW - 50), phase="Failed", deleted_at=NOW - 20),
        3,
        "Error",
        None,
        "",
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_an_end_is_told_as_it_was(what: str) -> None:
    gone, code, reason, signal, words = ENDS[what]
    rank = only(observation(gone))
    assert rank.state == "exited"
    found = rank.exit
    assert isinstance(found, Exit)
    assert (found.code, found.reason, found.signal) == (code, reason, signal)
    assert words in "\n".join([found.message, *found.log_tail])
    assert not found.is_stopped


AT = NOW - 10 + 0.123456  # the kubelet says NOW - 10


def record(code: int | None, **rest: Any) -> str:
    given = {"code": code, "at": AT, "signal": None, "reason": "Error" if code else "Completed"}
    return record_line({**given, **rest}, 3072).decode()


def recorded(code: int, text: str, reason: str = "Error") -> Exit:
    phase = "Failed" if code else "Succeeded"
    exit = only(observation(pod(0, ended(code, reason, text), phase=phase))).exit
    assert exit is not None
    return exit


def test_the_ranks_own_record_is_read_first() -> None:
    text = record(3, failedAt=AT - 1, message="Boom: why", tail=["one", "two"])
    exit = recorded(3, text)
    assert (exit.code, exit.reason, exit.signal) == (3, "Error", None)
    assert (exit.at, exit.failed_at) == (AT, AT - 1)
    assert (exit.message, exit.log_tail) == ("Boom: why", ["one", "two"])
    assert recorded(0, record(0), "Completed").at == AT


def test_a_program_that_exits_with_143_was_not_killed() -> None:
    assert recorded(143, record(143)).signal is None
    exit = recorded(143, record(143, signal="SIGTERM", reason="Signal"))
    assert (exit.signal, exit.reason) == ("SIGTERM", "Signal")


def test_a_command_that_the_wrapper_did_not_find_is_told_as_such() -> None:
    exit = recorded(127, record(127, reason="CommandNotFound", message="trian: no such file"))
    assert (exit.code, exit.reason, exit.message) == (127, "CommandNotFound", "trian: no such file")


def test_the_kernels_word_on_memory_counts_more_than_the_record() -> None:
    exit = recorded(137, record(137, signal="SIGKILL", reason="Signal", tail=["x"]), "OOMKilled")
    assert (exit.code, exit.reason, exit.signal) == (137, "OOMKilled", "SIGKILL")
    assert (exit.at, exit.log_tail) == (AT, ["x"])


@pytest.mark.parametrize(
    ("kubelet", "own", "code", "reason"), [(137, 0, 137, "Signal"), (0, 3, 3, "Error")]
)
def test_where_record_and_kubelet_differ_a_failure_counts_and_both_are_told(
    kubelet: int, own: int, code: int, reason: str
) -> None:
    exit = recorded(kubelet, record(own))
    assert (exit.code, exit.reason) == (code, reason)
    assert exit.message == f"the rank's record says exit code {own}, its kubelet {kubelet}"


def test_a_record_of_another_time_does_not_date_the_exit() -> None:
    assert recorded(3, record(3, at=NOW + 3600)).at == NOW - 10


def test_a_rank_that_was_stopped_was_stopped_whatever_it_recorded() -> None:
    gone = pod(0, ended(143, message=record(143, signal="SIGTERM", reason="Signal")))
    exit = Pod(gone).exit(is_stopped=True, now=NOW)
    assert (exit.reason, exit.is_stopped, exit.at) == ("Stopped", True, AT)


def recorder(state: Json) -> Pod:
    """A pod whose rank was to write a record."""
    manifest = pod(0, state, phase="Failed")
    made = render_job(training(), DesiredState(version=1, size=1), Options(is_exit_recorded=True))
    manifest["spec"]["containers"] = made["spec"]["template"]["spec"]["containers"]
    return Pod(manifest)


def test_an_exit_without_the_record_that_was_asked_for_says_whose_word_it_is() -> None:
    exit = recorder(ended(3, message="last line")).exit(is_stopped=False, now=NOW)
    assert (exit.code, exit.reason, exit.log_tail) == (3, "Error", ["last line"])
    assert (exit.is_from_backend, exit.message) == (True, "")
    assert not recorder(ended(143)).exit(is_stopped=True, now=NOW).is_from_backend
    assert not recorded(3, record(3)).is_from_backend


def test_an_image_without_sh_is_told_how_to_do_without() -> None:
    words = 'exec: "sh": executable file not found in $PATH'
    exit = recorder(ended(128, "StartError", words)).exit(is_stopped=False, now=NOW)
    assert (exit.code, exit.reason) == (127, "CommandNotFound")
    assert "is_exit_recorded=False" in exit.message


def test_two_ranks_that_fail_in_one_second_keep_their_order() -> None:
    exits = [recorded(1, record(1, at=AT + late)) for late in (0.0004, 0.0001)]
    assert exits[1].order < exits[0].order


def test_a_failure_of_its_own_just_before_a_stop_is_not_taken_for_the_stop() -> None:
    """Else the rank that fell over it would be blamed."""

    def end(at: float) -> Exit | None:
        text = record(3, at=at)
        fallen = pod(0, ended(3, "Error", text, at=int(at)), phase="Failed", deleted_at=NOW - 5)
        gang = job(3, annotations={SHRINKS: f"[[0, {NOW - 8}]]"})
        return only(observation(fallen, gang=gang)).exit

    before, after = end(NOW - 8.4), end(NOW - 7.6)
    assert before is not None
    assert after is not None
    assert (before.is_stopped, before.reason) == (False, "Error")
    assert (after.is_stopped, after.reason) == (True, "Stopped")
