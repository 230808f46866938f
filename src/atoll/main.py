"""Builds a control plane: the only place that creates real objects and wires them together.

`atoll serve` runs the control plane of one machine: store, executors, controller and
server in one process. Ranks are not in it, so it may be stopped and started at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import atoll
from atoll.backends.local.state import ENDPOINT, SOCKET, check_writable, listen_locally, state_dir
from atoll.core.errors import Conflict, NotFound, Permanent, ValidationError
from atoll.core.executors import LOCAL, Limits
from atoll.files.ownership import check_directory, check_entries
from atoll.files.writing import write_file
from atoll.sdk.config import is_changed, read_for_plane
from atoll.sdk.endpoint import Address, start_time

if TYPE_CHECKING:
    import ssl

    from starlette.types import ASGIApp

    from atoll.controller.informer import Informer
    from atoll.core.config import Config
    from atoll.core.ports import Executor, Key, Tokens
    from atoll.server.background import BackgroundTasks
    from atoll.server.handlers.admission import Setup
    from atoll.server.http.server import GuardedServer
    from atoll.server.http.streams import Streams
    from atoll.store.database import SQLiteTokens
    from atoll.store.sqlite import SQLiteStore

PORT_FILE = "port"  # in the state directory: the port of its last control plane
DEFAULT_PORT = 7878  # easy to type; `--port` chooses another
EVERY_ADDRESS = ("0.0.0.0", "::")
NAMESPACE = "default"
PURGE_S = 60.0  # of `atoll serve --owned`: two polite stops of 30 s, the default grace
# How soon a deleted state directory or socket is noticed: before a person has finished typing the
# command that would need it.
WATCH_FILES_S = 5.0


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


def build(
    where: Path,
    *,
    slots: int | None = None,
    config: Path | None = None,
    has_shared_namespaces: bool = False,
    is_loopback: bool = False,
) -> ControlPlane:
    """Wires a control plane on this state directory.

    Raises Permanent if another control plane uses the directory or nothing can be written there,
    and ValidationError if the configuration is wrong.
    """
    from atoll.backends.metrics_token import key_at
    from atoll.controller.informer import INFORMER, Informer
    from atoll.controller.loop import keep_mark, machine_clock, write_mark
    from atoll.metrics.store import MetricStore
    from atoll.server.app import create_app
    from atoll.server.background import BackgroundTasks, assemble
    from atoll.server.deliver import load_webhooks
    from atoll.server.gauges import Gauges
    from atoll.server.http.streams import Streams
    from atoll.server.ui.sessions import Sessions
    from atoll.store.database import SQLiteTokens
    from atoll.store.sqlite import SQLiteStore

    settings = read_for_plane(config)
    webhooks = load_webhooks(settings.webhooks, settings.path)
    check_directory(where)
    check_writable(where)
    check_entries(where)
    executors, setup = configured(settings, where)
    if not has_shared_namespaces:
        setup = replace(setup, only={LOCAL: NAMESPACE})
    store = SQLiteStore(where / "atoll.db")
    if slots is not None:  # nobody else uses the directory: the store is locked
        executors[LOCAL].set_limits(Limits(slots=slots))
    tokens = SQLiteTokens(where / "atoll.db")
    metrics = MetricStore(where / "series.db")
    informer = Informer(store)
    gauges, streams, background = Gauges(informer), Streams(), BackgroundTasks()
    store.outbox.configure(webhooks)
    clock = machine_clock(where / "clock")
    notes = setup.notes

    def all_notes() -> list[str]:
        failing = [f"{one.name} does not work: {one.error}" for one in background.failures]
        return [*notes(), *metrics.notes, *filter(None, [metrics.trouble]), *failing]

    setup = replace(setup, notes=all_notes, stale=lambda: store.stale)

    @contextlib.asynccontextmanager
    async def run_tasks() -> AsyncIterator[None]:
        for executor in executors.values():
            await executor.start(store)
        tasks = assemble(
            store=store,
            executors=executors,
            kinds=setup.kinds,
            informer=informer,
            clock=clock,
            metrics=metrics,
            gauges=gauges,
            outbox=store.outbox,
            round_stores=settings.round_stores,
            own_namespace=NAMESPACE,
            machine_use=executors[LOCAL].machine_use,
            # Its files are here, so the local executor may adopt it.
            may_return=lambda uid: (where / "ranks" / uid).exists(),
        )
        tasks[INFORMER] = informer.run
        tasks["clock"] = lambda: keep_mark(clock, where / "clock")
        tasks["files"] = lambda: _watch_files(store, executors[LOCAL])
        async with contextlib.AsyncExitStack() as running:
            for name, work in tasks.items():
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
        sessions=Sessions(_identity(where), is_loopback=is_loopback),
        lifespan=run_tasks,
    )
    return ControlPlane(where, store, tokens, app, streams, background, informer)


def configured(settings: Config, where: Path) -> tuple[dict[str, Executor], Setup]:
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
        restart=f"stop it (kill {os.getpid()}; ranks keep running) and run: "
        "atoll serve --config FILE",
        notes=lambda: [note for each in executors.values() for note in each.notes()],
    )
    return executors, setup


async def _watch_files(store: SQLiteStore, local: Executor) -> None:
    """Logs that somebody deleted the files of the store, also while nothing is written."""
    while True:
        await asyncio.sleep(WATCH_FILES_S)
        store.check_files()
        local.renew_reserve()


def _identity(where: Path) -> str:
    """The id of the control plane of this directory, created on first use."""
    path = where / "plane"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    write_file(path, f"{uuid.uuid4().hex}\n".encode())
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
    """Serves until stopped; prints the address once it answers.

    With a certificate and its key, files in PEM, by HTTPS only. `is_owned`: serves until standard
    input ends, then deletes all trainings and the state directory.
    """
    from atoll.server.http.server import BACKLOG, configure_log, listen, load_tls

    configure_log(logging.WARNING)
    where = state_dir(where)
    tls = load_tls(tls_cert, tls_key)
    listening = listen(host, port) if port else _listen_on_last_port(host, where)
    address = _endpoint(listening, is_tls=tls is not None)
    plane = build(
        where,
        slots=slots,
        config=config,
        has_shared_namespaces=has_shared_namespaces,
        is_loopback=Address(address["url"]).is_local and host not in EVERY_ADDRESS,
    )
    if not port:  # kept now that the store is locked: no other control plane writes it
        write_file(where / PORT_FILE, f"{listening.getsockname()[1]}\n".encode())
    asyncio.run(ensure_token(plane.tokens, where))
    # The store is locked: nobody else listens in this directory.
    local_socket = listen_locally(where, BACKLOG)
    server = _server(plane, address, tls, is_owned=is_owned)
    server.run(sockets=[listening, local_socket])
    if is_owned:
        shutil.rmtree(where, ignore_errors=True)


def _listen_on_last_port(host: str, where: Path) -> socket.socket:
    """On the port that this directory's control plane had last, so that addresses of its pages stay
    valid; on a free one if somebody else has taken it."""
    from atoll.server.http.server import listen

    with contextlib.suppress(OSError, ValueError, Permanent):
        return listen(host, int((where / PORT_FILE).read_text()))
    return listen(host, 0)


async def ensure_token(tokens: Tokens, where: Path) -> None:
    """Makes sure that the user's own token is in a private file and known to the server."""
    from atoll.server.http.auth import hash_token, new_token

    path = where / "token"
    try:
        token = path.read_text().strip()
    except FileNotFoundError:
        token = new_token()
        write_file(path, f"{token}\n".encode())
    if await tokens.namespace_of(hash_token(token)) is None:
        await tokens.add(hash_token(token), NAMESPACE, "local user", time.time())


