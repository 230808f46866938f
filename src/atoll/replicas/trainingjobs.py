"""The training jobs of launches from scripts, which several processes may follow."""

from __future__ import annotations

from atoll.replicas.recorded import RecordedLaunches
from atoll.sagemaker.executor import SageMakerBackend


class ScriptTrainingJobs(RecordedLaunches, SageMakerBackend):
    """Records are in the executor's own store, where a launch is found by its name alone."""
