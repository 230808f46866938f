"""DiLoCo for a training script: `from atoll.diloco import DiLoCo`. Needs `atoll[torch]`."""

from atoll.worker.diloco import DiLoCo, RoundReport


__all__ = ["DiLoCo", "RoundReport"]
