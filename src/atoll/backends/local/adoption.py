"""What a directory of ranks holds of its training, and how a store that lacks it gets it back.

`training.json` is the training as of the newest desired state, and with its verdict in the end. It
is never newer than a store that has lost nothing. `removed` is the tombstone: only a directory that
has one is deleted.

To stop ranks their supervisor needs a new desired state. Where a full disk has no room for one, a
file of the reserve is filled and takes its name: no block is asked for that a rank might take.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

from msgspec.structs import replace

from atoll.backends.local.protocol import DESIRED_FILE
from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.model import decode, encode
from atoll.core.ports import Store
from atoll.core.status import Event, Training
from atoll.files.ownership import make_private
from atoll.files.writing import clear_way, write_file

RECORD = "training.json"
TOMBSTONE = "removed"
RESERVE_FOLDER = "reserve"
RESERVE_FILES = 4  # two for each training that is stopped: training.json and desired.json
RESERVE_FILE_BYTES = 64 * 2**10  # a desired state with a usual environment, many times over

log = logging.getLogger(__name__)


def write_record(directory: Path, training: Training, reserve: Reserve | None = None) -> None:
    """Stores the training beside its ranks, with a digest for its code. Raises Temporary."""
    if training.spec.source is not None:
        source = training.spec.source.by_digest()
        training = replace(training, spec=replace(training.spec, source=source))
    write = _write if reserve is None else reserve.save
    write(directory / RECORD, encode(training))


def read_record(directory: Path) -> Training | None:
    """None if there is none. Raises Permanent if it is broken."""
    try:
        training = decode((directory / RECORD).read_bytes(), Training)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise Permanent(f"its {RECORD} cannot be read ({error})") from error
    if training.uid != directory.name:
        raise Permanent(f"its {RECORD} is that of another training")
    return training


def find_record(root: Path, name: str, uid: str | None) -> Training | None:
    """The training of that name which can be followed by its files; None if there is none."""
    if uid is not None and ("/" in uid or uid in (".", "..")):
        return None
    directories = [root / uid] if uid is not None else []
    with contextlib.suppress(OSError):
        directories = directories or sorted(root.iterdir())
    for directory in directories:
        with contextlib.suppress(Permanent):
            record = None if is_marked_deleted(directory) else read_record(directory)
            if record is not None and record.name == name:
                is_over = record.status.phase.is_terminal
                return record if is_over or (directory / DESIRED_FILE).exists() else None
    return None


@contextlib.asynccontextmanager
async def lock_directory(directory: Path) -> AsyncIterator[None]:
    """No other process writes to the directory of a gang meanwhile."""
    make_private(directory)
    lock = os.open(directory / "turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # other processes set no event
                await asyncio.sleep(0.02)
        yield
    finally:
        os.close(lock)


def mark_deleted(directory: Path) -> None:
    """Marks the directory as that of a removed training. Raises Temporary."""
    if directory.is_dir():
        _write(directory / TOMBSTONE, b"")


def is_marked_deleted(directory: Path) -> bool:
    return (directory / TOMBSTONE).exists()


def delete(directory: Path) -> None:
    """Deletes the directory, its tombstone last: what a crash leaves is deleted the next time."""
    with contextlib.suppress(OSError):
        if not directory.is_dir():
            directory.unlink()
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != TOMBSTONE:
                path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


async def adopt(directory: Path, store: Store) -> None:
    """Gives the store the training of a directory that it does not know.

    Raises Permanent if the directory has too little for that, and Conflict if the name is taken.
    """
    record = read_record(directory)
    if record is None:
        raise Permanent(f"it has no {RECORD}")
    if not record.status.phase.is_terminal and not (directory / DESIRED_FILE).exists():
        raise Permanent(f"its {DESIRED_FILE} is lost, and its ranks may have run already")
    training = await store.create(_with_code(record, directory))
    text = "the store had no record of it; it continues from the files of its ranks"
    await store.record(
        training.key, Event(type="Warning", reason="Adopted", message=text, at=time.time())
    )
    log.warning("training %s/%s (%s) is adopted: %s", *training.key, training.uid, text)


async def catch_up(directory: Path, stored: Training, store: Store) -> None:
    """Brings a store that is older than the directory up to its record; writes a missing record.

    `stored` is not over: what is over in the store stays as it is.
    """
    try:
        record = read_record(directory)
    except Permanent as error:
        log.warning("%s: %s; it is written again", directory, error)
        record = None
    if record is None:
        write_record(directory, stored)
    elif _is_newer(record, stored):
        mark = record.deletion_requested_at or stored.deletion_requested_at
        stored = await store.update_spec(
            replace(stored, spec=record.spec, deletion_requested_at=mark)
        )
        text = "the store was older than the files of its ranks; it continues from those"
        event = Event(type="Warning", reason="CaughtUp", message=text, at=time.time())
        await store.update_status(stored, record.status, [event])
        log.warning("training %s/%s (%s): %s", *stored.key, stored.uid, text)


def quarantine(directory: Path, why: str) -> str:
    """The sentence for what is neither adopted nor deleted."""
    return (
        f"{directory} is of a training that the store does not know, and is left alone: {why}; "
        f"its ranks, if any, keep running; to end them and delete it, run 'touch "
        f"{directory / TOMBSTONE}' and restart the control plane"
    )


def _is_newer(record: Training, stored: Training) -> bool:
    return record.status.phase.is_terminal or _desired_states(record) > _desired_states(stored)


def _desired_states(training: Training) -> int:
    return 0 if training.status.desired is None else training.status.desired.version


def _with_code(record: Training, directory: Path) -> Training:
    """The record with its code, which a training that is over does not need."""
    source = record.spec.source
    if source is None or record.status.phase.is_terminal:
        return record
    try:
        complete = replace(source, content=(directory / "source" / source.filename).read_bytes())
    except (OSError, ValidationError) as error:
        raise Permanent(f"its code cannot be read ({error})") from error
    if complete.by_digest() != source:
        raise Permanent("its code is not that of its record")
    return replace(record, spec=replace(record.spec, source=complete))


def _write(path: Path, data: bytes) -> None:
    try:
        make_private(path.parent)
        clear_way(path)
        write_file(path, data)
    except OSError as error:
        raise Temporary(f"cannot write {path}: {error.strerror}") from error


def has_space(where: Path, needed: int) -> bool:
    """Whether the file system has this many bytes left. A quota is not counted."""
    free = os.statvfs(where)
    return not free.f_flag & os.ST_RDONLY and free.f_bavail * free.f_frsize >= needed


class Reserve:
    """The reserve of one state directory."""

    def __init__(self, where: Path) -> None:
        self._folder = where / RESERVE_FOLDER

    def renew(self) -> None:
        """Makes the files that are missing, if there is room to spare."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True, mode=0o700)
            for number in range(RESERVE_FILES):
                path = self._folder / str(number)
                is_whole = path.exists() and path.stat().st_size == RESERVE_FILE_BYTES
                if not is_whole and has_space(self._folder, 4 * RESERVE_FILES * RESERVE_FILE_BYTES):
                    # Not durable: every first start would wait for it, and a lost one is renewed.
                    write_file(path, bytes(RESERVE_FILE_BYTES), is_durable=False)

    def save(self, path: Path, data: bytes) -> None:
        """Replaces the content of `path`, atomically, from the reserve if the disk is full.

        For what stops ranks alone: nothing else would stop one that fills it. Raises Temporary.
        """
        try:
            clear_way(path)
            try:
                write_file(path, data)
            except OSError:
                self._write(path, data)
        except OSError as error:
            raise Temporary(f"cannot write {path}: {error.strerror}") from error

    def _write(self, path: Path, data: bytes) -> None:
        """Raises OSError if no reserve is left."""
        if len(data) > RESERVE_FILE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        draft = path.with_name(f"{path.name}#reserve")
        for number in range(RESERVE_FILES):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._folder / str(number), draft)
                break
        else:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = os.open(draft, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(file, data, 0)
            os.ftruncate(file, len(data))
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(draft, path)
