"""What atoll asks of Modal, through its public client.

Where the client knows less than the service has told it (which kind of end it was), its own object
is looked into, and whatever is not there is not known.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Literal, NamedTuple, TypeVar

import modal
import modal.exception as failures
from modal._utils.async_utils import synchronizer

from atoll.backends.modal.options import ModalOptions
from atoll.backends.records import JobState
from atoll.backends.service import ServiceClient, one_line
from atoll.core.errors import Permanent, Temporary
from atoll.core.phase import ExitReason

T = TypeVar("T")

AT_ONCE = 32  # questions under way at a time: few for Modal's rate limit, enough to hide latency
# Of the service's words on an end, those that name a cause.
CAUSES = {
    "GENERIC_STATUS_KERNEL_OOM_KILL": ExitReason.OOM_KILLED,
    "GENERIC_STATUS_MEMORY_MANAGER_EVICTION": ExitReason.OOM_KILLED,
    "GENERIC_STATUS_MEMORY_THRASHING_EVICTION": ExitReason.OOM_KILLED,
    "GENERIC_STATUS_INTERNAL_FAILURE": ExitReason.HOST_LOST,
    "GENERIC_STATUS_INIT_FAILURE": ExitReason.CANNOT_RUN,
    "GENERIC_STATUS_TERMINATED": ExitReason.DELETED,
    "GENERIC_STATUS_TIMEOUT": ExitReason.TIME_LIMIT,
}
# Codes that Modal makes up for these ends, and the ends.
INVENTED = {137: "GENERIC_STATUS_TERMINATED", 124: "GENERIC_STATUS_TIMEOUT"}
SETTINGS = (("token_id", "token_secret"), ("oauth_refresh_token", "oauth_client_id"))
# What Modal will never do; a RemoteError says that the image cannot be had.
REFUSED = (
    *(failures.InvalidError, failures.NotFoundError),
    *(failures.PermissionDeniedError, failures.RemoteError),
)
CREDENTIALS = (
    "Modal needs credentials: 'modal token new' writes them, or set MODAL_TOKEN_ID and "
    "MODAL_TOKEN_SECRET"
)


async def answer(call: Awaitable[T]) -> T:
    """What the client answers. A cancel ends the wait at once.

    The client takes a cancel up in a thread of its own and waits for what comes of it, which may be
    another error, or nothing at all.
    """
    asking = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(asking)
    except asyncio.CancelledError:
        asking.cancel()
        asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        raise


def check_credentials() -> None:
    """Raises Permanent, with what to do, if this machine has none. Nothing is asked."""
    from modal.config import config

    if not any(all(config.get(name) for name in names) for names in SETTINGS):
        raise Permanent(CREDENTIALS)


class AlreadyStarted(Exception):
    """A sandbox of that name runs."""


def question(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """The method is one question to the service, which has been connected to before."""

    @functools.wraps(method)
    async def ask(self: Sandboxes, *values: Any, **named: Any) -> T:
        await self.open()
        turns = self._creates if method.__name__ == "create" else None
        return await self.ask(
            method.__name__, lambda: answer(method(self, *values, **named)), turns
        )

    return ask


class Sandboxes(ServiceClient):
    """The sandboxes of one app."""

    ERRORS = (failures.Error, OSError, TimeoutError)

    def __init__(self, options: ModalOptions) -> None:
        super().__init__(AT_ONCE)
        self._options = options
        self._app: Any = None
        self._opening = asyncio.Lock()
        self._creates = asyncio.Semaphore(options.creates)
        self._image = functools.cache(self._registry_image)  # each is looked up once

    def translate(self, error: Exception, question: str) -> Exception:
        text = f"Modal, {question}: {one_line(error)}"
        if isinstance(error, failures.AlreadyExistsError):
            return AlreadyStarted(text)
        if isinstance(error, failures.AuthError):
            return Permanent(f"{CREDENTIALS} ({one_line(error)})")
        if isinstance(error, REFUSED):
            return Permanent(text)
        is_full = isinstance(error, failures.ResourceExhaustedError)
        return Temporary(text, retry_after_s=30.0 if is_full else 1.0)

    async def open(self) -> None:
        """Finds the app, or makes it. Raises Permanent without credentials."""
        async with self._opening:
            if self._app is None:
                name, environment = self._options.app, self._options.environment
                look_up = functools.partial(modal.App.lookup.aio, environment_name=environment)
                self._app = await self.ask(
                    "app", lambda: answer(look_up(name, create_if_missing=True))
                )

    @question
    async def create(self, request: dict[str, Any]) -> str:
        """The id of the new sandbox. With a GPU it waits for room, for up to 21 minutes.

        Raises AlreadyStarted, Temporary, or Permanent for what Modal will never do.
        """
        options, image = self._options, request["image"]  # None: Modal's own, or an object
        rest = {n: v for n, v in request.items() if n not in ("command", "image")}
        sandbox = await modal.Sandbox.create.aio(
            *request["command"],
            app=self._app,
            image=self._image(image) if isinstance(image, str) else image,
            secrets=[self._secret(name) for name in options.secrets],
            cloud=options.cloud,
            region=options.region,
            volumes=self._volumes(),
            **rest,
        )
        return str(sandbox.object_id)

    @question
    async def running(self, tags: dict[str, str], expected: Collection[str] = ()) -> set[str]:
        """The ids of those that run and have the tags, in one question for a page of them.

        The listing ends with an empty page. It is not asked for where all expected ones were seen.
        """
        ids: set[str] = set()
        listing = modal.Sandbox.list.aio(app_id=self._app.app_id, tags=tags)
        while (sandbox := await answer(anext(listing, None))) is not None:
            ids.add(str(sandbox.object_id))
            if expected and ids >= set(expected):
                break
        return ids

    @question
    async def tags(self, id: str) -> dict[str, str]:
        return dict(await (await self._sandbox(id)).get_tags.aio())

    @question
    async def end_of(self, *, id: str = "", name: str = "") -> JobState | None:
        """How a sandbox ended, by its id or else the newest that had the name; None while it has
        not."""
        try:
            sandbox = await self._sandbox(id, name)
        except failures.NotFoundError:
            return JobState("ended", message=f"Modal knows no sandbox {id or name}")
        if not id:
            await sandbox.poll.aio()
        return read_end(sandbox)

    @question
    async def terminate(self, id: str) -> None:
        """At once, with no signal that it could catch. Already ended is success."""
        with contextlib.suppress(failures.NotFoundError):
            await (await self._sandbox(id)).terminate.aio()

    async def _sandbox(self, id: str, name: str = "") -> Any:
        if id:
            return await modal.Sandbox.from_id.aio(id)
        return await modal.Sandbox.from_name.aio(
            self._options.app,
            name,
            environment_name=self._options.environment,
            include_terminated=True,
        )

    def _registry_image(self, name: str) -> Any:
        return modal.Image.from_registry(name, secret=self._secret(self._options.registry_secret))

    def _secret(self, name: str | None) -> Any:
        if name is None:
            return None
        return modal.Secret.from_name(name, environment_name=self._options.environment)

    def _volumes(self) -> dict[Any, Any]:
        mounts: dict[Any, Any] = {
            path: modal.Volume.from_name(name, environment_name=self._options.environment)
            for path, name in self._options.volumes.items()
        }
        for path, bucket in self._options.buckets.items():
            mounts[path] = modal.CloudBucketMount(
                bucket.bucket,
                bucket_endpoint_url=bucket.endpoint,
                key_prefix=bucket.prefix,
                secret=self._secret(bucket.secret),
                oidc_auth_role_arn=bucket.role,
                read_only=bucket.read_only,
                requester_pays=bucket.requester_pays,
                force_path_style=bucket.force_path_style,
            )
        return mounts


def read_end(sandbox: Any) -> JobState | None:
    """What Modal says of a sandbox that has ended. A code that it makes up is left out."""
    code = sandbox.returncode
    if code is None:
        return None
    try:
        result = synchronizer._translate_in(sandbox)._impl.result  # type: ignore[no-untyped-call]
        kind = type(result).DESCRIPTOR.fields_by_name["status"].enum_type
        status, text = str(kind.values_by_number[result.status].name), str(result.exception)
    except (AttributeError, KeyError, TypeError):  # the client hides it
        status, text = "", ""
    end = status.removeprefix("GENERIC_STATUS_").replace("_", " ").lower() or "ended"
    is_invented = code in INVENTED and status in ("", INVENTED[code])
    shown = "" if is_invented else f", exit code {code}"
    message = f"Modal says {end}{shown}" + (f": {text}" if text else "")
    return JobState("ended", str(CAUSES.get(status, "")), message)


# Calls of a function that the user has decorated. One is found again by its id from any process;
# Modal keeps its result for some days.

# What says nothing of the call: the service did not answer.
UNANSWERED = (
    *(failures.ConnectionError, failures.ServiceError),
    *(failures.InternalError, failures.ClientClosed),
)


class CallState(NamedTuple):
    """How a call is, with its result or what it has failed with."""

    state: Literal["running", "succeeded", "failed", "cancelled"]
    result: Any = None
    error: str = ""


def find_call(id: str) -> Any:
    return modal.FunctionCall.from_id(id)


def inspect_call(call: Any) -> CallState:
    """Raises Temporary if Modal does not answer."""
    try:
        return CallState("succeeded", call.get(timeout=0))
    except UNANSWERED as error:
        raise Temporary(f"Modal: {error}") from error
    except Exception as error:  # the function's own, as it raised it, or Modal's word on it
        text = one_line(f"{type(error).__name__}: {error}").removesuffix(":")
        # The client raises a bare TimeoutError while there is no result.
        if type(error) is TimeoutError and not error.args:
            return CallState("running")
        is_gone = isinstance(error, failures.NotFoundError | failures.InputCancellation)
        is_cut = isinstance(error, failures.RemoteError) and is_terminated(call)
        return CallState("cancelled" if is_gone or is_cut else "failed", error=text)


def cancel(call: Any) -> None:
    """Its container ends. One that has ended or is unknown is cancelled already."""
    try:
        call.cancel(terminate_containers=True)
    except failures.NotFoundError:
        return
    except UNANSWERED as error:
        raise Temporary(f"Modal: {error}") from error


def is_terminated(call: Any) -> bool:
    """Whether somebody has cancelled it; the words of its error do not tell."""
    try:
        inputs = list(call.get_call_graph())
    except failures.Error:
        return False
    for each in inputs:  # which grows
        inputs += each.children
    return any(each.status.name == "TERMINATED" for each in inputs)
