"""Builds a control plane: the only place that creates real objects and wires them together.

`atoll serve` runs the control plane of one machine: store, executors, controller and
server in one process. Ranks are not in it, so it may be stopped and started at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import shlex
import shutil
import socket
import stat
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import atoll
from atoll.core.errors import Conflict, Permanent, ValidationError
from atoll.core.executors import LOCAL
from atoll.local.spare import FULL, has_room, make_spare, spare_directories
from atoll.local.state import ENDPOINT, state_dir
from atoll.sdk.config import is_changed, read
from atoll.sdk.embedded import start_time

if TYPE_CHECKING:
    import ssl

    from starlette.types import ASGIApp

    from atoll.core.config import Config
    from atoll.core.ports import Executor, Tokens
    from atoll.server.executors import Setup
    from atoll.server.serving import GuardedServer
    from atoll.server.streams import Streams
    from atoll.store.sqlite import SQLiteStore
    from atoll.store.tokens import SQLiteTokens

DEFAULT_PORT = 7878
NAMESPACE = "default"
PURGE_S = 60.0
WATCH_FILES_S = 5.0
SPACE_BYTES = 2**18  # for SQLite's files and the small ones beside them
LOOK_FOR_ROOM_S = 1.0
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EROFS: "mount it writable",
}
# Without these there is nothing to read, or nobody may.
NEEDED = ("atoll.db", "atoll.db.lock", "plane", "token")


@dataclass
class ControlPlane:
    """All parts of one control plane, wired but not yet running."""

    where: Path
    store: SQLiteStore
    tokens: SQLiteTokens
    app: ASGIApp
    streams: Streams
    read_only: str = ""  # why it only reads; empty if it does all
    is_to_go_on: bool = False  # it ended because there is room to write


def build(
    where: Path,
    *,
    slots: int | None = None,
    config: Path | None = None,
    has_shared_namespaces: bool = False,
) -> ControlPlane:
    """One that only reads, if what is stored there can be read but not written.

    Raises Permanent if another control plane uses that directory, or it cannot be used, and
    ValidationError if its configuration is wrong.
    """
    from atoll.controller.clock import keep_mark, machine_clock, write_mark
    from atoll.controller.loop import Controller
    from atoll.controller.sweep import keep_swept
    from atoll.core.ports import Sweeping
    from atoll.rank.report_token import key_at
    from atoll.rounds.follow import RoundFollower, figures_of, whose_of
    from atoll.series.collect import Collector
    from atoll.series.keep import SeriesKeeper
    from atoll.server.app import create_app
    from atoll.server.background import beside
    from atoll.server.deliver import Deliverer
    from atoll.server.gauges import Gauges
    from atoll.server.streams import Streams
    from atoll.server.ui.sessions import Sessions
    from atoll.store.sqlite import SQLiteStore
    from atoll.store.tokens import SQLiteTokens

    settings = read(config)
    _check_private(where)
    refusal = _why_full(where)
    executors, setup = configured(settings, where, slots=slots)
    if not has_shared_namespaces:
        setup = replace(setup, only={LOCAL: NAMESPACE})
    if refusal:
        return _build_read_only(where, executors, setup, refusal)
    store = SQLiteStore(where / "atoll.db")
    tokens = SQLiteTokens(where / "atoll.db")
    local: Any = executors[LOCAL]
    series = SeriesKeeper(where / "series.db")
    gauges, streams = Gauges(), Streams()
    deliverer = Deliverer(store.outbox, trusted=[NAMESPACE])
    clock = machine_clock(where / "clock")
    controller = Controller(
        store,
        executors,
        clock=clock,
        on_pass=lambda done: gauges.reconciled(done.seconds),
        quiet_s=series.stillness.quiet_s,
    )

    @contextlib.asynccontextmanager
    async def controlled() -> AsyncIterator[None]:
        await local.start(store)
        async with contextlib.AsyncExitStack() as running:
            await running.enter_async_context(beside(controller.run(), _end_if_dead))
            await running.enter_async_context(beside(keep_mark(clock, where / "clock")))
            await running.enter_async_context(beside(_watch_files(store)))
            await running.enter_async_context(beside(deliverer.run()))
            collector = Collector(
                series,
                figures_of(executors),
                local.machine_use,
                # Its files are here: it may be taken up again.
                lambda uid: (where / "ranks" / uid).exists(),
            )
            await running.enter_async_context(beside(collector.run(store)))
            follower = RoundFollower(
                series.rounds, whose_of(executors, setup.kinds), settings.round_stores, NAMESPACE
            )
            await running.enter_async_context(beside(follower.run(store)))
            for executor in executors.values():
                if isinstance(executor, Sweeping):
                    await running.enter_async_context(beside(keep_swept(store, executor)))
            yield
        for executor in executors.values():
            await executor.close()  # type: ignore[attr-defined]
        write_mark(clock, where / "clock")
        series.close()
        tokens.close()
        store.close()

    app = create_app(
        store=store,
        tokens=tokens,
        executors=executors,
        streams=streams,
        setup=setup,
        gauges=gauges,
        clock=clock,
        series=series,
        outbox=store.outbox,
        deliverer=deliverer,
        report_key=key_at(where),
        sessions=Sessions(_identity(where), where / "sessions.json"),
        lifespan=controlled,
    )
    return ControlPlane(where, store, tokens, app, streams)


def _build_read_only(
    where: Path, executors: dict[str, Executor], setup: Setup, refusal: str
) -> ControlPlane:
    """Without a controller: what it saw could not be stored, so it starts and stops nothing."""
    from atoll.controller.clock import machine_clock
    from atoll.server.app import create_app
    from atoll.server.streams import Streams
    from atoll.store.readonly import ReadOnlyStore, ReadOnlyTokens

    store = ReadOnlyStore(where / "atoll.db", refusal)
    tokens = ReadOnlyTokens(where / "atoll.db", refusal)
    streams = Streams()

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        yield
        for executor in executors.values():
            await executor.close()  # type: ignore[attr-defined]
        tokens.close()
        store.close()

    app = create_app(
        store=store,
        tokens=tokens,
        executors=executors,
        streams=streams,
        setup=replace(setup, read_only=refusal),
        clock=machine_clock(where / "clock"),
        lifespan=opened,
    )
    logging.getLogger(__name__).warning("read-only: %s", refusal)
    return ControlPlane(where, store, tokens, app, streams, refusal)


def configured(
    settings: Config, where: Path, *, slots: int | None = None
) -> tuple[dict[str, Executor], Setup]:
    """The executors that can be used, and why the others cannot. None is connected yet.

    Raises ValidationError naming the file and the option that is wrong.
    """
    from atoll.core.config import in_file
    from atoll.core.executors import Home, load
    from atoll.server.executors import Setup

    directory = Path(settings.path).parent if settings.path else where
    home = Home(where, _identity(where), directory)
    executors: dict[str, Executor] = {}
    unusable: dict[str, str] = {}
    for name, wanted in settings.executors.items():
        options = dict(wanted.options)
        if name == LOCAL and slots is not None:
            options["slots"] = slots
        try:
            executors[name] = load(wanted.kind).configured(name, options, home)
        except ValidationError as error:
            raise in_file(settings.path, error, f"executors.{name}") from error
        except Permanent as error:
            logging.getLogger(__name__).warning("executor %s: %s", name, error)
            unusable[name] = str(error)
    setup = Setup(
        kinds={name: wanted.kind for name, wanted in settings.executors.items()},
        unusable=unusable,
        default=settings.defaults.get("executor", LOCAL),
        config=settings.path,
        is_changed=lambda: is_changed(settings),
        restart=f"stop it (kill {os.getpid()}; ranks go on) and run: atoll serve --config FILE",
        notes=lambda: executors[LOCAL].set_aside,  # type: ignore[attr-defined]
    )
    return executors, setup


def _check_private(where: Path) -> None:
    """Raises Permanent for a state directory in which others could put files of their own."""
    with contextlib.suppress(FileNotFoundError):
        if os.stat(where).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Permanent(
                f"others can write to the state directory {where}, and so give commands that run "
                f"as you: run: chmod go-w {shlex.quote(str(where))}"
            )


def _why_full(where: Path) -> str:
    """Makes the state directory. Why it takes no more, in one line; empty if it can be written.

    Raises Permanent, before anything in it is touched, if it can be neither written nor read.
    """
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_private(where / "space", " " * SPACE_BYTES)
        (where / "space").unlink()
    except OSError as error:
        trouble = f"cannot write to {where}: {error.strerror}"
        remedy = REMEDIES.get(error.errno or 0, "allow it")
        if error.errno in FULL and all((where / name).exists() for name in NEEDED):
            return (
                f"{trouble}: {remedy}; until then this control plane only reads, starts and stops "
                "nothing, and ranks that run go on"
            )
        raise Permanent(
            f"{trouble}: {remedy}, then start it again; ranks that run go on meanwhile"
        ) from error
    return ""


def _can_go_on(plane: ControlPlane) -> bool:
    """Whether what a control plane needs can be written again."""
    from atoll.store.readonly import ReadOnlyStore

    assert isinstance(plane.store, ReadOnlyStore)
    copied = 0 if plane.store.is_current else (plane.where / "atoll.db").stat().st_size
    try:
        return has_room(plane.where, SPACE_BYTES + 2 * copied) and not _why_full(plane.where)
    except (OSError, Permanent):
        return False


async def _watch_files(store: SQLiteStore) -> None:
    """Tells of files that somebody deletes, also while nothing is written."""
    while True:
        await asyncio.sleep(WATCH_FILES_S)
        store.check_files()


def _identity(where: Path) -> str:
    """The id of the control plane of this directory, created on first use."""
    path = where / "plane"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    _write_private(path, f"{uuid.uuid4().hex}\n")
    return path.read_text().strip()


def _end_if_dead(controller: asyncio.Task[None]) -> None:
    """Ends the process if its controller has died: it must not pretend to work."""
    if not controller.cancelled() and controller.exception() is not None:
        asyncio.get_running_loop().call_exception_handler(
            {"message": "the controller died", "exception": controller.exception()}
        )
        os._exit(70)  # ranks keep running; the next control plane takes them over


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    where: Path | None = None,
    slots: int | None = None,
    config: Path | None = None,
    has_shared_namespaces: bool = False,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    is_owned: bool = False,
) -> None:
    """Serves until stopped; prints the address once it answers. With a certificate and its key,
    files in PEM, by HTTPS only.

    One that only reads goes on as a whole one, at the same address, once there is room to write.
    `is_owned`: serves until standard input ends, then removes all trainings.
    """
    from atoll.server.lograte import quiet_log
    from atoll.server.serving import listen, tls_of

    quiet_log(logging.WARNING)
    where = where or state_dir()
    tls = tls_of(tls_cert, tls_key)
    listening = listen(host, port)
    certificate = None if tls_cert is None else tls_cert.absolute()
    address = _endpoint(listening, certificate)
    if (limit := slots or read(config).executors[LOCAL].options.get("slots")) is not None:
        address["slots"] = limit
    is_first = True
    while True:
        plane = build(
            where, slots=slots, config=config, has_shared_namespaces=has_shared_namespaces
        )
        if plane.read_only and is_owned:
            raise Permanent(plane.read_only)
        asyncio.run(ensure_token(plane.tokens, where))
        server = _server(plane, address, tls, is_owned=is_owned, is_first=is_first)
        server.run(sockets=[listening.dup()])  # it closes them; who connects meanwhile waits
        if not plane.is_to_go_on:
            break
        is_first = False
    if is_owned:
        shutil.rmtree(where, ignore_errors=True)


async def ensure_token(tokens: Tokens, where: Path) -> None:
    """Makes sure that the user's own token is in a private file and known to the server."""
    from atoll.server.auth import hashed, new_token

    path = where / "token"
    try:
        token = path.read_text().strip()
    except FileNotFoundError:
        token = new_token()
        _write_private(path, token + "\n")
    if await tokens.namespace_of(hashed(token)) is None:
        await tokens.add(hashed(token), NAMESPACE, "local user", time.time())


