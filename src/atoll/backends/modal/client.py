"""What atoll asks of Modal, through its public client: the only module that imports it.

Where the client knows less than the service has told it (which kind of end it was), its own object
is looked into, and whatever is not there is not known.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NamedTuple, TypeVar

import modal
import modal.exception as failures
from modal._utils.async_utils import synchronizer

from atoll.backends.modal.options import ModalOptions
from atoll.backends.modal.render import SandboxRequest
from atoll.core.errors import Permanent, Temporary
from atoll.core.phase import ExitReason

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
INVENTED = {"GENERIC_STATUS_TERMINATED", "GENERIC_STATUS_TIMEOUT"}
SETTINGS = (("token_id", "token_secret"), ("oauth_refresh_token", "oauth_client_id"))
# What Modal will never do; a RemoteError says that the image cannot be had.
REFUSED = (
    failures.InvalidError,
    failures.NotFoundError,
    failures.PermissionDeniedError,
    failures.RemoteError,
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
                app, environment = self._options.app, self._options.environment

                async def look_up() -> Any:
                    self._client = await modal.Client.from_env.aio()
                    return await modal.App.lookup.aio(
                        app,
                        create_if_missing=True,
                        environment_name=environment,
                        client=self._client,
                    )

                self._app = await self._ask("app", app, look_up)
        return self._app

    async def hello(self) -> None:
        """Whether the service answers, and takes the credentials."""
        await self.open()
        await self._ask("hello", "", lambda: self._client.hello.aio())

    async def create(self, request: SandboxRequest) -> str:
        """The id of the new sandbox. With a GPU it waits for room, for up to 21 minutes.

        Raises AlreadyStarted, NoRoom, Temporary, or Permanent for what Modal will never do.
        """
        app, options = await self.open(), self._options
        sandbox = await self._ask(
            "create",
            request.name,
            lambda: modal.Sandbox.create.aio(
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
            ),
        )
        return str(sandbox.object_id)

    async def running(self, tags: dict[str, str], expected: Collection[str] = ()) -> set[str]:
        """The ids of those that run and have the tags, in one question for a page of them.

        The listing ends with an empty page. It is not asked for where all expected ones were seen.
        """
        app = await self.open()

        async def read() -> set[str]:
            ids: set[str] = set()
            listing = modal.Sandbox.list.aio(app_id=app.app_id, tags=tags, client=self._client)
            while (sandbox := await answer(anext(listing, None))) is not None:
                ids.add(str(sandbox.object_id))
                if expected and ids >= set(expected):
                    break
            return ids

        return await self._ask("list", "", read)

    async def tags(self, sandbox_id: str) -> dict[str, str]:
        await self.open()

        async def read() -> dict[str, str]:
            return dict(await (await self._sandbox(sandbox_id)).get_tags.aio())

        return await self._ask("tags", sandbox_id, read)

    async def end_of(self, *, id: str = "", name: str = "") -> SandboxEnd | None:
        """How a sandbox ended, by its id or else the newest that had the name; None while it has
        not."""
        await self.open()

        async def read() -> SandboxEnd | None:
            try:
                sandbox = await self._sandbox(id, name)
            except failures.NotFoundError:
                return SandboxEnd(None, "", f"Modal knows no sandbox {id or name}")
            if not id:
                await sandbox.poll.aio()
            return _end_of(sandbox)

        return await self._ask("end", id or name, read)

    async def terminate(self, sandbox_id: str) -> None:
        """At once, with no signal that it could catch. Already ended is success."""
        await self.open()

        async def end() -> None:
            with contextlib.suppress(failures.NotFoundError):
                await (await self._sandbox(sandbox_id)).terminate.aio()

        await self._ask("terminate", sandbox_id, end)

    async def _sandbox(self, id: str, name: str = "") -> Any:
        if id:
            return await modal.Sandbox.from_id.aio(id, client=self._client)
        return await modal.Sandbox.from_name.aio(
            self._options.app,
            name,
            environment_name=self._options.environment,
            include_terminated=True,
            client=self._client,
        )

    async def _ask(self, question: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """What the client answers. Its errors become ours, with what they are about."""
        self.questions[question] += 1
        about = " ".join(f"Modal, {question} {name}".split())
        try:
            return await answer(call())
        except failures.AlreadyExistsError as error:
            raise AlreadyStarted(name) from error
        except failures.ResourceExhaustedError as error:
            raise NoRoom(f"{about}: {_line(error)}", retry_after_s=30.0) from error
        except failures.AuthError as error:
            raise Permanent(f"{CREDENTIALS} ({_line(error)})") from error
        except REFUSED as error:
            raise Permanent(f"{about}: {_line(error)}") from error
        except (failures.Error, OSError, TimeoutError) as error:
            raise Temporary(f"{about}: {_line(error)}", retry_after_s=1.0) from error

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


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
