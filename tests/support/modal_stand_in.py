"""A stand-in for modal.com: a server of our own for the unmodified `modal` client.

It speaks the part of the client's wire that the life of sandboxes needs, and runs each sandbox as
processes of this machine. It is our reading of a protocol that is not documented; the real service
has not been asked. Both kinds of sandbox are there: V1 (with a GPU) and V2.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import string
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status
from grpclib.const import Handler
from grpclib.server import Server
from modal.client import _Client
from modal_proto import api_grpc, api_pb2

Result = api_pb2.GenericResult
ALPHABET = string.ascii_letters + string.digits
PAGE = 100
GIVEN = ("LANG", "TZ", "VIRTUAL_ENV", "PYTHONPATH")  # what an image would bring itself


def forget_client() -> None:
    """The next client is made from the environment: the library keeps its first for ever."""
    _Client._client_from_env = None


@dataclass
class StandInSandbox:
    """One sandbox: what was asked for, and the process that it is."""

    id: str
    definition: Any
    tags: dict[str, str]
    env: dict[str, str]
    created: float
    log: Path
    process: asyncio.subprocess.Process | None = None
    result: Any = None
    started: float = 0.0
    is_terminated: bool = False
    verdict: Any = None  # a result to give in place of the true one
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self.result is None

    @property
    def rank(self) -> int:
        return int(self.tags.get("atoll-rank", "-1"))

    @property
    def attempt(self) -> int:
        return int(self.tags.get("atoll-attempt", "-1"))

    def pids(self) -> list[int]:
        """Every process of the sandbox, by the variable that only they have."""
        mark = f"MODAL_TASK_ID=ta-{self.id[3:]}".encode()
        return [pid for pid in _pids() if mark in _environment(pid)]

    def kill(self) -> None:
        """Everything ends at once, as with a container."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


async def _unimplemented(self: Any, stream: Any) -> None:
    raise GRPCError(Status.UNIMPLEMENTED, "the stand-in has no such call")


_Nothing = type(
    "_Nothing",
    (api_grpc.ModalClientBase,),
    dict.fromkeys(api_grpc.ModalClientBase.__abstractmethods__, _unimplemented),
)


