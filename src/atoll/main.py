"""Builds a control plane: the only place that creates real objects and wires them together.

`atoll serve` runs the control plane of one machine: store, executors, controller and
server in one process. Ranks are not in it, so it may be stopped and started at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import logging
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import atoll
from atoll.backends.local import plane_socket
from atoll.backends.local.plane_socket import SOCKET
from atoll.backends.local.spare import FULL, has_room, make_spare, spare_directories
from atoll.backends.local.state import ENDPOINT, state_dir
from atoll.core.errors import Conflict, NotFound, Permanent, ValidationError
from atoll.core.executors import LOCAL
from atoll.files.ownership import check_directory, check_entries, make_private
from atoll.sdk.config import is_changed, read_for_plane
from atoll.sdk.embedded import start_time
from atoll.sdk.endpoint import Address

if TYPE_CHECKING:
    import ssl

    from starlette.types import ASGIApp

    from atoll.controller.informer import Informer
    from atoll.core.config import Config
    from atoll.core.ports import Executor, Key, Tokens
    from atoll.server.background import BackgroundTasks, Work
    from atoll.server.handlers.admission import Setup
    from atoll.server.http.server import GuardedServer
    from atoll.server.http.streams import Streams
    from atoll.server.ui.sessions import Sessions
    from atoll.store.sqlite import SQLiteStore
    from atoll.store.tokens import SQLiteTokens

DEFAULT_PORT = 7878
EVERY_ADDRESS = ("0.0.0.0", "::")
NAMESPACE = "default"
PURGE_S = 60.0
WATCH_FILES_S = 5.0
SPACE_BYTES = 2**18  # for SQLite's files and the small ones beside them
CHECK_SPACE_S = 1.0
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
    background: BackgroundTasks
    informer: Informer
    read_only: str = ""  # why it only reads; empty if it does all
    is_to_go_on: bool = False  # it ended because there is room to write


def build(
    where: Path,
    *,
    slots: int | None = None,
    config: Path | None = None,
    has_shared_namespaces: bool = False,
    is_loopback: bool = False,
) -> ControlPlane:
    """One that only reads, if what is stored there can be read but not written.

    Raises Permanent if another control plane uses that directory, or it cannot be used, and
    ValidationError if its configuration is wrong.
    """
    from atoll.backends.metrics_token import key_at
    from atoll.controller.clock import keep_mark, machine_clock, write_mark
    from atoll.controller.informer import INFORMER, Informer
    from atoll.controller.loop import Controller
    from atoll.controller.sweep import keep_swept
    from atoll.metrics.collect import Collector
    from atoll.metrics.store import MetricStore
    from atoll.rounds.follow import RoundFollower, metrics_uri_of, store_access_of
    from atoll.server.app import create_app
    from atoll.server.background import CONTROLLER, BackgroundTasks
    from atoll.server.deliver import Deliverer, load_webhooks
    from atoll.server.gauges import Gauges
    from atoll.server.http.streams import Streams
    from atoll.server.ui.sessions import Sessions
    from atoll.store.sqlite import SQLiteStore
    from atoll.store.tokens import SQLiteTokens

    settings = read_for_plane(config)
    webhooks = load_webhooks(settings.webhooks, settings.path)
    check_directory(where)
    refusal = _why_full(where)
    check_entries(where)
    executors, setup = configured(settings, where, slots=slots)
    if not has_shared_namespaces:
        setup = replace(setup, only={LOCAL: NAMESPACE})
    sessions = Sessions(_identity(where), is_loopback=is_loopback)
    if refusal:
        return _build_read_only(where, executors, setup, sessions, refusal)
    store = SQLiteStore(where / "atoll.db")
    tokens = SQLiteTokens(where / "atoll.db")
    metrics = MetricStore(where / "series.db")
    informer = Informer(store)
    gauges, streams = Gauges(informer), Streams()
    store.outbox.configure(webhooks)
    deliverer = Deliverer(store.outbox)
    clock = machine_clock(where / "clock")
    background = BackgroundTasks()
    notes = setup.notes

    def all_notes() -> list[str]:
        failing = [f"{one.name} does not work: {one.error}" for one in background.failures]
        return [*notes(), *metrics.notes, *filter(None, [metrics.trouble]), *failing]

    setup = replace(setup, notes=all_notes, stale=lambda: store.stale)

    def control() -> Awaitable[None]:
        controller = Controller(
            store,
            executors,
            informer=informer,
            clock=clock,
            on_pass=lambda done: gauges.record_pass(done.seconds),
            idle_s=metrics.idle_tracker.idle_s,
            rounds=metrics.rounds.observed,
        )
        metrics.rounds.on_news = controller.wake
        return controller.run()

    @contextlib.asynccontextmanager
    async def controlled() -> AsyncIterator[None]:
        for executor in executors.values():
            await executor.start(store)
        collector = Collector(
            metrics,
            metrics_uri_of(executors),
            executors[LOCAL].machine_use,
            # Its files are here: it may be taken up again.
            lambda uid: (where / "ranks" / uid).exists(),
        )
        follower = RoundFollower(
            metrics.rounds,
            store_access_of(executors, setup.kinds),
            settings.round_stores,
            NAMESPACE,
        )
        works: dict[str, Work] = {
            INFORMER: informer.run,
            CONTROLLER: control,
            "clock": lambda: keep_mark(clock, where / "clock"),
            "files": lambda: _watch_files(store, executors[LOCAL]),
            "webhooks": deliverer.run,
            "metrics": lambda: collector.run(informer),
            "rounds": lambda: follower.run(informer),
        }
        for name, executor in executors.items():
            works[f"sweep of {name}"] = functools.partial(keep_swept, store, executor)
        async with contextlib.AsyncExitStack() as running:
            for name, work in works.items():
                await running.enter_async_context(background.running(name, work))
            yield
        for executor in executors.values():
            await executor.close()
        write_mark(clock, where / "clock")
        metrics.close()
        tokens.close()
        store.close()

    app = create_app(
        store=store,
        tokens=tokens,
        executors=executors,
        streams=streams,
        setup=setup,
        informer=informer,
        gauges=gauges,
        clock=clock,
        metrics=metrics,
        report_key=key_at(where),
        background=background,
        sessions=sessions,
        lifespan=controlled,
    )
    return ControlPlane(where, store, tokens, app, streams, background, informer)


def _build_read_only(
    where: Path,
    executors: dict[str, Executor],
    setup: Setup,
    sessions: Sessions,
    refusal: str,
) -> ControlPlane:
    """Without a controller: what it saw could not be stored, so it starts and stops nothing."""
    from atoll.controller.clock import machine_clock
    from atoll.controller.informer import INFORMER, Informer
    from atoll.server.app import create_app
    from atoll.server.background import BackgroundTasks
    from atoll.server.http.streams import Streams
    from atoll.store.readonly import ReadOnlyStore, ReadOnlyTokens

    store = ReadOnlyStore(where / "atoll.db", refusal)
    tokens = ReadOnlyTokens(where / "atoll.db", refusal)
    streams = Streams()
    background = BackgroundTasks()
    informer = Informer(store)

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        async with background.running(INFORMER, informer.run):
            yield
        for executor in executors.values():
            await executor.close()
        tokens.close()
        store.close()

    app = create_app(
        store=store,
        tokens=tokens,
        executors=executors,
        streams=streams,
        informer=informer,
        setup=replace(setup, read_only=refusal),
        sessions=sessions,
        clock=machine_clock(where / "clock"),
        background=background,
        lifespan=opened,
    )
    logging.getLogger(__name__).warning("read-only: %s", refusal)
    return ControlPlane(where, store, tokens, app, streams, background, informer, refusal)


def configured(
    settings: Config, where: Path, *, slots: int | None = None
) -> tuple[dict[str, Executor], Setup]:
    """The executors that can be used, and why the others cannot. None is connected yet.

    Raises ValidationError naming the file and the option that is wrong.
    """
    from atoll.core.config import in_file
    from atoll.core.executors import PlaneContext, load
    from atoll.server.handlers.admission import Setup

    directory = Path(settings.path).parent if settings.path else where
    home = PlaneContext(where, _identity(where), directory)
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
        notes=lambda: [note for each in executors.values() for note in each.notes()],
    )
    return executors, setup


def _why_full(where: Path) -> str:
    """Makes the state directory. Why it takes no more, in one line; empty if it can be written.

    Raises Permanent, before anything in it is touched, if it can be neither written nor read.
    """
    try:
        make_private(where)
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
    try:
        return has_room(plane.where, SPACE_BYTES) and not _why_full(plane.where)
    except (OSError, Permanent):
        return False


async def _watch_files(store: SQLiteStore, local: Executor) -> None:
    """Tells of files that somebody deletes, also while nothing is written."""
    while True:
        await asyncio.sleep(WATCH_FILES_S)
        store.check_files()
        local.renew_reserve()


def _identity(where: Path) -> str:
    """The id of the control plane of this directory, created on first use."""
    path = where / "plane"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    _write_private(path, f"{uuid.uuid4().hex}\n")
    return path.read_text().strip()


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
    from atoll.server.http.log_rate import configure_log
    from atoll.server.http.server import BACKLOG, listen, load_tls

    configure_log(logging.WARNING)
    where = state_dir(where)
    tls = load_tls(tls_cert, tls_key)
    listening = [listen(host, port)]
    address = _endpoint(listening[0], is_tls=tls is not None)
    if (limit := slots or read_for_plane(config).executors[LOCAL].options.get("slots")) is not None:
        address["slots"] = limit
    is_first = True
    while True:
        plane = build(
            where,
            slots=slots,
            config=config,
            has_shared_namespaces=has_shared_namespaces,
            is_loopback=Address(address["url"]).is_local and host not in EVERY_ADDRESS,
        )
        if plane.read_only and is_owned:
            raise Permanent(plane.read_only)
        asyncio.run(ensure_token(plane.tokens, where))
        # The store is locked: nobody else listens in this directory.
        if (directory := _public_directory(plane, address["url"])) is not None:
            listening.append(plane_socket.listen(directory, BACKLOG))
        server = _server(plane, address, directory, tls, is_owned=is_owned, is_first=is_first)
        # It closes them; who connects meanwhile waits.
        server.run(sockets=[each.dup() for each in listening])
        if not plane.is_to_go_on:
            break
        is_first = False
    if is_owned:
        shutil.rmtree(where, ignore_errors=True)


async def ensure_token(tokens: Tokens, where: Path) -> None:
    """Makes sure that the user's own token is in a private file and known to the server."""
    from atoll.server.http.auth import hash_token, new_token

    path = where / "token"
    try:
        token = path.read_text().strip()
    except FileNotFoundError:
        token = new_token()
        _write_private(path, token + "\n")
    if await tokens.namespace_of(hash_token(token)) is None:
        await tokens.add(hash_token(token), NAMESPACE, "local user", time.time())


