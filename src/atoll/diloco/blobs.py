"""Blobs, the objects under one URI: put, create-only put, ranged get, find, delete.

The URI is file:// memory:// s3:// gs:// or az://. Every request is counted, and retried while the
failure looks temporary. The store's own retries are off, so the counts are the requests made.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
import obstore.exceptions as failures
from obstore.store import LocalStore, MemoryStore, from_url

from atoll.core.errors import NotFound, Permanent, Temporary, ValidationError
from atoll.core.retry import Retry
from atoll.core.stores import missing_keys
from atoll.diloco.silence import Silence, begin
from atoll.objectstore import Traffic

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
Pieces = Sequence[Buffer]  # the bytes of one object, one after the other

SCHEMES = ("file", "memory", "s3", "gs", "az")
LIST_PAGE = 1000  # keys in one LIST answer, and in one bulk delete
SINGLE_PUT_BYTES = 1 << 30  # larger objects go up in parts
PART_BYTES = 256 << 20
MAX_PIECES = 1024  # of one write to a file
CHUNK_BYTES = 1 << 20  # of an answer that is read as it comes
REQUEST_TIMEOUT = "300s"
FINAL = (
    failures.PermissionDeniedError,
    failures.UnauthenticatedError,
    failures.NotSupportedError,
    failures.InvalidPathError,
    failures.UnknownConfigurationKeyError,
    NotImplementedError,
    PermissionError,
)

# The store spells other keys differently in the names of files.
# As S3, Azure and Google say it of a listing.
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")
_PLAIN = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*(/[A-Za-z0-9_+-][A-Za-z0-9_.+-]*)*")
_STAGED = re.compile(r"#\d+$")  # of a file that is being written
_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


@dataclass(frozen=True)
class Blob:
    key: str
    size: int
    modified: datetime


class Blobs:
    """The objects under one URI. Safe to use from many threads."""

    def __init__(self, store: Any, name: str, *, patience_s: float = 60.0) -> None:
        """`patience_s`: how long a failing request is tried again before it is given up."""
        self.name = name
        self._store = store
        self._folder = str(store.prefix) if isinstance(store, LocalStore) and store.prefix else None
        self._patience_s = patience_s
        self._silence = Silence(name)
        self._usage = Traffic()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, uri: str | os.PathLike[str], *, patience_s: float = 60.0) -> Blobs:
        """The store at `uri`, a plain path or file:// memory:// s3:// gs:// az://.

        memory:// is shared by everyone in this process who names the same URI.
        """
        text = os.fspath(uri) if isinstance(uri, os.PathLike) else uri
        if not isinstance(text, str) or not text:
            raise ValidationError("uri", uri, f"expected a path or one of {', '.join(SCHEMES)}")
        return cls(_open_store(text), text, patience_s=patience_s)

    @property
    def is_folder(self) -> bool:
        """Whether objects are files: a request takes no time but that of its bytes."""
        return self._folder is not None

    @property
    def usage(self) -> Traffic:
        with self._lock:
            return Traffic(self._usage.requests, self._usage.bytes_up, self._usage.bytes_down)

    def put(self, key: str, data: Buffer | Pieces) -> None:
        """The object is there with `data`, whatever was there before.

        The memory of `data` is the caller's again when this returns or raises.
        """
        path = self.path_of(key)
        if path is not None:
            self._write(lambda: write_file(path, _pieces(data)), _size(data))
            return
        size, data = _size(data), self._apart(data)
        parts: dict[str, Any] = {"use_multipart": False}
        if size > SINGLE_PUT_BYTES:
            parts = {"use_multipart": True, "chunk_size": PART_BYTES}
        self._write(lambda: obstore.put(self._store, key, data, **parts), size)

    def create(self, key: str, data: Buffer | Pieces) -> bool:
        """Put the object unless the key is taken; False if it is.

        It may be this very call that took it: when an answer gets lost, the retry meets its own
        object. Whoever gets False reads what is there.
        """
        path, size = self.path_of(key), _size(data)
        put: Callable[[], Any]
        if path is None:
            data = self._apart(data)
            put = lambda: obstore.put(self._store, key, data, mode="create", use_multipart=False)  # noqa: E731
        else:
            put = lambda: write_file(path, _pieces(data), is_new=True)  # noqa: E731
        try:
            self._write(put, size)
        except (failures.AlreadyExistsError, failures.PreconditionError, FileExistsError):
            return False
        return True

    def get(self, key: str, start: int = 0, end: int | None = None) -> memoryview:
        """Bytes `start:end` of the object; fewer if it is shorter. Raises NotFound."""
        if end is not None and end <= start:
            return memoryview(b"")

        def whole() -> memoryview:
            return memoryview(obstore.get(self._store, key).bytes())

        def part() -> memoryview:
            try:
                return memoryview(obstore.get_range(self._store, key, start=start, end=end))
            except failures.GenericError:
                # A range past the end has no error type of its own, so the size decides.
                if obstore.head(self._store, key)["size"] <= start:
                    return memoryview(b"")
                raise

        path = self.path_of(key)
        if path is not None:
            read: Callable[[], memoryview] = lambda: read_file(path, start, end)  # noqa: E731
        else:
            read = whole if end is None and start == 0 else part
        try:
            data = self._ask(read)
        except FileNotFoundError:
            raise NotFound("object", key) from None
        with self._lock:
            self._usage.bytes_down += data.nbytes
        return data

    def get_dated(self, key: str, most: int) -> tuple[memoryview, datetime]:
        """The whole object, and when it was written. Raises NotFound, and Permanent for one of
        more than `most` bytes."""

        def read() -> tuple[memoryview, datetime]:
            answer = obstore.get(self._store, key)
            if answer.meta["size"] > most:
                raise Permanent(f"{self.name}: {key} has more than {most} bytes")
            return memoryview(answer.bytes()), answer.meta["last_modified"]

        try:
            data, modified = self._ask(read)
        except FileNotFoundError:
            raise NotFound("object", key) from None
        with self._lock:
            self._usage.bytes_down += data.nbytes
        return data, modified

    def reader(self, key: str, start: int = 0, end: int | None = None) -> BlobReader:
        """Bytes `start:end` of the object, to be read one after the other: one request."""
        return BlobReader(self, key, start, end)

    def find(self, prefix: str, after: str | None = None) -> list[Blob]:
        """All objects under the folder `prefix` with keys greater than `after`, sorted by key."""

        def read() -> list[Blob]:
            if self._folder is not None and _PLAIN.fullmatch(prefix):
                blobs = list_files(self._folder, prefix, after or "")
                if blobs is not None:
                    return blobs
            pages = obstore.list(self._store, prefix, offset=after, chunk_size=LIST_PAGE)
            return sorted(
                (Blob(m["path"], m["size"], m["last_modified"]) for page in pages for m in page),
                key=lambda blob: blob.key,
            )

        # A folder that others delete from can fail with "not found" halfway.
        blobs = self._ask(read, temporary=(FileNotFoundError,))
        with self._lock:
            self._usage.requests += len(blobs) // LIST_PAGE
        return blobs

    def folders(self) -> list[str]:
        """The names that keys begin with, up to their first slash."""

        def read() -> list[str]:
            return list(obstore.list_with_delimiter(self._store)["common_prefixes"])

        return self._ask(read, temporary=(FileNotFoundError,))

    def delete(self, keys: Iterable[str]) -> None:
        """None of the objects is there any more. Those already gone are no error."""
        doomed = list(keys)
        for first in range(0, len(doomed), LIST_PAGE):
            batch = doomed[first : first + LIST_PAGE]
            try:
                self._ask(lambda batch=batch: obstore.delete(self._store, batch))  # type: ignore[misc]
            except FileNotFoundError:
                self._delete_one_by_one(batch)

    def path_of(self, key: str) -> str | None:
        """The file that holds the object, where objects are files."""
        if self._folder is None or not _PLAIN.fullmatch(key):
            return None
        return f"{self._folder}/{key}"

    def _apart(self, data: Buffer | Pieces) -> Buffer | Pieces:
        """The data, copied where the store would keep the caller's memory as the object."""
        if not isinstance(self._store, MemoryStore):
            return data
        return b"".join([data] if isinstance(data, bytes | bytearray | memoryview) else data)

    def _write(self, put: Callable[[], Any], size: int) -> None:
        try:
            self._ask(put, up=size)
        except FileNotFoundError as error:  # a put needs no object, so it is the bucket
            raise Permanent(f"{self.name}: there is no such bucket: make it first") from error

    def _delete_one_by_one(self, keys: list[str]) -> None:
        for key in keys:
            try:
                self._ask(lambda key=key: obstore.delete(self._store, key))  # type: ignore[misc]
            except FileNotFoundError:
                pass

    def _ask(
        self,
        request: Callable[[], T],
        *,
        up: int = 0,
        temporary: tuple[type[Exception], ...] = (),
    ) -> T:
        retry = Retry(
            0.05,
            2.0,
            jitter=lambda: random.uniform(0.5, 1.0),
            patience_s=self._patience_s,
            clock=time.monotonic,
        )
        end = begin(self._silence, up)
        is_answer = True
        try:
            while True:
                with self._lock:
                    self._usage.requests += 1
                    self._usage.bytes_up += up
                try:
                    return request()
                except FINAL as error:  # without its own text: pages of debug output
                    raise Permanent(f"{self.name}: {_first_line(error)}") from None
                except (
                    FileNotFoundError,
                    FileExistsError,
                    failures.AlreadyExistsError,
                    failures.PreconditionError,
                ) as e:
                    if not isinstance(e, temporary):
                        raise
                    problem: Exception = e
                except (failures.BaseError, OSError, Temporary) as e:
                    if _NO_BUCKET.search(str(e)):
                        message = "there is no such bucket: make it first"
                        raise Permanent(f"{self.name}: {message}") from None
                    problem = e
                self._silence.fail(_first_line(problem))
                pause_s = retry.pause_s()
                if pause_s is None:
                    is_answer = False
                    missing = ", ".join(missing_keys(self.name, os.environ))
                    keys = f"; not set: {missing}" if missing else ""
                    message = f"{self.name}: no answer for {self._patience_s:g} s"
                    raise Temporary(f"{message}: {_first_line(problem)}{keys}") from None
                time.sleep(pause_s)
        finally:
            end(is_answer)


