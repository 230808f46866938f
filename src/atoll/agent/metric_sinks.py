"""Where metrics of a rank go: a folder on its host, the control plane by HTTP, an object store.

The scheme of the variable `ATOLL_REPORTS` says which. A sink is used by one thread.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

TYPE_CHECKING = False  # it travels with `agent/machine_use.py`, to Python 3.7 as well
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Protocol
else:
    Protocol = object

WHERE = "ATOLL_REPORTS"
TOKEN = "ATOLL_REPORTS_TOKEN"
METRICS = "metrics"  # the folder, or prefix, of what the ranks of a training report
EVERY_S = 1.0  # a page that follows a training draws once a second
SEGMENT_BYTES = 2**20  # of a file, which the collector deletes when it has read it
UNCOLLECTED_SEGMENTS = 8  # from here on nobody seems to read: send less
UNCOLLECTED_S = 60.0  # a point a minute is enough for somebody who comes back after days
HTTP_EVERY_S = 2.0  # 1,000 ranks are 500 requests a second, which one control plane takes
HTTP_TIMEOUT_S = 5.0  # then merged and sent with the next batch
OBJECTS_EVERY_S = 15.0  # a put costs money: 240 an hour and rank
OFTEN = 240  # objects of one process; later ones are rarer
STORES = ("s3", "gs", "az")


class BatchRefused(Exception):
    """This batch will never be taken."""


class Sink(Protocol):
    """Where metrics go."""

    patience_s: float  # until a failed try is repeated

    def hand_on(self, batch: bytes) -> float:
        """Returns the seconds until the next batch is wanted. Raises OSError and BatchRefused."""


class FolderSink:
    """Files in a folder that the control plane reads and clears away."""

    patience_s = 5.0

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder
        self._owner = owner
        self._number = 0
        self._pause_s = EVERY_S

    def hand_on(self, batch: bytes) -> float:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{self._owner}.{self._number:06d}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            start = os.fstat(file).st_size
            try:
                if os.write(file, batch) != len(batch):
                    raise OSError(f"{path} took only a part")
            except OSError:
                os.ftruncate(file, start)
                raise
        finally:
            os.close(file)
        if start + len(batch) >= SEGMENT_BYTES:
            self._number += 1
            uncollected = sum(
                name.startswith(f"{self._owner}.") for name in os.listdir(self._folder)
            )
            self._pause_s = EVERY_S if uncollected < UNCOLLECTED_SEGMENTS else UNCOLLECTED_S
        return self._pause_s


class HttpSink:
    """The control plane, by a token that can report for this training and nothing else."""

    patience_s = 10.0

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    def hand_on(self, batch: bytes) -> float:
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/x-ndjson"}
        request = Request(self._url, batch, headers, method="POST")
        try:
            with urlopen(request, timeout=HTTP_TIMEOUT_S) as response:
                response.read()
        except HTTPError as error:
            with error:
                answer = error.read(300).decode(errors="replace")
            message = f"{self._url} answered {error.code}: {answer}"
            if error.code in (400, 413, 422):
                raise BatchRefused(message) from error
            raise OSError(message) from error
        return HTTP_EVERY_S


class ObjectSink:
    """Objects in a store that the control plane reads and deletes."""

    patience_s = 30.0

    def __init__(self, uri: str, owner: str) -> None:
        self._uri = uri
        self._owner = owner
        self._store: Any = None
        self._number = 0

    def hand_on(self, batch: bytes) -> float:
        from atoll.core.errors import BackendError
        from atoll.objectstore.bucket import Bucket

        try:
            if self._store is None:
                self._store = Bucket.open(self._uri)
            self._store.put(f"{self._owner}.{self._number:06d}", batch)
        except BackendError as error:
            raise OSError(str(error)) from error
        self._number += 1
        return OBJECTS_EVERY_S if self._number < OFTEN else UNCOLLECTED_S


def sink_of(environment: Mapping[str, str], owner: str) -> Sink | None:
    """None where metrics go nowhere."""
    where = environment.get(WHERE, "")
    url = urlsplit(where)
    if url.scheme == "file":
        return FolderSink(Path(unquote(url.path)), owner)
    if url.scheme in ("http", "https"):
        return HttpSink(where, environment.get(TOKEN, ""))
    if url.scheme in STORES:
        return ObjectSink(where, owner)
    return None
