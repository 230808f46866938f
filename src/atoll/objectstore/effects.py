"""Requests to a store as values: what a pure machine yields, and what it is sent as the answer.

Where the store fails, whoever performs them throws a StoreError in; whether a failed write happened
is then unknown, and it may still happen later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.files.writing import Buffer


class StoreError(Exception):
    """A request to the store failed for good: the driver has retried what may be retried."""


@dataclass(frozen=True, slots=True)
class Put:
    """Write an object. Answer: None."""

    key: str
    body: Buffer | Sequence[Buffer]  # pieces go one after the other


@dataclass(frozen=True, slots=True)
class Create:
    """Write an object unless its key is taken. Answer: bool.

    False: the key was taken. That may be by an earlier try of the same request, so it is no error
    and does not say whose object is there. `after`: folders of which all names survive a loss of
    power before this object is there.
    """

    key: str
    body: bytes
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete objects. Those that are not there are no error. Answer: None."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Get:
    """Read an object. Answer: its bytes, or None if it is not there."""

    key: str


@dataclass(frozen=True, slots=True)
class List:
    """List the keys that begin with `prefix` and come after `after`, sorted.

    Answer: [(key, the store's time of its last write in seconds)]. It may be no snapshot: objects
    written or deleted meanwhile are in it or not, each for itself.
    """

    prefix: str
    after: str = ""
