"""ObjectStore: the objects under one URI, with retries, counts and errors that say what to do.

| answer of the store | raised |
|---|---|
| no such object | NotFound |
| key refused (401, 403) | StoreDenied, at once, naming the bucket and what to check |
| no such bucket, no hard links, larger than allowed | Permanent |
| anything else, for `patience_s` without any progress | Temporary |

A transfer that makes progress is never timed out: a download goes on behind the last byte that
came, and an upload has time for its size. obstore's own retries are off, so the counts are the
requests made.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from threading import Lock
from typing import Any, Self, TypeVar

import obstore
import obstore.exceptions as failures
from obstore.store import LocalStore, MemoryStore

from atoll.core.clock import Retry
from atoll.core.errors import NotFound, Permanent, StoreDenied, Temporary
from atoll.core.stores import missing_keys
from atoll.files.writing import Buffer
from atoll.objectstore import files, idle
from atoll.objectstore.errors import (
    describe,
    is_denied,
    is_final,
    is_no_bucket,
    is_server_error,
    is_without_key,
)
from atoll.objectstore.files import PLAIN_KEY, ObjectInfo
from atoll.objectstore.opening import open_clients

__all__ = ["Buffer", "ObjectInfo", "RangeReader", "ObjectStore", "Pieces", "Traffic"]

T = TypeVar("T")
Pieces = Sequence[Buffer]  # the bytes of one object, one after the other

LIST_PAGE = 1000  # keys in one LIST answer, and in one bulk delete: S3's limit
# Larger objects go up in parts, each a request with a time limit of its own. A part is large enough
# that a request's latency does not count, and four in flight are 128 MiB of copies.
MAX_PUT_BYTES = 256 << 20
PART_BYTES = 32 << 20
PARTS_IN_FLIGHT = 4
MAX_CREATE_BYTES = 5 << 30  # S3's limit for one request; a create cannot be cut into parts
CHUNK_BYTES = 1 << 20  # of an answer that is read as it comes
# A store that is restarted, or fails over, is back within a minute. A caller with a shorter limit
# of time waits no longer than that.
PATIENCE_S = 60.0
# Without any key a client asks its machine for one: it has so long, in place of `patience_s`.
KEYLESS_PATIENCE_S = 5.0

_TAKEN = (failures.AlreadyExistsError, failures.PreconditionError, FileExistsError)


@dataclass
class Traffic:
    """What was asked of the store. Every try counts, failed ones too."""

    requests: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.requests - earlier.requests,
            self.bytes_up - earlier.bytes_up,
            self.bytes_down - earlier.bytes_down,
        )


class ObjectStore:
    """The objects under one URI. Safe to use from many threads."""

    def __init__(
        self,
        client: Any,
        uri: str,
        *,
        patience_s: float = PATIENCE_S,
        upload_client: Callable[[float], Any] | None = None,
    ) -> None:
        """Use `open`. `upload_client(seconds)`: the client whose uploads may take so long."""
        self.uri = uri
        self._reader = client
        self._clients = upload_client or (lambda seconds: client)
        is_local = isinstance(self._reader, LocalStore) and self._reader.prefix
        self._folder = str(self._reader.prefix) if is_local else None
        # Whether objects are files: a request takes no time but that of its bytes.
        self.is_folder = self._folder is not None
        self._patience_s = patience_s
        self._tracker = idle.IdleTracker(uri)
        self._traffic = Traffic()
        self._lock = Lock()

    @classmethod
    def open(cls, uri: str | os.PathLike[str] | Self, *, patience_s: float = PATIENCE_S) -> Self:
        """The store at `uri`, a plain path or file:// memory:// s3:// gs:// az://, or that store.

        memory:// is shared by everyone in this process who names the same URI. `patience_s`: how
        long a request that makes no progress is tried again before it is given up.
        """
        if isinstance(uri, ObjectStore):
            return uri
        text, clients = open_clients(uri)
        return cls(clients(0.0), text, patience_s=patience_s, upload_client=clients)

    @property
    def traffic(self) -> Traffic:
        with self._lock:
            return Traffic(self._traffic.requests, self._traffic.bytes_up, self._traffic.bytes_down)

    def put(
        self,
        key: str,
        data: Buffer | Pieces,
        *,
        is_durable: bool = False,
        is_name_durable: bool = True,
    ) -> None:
        """Store the object, whatever was there before.

        The memory of `data` is the caller's again when this returns or raises. `is_durable`: sync
        a file to its disk, for what a later create names; its name, too, unless that create has its
        folder among those that it comes `after`.
        """
        self._write(key, data, is_durable=is_durable, is_name_durable=is_name_durable)

    def create(
        self,
        key: str,
        data: Buffer | Pieces,
        *,
        after: Sequence[str] = (),
        is_name_durable: bool = True,
    ) -> bool:
        """Store the object unless the key is taken; return False if it is. A file is synced.

        `after`: folders of which all names are durable before this object is there.

        It may be this very call that took it: when an answer gets lost, the retry meets its own
        object. Whoever gets False reads what is there.
        """
        try:
            self._write(key, data, after, is_new=True, is_name_durable=is_name_durable)
        except _TAKEN:
            return False
        return True

    def require_conditional_writes(self, folder: str) -> None:
        """Raise Permanent if a key under `folder` can be created twice."""
        key = f"{folder}/probe-{secrets.token_hex(8)}"
        self.create(key, b"1")
        is_twice = self.create(key, b"2")
        self.delete([key])
        if is_twice:
            raise Permanent(
                f"{self.uri}: the store ignores conditional writes (If-None-Match: *), without "
                "which two writers could both have one round or version: use a store that has "
                "them, such as S3, Google Cloud Storage, Azure, MinIO or a folder"
            )

    def get(
        self, key: str, start: int = 0, end: int | None = None, *, max_bytes: int | None = None
    ) -> memoryview:
        """Bytes `start:end` of the object, fewer if it is shorter. Raises NotFound.

        Raises Permanent, before memory is taken, for more than `max_bytes`.
        """
        data = self.find(key, start, end, max_bytes=max_bytes)
        if data is None:
            raise NotFound("object", key)
        return data

    def find(
        self, key: str, start: int = 0, end: int | None = None, *, max_bytes: int | None = None
    ) -> memoryview | None:
        """As `get`; None if there is no such object."""
        if end is not None and end <= start:
            return memoryview(b"")
        path = self.path_of(key)
        if path is not None:
            try:
                data = self._ask(lambda: files.read_file(path, start, end, max_bytes))
            except FileNotFoundError:
                return None
            self._count(down=data.nbytes)
            return data
        with self.reader(key, start, end) as reader:
            try:
                size = reader.remaining()
            except NotFound:
                return None
            files.check_size(f"{self.uri}: {key}", size, max_bytes)
            buffer = memoryview(bytearray(size))
            return buffer[: reader.fill(buffer)]

    def get_with_time(self, key: str, *, max_bytes: int) -> tuple[memoryview, datetime]:
        """The whole object, and when the store wrote it. Raises NotFound; Permanent if larger."""

        def read() -> tuple[memoryview, datetime]:
            answer = obstore.get(self._reader, key)
            files.check_size(f"{self.uri}: {key}", answer.meta["size"], max_bytes)
            return memoryview(answer.bytes()), answer.meta["last_modified"]

        try:
            data, modified = self._ask(read)
        except FileNotFoundError:
            raise NotFound("object", key) from None
        self._count(down=data.nbytes)
        return data, modified

    def reader(self, key: str, start: int = 0, end: int | None = None) -> RangeReader:
        """Bytes `start:end` of the object, to be read one after the other: one request."""
        return RangeReader(self, key, start, end)

    def list(self, prefix: str, after: str | None = None) -> list[ObjectInfo]:
        """All objects under the folder `prefix` with keys greater than `after`, sorted by key."""
        match: list[ObjectInfo] | None = None
        if self._folder is not None and PLAIN_KEY.fullmatch(prefix):
            match = self._ask(partial(files.list_files, self._folder, prefix, after or ""))
            if match is not None:
                return match

        def read() -> list[ObjectInfo]:
            pages = obstore.list(self._reader, prefix, offset=after, chunk_size=LIST_PAGE)
            rows = (
                ObjectInfo(m["path"], m["size"], m["last_modified"]) for page in pages for m in page
            )
            return sorted(rows, key=lambda info: info.key)

        # A folder that others delete from can fail with "not found" halfway.
        match = self._ask(read, temporary=(FileNotFoundError,))
        self._count(requests=len(match) // LIST_PAGE)
        return match

    def list_folders(self) -> Sequence[str]:
        """The names that keys begin with, up to their first slash."""

        def read() -> Sequence[str]:
            return obstore.list_with_delimiter(self._reader)["common_prefixes"]

        return self._ask(read, temporary=(FileNotFoundError,))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects. Those already gone are no error."""
        doomed = [*keys]
        for first in range(0, len(doomed), LIST_PAGE):
            batch = doomed[first : first + LIST_PAGE]
            paths = [path for key in batch if (path := self.path_of(key))]
            if self._folder is not None and len(paths) == len(batch):
                self._ask(partial(files.delete_files, self._folder, paths))
                continue
            try:
                self._ask(partial(obstore.delete, self._reader, batch))
            except FileNotFoundError:
                self._delete_one_by_one(batch)

    def _delete_one_by_one(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                self._ask(partial(obstore.delete, self._reader, key))
            except FileNotFoundError:
                pass

    def path_of(self, key: str) -> str | None:
        """The file that holds the object, where objects are files."""
        if self._folder is None or not PLAIN_KEY.fullmatch(key):
            return None
        return f"{self._folder}/{key}"

    def _count(self, requests: int = 0, up: int = 0, down: int = 0) -> None:
        with self._lock:
            self._traffic.requests += requests
            self._traffic.bytes_up += up
            self._traffic.bytes_down += down

    def _write(
        self,
        key: str,
        data: Buffer | Pieces,
        after: Sequence[str] = (),
        *,
        is_new: bool = False,
        is_durable: bool = True,
        is_name_durable: bool = True,
    ) -> None:
        pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
        size = sum(memoryview(piece).nbytes for piece in pieces)
        path = self.path_of(key)
        request: Callable[[], object]
        if path is not None:
            request = partial(
                files.write_object,
                path,
                pieces,
                [f"{self._folder}/{folder}" for folder in after],
                is_new=is_new,
                is_durable=is_durable,
                is_name_durable=is_name_durable,
            )
        elif is_new and size > MAX_CREATE_BYTES:
            raise Permanent(f"{self.uri}: {key} has {size} bytes, at most {MAX_CREATE_BYTES} fit")
        else:
            request = self._put_request(key, pieces, size, is_new=is_new)
        try:
            self._ask(request, up=size)
        except FileNotFoundError as error:  # a put needs no object, so it is the bucket
            raise Permanent(f"{self.uri}: there is no such bucket: make it first") from error

    def _put_request(
        self, key: str, pieces: Pieces, size: int, *, is_new: bool
    ) -> Callable[[], object]:
        if isinstance(self._reader, MemoryStore):
            pieces = [b"".join(pieces)]  # it would keep the caller's memory as the object
        if is_new or size <= MAX_PUT_BYTES:
            put = partial(obstore.put, self._clients(_seconds_for(size)), key, pieces)
            return partial(put, mode="create" if is_new else "overwrite", use_multipart=False)
        self._count(requests=-(-size // PART_BYTES) + 1)  # the parts, their begin and end
        return partial(
            obstore.put,
            self._clients(_seconds_for(PART_BYTES * PARTS_IN_FLIGHT)),
            key,
            pieces,
            use_multipart=True,
            chunk_size=PART_BYTES,
            max_concurrency=PARTS_IN_FLIGHT,
        )

    def _ask(
        self,
        request: Callable[[], T],
        *,
        up: int = 0,
        temporary: tuple[type[Exception], ...] = (),
    ) -> T:
        """Make the request, again while its failure looks temporary."""
        retry: Retry | None = None
        began = time.monotonic()
        number = self._tracker.begin(up, began)
        idle.watch.add(self._tracker)
        is_answer = True
        try:
            while True:
                self._count(requests=1, up=up)
                try:
                    return request()
                except (FileNotFoundError, *_TAKEN) as error:
                    if not isinstance(error, temporary):
                        raise
                    problem: Exception = error
                except (failures.BaseError, OSError, NotImplementedError) as error:
                    self._raise_final(error, time.monotonic() - began)
                    problem = error
                self._tracker.fail(describe(problem))
                retry = retry or self._make_retry(time.monotonic() - began)
                pause_s = retry.pause_s()
                if pause_s is None:
                    is_answer = False
                    raise Temporary(self._no_answer(problem)) from None
                time.sleep(pause_s)
        finally:
            if text := self._tracker.end(number, time.monotonic(), is_answer=is_answer):
                idle.log.warning("%s", text)

    def _make_retry(self, waited_s: float) -> Retry:
        return Retry(
            0.05,
            2.0,
            jitter=lambda: random.uniform(0.5, 1.0),
            patience_s=self._patience_s - waited_s,
            clock=time.monotonic,
        )

    def _raise_final(self, error: Exception, waited_s: float) -> None:
        """Raise what trying again will not mend; without the error's own pages of debug output."""
        if is_no_bucket(error):
            raise Permanent(f"{self.uri}: there is no such bucket: make it first") from None
        missing = missing_keys(self.uri, os.environ)
        is_keyless = bool(missing) and is_without_key(error) and waited_s >= KEYLESS_PATIENCE_S
        if is_denied(error) or is_keyless:
            keys = f"set {', '.join(missing)}" if missing else "check the key"
            raise StoreDenied(
                f"{self.uri}: the store refused access: {describe(error)}; {keys}, and that it may "
                f"read, write, list and delete objects there"
            ) from None
        if is_final(error):
            raise Permanent(f"{self.uri}: {describe(error)}") from None

    def _no_answer(self, problem: Exception) -> str:
        missing = missing_keys(self.uri, os.environ)
        keys = f"; not set: {', '.join(missing)}" if missing else ""
        return f"{self.uri}: no answer for {self._patience_s:g} s: {describe(problem)}{keys}"

    def _progress(self, count: int) -> None:
        self._count(down=count)
        if text := self._tracker.progress(time.monotonic()):
            idle.log.warning("%s", text)


class RangeReader:
    """Fills buffers with the bytes of an object as they come. Used by one thread."""

    def __init__(self, store: ObjectStore, key: str, start: int, end: int | None) -> None:
        self._store = store
        self._key, self._path = key, store.path_of(key)
        self._at, self._end = start, end
        self._stop = -1  # where the range ends in the object, once the store said so
        self._chunks: Iterator[Any] | None = None
        self._remainder = memoryview(b"")
        self._file = -1

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._chunks = None

    def remaining(self) -> int:
        """How many bytes of the range are still to come. Raises NotFound."""
        self._open()
        return max(0, self._stop - self._at)

    def fill(self, buffer: memoryview) -> int:
        """Read into the buffer; return how many bytes there were: fewer at the end of the range.

        Raises NotFound.
        """
        self._open()
        if self._path is not None:
            left = max(0, self._stop - self._at)
            if buffer.nbytes > left:
                buffer = buffer[:left]
            count = files.fill_from(self._file, buffer, self._at)
            self._at += count
            self._store._count(down=count)
            return count
        count = 0
        while count < buffer.nbytes and self._at < self._stop:
            if not self._remainder.nbytes and not self._next_chunk():
                break
            part = self._remainder[: buffer.nbytes - count]
            buffer[count : count + part.nbytes] = part
            self._remainder = self._remainder[part.nbytes :]
            count, self._at = count + part.nbytes, self._at + part.nbytes
        return count

    def _open(self) -> None:
        if self._stop >= 0:
            return
        try:
            if self._path is None:
                self._store._ask(self._request)
                return
            self._file = self._store._ask(partial(os.open, self._path, os.O_RDONLY))
        except FileNotFoundError:
            raise NotFound("object", self._key) from None
        size = os.fstat(self._file).st_size
        self._stop = size if self._end is None else min(self._end, size)

    def _request(self) -> None:
        """Ask for what is left of the range; the first chunk is read with it."""
        client, at = self._store._reader, self._at
        span: Any = {"offset": at} if self._end is None else (at, self._end)
        is_entire = self._end is None and not at
        try:
            answer = obstore.get(client, self._key, options=None if is_entire else {"range": span})
        except failures.GenericError as error:
            # A range past the end has no error type of its own, so the size decides.
            if is_server_error(error):
                raise
            if obstore.head(client, self._key)["size"] <= at:
                self._stop = at
                return
            raise
        chunks = iter(answer.stream(min_chunk_size=CHUNK_BYTES))
        self._remainder = memoryview(next(chunks, b""))
        self._stop, self._chunks = answer.range[1], chunks
        self._store._progress(self._remainder.nbytes)

    def _next_chunk(self) -> bool:
        """Read the next chunk; an answer that breaks off goes on with another request."""
        if self._chunks is not None:
            try:
                self._remainder = memoryview(next(self._chunks, b""))
                self._store._progress(self._remainder.nbytes)
                if self._remainder.nbytes:
                    return True
            except (failures.BaseError, OSError):
                pass
        self._chunks = None
        try:
            self._store._ask(self._request)
        except FileNotFoundError:
            raise NotFound("object", self._key) from None
        return self._remainder.nbytes > 0


def _seconds_for(size: int) -> float:
    """How long a request that sends so many bytes may take."""
    return size / idle.MIN_BYTES_PER_S
