"""DiLoCo for a training script: `from atoll.diloco import DiLoCo`. Needs `atoll[torch]`."""

from atoll.worker.diloco import DiLoCo, RoundReport
from atoll.worker.torchft_manager import ObjectStoreManager

__all__ = ["DiLoCo", "ObjectStoreManager", "RoundReport"]
