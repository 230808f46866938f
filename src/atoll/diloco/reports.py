"""What the rounds of a replica cost, one by one and together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

log = logging.getLogger("atoll.diloco")

_TOTALS = ("rounds", "bytes_up", "bytes_down", "requests", "hidden_s", "blocked_s")


class RoundReport(NamedTuple):
    """What one round of a fragment cost, and which ranks were in it."""

    round: int
    fragment: int
    members: tuple[int, ...]
    weight: float
    bytes_up: int
    bytes_down: int
    requests: int
    hidden_s: float  # the store worked while the model trained
    blocked_s: float  # the model did not train


class RoundReports:
    """The last reports, and totals of all of them."""

    def __init__(self, on_round: Callable[[RoundReport], None] | None) -> None:
        self.last: deque[RoundReport] = deque(maxlen=10_000)
        self.totals = dict.fromkeys(_TOTALS, 0.0)
        self._on_round = on_round

    def add(self, report: RoundReport) -> None:
        self.last.append(report)
        self.totals["rounds"] += 1
        for name in _TOTALS[1:]:
            self.totals[name] += getattr(report, name)
        log.info("%s", report)
        if self._on_round:
            self._on_round(report)
