"""What a gang's directory holds of its training, and how a store that lacks it gets it back.

`training.json` is the record as of the newest wish, and of the verdict in the end. It is never
newer than a store that has lost nothing. `removed` is the tombstone: only a directory that carries
it is deleted.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from pathlib import Path

from msgspec.structs import replace

from atoll.backends.local.journal import clear_way, write_durably
from atoll.backends.local.reserve import Reserve
from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.model import decode, encode
from atoll.core.ports import Store
from atoll.core.status import Event, Training
from atoll.files.ownership import make_private

RECORD = "training.json"
TOMBSTONE = "removed"

log = logging.getLogger(__name__)


def write_record(directory: Path, training: Training, reserve: Reserve | None = None) -> None:
    """Stores the training beside its gang, with a digest for its code. Raises Temporary."""
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

    Raises Permanent if the directory does not tell enough, and Conflict if the name is taken.
    """
    record = read_record(directory)
    if record is None:
        raise Permanent(f"it has no {RECORD} (older releases write none)")
    if not record.status.phase.is_terminal and not (directory / "gang.json").exists():
        raise Permanent("its gang.json is gone, and its ranks may have run already")
    training = await store.create(_with_code(record, directory))
    text = "the store had no record of it; it goes on from the files of its ranks"
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
        log.warning("%s: %s; it is written anew", directory, error)
        record = None
    if record is None:
        write_record(directory, stored)
    elif _is_newer(record, stored):
        mark = record.deletion_requested_at or stored.deletion_requested_at
        stored = await store.update_spec(
            replace(stored, spec=record.spec, deletion_requested_at=mark)
        )
        text = "the store was older than the files of its ranks; it goes on from those"
        event = Event(type="Warning", reason="CaughtUp", message=text, at=time.time())
        await store.update_status(stored, record.status, [event])
        log.warning("training %s/%s (%s): %s", *stored.key, stored.uid, text)


def quarantine(directory: Path, why: str) -> str:
    """The sentence for what is neither adopted nor deleted."""
    return (
        f"{directory} is of a training that the store does not know, and is left alone: {why}; "
        f"its ranks, if any run, go on; to end them and delete it, run 'touch "
        f"{directory / TOMBSTONE}' and start the control plane anew"
    )


def _is_newer(record: Training, stored: Training) -> bool:
    return record.status.phase.is_terminal or _desired_states(record) > _desired_states(stored)


def _desired_states(training: Training) -> int:
    return 0 if training.status.desired is None else training.status.desired.version


def _with_code(record: Training, directory: Path) -> Training:
    """The record with its code. That of a training that is over is gone, and is not needed."""
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
        write_durably(path, data)
    except OSError as error:
        raise Temporary(f"cannot write {path}: {error.strerror}") from error
