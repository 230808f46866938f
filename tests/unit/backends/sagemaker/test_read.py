"""Each state of SageMaker's, and what is to be believed of it."""

from __future__ import annotations

from typing import Any

import botocore.session
import pytest

from atoll.backends.sagemaker.read import lacks_capacity, read_end, read_summary
from atoll.core.phase import ExitReason


def summary(status: str, second: str) -> dict[str, Any]:
    return {"TrainingJobStatus": status, "SecondaryStatus": second}


@pytest.mark.parametrize(
    ("status", "second", "state", "reason"),
    [
        ("InProgress", "Starting", "pending", ""),
        ("InProgress", "DownloadingTrainingImage", "pending", ""),
        ("InProgress", "Training", "running", ""),
        ("InProgress", "Uploading", "ended", ""),  # its container is gone
        ("Stopping", "Stopping", "running", "Deleted"),  # it may still run for two minutes
        ("InProgress", "Interrupted", "running", "Preempted"),
        ("Stopped", "MaxRuntimeExceeded", "ended", "TimeLimit"),
        ("Completed", "Completed", "ended", ""),
        ("Failed", "Failed", "ended", ""),
    ],
)
def test_a_list(status: str, second: str, state: str, reason: str) -> None:
    job = read_summary(summary(status, second))
    assert (job.state, job.reason) == (state, reason)
    assert job.is_repeated == (second == "Interrupted")


def test_every_state_of_the_model_has_a_meaning() -> None:
    model = botocore.session.get_session().get_service_model("sagemaker")
    for status in model.shape_for("TrainingJobStatus").enum:
        for second in model.shape_for("SecondaryStatus").enum:
            assert read_summary(summary(status, second)).state in ("pending", "running", "ended")


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"FailureReason": "AlgorithmError: , exit code: 137"}, ""),  # the text is no exit code
        ({"FailureReason": "InternalServerError: try again"}, ExitReason.HOST_LOST),
        ({"FailureReason": "ClientError: Cannot find repository"}, ExitReason.REJECTED),
        (
            {"FailureReason": "ClientError: Please use an instance type with more memory"},
            ExitReason.OOM_KILLED,
        ),
        ({"SecondaryStatusTransitions": [{"Status": "Interrupted"}]}, ExitReason.PREEMPTED),
        ({"TrainingJobStatus": "Stopped", "SecondaryStatus": "Stopped"}, ExitReason.DELETED),
    ],
)
def test_why_a_job_ended(job: dict[str, Any], reason: str) -> None:
    end = read_end(summary("Failed", "Failed") | job)
    assert (end.state, end.reason) == ("ended", reason)
    assert end.message.startswith("SageMaker: ")


def test_no_capacity_is_no_failure() -> None:
    assert lacks_capacity(summary("Failed", "Failed") | {"FailureReason": "CapacityError: none"})
    assert lacks_capacity(summary("Stopped", "MaxWaitTimeExceeded"))
    ran = {"TrainingStartTime": 1.0}
    assert not lacks_capacity(summary("Stopped", "MaxWaitTimeExceeded") | ran)
    assert not lacks_capacity(summary("Failed", "Failed") | {"FailureReason": "AlgorithmError"})