def _server(
    plane: ControlPlane,
    address: dict[str, Any],
    directory: Path | None,
    tls: ssl.SSLContext | None,
    *,
    is_owned: bool,
    is_first: bool,
) -> GuardedServer:
    from atoll.server.http.server import BACKLOG, GuardedServer

    class Server(GuardedServer):
        """A server that announces when it is ready, and ends open streams when it stops."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.loop = asyncio.get_running_loop()
            _announce(plane, address, directory)
            self.watching = self.loop.create_task(
                plane.background.keep_running("socket", self.keep_announced)
            )
            if is_first:
                with contextlib.suppress(BrokenPipeError):  # who started it has left
                    sys.stdout.write(json.dumps(address) + "\n")
                    sys.stdout.flush()
            if plane.read_only:
                work = plane.background.keep_running("look for room", self.look_for_room)
                self.looking = self.loop.create_task(work)
            if is_owned:
                self.loop.add_reader(0, self.abandon)

        async def keep_announced(self) -> None:
            """Makes again what commands find it by, if somebody deletes that."""
            while directory is not None:
                await asyncio.sleep(WATCH_FILES_S)
                if not plane.read_only and not plane.store.check_files():
                    continue  # the directory may be another control plane's by now
                if not (directory / SOCKET).exists():
                    await self.accept_from(plane_socket.listen(directory, BACKLOG))
                if not (directory / ENDPOINT).exists():
                    _announce(plane, address, directory)

        async def look_for_room(self) -> None:
            is_full = True
            while is_full:
                await asyncio.sleep(CHECK_SPACE_S)
                is_full = not _can_go_on(plane)
            plane.is_to_go_on = not self.should_exit
            self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            plane.streams.close()
            self.watching.cancel()
            if not plane.is_to_go_on:  # else it stays true
                _withdraw(plane.where, *spare_directories(plane.where))
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
                await _remove_all(plane.informer)
            finally:
                self.should_exit = True

    return Server(plane.app, tls=tls)


def _public_directory(plane: ControlPlane, url: str) -> Path | None:
    """Where commands on this machine look for it: its directory, or one in place of that; None if
    none can be written."""
    if not plane.read_only:
        return plane.where
    try:
        return make_spare(plane.where)
    except OSError as error:
        why = f"no other place for {ENDPOINT} and {SOCKET} can be written: {error.strerror}"
        logging.getLogger(__name__).warning(
            "%s: commands find it only with ATOLL_URL=%s and ATOLL_TOKEN", why, url
        )
        return None


def _announce(plane: ControlPlane, address: dict[str, Any], directory: Path | None) -> None:
    """Tells commands on this machine that it serves the socket in that directory."""
    if directory is not None:
        _write_private(directory / ENDPOINT, json.dumps(address))
    if directory == plane.where:
        _withdraw(*spare_directories(plane.where))


def _withdraw(*directories: Path) -> None:
    for directory in directories:
        for name in (ENDPOINT, SOCKET):
            with contextlib.suppress(OSError):
                (directory / name).unlink(missing_ok=True)


def _endpoint(listening: socket.socket, *, is_tls: bool) -> dict[str, Any]:
    """What commands on this machine need to know."""
    host, port = listening.getsockname()[:2]
    url_host = f"[{host}]" if ":" in host else host
    if host in EVERY_ADDRESS:
        url_host = "127.0.0.1"
    return {
        "url": f"http{'s' if is_tls else ''}://{url_host}:{port}",
        "pid": os.getpid(),
        "startTime": start_time(os.getpid()),
        "release": atoll.__version__,
    }


async def _remove_all(informer: Informer) -> None:
    """Removes every training; returns when all of them are gone, or after a while."""
    from msgspec.structs import replace

    async def mark(key: Key) -> None:
        with contextlib.suppress(Conflict, NotFound):  # an update tells of the change
            training = await informer.store.get(key)
            if training.deletion_requested_at is None:
                training = replace(training, deletion_requested_at=time.time())
                await informer.store.update_spec(training)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PURGE_S):
            for _, key in informer.keys():
                await mark(key)
            updates = informer.updates()
            while informer.keys():
                update = await anext(updates)
                if not update.is_removed:
                    await mark(update.key)


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