class _Servicer(_Nothing):  # type: ignore[misc, valid-type]
    """The calls. A fault that was arranged for a call comes before or after it."""

    def __init__(self, home: ModalStandIn) -> None:
        self.home = home

    def __mapping__(self) -> dict[str, Handler]:
        handlers = super().__mapping__()
        return {path: self._counted(path, handler) for path, handler in handlers.items()}

    def _counted(self, path: str, handler: Handler) -> Handler:
        name = path.rpartition("/")[2]

        async def call(stream: Any) -> None:
            self.home.calls[name] += 1
            if self.home.requires_credentials and not stream.metadata.get("x-modal-token-id"):
                raise GRPCError(Status.UNAUTHENTICATED, "Token missing")
            if (before := self.home.before.get(name)) is not None:
                await before(stream)
            await handler.func(stream)

        return Handler(call, handler.cardinality, handler.request_type, handler.reply_type)

    async def ClientHello(self, s: Any) -> None:
        await s.recv_message()
        await s.send_message(api_pb2.ClientHelloResponse())

    async def AuthTokenGet(self, s: Any) -> None:
        await s.recv_message()
        token = "x.eyJleHAiOjk5OTk5OTk5OTl9.x"  # {"exp": 9999999999}
        await s.send_message(api_pb2.AuthTokenGetResponse(token=token))

    async def AppGetOrCreate(self, s: Any) -> None:
        request = await s.recv_message()
        is_made = request.object_creation_type == api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING
        if request.app_name not in self.home.apps:
            if not is_made:
                raise GRPCError(Status.NOT_FOUND, f"App {request.app_name!r} not found")
            self.home.apps[request.app_name] = f"ap-{_code(22)}"
        app_id = self.home.apps[request.app_name]
        await s.send_message(api_pb2.AppGetOrCreateResponse(app_id=app_id))

    async def EnvironmentGetOrCreate(self, s: Any) -> None:
        request = await s.recv_message()
        if request.deployment_name not in self.home.environments:
            raise GRPCError(Status.NOT_FOUND, f"no environment {request.deployment_name!r}")
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        answer = api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)
        await s.send_message(answer)

    async def ImageGetOrCreate(self, s: Any) -> None:
        request = await s.recv_message()
        self.home.images.append(list(request.image.dockerfile_commands))
        words = " ".join(request.image.dockerfile_commands)
        result = Result(status=Result.GENERIC_STATUS_SUCCESS)
        if any(name in words for name in self.home.bad_images):
            result = Result(status=Result.GENERIC_STATUS_FAILURE, exception="pull access denied")
        image_id = f"im-{len(self.home.images)}"
        await s.send_message(api_pb2.ImageGetOrCreateResponse(image_id=image_id, result=result))

    async def SecretGetOrCreate(self, s: Any) -> None:
        request = await s.recv_message()
        env = dict(request.env_dict)
        if request.deployment_name:
            known = self.home.secrets.get(request.deployment_name)
            if known is None:
                raise GRPCError(Status.NOT_FOUND, f"Secret {request.deployment_name!r} not found")
            env = known
        secret_id = f"st-{_code(22)}"
        self.home.secret_values[secret_id] = env
        metadata = api_pb2.SecretMetadata(name=request.deployment_name, keys=list(env))
        answer = api_pb2.SecretGetOrCreateResponse(secret_id=secret_id, metadata=metadata)
        await s.send_message(answer)

    async def VolumeGetOrCreate(self, s: Any) -> None:
        request = await s.recv_message()
        is_made = request.object_creation_type == api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING
        if request.deployment_name not in self.home.volumes and not is_made:
            raise GRPCError(Status.NOT_FOUND, f"Volume {request.deployment_name!r} not found")
        self.home.volumes.setdefault(request.deployment_name, f"vo-{_code(22)}")
        volume_id = self.home.volumes[request.deployment_name]
        await s.send_message(api_pb2.VolumeGetOrCreateResponse(volume_id=volume_id))

    async def SandboxCreate(self, s: Any) -> None:
        request = await s.recv_message()
        env: dict[str, str] = {}
        for secret_id in request.definition.secret_ids:
            env.update(self.home.secret_values[secret_id])
        box = await self.home.begin(request, f"sb-{_code(22)}", env)
        metadata = api_pb2.SandboxHandleMetadata(app_id=request.app_id)
        await s.send_message(api_pb2.SandboxCreateResponse(sandbox_id=box.id, metadata=metadata))

    async def SandboxCreateV2(self, s: Any) -> None:
        request = await s.recv_message()
        if request.definition.resources.gpu_config.count:
            raise GRPCError(Status.INVALID_ARGUMENT, "no GPUs on V2")
        env: dict[str, str] = {}
        for source in request.secret_sources:
            env.update(self.home.secret_values.get(source.secret_id, {}))
            env.update(source.env.contents)
        box = await self.home.begin(request, f"sb-01{_code(24)}", env)
        metadata = api_pb2.SandboxHandleMetadata(app_id=request.app_id)
        await s.send_message(
            api_pb2.SandboxCreateV2Response(
                sandbox_id=box.id, task_id=f"ta-{box.id[3:]}", metadata=metadata
            )
        )

    async def SandboxGetTaskId(self, s: Any) -> None:
        request = await s.recv_message()
        box = self._box(request.sandbox_id)
        answer = api_pb2.SandboxGetTaskIdResponse()
        if box.process is not None or box.result is not None:
            answer.task_id = f"ta-{box.id[3:]}"
        await s.send_message(answer)

    async def SandboxWait(self, s: Any) -> None:
        request = await s.recv_message()
        box = self._box(request.sandbox_id)
        if request.timeout:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(box.ended.wait(), request.timeout)
        metadata = api_pb2.SandboxHandleMetadata(app_id=box.definition.app_id)
        await s.send_message(api_pb2.SandboxWaitResponse(result=box.result, metadata=metadata))

    SandboxWaitV2 = SandboxWait

    async def SandboxTerminate(self, s: Any) -> None:
        request = await s.recv_message()
        box = self._box(request.sandbox_id)
        self.home.terminate(box)
        await s.send_message(api_pb2.SandboxTerminateResponse())

    SandboxTerminateV2 = SandboxTerminate

    async def SandboxList(self, s: Any) -> None:
        request = await s.recv_message()
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        shown = [
            box
            for box in self.home.sandboxes.values()
            if (request.include_finished or box.is_running)
            and request.app_id in ("", box.definition.app_id)
            and wanted.items() <= box.tags.items()
            and not (request.before_timestamp and box.created >= request.before_timestamp)
        ]
        shown.sort(key=lambda box: -box.created)
        shown = shown[: self.home.page]
        await s.send_message(api_pb2.SandboxListResponse(sandboxes=map(_info, shown)))

    SandboxListV2 = SandboxList

    async def SandboxTagsGet(self, s: Any) -> None:
        request = await s.recv_message()
        tags = self._box(request.sandbox_id).tags
        await s.send_message(api_pb2.SandboxTagsGetResponse(tags=_tags(tags)))

    SandboxTagsGetV2 = SandboxTagsGet

    async def SandboxGetFromName(self, s: Any) -> None:
        request = await s.recv_message()
        same = [b for b in self.home.sandboxes.values() if b.definition.definition.name == (
            request.sandbox_name
        )]  # fmt: skip
        running = [box for box in same if box.is_running]
        if request.include_terminated and not running:
            running = same
        if not running:
            raise GRPCError(Status.NOT_FOUND, f"no sandbox {request.sandbox_name!r}")
        answer = api_pb2.SandboxGetFromNameResponse(sandbox_id=running[-1].id)
        await s.send_message(answer)

    SandboxGetFromNameV2 = SandboxGetFromName

    def _box(self, sandbox_id: str) -> StandInSandbox:
        box = self.home.sandboxes.get(sandbox_id)
        if box is None:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {sandbox_id} not found")
        return box


