"""`atoll.worker.diloco`, as the release before called it."""

from atoll.diloco.loop import DiLoCo
from atoll.diloco.reports import RoundReport

__all__ = ["DiLoCo", "RoundReport"]
