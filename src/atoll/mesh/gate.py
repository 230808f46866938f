"""The gate at which a rank waits until its host's network is ready.

It never raises, and opens by itself after its timeout.
"""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Literal

from atoll.core.clock import Retry
from atoll.core.mesh import degraded_path, ready_path, split_endpoint
from atoll.mesh.http import http_status

MeshStatus = Literal["ready", "degraded", "timeout"]

REQUEST_S = 2.0  # one request, name lookup included
MIN_REQUEST_S = 0.5  # so that `timeout=0` can still get an answer
HOST_NAMES = ("NODE_NAME", "KUBERNETES_NODE_NAME")
# The first variable that is set counts; an empty one means that the training has no gate. A c10d
# training needs that: there the second variable names a TCPStore, not an etcd.
ENDPOINT_NAMES = ("ATOLL_MESH_ENDPOINT", "BASILICA_RDZV_ENDPOINT")

_last: MeshStatus | None = None


def mesh_status() -> MeshStatus | None:
    """How the last `mesh_wait()` ended; None if nothing was waited for."""
    return _last


def mesh_wait(timeout: float = 60) -> None:
    """Return when this host's network is ready, known to be degraded, or `timeout` has passed.

    Call it before `torch.distributed.init_process_group()`. It never raises; `mesh_status()` says
    which it was. Without a host name or an endpoint in the environment, it returns at once.
    """
    global _last
    host = next((value for name in HOST_NAMES if (value := os.environ.get(name))), "")
    endpoint = next((os.environ[name] for name in ENDPOINT_NAMES if name in os.environ), "")
    if not host or not endpoint:
        _last = None
        return
    limit = _seconds(timeout)
    _say(f"BEGIN host={host!r} endpoint={endpoint!r} timeout={limit:g}s")
    host_port = split_endpoint(endpoint)
    if host_port is None:
        _last = "timeout"  # waiting would not make it right
        _say(f"TIMEOUT after=0s bad endpoint {endpoint!r}, expected host:port")
        return
    started = time.monotonic()
    _last, why = _poll(host_port, host, started + limit)
    label = {"ready": "OK", "degraded": "DEGRADED", "timeout": "TIMEOUT"}[_last]
    _say(f"{label} after={time.monotonic() - started:.0f}s host={host!r}{why}")


def _poll(endpoint: tuple[str, int], host: str, deadline: float) -> tuple[MeshStatus, str]:
    outcomes: tuple[tuple[MeshStatus, str], ...] = (
        ("ready", ready_path(host)),
        ("degraded", degraded_path(host)),
    )
    patience_s = deadline - time.monotonic()
    retry = Retry(0.02, 2.0, growth=1.6, patience_s=patience_s, clock=time.monotonic)
    why = ""
    while True:
        for outcome, path in outcomes:
            left = deadline - time.monotonic()
            code, why = http_status(endpoint, path, min(REQUEST_S, max(left, MIN_REQUEST_S)))
            if code == 200:
                return outcome, ""
            if code is None or time.monotonic() >= deadline:
                break  # no answer, or no time left: asking for the second key would not help
        pause_s = retry.pause_s()
        if pause_s is None:
            return "timeout", f" last: {why}"
        time.sleep(pause_s)


def _seconds(timeout: object) -> float:
    try:
        seconds = float(timeout)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 60.0
    return 60.0 if math.isnan(seconds) else max(0.0, seconds)


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"mesh-wait: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # no stderr, or a closed one, is no reason not to train
