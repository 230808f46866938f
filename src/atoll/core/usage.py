"""The seconds of ranks and GPUs that a training has used."""

from __future__ import annotations

from atoll.core.clock import Time
from atoll.core.status import Training, Usage


def usage(training: Training, time: Time) -> Usage:
    """A clock that was set, or a machine that slept, adds nothing."""
    status = training.status
    ranks, now = (*status.ranks, *status.removed_ranks), time.steady + status.clock_skew
    running = sum(max(now - (r.started_at or now), 0.0) for r in ranks if r.is_alive)
    seconds = running + sum(r.metered_s for r in ranks)
    gpus = training.spec.resources.gpu_count
    return Usage(rank_seconds=seconds, gpu_seconds=seconds * gpus)
