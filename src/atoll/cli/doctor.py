"""`atoll doctor`: what of this machine atoll works with, and what to do about the rest.

Each check is a function that reads one thing and changes nothing, except `store`: it writes an
object to test conditional writes, and deletes it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from atoll.cli.options import config_option, json_option
from atoll.core.errors import AtollError
from atoll.core.text import format_bytes

if TYPE_CHECKING:
    from atoll.objectstore import ObjectStore

GOOD, NOTE, BAD = "ok", "note", "bad"
# A package of each extra that stands for it, and what it is for.
EXTRAS = {
    "store": ("obstore", "DiLoCo's all-reduce"),
    "torch": ("torch", "DiLoCo"),
    "transformers": ("transformers", "the callback for Hugging Face's Trainer"),
    "lightning": ("lightning", "the callback for Lightning"),
    "kubernetes": ("lightkube", "clusters"),
    "modal": ("modal", "Modal"),
    "sagemaker": ("boto3", "SageMaker"),
    "hfjobs": ("huggingface_hub", "Hugging Face Jobs"),
}
# Sixteen full logs of ranks (64 MiB each); one of them and a little for the store.
ENOUGH_BYTES, TOO_FEW_BYTES = 2**30, 100 * 2**20
ENOUGH_SHM_BYTES = 256 * 2**20  # Docker gives 64 MiB, which DataLoader workers overrun
ENOUGH_FILES = 1024  # the usual soft limit
ENOUGH_RANKS = 64  # more than people run on one machine
STORE_S = 5.0  # how long a store may take to answer; one that works takes less than a second
SKEW_S = 5.0  # stores refuse at 15 minutes; synchronised clocks differ by milliseconds
UNSYNCHRONISED = 5  # of adjtimex(2)


class Finding(NamedTuple):
    """One line: `todo` is what would make it better, empty if it is well."""

    what: str
    state: str
    message: str
    todo: str = ""


@click.command()
@click.option("--uri", help="Object store to try: file://, s3://, gs:// or az://.")
@config_option
@json_option
def doctor(uri: str | None, is_json: bool) -> None:
    """Check this machine and say what to do.

    Exit code: 0 if trainings can run, 1 if something prevents it. It starts nothing; with --uri
    it writes an object to the store and deletes it.
    """
    from atoll.cli.output import print_json

    findings = []
    for finding in run_checks(uri):
        findings.append(finding)
        if not is_json:
            print(format_finding(finding), flush=True)
    if is_json:
        print_json([finding._asdict() for finding in findings])
    raise SystemExit(any(finding.state == BAD for finding in findings))


def run_checks(uri: str | None) -> Iterator[Finding]:
    checks: list[Callable[[], Iterator[Finding]]] = [
        python, extras, gpus, state, disk, shm, limits, clock, control_plane, executors,
        partial(store, uri),
    ]  # fmt: skip
    reported: set[str] = (
        set()
    )  # one mistake, such as in atoll.toml, is in the way of several checks
    for check in checks:
        try:
            yield from check()
        except AtollError as error:
            message = str(error).replace("\n", " ")
            if message not in reported:
                yield Finding("check", BAD, message)
            reported.add(message)


def format_finding(finding: Finding) -> str:
    todo = f": {finding.todo}" if finding.todo else ""
    return f"{finding.state:<4}  {finding.what:<18} {finding.message}{todo}"


def python() -> Iterator[Finding]:
    import atoll

    text = f"{sys.version.split()[0]} at {sys.executable}, atoll {atoll.__version__}"
    if not sys.platform.startswith("linux"):
        yield Finding("python", BAD, f"{text} on {sys.platform}", "the local executor needs Linux")
    else:
        yield Finding("python", GOOD, text)


def extras() -> Iterator[Finding]:
    from atoll.core.errors import to_install

    for extra, (package, purpose) in EXTRAS.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing = f"{package} is not installed; {purpose} needs it"
            yield Finding(f"extra {extra}", NOTE, missing, to_install(extra))
        else:
            yield Finding(f"extra {extra}", GOOD, f"{package} {version}")


def gpus() -> Iterator[Finding]:
    from atoll.backends.local.capacity import ids_of, present
    from atoll.core.executors import LOCAL
    from atoll.sdk.config import read_for_plane

    listed = read_for_plane().executors[LOCAL].options.get("gpus")
    ids = present(os.environ) if listed is None else ids_of("gpus", listed)
    if ids:
        yield Finding("gpus", GOOD, f"ranks may use {', '.join(ids)}")
    else:
        todo = "list them as [executors.local] gpus in atoll.toml if there are some"
        yield Finding("gpus", NOTE, "none are known", todo)


def state() -> Iterator[Finding]:
    from atoll.backends.local.state import state_dir

    where = state_dir()
    there = _existing(where)
    if not os.access(there, os.W_OK | os.X_OK):
        todo = "allow it, or set ATOLL_STATE_DIR to a directory of yours"
        yield Finding("state", BAD, f"{there} cannot be written", todo)
    else:
        yield Finding("state", GOOD, str(where))


def disk() -> Iterator[Finding]:
    from atoll.backends.local.state import state_dir

    where = _existing(state_dir())
    free = shutil.disk_usage(where).free
    text = f"{format_bytes(free)} free in {where}"
    todo = "free some, or set ATOLL_STATE_DIR to another disk: logs and records are stored there"
    if free < TOO_FEW_BYTES:
        yield Finding("disk", BAD, text, todo)
    else:
        yield Finding("disk", *((GOOD, text) if free >= ENOUGH_BYTES else (NOTE, text, todo)))


def shm() -> Iterator[Finding]:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        yield Finding("shm", NOTE, "there is no /dev/shm", "DataLoader workers need one")
        return
    if size < ENOUGH_SHM_BYTES:
        todo = "DataLoader workers need more: docker run --shm-size 8g"
        yield Finding("shm", NOTE, f"/dev/shm has {format_bytes(size)}", todo)
    else:
        yield Finding("shm", GOOD, f"/dev/shm has {format_bytes(size)}")


def limits() -> Iterator[Finding]:
    from atoll.backends.local.capacity import Machine

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < ENOUGH_FILES:
        yield Finding("files", NOTE, f"{soft} open files a process", "ulimit -n 65536")
    else:
        yield Finding("files", GOOD, f"{soft} open files a process")
    ranks, why = min(Machine().most(), Machine().free())
    if ranks < ENOUGH_RANKS:
        yield Finding("capacity", BAD if ranks < 1 else NOTE, f"{ranks} ranks: {why}", "raise it")
    else:
        yield Finding("capacity", GOOD, f"{ranks} ranks at least could start: {why}")


def clock() -> Iterator[Finding]:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    buffer = ctypes.create_string_buffer(512)  # struct timex, with nothing to set
    reported = ctypes.CDLL(None).adjtimex(buffer)
    if reported == UNSYNCHRONISED:
        todo = "start an NTP service (chrony, systemd-timesyncd), or check the host's"
        yield Finding("clock", NOTE, f"{now}, not synchronised, according to this kernel", todo)
    else:
        yield Finding("clock", GOOD, now)


def control_plane() -> Iterator[Finding]:
    from atoll.sdk.client import Client

    name, url = "control plane", _plane()
    if url is None:
        yield Finding(name, GOOD, "none runs; the next command starts one")
        return
    try:
        count = len(Client().list())
    except AtollError as error:
        todo = "check ATOLL_URL and ATOLL_TOKEN" if os.environ.get("ATOLL_URL") else "atoll stop"
        yield Finding(name, BAD, f"{url}: {error}".replace("\n", " "), todo)
    else:
        yield Finding(name, GOOD, f"{url} answers, with {count} trainings")


def executors() -> Iterator[Finding]:
    from atoll.core.executors import load
    from atoll.sdk import flows
    from atoll.sdk.client import Client
    from atoll.sdk.config import read_for_plane

    if _plane() is not None:
        try:
            client = Client()
            known = client.run(flows.executors())
            for note in known.message.splitlines():
                yield Finding("control plane", NOTE, note)
            for each in known.items:
                well = Finding(each.name, GOOD, f"{each.kind}, reachable")
                bad = Finding(each.name, BAD, f"{each.kind}, not reachable", each.message)
                yield well if each.is_reachable else bad
        except AtollError:
            pass  # reported by `control_plane`
        return
    for name, wanted in read_for_plane().executors.items():
        try:
            load(wanted.kind)
        except AtollError as error:
            yield Finding(name, BAD, f"{wanted.kind} cannot be used", str(error))
        else:
            yield Finding(name, GOOD, f"{wanted.kind}; 'atoll executors' tries to reach it")


def store(uri: str | None) -> Iterator[Finding]:
    from atoll.core.errors import to_install
    from atoll.core.stores import missing_keys
    from atoll.sdk.config import find, read

    uri = uri or read(find()).defaults.get("rendezvous_uri")
    if uri is None:
        yield Finding("store", NOTE, "none was tried", "atoll doctor --uri s3://bucket/prefix")
        return
    if missing := missing_keys(uri, os.environ):
        names = " and ".join(missing)
        yield Finding("store", NOTE, f"{names} not set", "set them, unless the machine has a role")
    try:
        from atoll.objectstore import ObjectStore

        yield from try_store(uri, ObjectStore.open(uri, patience_s=STORE_S))
    except ModuleNotFoundError:
        yield Finding("store", BAD, f"{uri} cannot be tried", to_install("store"))
    except AtollError as error:
        todo = "check its address, its keys (AWS_*, GOOGLE_*, AZURE_*) and the endpoint"
        yield Finding("store", BAD, str(error).replace("\n", " "), todo)


def try_store(uri: str, blobs: ObjectStore) -> Iterator[Finding]:
    """Whether the store creates an object only once, and the time of its clock."""
    folder = f"atoll-doctor/{os.urandom(8).hex()}"
    key, began = f"{folder}/object", time.monotonic()
    is_first = blobs.create(key, b"1")
    try:
        is_second = blobs.create(key, b"2")
        took_s = time.monotonic() - began
        content = bytes(blobs.get(key))
        (listed,) = blobs.list(folder)
    finally:
        blobs.delete([key])
    text = f"{uri} answers ({took_s / 2 * 1000:.0f} ms a write)"
    if is_first and not is_second and content == b"1":
        yield Finding("store", GOOD, f"{text} and supports conditional writes")
    else:
        todo = "rounds need If-None-Match: use a newer release of the store, or another one"
        yield Finding("store", BAD, f"{text} but overwrites objects that exist", todo)
    skew_s = listed.modified.timestamp() - time.time()
    if abs(skew_s) > SKEW_S:
        todo = "set the clock of this machine: stores refuse requests that are minutes off"
        yield Finding("store clock", NOTE, f"{abs(skew_s):.0f} s from this machine's", todo)


def _plane() -> str | None:
    from atoll.backends.local.state import state_dir
    from atoll.sdk.endpoint import running

    return os.environ.get("ATOLL_URL") or running(state_dir())


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())