class BlobReader:
    """Fills buffers with the bytes of an object as they come. Used by one thread."""

    def __init__(self, blobs: Blobs, key: str, start: int, end: int | None) -> None:
        self._blobs = blobs
        self._key, self._path = key, blobs.path_of(key)
        self._at, self._end = start, end
        self._chunks: Iterator[Any] | None = None
        self._rest = memoryview(b"")
        self._file = -1

    def __enter__(self) -> BlobReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._chunks = None

    def fill(self, target: memoryview) -> int:
        """How many bytes were there for it: fewer than it has room for at the end of the range.

        Raises NotFound.
        """
        path = self._path
        count = self._from_stream(target) if path is None else self._from_file(path, target)
        with self._blobs._lock:
            self._blobs._usage.bytes_down += count
        return count

    def _from_file(self, path: str, target: memoryview) -> int:
        if self._file < 0:
            try:
                self._file = self._blobs._ask(lambda: os.open(path, os.O_RDONLY))
            except FileNotFoundError:
                raise NotFound("object", self._key) from None
        if self._end is not None:
            target = target[: max(0, self._end - self._at)]
        count = _fill_from(self._file, target, self._at)
        self._at += count
        return count

    def _from_stream(self, target: memoryview) -> int:
        count = 0
        while count < target.nbytes:
            if not self._rest.nbytes:
                self._rest = self._next()
                if not self._rest.nbytes:
                    break
            part = self._rest[: target.nbytes - count]
            target[count : count + part.nbytes] = part
            self._rest = self._rest[part.nbytes :]
            count, self._at = count + part.nbytes, self._at + part.nbytes
        return count

    def _next(self) -> memoryview:
        if self._end is not None and self._at >= self._end:
            return memoryview(b"")
        if self._chunks is not None:
            try:
                return memoryview(next(self._chunks, b""))
            except (failures.BaseError, OSError):
                self._chunks = None  # an answer that breaks off goes on with another request
        try:
            return self._blobs._ask(self._open)
        except FileNotFoundError:
            raise NotFound("object", self._key) from None

    def _open(self) -> memoryview:
        """The first chunk from here on."""
        store, at = self._blobs._store, self._at
        span: Any = {"offset": at} if self._end is None else (at, self._end)
        is_whole = self._end is None and not at
        try:
            answer = obstore.get(store, self._key, options=None if is_whole else {"range": span})
        except failures.GenericError:
            # A range past the end has no error type of its own, so the size decides.
            if obstore.head(store, self._key)["size"] <= at:
                return memoryview(b"")
            raise
        chunks = iter(answer.stream(min_chunk_size=CHUNK_BYTES))
        first = memoryview(next(chunks, b""))
        self._chunks = chunks
        return first


