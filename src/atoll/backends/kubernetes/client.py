"""The Kubernetes API as atoll needs it: eight verbs over plain JSON objects, and their `Mirror`.

lightkube reads configuration, credentials and TLS. Objects stay dictionaries, so fields that a
newer server adds are kept. Only this module translates the errors of Kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar
from urllib.parse import quote

import httpx2
import msgspec
from lightkube.core.exceptions import ConfigError

from atoll.backends.kubernetes.access import Access, no_credentials, read_access
from atoll.backends.kubernetes.names import SELECTOR, UID
from atoll.backends.kubernetes.pod import PodManifest
from atoll.core.clock import Retry
from atoll.core.errors import (
    AtollError,
    Conflict,
    Denied,
    Gone,
    NotFound,
    ObjectTooLarge,
    Permanent,
    Temporary,
)
from atoll.core.model import json_decoder
from atoll.core.text import alines_of

Json = dict[str, Any]
log = logging.getLogger(__name__)

PatchType = Literal["merge", "strategic", "json", "apply"]

FIELD_MANAGER = "atoll"
KINDS = {
    "configmaps": "api/v1",
    "customresourcedefinitions": "apis/apiextensions.k8s.io/v1",
    "deployments": "apis/apps/v1",
    "events": "api/v1",
    "jobs": "apis/batch/v1",
    "leases": "apis/coordination.k8s.io/v1",
    "namespaces": "api/v1",
    "nodes": "api/v1",
    "pods": "api/v1",
    "secrets": "api/v1",
    "services": "api/v1",
    "trainings": "apis/atoll.dev/v1",
}
PATCH_TYPES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}
TOO_LARGE = ("request is too large", "larger than max")  # how etcd refuses an object, with code 500
ErrorT = TypeVar("ErrorT", bound=AtollError)
T = TypeVar("T")
IS_THERE = "does 'kubectl cluster-info' answer? KUBECONFIG names the file with its address"
MAY_I = "'kubectl auth can-i --list' shows what this account may do"
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
NO_LOG = re.compile(r"unable to retrieve container logs for \w+://[0-9a-f]{64}")
WATCH_S = 240  # the server ends a watch after this; the client resumes it from there
# Objects of one request. 500 pods are 5 MB, decoded in 20 ms; a training may have 1 MB.
PAGES = {"pods": 500, "jobs": 200}
PAGE = 50  # of trainings, with their status: 50 MB at the most, a few MB as a rule
RESTARTS = 3  # of a list whose continue token expired, as it may when etcd is compacted


def keepalive(idle_s: int, every_s: int) -> list[tuple[int, int, int]]:
    """Socket options: the kernel probes an idle connection, and gives up after three answers are
    missing."""
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ]


class Rejected(Permanent):
    """The API server refuses an object. `causes` are pairs of a field and what is wrong with it."""

    def __init__(self, text: str, causes: list[tuple[str, str]]) -> None:
        super().__init__(text)
        self.causes = causes


class ObjectList(NamedTuple):
    """The objects of one kind, and the version of the cluster they were read at."""

    items: list[Json]
    version: str
    more: str = ""  # where the rest begins, if `limit` left some out


class WatchEvent(NamedTuple):
    """One watch event. A `BOOKMARK` carries only the version reached."""

    type: str
    object: Json


class _PodList(TypedDict, total=False):
    metadata: Json
    items: list[PodManifest] | None


class _Version(TypedDict):
    name: str
    resourceVersion: str


class _Versioned(TypedDict):
    metadata: _Version


class _MetadataList(TypedDict, total=False):
    metadata: Json
    items: list[_Versioned] | None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


_JSON: msgspec.json.Decoder[Any] = json_decoder(Any)
_EVENT = json_decoder(_Event)
_LISTS: dict[str, msgspec.json.Decoder[Any]] = {"pods": json_decoder(_PodList)}
_METADATA = json_decoder(_MetadataList)
_OBJECTS: dict[str, msgspec.json.Decoder[Any]] = {"pods": json_decoder(PodManifest)}


# After 10 s without an answer a caller tries again; the API server itself gives up after 60. A
# connection may be free only after that.
TIMEOUT = httpx2.Timeout(10.0, pool=60.0)


class Cluster:
    """A client of one API server. `requests` counts the requests sent, by verb and kind."""

    def __init__(self, client: httpx2.AsyncClient, namespace: str = "default") -> None:
        self._http = client
        self.namespace = namespace
        self.requests: Counter[tuple[str, str]] = Counter()
        self.time = ServerTime()

    @classmethod
    def connect(
        cls,
        context: str | None = None,
        kubeconfig: str | None = None,
        *,
        most_connections: int | None = 200,
    ) -> Cluster:
        """Reads the pod's service account, `KUBECONFIG` or ~/.kube/config, in that order."""
        return cls.reach(read_access(context, kubeconfig), most_connections)

    @classmethod
    def reach(cls, access: Access, most_connections: int | None = 200) -> Cluster:
        client = httpx2.AsyncClient(
            base_url=access.server,
            auth=access.auth,
            headers=access.headers,
            timeout=TIMEOUT,
            transport=httpx2.AsyncHTTPTransport(
                verify=access.verify,
                proxy=access.proxy,
                # A peer that vanished is noticed in under half a minute, even on idle watches.
                socket_options=keepalive(10, 5),
                limits=httpx2.Limits(
                    max_connections=most_connections, max_keepalive_connections=20
                ),
            ),
        )
        return cls(client, access.namespace)

    async def close(self) -> None:
        await self._http.aclose()

    async def version(self) -> str:
        """The server's version. Raises Temporary if it does not answer, Denied if it refuses."""
        return str((await self._send("get", "version", "/version")).get("gitVersion", ""))

    async def get(self, kind: str, namespace: str | None, name: str) -> Json:
        return await self._send("get", kind, _path(kind, namespace, name))

    async def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        version: str = "",
        is_metadata: bool = False,
    ) -> ObjectList:
        """All objects; with `version`, as they were then. Raises Gone if that is too long ago.

        `is_metadata`: only the name and the version of each, at half the cost of all of it.
        """
        for _ in range(RESTARTS):
            items: list[Json] = []
            newest = ""
            try:
                options = {"labels": labels, "fields": fields, "version": version}
                async for page in self.pages(kind, namespace, is_metadata=is_metadata, **options):
                    items += page.items
                    newest = page.version
            except Gone:
                if version:
                    raise
                continue  # from the start: the rest of it would be of another version
            return ObjectList(items, newest)
        raise Temporary(f"the list of {kind} did not end before the cluster forgot its version")

    async def pages(
        self, kind: str, namespace: str | None = None, **options: Any
    ) -> AsyncGenerator[ObjectList, None]:
        """As `list`, page by page."""
        limit, more = PAGES.get(kind, PAGE), ""
        while True:
            page = await self.page(kind, namespace, limit=limit, after=more, **options)
            yield page
            more = page.more
            if not more:
                return

    async def page(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        limit: int,
        after: str = "",
        labels: str = "",
        fields: str = "",
        version: str = "",
        is_metadata: bool = False,
    ) -> ObjectList:
        """At most `limit` objects, from the start or from where the page before ended: `after` is
        its `more`."""
        params = _selectors(labels, fields) | {"limit": str(limit)}
        if after:  # it holds the version, too
            params["continue"] = after
        elif version:
            params |= {"resourceVersion": version, "resourceVersionMatch": "Exact"}
        headers = {"Accept": METADATA} if is_metadata else None
        decoder = _METADATA if is_metadata else _LISTS.get(kind, _JSON)
        path = _path(kind, namespace)
        reply = await self._send(
            "list", kind, path, params=params, headers=headers, decoder=decoder
        )
        items, metadata = reply.get("items") or [], reply["metadata"]
        for item in items:  # half of an object, which nobody here reads
            item["metadata"].pop("managedFields", None)
        return ObjectList(items, metadata["resourceVersion"], metadata.get("continue") or "")

    async def create(
        self, kind: str, namespace: str | None, body: Json, *, is_dry_run: bool = False
    ) -> Json:
        """Creates the object and returns it as stored; with `is_dry_run` as it would be."""
        # Without Strict, the server silently drops fields that it does not know.
        params = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        if is_dry_run:  # the server checks everything, rights included, and writes nothing
            params["dryRun"] = "All"
        return await self._send("create", kind, _path(kind, namespace), body=body, params=params)

    async def replace(
        self, kind: str, namespace: str | None, name: str, body: Json, *, part: str = ""
    ) -> Json:
        """Raises Conflict if `body` carries a version that is no longer the newest."""
        path = _path(kind, namespace, name, part)
        params = {"fieldManager": FIELD_MANAGER}
        return await self._send("replace", kind, path, body=body, params=params)

    async def patch(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        body: Any,
        *,
        type: PatchType = "merge",
        part: str = "",
        is_dry_run: bool = False,
    ) -> Json:
        params = {"fieldManager": FIELD_MANAGER}
        if is_dry_run:
            params["dryRun"] = "All"
        if type == "apply":
            params["force"] = "true"
        path = _path(kind, namespace, name, part)
        headers = {"Content-Type": PATCH_TYPES[type]}
        return await self._send("patch", kind, path, body=body, params=params, headers=headers)

    async def delete(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        *,
        propagation: str = "Background",
        uid: str | None = None,
        version: str | None = None,
    ) -> None:
        """The object is being deleted. Raises NotFound; Conflict if `uid` or `version` differs."""
        identity = {"uid": uid, "resourceVersion": version}
        options: Json = {"propagationPolicy": propagation}
        if preconditions := {k: v for k, v in identity.items() if v is not None}:
            options["preconditions"] = preconditions
        await self._send("delete", kind, _path(kind, namespace, name), body=options)

    async def drop(self, kinds: Iterable[str], namespace: str, name: str) -> None:
        """The objects of this name are being deleted, or do not exist."""
        for kind in kinds:
            with contextlib.suppress(NotFound):
                await self.delete(kind, namespace, name)

    async def delete_all(
        self, kind: str, namespace: str | None, *, labels: str, fields: str = ""
    ) -> None:
        params = _selectors(labels, fields)
        await self._send("delete", kind, _path(kind, namespace), params=params)

    async def watch(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        after: str,
        labels: str = "",
        fields: str = "",
        seconds: int = WATCH_S,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Every change after that version, until the server ends the watch after so many seconds.

        Raises Gone, Temporary.
        """
        params = _selectors(labels, fields) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": after,
            "timeoutSeconds": str(seconds),
        }
        # The server ends it in time; a minute more than that, and it has vanished.
        limits = httpx2.Timeout(10.0, read=seconds + 60.0)
        async with self._stream("watch", kind, _path(kind, namespace), params, limits) as lines:
            async for line in lines:
                event = _decoded(_EVENT, line)
                if event.type == "ERROR":
                    status = _decoded(_JSON, event.object)
                    raise _error(status, status.get("code", 500), kind)
                item = _decoded(_OBJECTS.get(kind, _JSON), event.object)
                item["metadata"].pop("managedFields", None)
                yield WatchEvent(event.type, item)

    async def log(
        self,
        namespace: str,
        pod: str,
        *,
        tail: int | None = None,
        follow: bool = False,
        more: Mapping[str, str] | None = None,
        on_open: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[str, None]:
        """The lines of the pod's main container, not of sidecars. Raises NotFound, Temporary."""
        params = dict(more or {})
        if tail is not None:
            params["tailLines"] = str(tail)
        if follow:
            params["follow"] = "true"
        path = _path("pods", namespace, pod, "log")
        # A kubelet may have to fetch a log from a slow disk; a followed log may be silent for days.
        limits = httpx2.Timeout(10.0, read=None if follow else 30.0)
        async with self._stream("log", "pods", path, params, limits) as lines:
            on_open()
            async for line in lines:
                if NO_LOG.fullmatch(line):  # the kubelet's message in place of the log
                    raise NotFound("log of pod", pod)
                yield line

    async def log_with_times(
        self,
        namespace: str,
        pod: str,
        *,
        after: int = 0,
        tail: int | None = None,
        follow: bool = False,
    ) -> AsyncGenerator[tuple[int, str], None]:
        """Like `log`, with the nanosecond each line was written at; only lines after `after`."""
        params = {"timestamps": "true"}
        if after:  # the API server takes whole seconds only
            since = datetime.fromtimestamp(after // 10**9, UTC)
            params["sinceTime"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
        lines = self.log(namespace, pod, tail=tail, follow=follow, more=params)
        async with contextlib.aclosing(lines):
            async for line in lines:
                stamp, _, text = line.partition(" ")
                at = _nanosecond(stamp)
                if at > after:
                    yield at, text

    async def _send(
        self,
        verb: str,
        kind: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        decoder: msgspec.json.Decoder[Any] = _JSON,
    ) -> Json:
        self.requests[verb, kind] += 1
        method = {"get": "GET", "list": "GET", "create": "POST", "replace": "PUT"}.get(
            verb, verb.upper()
        )
        content = None if body is None else msgspec.json.encode(body)
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        try:
            answer = await self._http.request(
                method, path, params=params, content=content, headers=all_headers
            )
        except (httpx2.HTTPError, ConfigError, OSError) as error:
            raise _unreachable(error) from error
        self.time.update(answer.headers.get("Date"))
        if answer.is_error:
            raise _error(_status(answer), answer.status_code, kind)
        reply: Json = _decoded(decoder, answer.content)
        return reply

    @contextlib.asynccontextmanager
    async def _stream(
        self, verb: str, kind: str, path: str, params: Mapping[str, str], limits: httpx2.Timeout
    ) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of the answer. The connection is closed even if the caller stops early."""
        self.requests[verb, kind] += 1
        try:
            async with self._http.stream("GET", path, params=params, timeout=limits) as answer:
                self.time.update(answer.headers.get("Date"))
                if answer.is_error:
                    await answer.aread()
                    raise _error(_status(answer), answer.status_code, kind)
                async with contextlib.aclosing(alines_of(answer.aiter_bytes())) as lines:
                    yield lines
        except (httpx2.HTTPError, ConfigError, OSError) as error:
            raise _unreachable(error) from error


async def gather(limit: int, calls: list[Any]) -> None:
    """Runs all calls, at most `limit` at once; raises the first error when all have ended."""
    gate = asyncio.Semaphore(limit)

    async def one(call: Any) -> None:
        async with gate:
            await call

    for outcome in await asyncio.gather(*map(one, calls), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _path(kind: str, namespace: str | None, name: str = "", part: str = "") -> str:
    parts = [KINDS[kind]]
    if namespace is not None:
        parts += ["namespaces", quote(namespace, safe="")]
    parts.append(kind)
    if name:
        parts.append(quote(name, safe=""))
    if part:
        parts.append(part)
    return "/" + "/".join(parts)


def _selectors(labels: str, fields: str) -> dict[str, str]:
    selectors = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in selectors.items() if value}


def _decoded(decoder: msgspec.json.Decoder[Any], text: bytes | str | msgspec.Raw) -> Any:
    try:
        return decoder.decode(text)
    except msgspec.DecodeError as error:
        raise Temporary(f"the answer of the Kubernetes API server is damaged: {error}") from error


def _status(answer: httpx2.Response) -> Json:
    try:
        status = _JSON.decode(answer.content)
    except msgspec.DecodeError:
        status = None
    return status if isinstance(status, dict) else {"message": answer.text[:500]}


def _error(status: Json, code: int, kind: str) -> Exception:
    """The server's answer as an atoll error, with the server's message."""
    text = status.get("message") or status.get("reason") or f"HTTP {code}"
    details = status.get("details") or {}
    if code == 404:
        return NotFound(details.get("kind") or kind, details.get("name", ""))
    if code == 409:
        return Conflict(text)
    causes = details.get("causes") or ()
    if code == 410 or any(cause.get("reason") == "ResourceVersionTooLarge" for cause in causes):
        return Gone(0, 0)
    if code in (401, 403):
        return _hinted(Denied(f"Kubernetes refused: {text}"), MAY_I)
    if code == 413 or any(marker in text for marker in TOO_LARGE):
        return ObjectTooLarge(f"Kubernetes refused: {text}")
    if code == 429 or code >= 500:
        return Temporary(f"Kubernetes: {text}", float(details.get("retryAfterSeconds") or 1))
    fields = [(cause.get("field", ""), cause.get("message", "")) for cause in causes]
    return Rejected(f"Kubernetes refused: {text}", fields)


def _hinted(error: ErrorT, hint: str) -> ErrorT:
    error.hint = hint
    return error


def _unreachable(error: Exception) -> Temporary | Denied:
    if not isinstance(error, httpx2.HTTPError):  # of a plugin or a file with credentials
        return no_credentials(error)
    detail = str(error) or type(error).__name__
    return _hinted(Temporary(f"the Kubernetes API server did not answer: {detail}"), IS_THERE)


def _nanosecond(text: str) -> int:
    """Nanoseconds since the epoch of an RFC 3339 time with any number of fraction digits."""
    second, point, remainder = text.partition(".")
    if not point:
        return int(datetime.fromisoformat(text).timestamp()) * 10**9
    digits = remainder[: len(remainder) - len(remainder.lstrip("0123456789"))]
    seconds = int(datetime.fromisoformat(second + remainder[len(digits) :]).timestamp())
    return seconds * 10**9 + int(digits.ljust(9, "0")[:9])


STEP_S = 5.0  # a date this much earlier means that the server's clock was set back


class ServerTime:
    """A clock that shows the time of the API server, from the `Date` of its answers.

    It dates pods and Jobs. The clock of this machine may be wrong, or set, or asleep: it is read
    only until the first answer; then the monotonic clock is added to the server's time.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._ahead_s: float | None = None  # of the server, compared with the monotonic clock

    def __call__(self) -> float:
        return self._wall() if self._ahead_s is None else self._monotonic() + self._ahead_s

    def update(self, date: str | None) -> None:
        """Takes a date, cut to whole seconds, that was some time on its way.

        Each is too early by up to a second and more, so the latest is the best.
        """
        if date is None:
            return
        try:
            ahead_s = parsedate_to_datetime(date).timestamp() - self._monotonic()
        except ValueError:
            return
        last = self._ahead_s
        if last is None or ahead_s > last or ahead_s < last - STEP_S:
            self._ahead_s = ahead_s


class Mirror(Generic[T]):
    """Objects by training uid and name, each parsed once by `parse`.

    `notify` gets the labels of an object of each training that may have changed. `on_deleted` gets
    each object that no longer exists, and whether that is its very last state.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        namespace: str | None,
        parse: Callable[[Json], T],
        notify: Callable[[Json], None],
        on_deleted: Callable[[T, bool], None] = lambda item, is_final: None,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._namespace = namespace
        self._parse = parse
        self._notify = notify
        self._on_deleted = on_deleted
        self._objects: dict[str, dict[str, T]] = defaultdict(dict)
        self._labels: dict[str, Json] = {}  # of an object of each training
        self._version = 0
        self._moved = asyncio.Event()
        self.is_live = False

    def of(self, uid: str) -> Mapping[str, T]:
        return self._objects.get(uid, {})

    async def reach(self, version: int, timeout_s: float) -> bool:
        """Waits until the copy has that version of the cluster; False if it does not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_live and self._version < version:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return False
        return self.is_live

    async def run(self) -> None:
        """Runs until cancelled, and retries while the API server does not answer."""
        retry = Retry(0.2, 10.0)
        while True:
            try:
                await self._load()
                retry.has_worked()
                await self._follow()
            except Gone:
                log.info("the watch on %s fell behind; listing again", self._kind)
            except (Temporary, Denied, Permanent) as error:
                # The first failure shows in other requests too; the next is worth a warning.
                level = logging.WARNING if retry.failures == 1 else logging.INFO
                log.log(level, "cannot watch %s: %s; trying again", self._kind, error)
                self._go_stale()
                await asyncio.sleep(retry.pause_s() or 0.0)
            finally:
                self._go_stale()

    async def _load(self) -> None:
        objects = await self._cluster.list(self._kind, self._namespace, labels=SELECTOR)
        old, old_labels = self._objects, self._labels
        self._objects, self._labels = defaultdict(dict), {}
        for item in objects.items:
            self.put(item)
        self._version = int(objects.version)
        self._moved.set()
        self.is_live = True
        for uid, by_name in old.items():
            for name in by_name.keys() - self.of(uid).keys():
                self._on_deleted(by_name[name], False)
        for labels in (old_labels | self._labels).values():
            self._notify(labels)

    def put(self, item: Json) -> str:
        """Takes over the newest state of an object; returns the uid of its training."""
        labels = item["metadata"].get("labels") or {}
        uid = str(labels.get(UID, ""))
        self._objects[uid][item["metadata"]["name"]] = self._parse(item)
        self._labels[uid] = labels
        return uid

    async def _follow(self) -> None:
        while True:
            async for event in self._cluster.watch(
                self._kind, self._namespace, after=str(self._version), labels=SELECTOR
            ):
                if event.type != "BOOKMARK":
                    uid = self.put(event.object)
                    self._notify(self._labels[uid])
                if event.type == "DELETED":
                    deleted = self._objects[uid].pop(event.object["metadata"]["name"])
                    if not self._objects[uid]:
                        del self._objects[uid], self._labels[uid]
                    self._on_deleted(deleted, True)
                self._version = int(event.object["metadata"]["resourceVersion"])
                self._moved.set()

    def _go_stale(self) -> None:
        self.is_live = False
        self._moved.set()
