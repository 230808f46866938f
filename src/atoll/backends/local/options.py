"""What `[executors.local]` may say, and the limits that were set on a running control plane."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from atoll.backends.local.capacity import SLOTS, ids_of, requested
from atoll.core.checks import check_int
from atoll.core.executors import MAX_SLOTS
from atoll.core.model import SpecModel
from atoll.core.spec import Resources
from atoll.core.text import check_quantity

MIN_LOG_BYTES, MAX_LOG_BYTES = 64 * 2**10, 2**40  # eight segments of 8 KiB; no limit in practice

log = logging.getLogger(__name__)


class LocalOptions(SpecModel, frozen=True):
    """What `[executors.local]` may say."""

    slots: int | None = None  # largest number of ranks at the same time
    cpu: str | int | None = None  # CPUs that ranks may ask for in all; None: those of the machine
    memory: str | None = None  # likewise
    log_bytes: int | None = None  # of the log of each rank, the newest; None: 64 MiB
    gpus: int | list[int | str] | None = None  # that ranks may use; None: all there are

    def __post_init__(self) -> None:
        if self.log_bytes is not None:
            check_int("log_bytes", self.log_bytes, MIN_LOG_BYTES, MAX_LOG_BYTES)
        if self.slots is not None:
            check_int("slots", self.slots, 1, MAX_SLOTS)
        if self.gpus is not None:
            ids_of("gpus", self.gpus)
        for field in ("cpu", "memory"):
            value = getattr(self, field)
            check_quantity(field, str(value) if type(value) is int else value)

    @property
    def limits(self) -> dict[str, int]:
        """What is limited by the file."""
        return amounts_of(self.slots, None if self.cpu is None else str(self.cpu), self.memory)


LIMITS_FILE = "limits.json"  # in the state directory: what was set on a running control plane


def amounts_of(slots: int | None, cpu: str | None, memory: str | None) -> dict[str, int]:
    amounts = requested(Resources(cpu=cpu, memory=memory))
    del amounts[SLOTS]
    return amounts if slots is None else {**amounts, SLOTS: slots}


def read_limits(state_dir: Path) -> dict[str, int]:
    """What was set on a control plane here; it counts before atoll.toml."""
    try:
        limits = json.loads((state_dir / LIMITS_FILE).read_bytes())
        return {str(name): int(amount) for name, amount in limits.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s is ignored: %s", state_dir / LIMITS_FILE, error)
        return {}