def _pieces(data: Buffer | Pieces) -> Pieces:
    return [data] if isinstance(data, bytes | bytearray | memoryview) else data


def _size(data: Buffer | Pieces) -> int:
    return sum(memoryview(piece).nbytes for piece in _pieces(data))


def write_file(path: str, pieces: Pieces, *, is_new: bool = False) -> None:
    """The file is there with the pieces, all at once. Raises FileExistsError if `is_new` and it is.

    Until then its bytes are in a file beside it, with a name that the store's client uses for the
    same, and that no listing has.
    """
    staging, file = _stage(path)
    try:
        try:
            rest = [view for piece in pieces if (view := memoryview(piece).cast("B")).nbytes]
            while rest:
                count = os.writev(file, rest[:MAX_PIECES])
                while rest and count >= rest[0].nbytes:
                    count -= rest.pop(0).nbytes
                if count:
                    rest[0] = rest[0][count:]
        finally:
            os.close(file)
        if is_new:
            os.link(staging, path)
        else:
            os.rename(staging, path)
    except BaseException:
        os.unlink(staging)
        raise
    if is_new:
        os.unlink(staging)


def _stage(path: str) -> tuple[str, int]:
    """A new file beside `path`, open."""
    number = 1
    while True:
        staging = f"{path}#{number}"
        try:
            return staging, os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            number += 1
        except FileNotFoundError:
            with suppress(FileNotFoundError):  # somebody deletes folders that are empty
                os.makedirs(os.path.dirname(path), exist_ok=True)


