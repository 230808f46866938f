"""How a pod ended, and what is put on record for it."""

from __future__ import annotations

import pytest

from atoll.core.status import Exit
from tests.unit.kubernetes.kube import NOW, TAINTED, Json, ended, only, pod, running, seen

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
            left_at=NOW - 20,
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
            left_at=NOW - 20,
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
        pod(0, running(), left_at=NOW - 20, conditions=TAINTED),
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
    "kubectl delete pod": (
        pod(0, ended(143, at=NOW - 12), phase="Failed", left_at=NOW - 20),
        143,
        "Signal",
        "SIGTERM",
        "",
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_an_end_is_told_as_it_was(what: str) -> None:
    gone, code, reason, signal, words = ENDS[what]
    rank = only(seen(gone))
    assert rank.state == "exited"
    found = rank.exit
    assert isinstance(found, Exit)
    assert (found.code, found.reason, found.signal) == (code, reason, signal)
    assert words in "\n".join([found.message, *found.log_tail])
    assert not found.is_stopped
