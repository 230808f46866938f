"""What atoll asks of Modal, through its public client: the only module that imports it.

Where the client knows less than the service has told it (which kind of end it was), its own object
is looked into, and whatever is not there is not known.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import modal
import modal.exception as failures
from modal._utils.async_utils import synchronizer

from atoll.backends.modal.options import ModalOptions
from atoll.backends.modal.render import SandboxRequest
from atoll.core.errors import Permanent, Temporary
from atoll.core.reasons import ExitReason

T = TypeVar("T")

# Of the service's words on an end, those that name a cause. The code is invented for TERMINATED
# (137) and TIMEOUT (124).
ENDS = {
    "GENERIC_STATUS_KERNEL_OOM_KILL": ExitReason.OOM_KILLED,
    "GENERIC_STATUS_MEMORY_MANAGER_EVICTION": ExitReason.OOM_KILLED,
    "GENERIC_STATUS_MEMORY_THRASHING_EVICTION": ExitReason.OOM_KILLED,
    "GENERIC_STATUS_INTERNAL_FAILURE": ExitReason.HOST_LOST,
    "GENERIC_STATUS_INIT_FAILURE": ExitReason.CANNOT_RUN,
    "GENERIC_STATUS_TERMINATED": ExitReason.DELETED,
    "GENERIC_STATUS_TIMEOUT": ExitReason.TIME_LIMIT,
}
TERMINATED, TIMEOUT = "GENERIC_STATUS_TERMINATED", "GENERIC_STATUS_TIMEOUT"
INVENTED = {TERMINATED, TIMEOUT}
SETTINGS = (("token_id", "token_secret"), ("oauth_refresh_token", "oauth_client_id"))
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


class SandboxEnd(NamedTuple):
    """What Modal says of a sandbox that has ended. `code` is None where it is invented."""

    code: int | None
    status: str  # in the words of the wire; empty if the client hides it
    message: str = ""

    @property
    def reason(self) -> str:
        """The cause that Modal names; empty if it names none."""
        return str(ENDS.get(self.status, ""))

    @property
    def detail(self) -> str:
        status = self.status.removeprefix("GENERIC_STATUS_").replace("_", " ").lower()
        code = "" if self.code is None else f", exit code {self.code}"
        message = f": {self.message}" if self.message else ""
        return f"Modal says {status or 'ended'}{code}{message}"


class AlreadyStarted(Exception):
    """A sandbox of that name runs."""


class NoRoom(Temporary):
    """Modal had no room for the sandbox within the time that its client waits."""


class Sandboxes:
    """The sandboxes of one app. `questions` counts what was asked, by the call."""

    def __init__(self, options: ModalOptions) -> None:
        self._options = options
        self._app: Any = None
        self._client: Any = None
        self._turn = asyncio.Lock()
        self._images: dict[Any, Any] = {}
        self.questions: Counter[str] = Counter()

    async def open(self) -> Any:
        """The app, which is made where it does not exist. Raises Permanent without credentials."""
        async with self._turn:
            if self._app is None:
                async with _warned("the app", self._options.app):
                    self._client = await answer(modal.Client.from_env.aio())
                    self.questions["app"] += 1
                    self._app = await answer(
                        modal.App.lookup.aio(
                            self._options.app,
                            create_if_missing=True,
                            environment_name=self._options.environment,
                            client=self._client,
                        )
                    )
        return self._app

    async def hello(self) -> None:
        """Whether the service answers, and takes the credentials."""
        await self.open()
        async with _warned("the service", ""):
            self.questions["hello"] += 1
            await answer(self._client.hello.aio())

    async def create(self, request: SandboxRequest) -> str:
        """The id of the new sandbox. With a GPU it waits for room, for up to 21 minutes.

        Raises AlreadyStarted, NoRoom, Temporary, or Permanent for what Modal will never do.
        """
        app = await self.open()
        options = self._options
        async with _warned("a sandbox", request.name):
            self.questions["create"] += 1
            sandbox = await answer(
                modal.Sandbox.create.aio(
                    *request.command,
                    app=app,
                    name=request.name,
                    tags=request.tags,
                    image=self._image(request.image),
                    secrets=[self._secret(name) for name in options.secrets],
                    timeout=request.timeout_s,
                    gpu=request.gpu,
                    cloud=options.cloud,
                    region=options.region,
                    cpu=request.cpu,
                    memory=request.memory,
                    volumes=self._volumes(),
                    client=self._client,
                )
            )
        return str(sandbox.object_id)

    async def running(self, tags: dict[str, str], expected: Collection[str] = ()) -> set[str]:
        """The ids of those that run and have the tags, in one question for a page of them.

        The listing ends with an empty page. It is not asked for where all expected ones were seen.
        """
        app = await self.open()
        ids: set[str] = set()
        missing = set(expected)
        async with _warned("the list of sandboxes", ""):
            self.questions["list"] += 1
            listing = modal.Sandbox.list.aio(app_id=app.app_id, tags=tags, client=self._client)
            while (sandbox := await answer(anext(listing, None))) is not None:
                ids.add(str(sandbox.object_id))
                if expected and not missing - ids:
                    break
        return ids

    async def tags(self, sandbox_id: str) -> dict[str, str]:
        await self.open()
        async with _warned("the tags of", sandbox_id):
            self.questions["tags"] += 1
            sandbox = await answer(modal.Sandbox.from_id.aio(sandbox_id, client=self._client))
            return dict(await answer(sandbox.get_tags.aio()))

    async def end_of(self, sandbox_id: str) -> SandboxEnd | None:
        """How it ended; None while it has not."""
        await self.open()
        async with _warned("the end of", sandbox_id):
            self.questions["end"] += 1
            try:
                sandbox = await answer(modal.Sandbox.from_id.aio(sandbox_id, client=self._client))
            except failures.NotFoundError:
                return SandboxEnd(None, "", f"Modal no longer knows the sandbox {sandbox_id}")
        return _end_of(sandbox)

    async def end_by_name(self, name: str) -> SandboxEnd | None:
        """The same of the newest sandbox that had the name, whoever has started it."""
        await self.open()
        async with _warned("the end of", name):
            self.questions["end"] += 1
            try:
                sandbox = await answer(
                    modal.Sandbox.from_name.aio(
                        self._options.app,
                        name,
                        environment_name=self._options.environment,
                        include_terminated=True,
                        client=self._client,
                    )
                )
            except failures.NotFoundError:
                return SandboxEnd(None, "", f"Modal knows no sandbox {name}")
            await answer(sandbox.poll.aio())
        return _end_of(sandbox)

    async def terminate(self, sandbox_id: str) -> None:
        """At once, with no signal that it could catch. Already ended is success."""
        await self.open()
        async with _warned("to terminate", sandbox_id):
            self.questions["terminate"] += 1
            try:
                sandbox = await answer(modal.Sandbox.from_id.aio(sandbox_id, client=self._client))
                await answer(sandbox.terminate.aio())
            except failures.NotFoundError:
                return

    def _image(self, image: Any) -> Any:
        """None is Modal's own: Debian with the Python of this machine."""
        if image is None or not isinstance(image, str):
            return image
        if image not in self._images:
            name = self._options.registry_secret
            secret = None if name is None else self._secret(name)
            self._images[image] = modal.Image.from_registry(image, secret=secret)
        return self._images[image]

    def _secret(self, name: str) -> Any:
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
                secret=None if bucket.secret is None else self._secret(bucket.secret),
                oidc_auth_role_arn=bucket.role,
                read_only=bucket.read_only,
                requester_pays=bucket.requester_pays,
                force_path_style=bucket.force_path_style,
            )
        return mounts


