"""What publishers and followers in a rank report to the control plane: a metric, and the channel.

`agent/metrics.py` does nothing where there is no control plane, and never waits or raises.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from atoll.agent.metrics import report, report_weights
from atoll.core.weights import ReportedWeights, channel_of_uri
from atoll.weights.machine import RENEW_S
from atoll.weights.records import VersionRecord

METRIC = "weights_version"


class ChannelReports:
    """Reports of one publisher or follower, whose id is `id`."""

    def __init__(self, uri: str, role: Literal["publisher", "follower"], id: str) -> None:
        parts = urlsplit(uri)
        self._channel = channel_of_uri(uri if parts.scheme else str(Path(uri).absolute()))
        self._role: Literal["publisher", "follower"] = role
        self._id = id
        self._message: ReportedWeights | None = None  # the last one
        self._reported_at = 0.0

    def add(self, record: VersionRecord | None) -> None:
        """This version was published, or is served; None: a follower has none yet."""
        message = ReportedWeights(
            channel=self._channel, role=self._role, id=self._id, at=time.time()
        )
        if record is not None:
            message = replace(
                message,
                number=record.number,
                step=record.step,
                bytes=record.bytes,
                changed=record.changed,
                publisher=record.publisher,
            )
        if self._message is None or message.number != self._message.number:
            self._send(message)
            if record is not None:
                report(record.step, **{METRIC: record.number})

    def renew(self) -> None:
        """Report the same again, once a minute: it shows that the follower lives."""
        if self._message is not None and time.monotonic() - self._reported_at >= RENEW_S:
            self._send(replace(self._message, at=time.time()))

    def close(self) -> None:
        """The follower has ended."""
        if self._message is not None:
            self._send(replace(self._message, is_closed=True))

    def _send(self, message: ReportedWeights) -> None:
        self._message, self._reported_at = message, time.monotonic()
        report_weights(msgspec.to_builtins(message))
