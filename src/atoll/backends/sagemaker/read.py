"""What SageMaker says of a job, and what of it is to be believed. Pure.

It has no exit codes: those are in the ranks' own records. Its word counts for why a job never ran,
or why it was ended.
"""

from __future__ import annotations

from typing import Any

from atoll.backends.records import JobState, Json
from atoll.core.phase import ExitReason

# Of a job that is in progress, by its secondary status.
BEFORE = {
    "Starting": "SageMaker is starting it",
    "Pending": "SageMaker has no capacity for it yet",
    "LaunchingMLInstances": "its instance is being launched",
    "PreparingTrainingStack": "its instance is being prepared",
    "Downloading": "its data is being downloaded",
    "DownloadingTrainingImage": "its image is being downloaded",
}
AGAIN = ("Interrupted", "Restarting")  # SageMaker will start it a second time
ENDED = ("Completed", "Failed", "Stopped", "Deleting")
# Why SageMaker ended a job, by its secondary status.
REASONS = {
    "MaxRuntimeExceeded": ExitReason.TIME_LIMIT,
    "MaxWaitTimeExceeded": ExitReason.TIME_LIMIT,
    "Interrupted": ExitReason.PREEMPTED,
}
NO_CAPACITY = ("CapacityError", "ResourceLimitExceeded")


def read_summary(summary: Json) -> JobState:
    """From a list, in which nobody says why a job ended."""
    status, second = summary["TrainingJobStatus"], summary.get("SecondaryStatus", "")
    if status in ENDED:
        return JobState("ended", reason=REASONS.get(second, ""), message=f"SageMaker: {second}")
    if second == "Uploading":  # its container has ended
        return JobState("ended")
    if status == "Stopping":  # it still runs
        return JobState("running", reason=ExitReason.DELETED, message="SageMaker is stopping it")
    if second in AGAIN:
        text = f"SageMaker: {second}, and will be started again"
        return JobState("running", reason=ExitReason.PREEMPTED, message=text, is_repeated=True)
    if second in BEFORE:
        return JobState("pending", message=BEFORE[second])
    return JobState("running")


def read_end(job: Json) -> JobState:
    """Of a job that has ended, with its reason."""
    second, text = job.get("SecondaryStatus", ""), " ".join(job.get("FailureReason", "").split())
    passed = [each.get("Status") for each in job.get("SecondaryStatusTransitions") or ()]
    message = f"SageMaker: {text or second}"[:600]
    return JobState(
        "ended", reason=_reason(job["TrainingJobStatus"], second, text, passed), message=message
    )


def _reason(status: str, second: str, text: str, passed: list[Any]) -> str:
    if "Interrupted" in passed:
        return ExitReason.PREEMPTED
    if second in REASONS:
        return REASONS[second]
    if status == "Stopped":
        return ExitReason.DELETED
    if "more memory" in text:
        return ExitReason.OOM_KILLED
    if text.startswith("InternalServerError"):
        return ExitReason.HOST_LOST
    return ExitReason.REJECTED if text.startswith("ClientError") else ""


def lacks_capacity(job: Json) -> bool:
    """Whether it ran nothing because there was no instance for it: it may be asked for again."""
    if job.get("SecondaryStatus") == "MaxWaitTimeExceeded":
        return job.get("TrainingStartTime") is None
    return job["TrainingJobStatus"] == "Failed" and str(job.get("FailureReason", "")).startswith(
        NO_CAPACITY
    )
