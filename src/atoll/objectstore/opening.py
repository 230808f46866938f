"""From a URI to obstore's clients."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore.exceptions as failures
from obstore.store import LocalStore, MemoryStore, from_url

from atoll.core.errors import ValidationError
from atoll.objectstore.errors import describe

SCHEMES = ("file", "memory", "s3", "gs", "az")
# A request that moves no byte for so long is given up and made again. S3 itself answers "slow
# down" or closes within 20 s; a minute leaves room for a proxy.
IDLE_TIMEOUT_S = 60
CONNECT_TIMEOUT = "10s"

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_clients(uri: str | os.PathLike[str]) -> tuple[str, Callable[[float], Any]]:
    """The URI as text, and the client for requests that send for so many seconds."""
    text = os.fspath(uri) if isinstance(uri, os.PathLike) else uri
    if not isinstance(text, str) or not text:
        raise ValidationError("uri", uri, f"expected a path or one of {', '.join(SCHEMES)}")
    parts = urlsplit(text)
    if not parts.scheme:
        return text, _always(_open_folder(text, Path(text).absolute()))
    if parts.scheme not in SCHEMES:
        raise ValidationError("uri", text, f"expected a path or one of {', '.join(SCHEMES)}")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ValidationError("uri", text, "expected file:///absolute/path")
        if parts.query or parts.fragment:
            raise ValidationError("uri", text, "expected '?' as %3F and '#' as %23 in a path")
        return text, _always(_open_folder(text, Path(unquote(parts.path))))
    if parts.scheme == "memory":
        with _memory_lock:
            return text, _always(_memory.setdefault(text, MemoryStore()))
    if not parts.netloc:
        raise ValidationError("uri", text, f"expected {parts.scheme}://bucket/prefix")
    return text, _RemoteClients(text, parts.scheme).client


def _always(client: Any) -> Callable[[float], Any]:
    return lambda seconds: client


class _RemoteClients:
    """One client for reads and small writes, and one for each doubling of an upload's time."""

    def __init__(self, uri: str, scheme: str) -> None:
        self._uri, self._scheme = uri, scheme
        self._lock = threading.Lock()
        self._clients: dict[int, Any] = {0: self._open(0)}

    def client(self, seconds: float) -> Any:
        step = 0
        while seconds > IDLE_TIMEOUT_S * (2**step - 1):
            step += 1
        with self._lock:
            if step not in self._clients:
                self._clients[step] = self._open(step)
            return self._clients[step]

    def _open(self, step: int) -> Any:
        # A read has no limit in all: it goes on while bytes come. obstore does not see the progress
        # of a write, whose answer comes at its end, so that limit is on the whole.
        limit = f"{IDLE_TIMEOUT_S * 2**step}s"
        limits = {"timeout": limit} if step else {"timeout": "86400s", "read_timeout": limit}
        try:
            return from_url(
                self._uri,
                client_options={
                    **limits,
                    "connect_timeout": CONNECT_TIMEOUT,
                    "allow_http": _is_plain_http(),
                },
                retry_config={"max_retries": 0},
                **_s3_defaults(self._scheme),
            )  # type: ignore[call-overload]
        except failures.BaseError as error:
            raise ValidationError("uri", self._uri, describe(error)) from error


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
    return {"config": {"region": region} | ({"endpoint": endpoint} if endpoint else {})}
