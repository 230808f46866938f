"""Blobs, the objects under one URI: put, create-only put, ranged get, find, delete.

The URI is file:// memory:// s3:// gs:// or az://. Every request is counted, and retried while the
failure looks temporary. The store's own retries are off, so the counts are the requests made.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
import obstore.exceptions as failures
from obstore.store import LocalStore, MemoryStore, from_url

from atoll.core.errors import NotFound, Permanent, Temporary, ValidationError
from atoll.core.retry import Retry

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

SCHEMES = ("file", "memory", "s3", "gs", "az")
LIST_PAGE = 1000  # keys in one LIST answer, and in one bulk delete
SINGLE_PUT_BYTES = 1 << 30  # larger objects go up in parts
PART_BYTES = 256 << 20
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

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


@dataclass(frozen=True)
class Blob:
    key: str
    size: int
    modified: datetime


@dataclass
class Traffic:
    """What was asked of the store so far. Every try counts, failed ones too."""

    requests: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.requests - earlier.requests,
            self.bytes_up - earlier.bytes_up,
            self.bytes_down - earlier.bytes_down,
        )


class Blobs:
    """The objects under one URI. Safe to use from many threads."""

    def __init__(self, store: Any, name: str, *, patience_s: float = 60.0) -> None:
        """`patience_s`: how long a failing request is tried again before it is given up."""
        self.name = name
        self._store = store
        self._patience_s = patience_s
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
    def usage(self) -> Traffic:
        with self._lock:
            return Traffic(self._usage.requests, self._usage.bytes_up, self._usage.bytes_down)

    def put(self, key: str, data: Buffer) -> None:
        """The object is there with `data`, whatever was there before."""
        size = memoryview(data).nbytes
        parts: dict[str, Any] = {"use_multipart": False}
        if size > SINGLE_PUT_BYTES:
            parts = {"use_multipart": True, "chunk_size": PART_BYTES}
        self._write(lambda: obstore.put(self._store, key, data, **parts), size)

    def create(self, key: str, data: Buffer) -> bool:
        """Put the object unless the key is taken; False if it is.

        It may be this very call that took it: when an answer gets lost, the retry meets its own
        object. Whoever gets False reads what is there.
        """
        size = memoryview(data).nbytes
        put = lambda: obstore.put(self._store, key, data, mode="create", use_multipart=False)  # noqa: E731
        try:
            self._write(put, size)
        except (failures.AlreadyExistsError, failures.PreconditionError):
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

        try:
            data = self._ask(whole if end is None and start == 0 else part)
        except FileNotFoundError:
            raise NotFound("object", key) from None
        with self._lock:
            self._usage.bytes_down += data.nbytes
        return data

    def find(self, prefix: str, after: str | None = None) -> list[Blob]:
        """All objects under the folder `prefix` with keys greater than `after`, sorted by key."""

        def read() -> list[Blob]:
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

    def delete(self, keys: Iterable[str]) -> None:
        """None of the objects is there any more. Those already gone are no error."""
        doomed = list(keys)
        for first in range(0, len(doomed), LIST_PAGE):
            batch = doomed[first : first + LIST_PAGE]
            try:
                self._ask(lambda batch=batch: obstore.delete(self._store, batch))  # type: ignore[misc]
            except FileNotFoundError:
                self._delete_one_by_one(batch)

    def _write(self, put: Callable[[], Any], size: int) -> None:
        try:
            self._ask(put, up=size)
        except FileNotFoundError as error:  # a put needs no object, so it is the bucket
            raise Permanent(
                f"{self.name}: there is no such bucket: {_first_line(error)}"
            ) from error

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
        while True:
            with self._lock:
                self._usage.requests += 1
                self._usage.bytes_up += up
            try:
                return request()
            except FINAL as error:
                raise Permanent(f"{self.name}: {_first_line(error)}") from error
            except (
                FileNotFoundError,
                failures.AlreadyExistsError,
                failures.PreconditionError,
            ) as e:
                if not isinstance(e, temporary):
                    raise
                problem: Exception = e
            except (failures.BaseError, OSError, Temporary) as e:
                problem = e
            pause_s = retry.pause_s()
            if pause_s is None:
                raise Temporary(
                    f"{self.name}: no answer for {self._patience_s:g} s: {_first_line(problem)}"
                ) from problem
            time.sleep(pause_s)


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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
