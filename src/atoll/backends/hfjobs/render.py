"""From a training, a rank and an attempt to the job that is asked for. Pure."""

from __future__ import annotations

import math
from typing import Any

from atoll.backends.base import labels_of, wrapper_command
from atoll.backends.hfjobs.options import MAX_S, HFJobsOptions
from atoll.backends.records import AttemptKey
from atoll.core.status import Training

MARGIN_S = 300  # by which the end that Hugging Face makes is after the one that atoll makes


def render_job(training: Training, key: AttemptKey, options: HFJobsOptions) -> dict[str, Any]:
    """The arguments of `run_job` for one attempt; of secrets the names.

    It runs the wrapper, which finds the rest with the records. Hugging Face itself never tries it
    again: that is a new attempt.
    """
    spec = training.spec
    longest_s = options.max_runtime_s
    if spec.deadline_s is not None:
        longest_s = min(math.ceil(spec.deadline_s + spec.stop_grace_s) + MARGIN_S, MAX_S)
    return {
        "image": spec.image or options.image,
        "command": wrapper_command(training, key, options),
        "env": dict(options.env),
        "secrets": sorted(options.secrets),
        "flavor": options.hardware_of(spec),
        "timeout": longest_s,
        "attempts": 1,
        "name": f"atoll-{spec.name}-r{key[0]}-a{key[1]}",
        "labels": labels_of(training.uid, key),
        "namespace": options.namespace,
    }
