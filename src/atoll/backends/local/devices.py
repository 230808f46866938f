"""GPUs of this machine: each rank that asks for some has its own, for as long as it lives.

Which rank has which is written into the document of its gang, so a control plane that starts anew
knows it, and a rank that is started again finds the same ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.core.errors import ValidationError

VARIABLE = "CUDA_VISIBLE_DEVICES"
MAX_DEVICES = 1024

Assignment = dict[int, list[str]]  # by rank


class DeviceShare(NamedTuple):
    """What a training asks for: so many for each rank, of these devices."""

    each: int
    of: list[str]


class Devices:
    """Devices and who has them. One that is listed twice may be used by two ranks."""

    def __init__(self, ids: Sequence[str] = ()) -> None:
        self.ids = list(ids)
        self._assigned: dict[str, Assignment] = {}  # by uid of the training

    def share(self, count: int, env: Mapping[str, str]) -> DeviceShare | None:
        """None: it asks for none, or no device is known here.

        The training's own CUDA_VISIBLE_DEVICES is the list that it may choose from.
        """
        own = None if VARIABLE not in env else parse_ids(env[VARIABLE])
        if not count or not (self.ids or own):
            return None
        if own is None or not self.ids:
            return DeviceShare(count, self.ids or own or [])
        return DeviceShare(count, [device for device in self.ids if device in own])

    def assign(self, uid: str, size: int, share: DeviceShare) -> Assignment | None:
        """Devices for ranks `0..size-1`, and for the higher ones that still have theirs; None if
        there are too few."""
        assigned = dict(self._assigned.get(uid, {}))
        free = self.free(share)
        for rank in range(size):
            if rank not in assigned:
                if len(free) < share.each:
                    return None
                assigned[rank], free = free[: share.each], free[share.each :]
        self._assigned[uid] = assigned
        return assigned

    def keep(self, uid: str, ranks: int) -> bool:
        """Higher ranks give theirs back. Returns whether some did."""
        assigned = self._assigned.get(uid, {})
        departed = [rank for rank in assigned if rank >= ranks]
        for rank in departed:
            del assigned[rank]
        if not assigned:
            self._assigned.pop(uid, None)
        return bool(departed)

    def take_over(self, uid: str, assigned: Mapping[str, Sequence[str]]) -> None:
        """What the document of a gang says of an earlier control plane's choice."""
        if assigned:
            self._assigned[uid] = {int(rank): list(devices) for rank, devices in assigned.items()}

    def describe(self, share: DeviceShare, host: str, least: int) -> str:
        """Why ranks wait."""
        used = len(share.of) - len(self.free(share))
        message = f"{used} of {len(share.of)} GPUs of {host} are in use, and each rank takes"
        if len(share.of) < least * share.each:
            return f"{message} {share.each}: {least} ranks need {least * share.each}"
        return f"{message} {share.each}"

    def free(self, share: DeviceShare) -> list[str]:
        """Those that no rank has."""
        used = Counter(
            device
            for assigned in self._assigned.values()
            for devices in assigned.values()
            for device in devices
        )
        free = []
        for device in share.of:
            if used[device]:
                used[device] -= 1
            else:
                free.append(device)
        return free


def parse_ids(text: str) -> list[str]:
    """As CUDA reads the variable: what comes after a negative number does not count."""
    ids = []
    for part in text.split(","):
        if not part.strip() or part.strip().startswith("-"):
            break
        ids.append(part.strip())
    return ids


def ids_of(field: str, value: object) -> list[str]:
    """A number of devices, or a list of their ids, as `[executors.local]` may say it."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DEVICES:
        return [str(device) for device in range(value)]
    if isinstance(value, list) and len(value) <= MAX_DEVICES:
        ids = [str(device) if type(device) is int else device for device in value]
        if all(isinstance(device, str) and re.fullmatch(r"[\w:./-]+", device) for device in ids):
            return ids
    raise ValidationError(field, value, "expected a number of GPUs, or a list such as [0, 1]")


def count_visible(env: Mapping[str, str], machine: int) -> int:
    """How many devices a process sees, on a machine with so many."""
    return len(parse_ids(env[VARIABLE])) if VARIABLE in env else machine


def present(env: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Those that this process may use by its environment, else all of NVIDIA's."""
    if VARIABLE in env:
        return parse_ids(env[VARIABLE])
    cards: Iterable[Path] = (root / "proc/driver/nvidia/gpus").glob("*")
    count = len(list(cards)) or len(
        [path for path in (root / "dev").glob("nvidia*") if path.name[6:].isdigit()]
    )
    return [str(device) for device in range(count)]
