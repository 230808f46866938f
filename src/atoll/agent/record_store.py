"""Where the records of a training are, as wrappers and executors see it."""

from __future__ import annotations

from typing import Protocol


class RecordStore(Protocol):
    """Where the records of one training are. Names have no slashes."""

    poll_s: float  # how often it may be asked for the wish
    heartbeat_s: float  # how often an attempt shows that it is followed

    def create(self, name: str, data: bytes) -> bool:
        """Durably, unless the name is taken; False if it is, with something else."""

    def put(self, name: str, data: bytes) -> None:
        """Durably and atomically, whatever was there before."""

    def get(self, name: str) -> bytes | None: ...

    def heartbeat(self, name: str) -> None:
        """The stamp of `name` changes."""

    def entries(self) -> dict[str, int]:
        """Return all names in one question, each with a stamp that its heartbeats change.

        The stamp is a time in nanoseconds since 1970, by the clock of the store.
        """

    def delete(self, names: list[str]) -> None:
        """Already gone is success."""
