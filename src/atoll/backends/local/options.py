"""What `[executors.local]` may say, and what this machine does not do of a spec."""

from __future__ import annotations

import socket

from atoll.backends.local.devices import ids_of
from atoll.core.checks import check_int
from atoll.core.model import SpecModel
from atoll.core.support import ignore, refuse

MAX_SLOTS = 10_000
MIN_LOG_BYTES, MAX_LOG_BYTES = 64 * 2**10, 2**40
NO_GPU = "this machine has no GPU that is known, see [executors.local] gpus in atoll.toml"
SHARED = "ranks are processes of this machine, and share it"
SUPPORTS = (
    refuse("code", f"expected none: ranks on {socket.gethostname()} run where the code is"),
    *(ignore(field, SHARED) for field in ("image", "cpu", "memory", "gpu_models")),
    *(ignore(f, SHARED) for f in ("min_gpu_memory_gb", "provider_filter", "topology_spread")),
    ignore(
        "gpu_count",
        NO_GPU,
        when=lambda spec, devices: devices.share(spec.resources.gpu_count, spec.env) is None,
    ),
)


class LocalOptions(SpecModel, frozen=True):
    """What `[executors.local]` may say."""

    slots: int | None = None  # largest number of ranks at the same time
    log_bytes: int | None = None  # kept of the log of each rank, the newest; None: 64 MiB
    gpus: int | list[int | str] | None = None  # that ranks may use; None: all there are

    def __post_init__(self) -> None:
        if self.log_bytes is not None:
            check_int("log_bytes", self.log_bytes, MIN_LOG_BYTES, MAX_LOG_BYTES)
        if self.slots is not None:
            check_int("slots", self.slots, 1, MAX_SLOTS)
        if self.gpus is not None:
            ids_of("gpus", self.gpus)
