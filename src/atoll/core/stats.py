"""The numbers of a training, all computed from its status."""

from __future__ import annotations

from atoll.core.clock import Now
from atoll.core.model import Model
from atoll.core.status import Training, Usage


class TrainingStats(Model, frozen=True, omit_defaults=False):
    """Counted from what was seen of the training. Durations in seconds."""

    ready: int
    target: int
    ranks_running: int
    ranks_succeeded: int
    ranks_failed: int
    restarts: int
    resizes: int
    generation: int
    observed_generation: int
    age_s: float
    running_s: float
    time_to_first_rank_s: float | None
    rank_seconds: float
    gpu_seconds: float


def training_stats(training: Training, time: Now) -> TrainingStats:
    status = training.status
    spent = usage(training, time)
    created_at = status.started_monotonic.get("created", training.created_at)
    started = status.started_at
    phases = [rank.phase for rank in status.ranks]
    targets = [point.target for point in status.world_size_history]
    return TrainingStats(
        ready=status.world.ready,
        target=training.spec.world_size.target,
        ranks_running=phases.count("Running"),
        ranks_succeeded=phases.count("Succeeded"),
        ranks_failed=phases.count("Failed"),
        restarts=sum(rank.restarts for rank in (*status.ranks, *status.removed_ranks)),
        resizes=sum(a != b for a, b in zip(targets, targets[1:], strict=False)),
        generation=training.generation,
        observed_generation=status.observed_generation,
        age_s=max(0.0, time.monotonic - created_at),
        running_s=status.ran_for(time.monotonic + status.clock_skew) or 0.0,
        time_to_first_rank_s=None if started is None else max(0.0, started - training.created_at),
        rank_seconds=spent.rank_seconds,
        gpu_seconds=spent.gpu_seconds,
    )


def usage(training: Training, time: Now) -> Usage:
    """A clock that was set, or a machine that slept, adds nothing."""
    status = training.status
    ranks, now = (*status.ranks, *status.removed_ranks), time.monotonic + status.clock_skew
    running = sum(max(now - (r.started_at or now), 0.0) for r in ranks if r.is_alive)
    seconds = running + sum(r.metered_s for r in ranks)
    gpus = training.spec.resources.gpu_count
    return Usage(rank_seconds=seconds, gpu_seconds=seconds * gpus)
