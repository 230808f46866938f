"""`atoll.worker.diloco`, as the release before called it."""

from atoll.diloco.loop import DiLoCo, RoundReport

__all__ = ["DiLoCo", "RoundReport"]
