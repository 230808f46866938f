"""What a backend must be able to do for the table to be run on it."""

from __future__ import annotations

from typing import Protocol

from tests.conformance.table import Row

from atoll.core.status import Training


class Backend(Protocol):
    """Runs trainings of ranks that each run until told to exit, and provokes faults for real."""

    name: str

    def cannot(self, row: Row) -> str:
        """Why this fault cannot be provoked here; empty if it can."""

    def deploy(self, row: Row) -> str:
        """A training of the row's world is asked for. Its name."""

    def until_running(self, name: str) -> None:
        """All ranks run."""

    def strike(self, row: Row, name: str) -> None:
        """The row's fault has been provoked; a controller that was to die has been replaced."""

    def end(self, name: str) -> None:
        """Every rank is told to exit 0, whatever its attempt."""

    def until_over(self, name: str) -> Training: ...

    def attempts(self, name: str) -> list[tuple[int, int]]:
        """(rank, attempt) once for each time that a rank began to run."""

    def left(self, name: str) -> list[str]:
        """What still runs for the training, once the executor has let go of it."""