def _code(length: int) -> str:
    return "".join(random.choices(ALPHABET, k=length))


def _tags(tags: dict[str, str]) -> list[Any]:
    return [api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]


def _info(box: StandInSandbox) -> Any:
    return api_pb2.SandboxInfo(
        id=box.id,
        created_at=box.created,
        app_id=box.definition.app_id,
        name=box.definition.definition.name,
        task_info=api_pb2.TaskInfo(result=box.result, started_at=box.started),
        tags=_tags(box.tags),
        metadata=api_pb2.SandboxHandleMetadata(app_id=box.definition.app_id),
    )


class _Hanging(Server):
    """A server that can hang up on those who are connected."""

    def __init__(self, services: list[Any]) -> None:
        super().__init__(services)
        self.protocols: list[Any] = []

    def _protocol_factory(self) -> Any:
        self.protocols.append(super()._protocol_factory())
        return self.protocols[-1]


class ModalStandIn:
    """The server, in a thread of its own. Its public fields arrange faults and count calls.

    `held`: sandboxes are accepted, but none is scheduled until it is cleared.
    """

    def __init__(self, *, credentials: bool = False) -> None:
        self.calls: Counter[str] = Counter()
        self.before: dict[str, Callable[[Any], Any]] = {}
        self.apps: dict[str, str] = {}
        self.environments = {"", "main"}
        self.secrets: dict[str, dict[str, str]] = {}
        self.secret_values: dict[str, dict[str, str]] = {}
        self.volumes: dict[str, str] = {}
        self.images: list[list[str]] = []
        self.bad_images: set[str] = set()
        self.sandboxes: dict[str, StandInSandbox] = {}
        self.requires_credentials = credentials
        self.page = PAGE
        self.held = threading.Event()
        self._logs = tempfile.TemporaryDirectory(prefix="modal-stand-in-")
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._port = 0
        self._do(self._open())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs so that the client talks to this server and to no other."""
        return {
            "MODAL_SERVER_URL": self.url,
            "MODAL_TOKEN_ID": "ak-stand-in",
            "MODAL_TOKEN_SECRET": "as-stand-in",
            "MODAL_CONFIG_PATH": f"{self._logs.name}/modal.toml",
        }

    def close(self) -> None:
        self.held.clear()
        for box in self.sandboxes.values():
            if box.process is not None or self._tasks:
                self.terminate(box)
        self._do(self._close(is_last=True))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._logs.cleanup()

    def down(self) -> None:
        """The service goes away; its sandboxes run on."""
        self._do(self._close())

    def up(self) -> None:
        self._do(self._open(self._port))

    def running(self, **tags: str) -> list[StandInSandbox]:
        boxes = [box for box in self.sandboxes.values() if box.is_running]
        wanted = {f"atoll-{name}": value for name, value in tags.items()}
        return [box for box in boxes if wanted.items() <= box.tags.items()]

    def lose(self, box: StandInSandbox, status: str, exit_code: int = 137) -> None:
        """The sandbox is killed, and the service says this of it: `KERNEL_OOM_KILL`, …"""
        value = getattr(Result, f"GENERIC_STATUS_{status}")
        box.verdict = Result(status=value, exitcode=exit_code)
        box.kill()

    def terminate(self, box: StandInSandbox) -> None:
        """No signal that could be caught, no grace; and 137 whatever the process did."""
        if not box.is_running:
            return
        box.is_terminated = True
        box.kill()

    def add_entry(self, app_id: str, name: str, uid: str, rank: int) -> None:
        """A sandbox that runs as far as anybody can see, but without a process."""
        tags = {"atoll-uid": uid, "atoll-rank": str(rank), "atoll-attempt": "0"}
        definition = api_pb2.Sandbox(name=name)
        request = api_pb2.SandboxCreateV2Request(app_id=app_id, definition=definition)
        created = time.time()
        sandbox_id = f"sb-01{_code(24)}"
        log = Path(self._logs.name) / sandbox_id
        self.sandboxes[sandbox_id] = StandInSandbox(sandbox_id, request, tags, {}, created, log)

    def run_again(self, box: StandInSandbox) -> None:
        """The service starts the same sandbox a second time, beside the first."""
        self._do(self._spawn(box))

    async def begin(self, request: Any, sandbox_id: str, env: dict[str, str]) -> StandInSandbox:
        name = request.definition.name
        for box in self.sandboxes.values():
            is_same = box.definition.app_id == request.app_id and name
            if is_same and box.is_running and box.definition.definition.name == name:
                raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox with name {name!r} exists")
        box = StandInSandbox(
            id=sandbox_id,
            definition=request,
            tags={tag.tag_name: tag.tag_value for tag in request.tags},
            env=env,
            created=time.time(),
            log=Path(self._logs.name) / sandbox_id,
        )
        self.sandboxes[sandbox_id] = box
        task = asyncio.create_task(self._live(box))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return box

    async def _live(self, box: StandInSandbox) -> None:
        # Tests set both from another thread.
        while self.held.is_set() and not box.is_terminated:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if box.is_terminated:
            self._end(box, Result(status=Result.GENERIC_STATUS_TERMINATED))
            return
        try:
            process = await self._spawn(box)
        except OSError as error:
            self._end(box, Result(status=Result.GENERIC_STATUS_INIT_FAILURE, exception=str(error)))
            return
        box.process, box.started = process, time.time()
        if box.is_terminated:  # meanwhile
            await asyncio.to_thread(box.kill)
        timeout = box.definition.definition.timeout_secs
        try:
            code = await asyncio.wait_for(process.wait(), timeout or None)
        except TimeoutError:
            await asyncio.to_thread(box.kill)
            self._end(box, Result(status=Result.GENERIC_STATUS_TIMEOUT))
            return
        await asyncio.to_thread(box.kill)  # whatever the command left behind
        code = code if code >= 0 else 128 - code
        status = Result.GENERIC_STATUS_FAILURE if code else Result.GENERIC_STATUS_SUCCESS
        true = Result(status=status, exitcode=code)
        if box.is_terminated:
            true = Result(status=Result.GENERIC_STATUS_TERMINATED, exitcode=code)
        self._end(box, box.verdict or true)

    async def _spawn(self, box: StandInSandbox) -> asyncio.subprocess.Process:
        definition = box.definition.definition
        given = {name: os.environ[name] for name in GIVEN if name in os.environ}
        regions = definition.scheduler_placement.regions
        env = {
            **given,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # the image has atoll
            "HOME": self._logs.name,
            **box.env,
            "MODAL_TASK_ID": f"ta-{box.id[3:]}",
            "MODAL_IMAGE_ID": definition.image_id,
            "MODAL_CLOUD_PROVIDER": "CLOUD_PROVIDER_AWS",
            "MODAL_REGION": regions[0] if regions else "us-east-1",
        }
        with box.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *definition.entrypoint_args,
                env=env,
                cwd=definition.workdir or self._logs.name,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _end(self, box: StandInSandbox, result: Any) -> None:
        box.result = result
        self._loop.call_soon_threadsafe(box.ended.set)

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _open(self, port: int = 0) -> None:
        self._server = _Hanging([_Servicer(self)])
        await self._server.start("127.0.0.1", port)
        self._port = self._server._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def _close(self, *, is_last: bool = False) -> None:
        if is_last:
            await asyncio.gather(*self._tasks)
        self._server.close()
        for protocol in self._server.protocols:
            if hasattr(protocol, "connection"):
                protocol.connection.close()
        await self._server.wait_closed()
        await asyncio.sleep(0)  # the loop closes their sockets