def _end_of(sandbox: Any) -> SandboxEnd | None:
    code = sandbox.returncode
    if code is None:
        return None
    status, message = _result_of(sandbox)
    is_invented = status in INVENTED or (not status and code in (124, 137))
    return SandboxEnd(None if is_invented else code, status, message)


def _result_of(sandbox: Any) -> tuple[str, str]:
    """The status of its end as the wire has it, and what was said; empty if it is hidden."""
    try:
        result = synchronizer._translate_in(sandbox)._impl.result  # type: ignore[no-untyped-call]
        kind = type(result).DESCRIPTOR.fields_by_name["status"].enum_type
        return str(kind.values_by_number[result.status].name), str(result.exception)
    except (AttributeError, KeyError, TypeError):
        return "", ""


@asynccontextmanager
async def _warned(what: str, name: str) -> AsyncIterator[None]:
    """Turns the errors of the client into ours, with what it was about."""
    about = f"Modal, {what} {name}".rstrip()
    try:
        yield
    except failures.AlreadyExistsError as error:
        raise AlreadyStarted(name) from error
    except failures.ResourceExhaustedError as error:
        raise NoRoom(f"{about}: {_line(error)}", retry_after_s=30.0) from error
    except failures.AuthError as error:
        raise Permanent(f"{CREDENTIALS} ({_line(error)})") from error
    except (failures.InvalidError, failures.NotFoundError, failures.PermissionDeniedError) as error:
        raise Permanent(f"{about}: {_line(error)}") from error
    except failures.RemoteError as error:  # the image cannot be had
        raise Permanent(f"{about}: {_line(error)}") from error
    except (failures.Error, OSError, TimeoutError) as error:
        raise Temporary(f"{about}: {_line(error)}", retry_after_s=1.0) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