def read_file(path: str, start: int = 0, end: int | None = None) -> memoryview:
    """Bytes `start:end` of the file, fewer if it is shorter. Raises FileNotFoundError."""
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        room = memoryview(bytearray(max(0, min(size, size if end is None else end) - start)))
        return room[: _fill_from(file, room, start)]
    finally:
        os.close(file)


def list_files(folder: str, prefix: str, after: str) -> list[Blob] | None:
    """The objects with keys under `prefix` greater than `after`, sorted; None if the names of files
    are not their keys. What others delete meanwhile may be there or not.
    """
    found = list[Blob]()
    folders = [prefix]
    while folders:
        parent = folders.pop()
        try:
            entries = list(os.scandir(f"{folder}/{parent}"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            key = f"{parent}/{entry.name}"
            if _STAGED.search(key):
                continue
            if not _PLAIN.fullmatch(key):
                return None
            with suppress(FileNotFoundError):
                if entry.is_dir():
                    inside = f"{key}/"  # which all keys in it begin with
                    if inside > after or after.startswith(inside):
                        folders.append(key)
                elif key > after:
                    state = entry.stat()
                    modified = datetime.fromtimestamp(state.st_mtime_ns / 1e9, UTC)
                    found.append(Blob(key, state.st_size, modified))
    return sorted(found, key=lambda blob: blob.key)


def _fill_from(file: int, room: memoryview, at: int) -> int:
    """How many bytes there were for the room from `at` on."""
    count = 0
    while count < room.nbytes:
        more = os.preadv(file, [room[count:]], at + count)
        if not more:
            break
        count += more
    return count


def _open_store(uri: str) -> Any:
    parts = urlsplit(uri)
    if not parts.scheme:
        return _open_folder(uri, Path(uri).absolute())
    if parts.scheme not in SCHEMES:
        raise ValidationError("uri", uri, f"expected a path or one of {', '.join(SCHEMES)}")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ValidationError("uri", uri, "expected file:///absolute/path")
        if parts.query or parts.fragment:
            raise ValidationError("uri", uri, "expected '?' as %3F and '#' as %23 in a path")
        return _open_folder(uri, Path(unquote(parts.path)))
    if parts.scheme == "memory":
        with _memory_lock:
            return _memory.setdefault(uri, MemoryStore())
    if not parts.netloc:
        raise ValidationError("uri", uri, f"expected {parts.scheme}://bucket/prefix")
    try:
        return from_url(
            uri,
            client_options={
                "timeout": REQUEST_TIMEOUT,
                "connect_timeout": "10s",
                "allow_http": _is_plain_http(),
            },
            retry_config={"max_retries": 0},
            **_s3_defaults(parts.scheme),
        )
    except failures.BaseError as error:
        raise ValidationError("uri", uri, _first_line(error)) from error


def _open_folder(uri: str, path: Path) -> Any:
    try:
        return LocalStore(path, mkdir=True, automatic_cleanup=True)
    except OSError as error:
        raise ValidationError("uri", uri, f"expected a folder that can be made: {error}") from error


def _is_plain_http() -> bool:
    """Whether an endpoint is plain http://, as that of a MinIO or a test server."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_ENDPOINT")
    return any(os.environ.get(name, "").startswith("http://") for name in names)


def _s3_defaults(scheme: str) -> dict[str, Any]:
    if scheme != "s3":
        return {}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config = {"region": region} | ({"endpoint": endpoint} if endpoint else {})
    return {"config": config}


_REASON = re.compile(r'\bmessage: "([^"]+)"')


def _first_line(error: Exception) -> str:
    """The error in one line, with the reason that its debug output has below."""
    first, _, rest = str(error).partition("\n")
    reason = _REASON.search(rest)
    message = f"{type(error).__name__}: {first}"
    return f"{message}: {reason[1]}" if reason and reason[1] not in first else message
