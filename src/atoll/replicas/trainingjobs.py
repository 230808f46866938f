"""The training jobs of launches from scripts, which several processes may follow."""

from __future__ import annotations

from atoll.backends.sagemaker.executor import SageMakerBackend
from atoll.replicas.recorded import RecordedLaunches


class ScriptTrainingJobs(RecordedLaunches, SageMakerBackend):
    """Records are in the executor's own store, where a launch is found by its name alone."""