def _server(
    plane: ControlPlane, address: dict[str, Any], tls: ssl.SSLContext | None, *, is_owned: bool
) -> GuardedServer:
    from atoll.server.http.server import BACKLOG, GuardedServer

    class Server(GuardedServer):
        """A server that announces when it is ready, and ends open streams when it stops."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.loop = asyncio.get_running_loop()
            _announce(plane.where, address)
            self.watching = self.loop.create_task(
                plane.background.keep_running("socket", self.keep_announced)
            )
            with contextlib.suppress(BrokenPipeError):  # the process that started it has ended
                sys.stdout.write(json.dumps(address) + "\n")
                sys.stdout.flush()
            if is_owned:
                self.loop.add_reader(0, self.abandon)

        async def keep_announced(self) -> None:
            """Creates again what commands find it by, if somebody deletes that."""
            while True:
                await asyncio.sleep(WATCH_FILES_S)
                if not plane.store.check_files():
                    continue  # the directory may be another control plane's by now
                if not (plane.where / SOCKET).exists():
                    await self.accept_from(listen_locally(plane.where, BACKLOG))
                if not (plane.where / ENDPOINT).exists():
                    _announce(plane.where, address)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            plane.streams.close()
            self.watching.cancel()
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
            self.deleting = self.loop.create_task(self.delete_all())

        async def delete_all(self) -> None:
            try:
                await _delete_all(plane.informer)
            finally:
                self.should_exit = True

    return Server(plane.app, tls=tls)


def _announce(where: Path, address: dict[str, Any]) -> None:
    """Writes what commands on this machine find the control plane by."""
    write_file(where / ENDPOINT, json.dumps(address).encode())


def _withdraw(where: Path) -> None:
    for name in (ENDPOINT, SOCKET):
        with contextlib.suppress(OSError):
            (where / name).unlink(missing_ok=True)


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


async def _delete_all(informer: Informer) -> None:
    """Deletes every training; returns when all are deleted, or after `PURGE_S`."""
    from msgspec.structs import replace

    async def mark(key: Key) -> None:
        with contextlib.suppress(Conflict, NotFound):  # an update has the change
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