def _server(
    plane: ControlPlane,
    address: dict[str, Any],
    tls: ssl.SSLContext | None,
    *,
    is_owned: bool,
    is_first: bool,
) -> GuardedServer:
    from atoll.server.serving import GuardedServer

    class Server(GuardedServer):
        """A server that announces when it is ready, and ends open streams when it stops."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.loop = asyncio.get_running_loop()
            _announce(plane, address)
            if is_first:
                with contextlib.suppress(BrokenPipeError):  # who started it has left
                    sys.stdout.write(json.dumps(address) + "\n")
                    sys.stdout.flush()
            if plane.read_only:
                self.looking = self.loop.create_task(self.look_for_room())
            if is_owned:
                self.loop.add_reader(0, self.abandon)

        async def look_for_room(self) -> None:
            is_full = True
            while is_full:
                await asyncio.sleep(LOOK_FOR_ROOM_S)
                is_full = not _can_go_on(plane)
            plane.is_to_go_on = not self.should_exit
            self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            plane.streams.close()
            if not plane.is_to_go_on:  # else it stays true
                _withdraw(plane.where)
            await super().shutdown(sockets)

        def handle_exit(self, sig: int, frame: Any) -> None:
            # uvicorn would raise the signal again afterwards, but a requested stop is no failure.
            if self.should_exit:
                self.force_exit = True
            if is_owned:
                self.loop.call_soon_threadsafe(self.abandon)
            else:
                self.should_exit = True

        def abandon(self) -> None:
            self.loop.remove_reader(0)
            self.purging = self.loop.create_task(self.purge())

        async def purge(self) -> None:
            try:
                await _remove_all(plane.store)
            finally:
                self.should_exit = True

    return Server(plane.app, tls=tls)


def _announce(plane: ControlPlane, address: dict[str, Any]) -> None:
    """Tells commands on this machine where it is: in its directory, or in place of that."""
    log = logging.getLogger(__name__)
    if not plane.read_only:
        _write_private(plane.where / ENDPOINT, json.dumps(address))
        for spare in spare_directories(plane.where):
            (spare / ENDPOINT).unlink(missing_ok=True)
        return
    try:
        _write_private(make_spare(plane.where) / ENDPOINT, json.dumps(address))
    except OSError as error:
        url = address["url"]
        why = f"no other place for {ENDPOINT} can be written: {error.strerror}"
        log.warning("%s: commands find it only with ATOLL_URL=%s and ATOLL_TOKEN", why, url)


def _withdraw(where: Path) -> None:
    for directory in (where, *spare_directories(where)):
        with contextlib.suppress(OSError):
            (directory / ENDPOINT).unlink(missing_ok=True)


def _endpoint(listening: socket.socket, certificate: Path | None) -> dict[str, Any]:
    """What commands on this machine need to know. They trust the certificate by its file, whatever
    name it is for."""
    host, port = listening.getsockname()[:2]
    url_host = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        url_host = "127.0.0.1"
    tls = {} if certificate is None else {"certificate": str(certificate)}
    return {
        "url": f"http{'s' if tls else ''}://{url_host}:{port}",
        **tls,
        "pid": os.getpid(),
        "startTime": start_time(os.getpid()),
        "release": atoll.__version__,
    }


async def _remove_all(store: SQLiteStore) -> None:
    """Removes every training; returns when all of them are gone, or after a while."""
    from msgspec.structs import replace

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PURGE_S):
            version = await store.version()
            while left := await store.list():
                for training in left:
                    if training.deletion_requested_at is None:
                        with contextlib.suppress(Conflict):
                            await store.update_spec(
                                replace(training, deletion_requested_at=time.time())
                            )
                change = await anext(store.watch(version))
                version = change.version


def _write_private(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
