"""Trainings and events in one SQLite file, owned by one process.

Every write takes a version from one growing counter and goes into a log of changes, so a watcher
can follow from any version in it. The log is bounded in bytes; older versions raise `Gone`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from atoll.core.errors import Conflict, Gone, NotFound, Permanent, Temporary
from atoll.core.model import encode, json_decoder
from atoll.core.ports import PAGE_BYTES, Change, Key, SettledTraining, Snapshot, TrainingPage
from atoll.core.ranks import MAX_ATTEMPTS
from atoll.core.status import AttemptStatus, Event, Status, Training
from atoll.files.ownership import make_private_file
from atoll.store.database import FileReserve, has_room, prepare
from atoll.store.feed import Feed, Outbox

LOG_BYTES = 32 * 2**20  # hours of changes of a busy control plane
MAX_EVENTS = 1000  # of one training, the newest
AFTER_NAMES = "\x7f"  # sorts after every character of a name

Changes = list[Change]
_ATTEMPT = json_decoder(AttemptStatus)
_TRAINING = json_decoder(Training)
log = logging.getLogger(__name__)


class SQLiteStore:
    """The Store of `core/ports.py` on one file."""

    # Since when nothing could be written, and why.
    stale: tuple[float, str] | None = None
    _reserves: Sequence[FileReserve] = ()

    def __init__(self, path: Path | str, *, log_bytes: int = LOG_BYTES) -> None:
        self._path = Path(path)
        self._log_bytes = log_bytes
        self._feed = Feed()
        self._wal_path = Path(f"{path}-wal")
        self._wal: os.stat_result | None = None  # known from the first write on
        self._is_lost = False
        self._reserves = (FileReserve(), FileReserve())  # of the file and its write-ahead log
        self._lock = _create_locked(self._path)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, self._lock)
            with translate_errors(self._path):
                self._db = sqlite3.connect(
                    self._path, isolation_level=None, check_same_thread=False
                )
                opened.callback(self._db.close)
                prepare(self._db, self._path, is_owner=True)
                row = self._db.execute("select total(length(body)) from changes").fetchone()
                self._logged_bytes = int(row[0])
            self._file = self._path.stat()
            opened.pop_all()
        self.outbox = Outbox(lambda: self._db, self._write, lambda: translate_errors(self._path))

    def close(self) -> None:
        self._feed.close()
        self._db.close()
        for reserve in self._reserves:
            reserve.close()
        os.close(self._lock)

    async def create(
        self,
        training: Training,
        *,
        idempotency_key: str | None = None,
        events: Sequence[Event] = (),
    ) -> Training:
        with self._write() as changes:
            existing = self._created_with(idempotency_key, training)
            if existing is not None:
                return existing
            stored, body = self._log(self._without_code(training), changes)
            try:
                self._db.execute(
                    "insert into trainings values (?, ?, ?, ?, ?, ?, ?, ?)",
                    (*training.key, training.uid, stored.resource_version, stored.status.phase)
                    + (stored.is_settled, idempotency_key, body),
                )
            except sqlite3.IntegrityError as error:
                raise Conflict(
                    f"a training named {training.name!r} exists: choose another name, or delete "
                    "it, as --replace and replace=True do"
                ) from error
            for event in events:
                self._add_event(training.uid, event)
        return stored

    async def get(self, key: Key) -> Training:
        with translate_errors(self._path):
            row = self._db.execute(
                "select version, body from trainings where namespace = ? and name = ?", key
            ).fetchone()
        if row is None:
            raise NotFound("training", key[1])
        return decode_training(*row)

    async def list(self, namespace: str | None = None) -> Sequence[Training]:
        where = "" if namespace is None else "where namespace = ? "
        query = f"select version, body from trainings {where}order by name, namespace"
        with translate_errors(self._path):
            rows = self._db.execute(query, () if namespace is None else (namespace,)).fetchall()
        return [decode_training(*row) for row in rows]

    async def snapshot(self) -> Snapshot:
        version = await self.version()
        with translate_errors(self._path):
            active = self._db.execute(
                "select version, body from trainings where is_settled = 0 order by name, namespace"
            ).fetchall()
            settled = self._db.execute(
                "select uid, namespace, name, phase from trainings where is_settled = 1"
            ).fetchall()
        return Snapshot(
            version,
            [decode_training(*row) for row in active],
            [SettledTraining(uid, (namespace, name), ph) for uid, namespace, name, ph in settled],
        )

    async def page(
        self,
        namespace: str,
        *,
        after: str = "",
        limit: int = 100,
        max_bytes: int = PAGE_BYTES,
        phase: str | None = None,
        prefix: str = "",
    ) -> TrainingPage:
        # Each condition is a part of an index: (namespace, name) or (namespace, phase, name).
        conditions = {"namespace = ?": namespace, "name > ?": after}
        if prefix:
            conditions["name < ?"] = prefix + AFTER_NAMES
        if prefix > after:
            del conditions["name > ?"]
            conditions["name >= ?"] = prefix
        if phase is not None:
            conditions["phase = ?"] = phase
        query = (
            f"select version, body from trainings where {' and '.join(conditions)} order by name"
        )
        with translate_errors(self._path), closing(self._db.cursor()) as rows:
            rows.execute(query, tuple(conditions.values()))
            bodies = ((version, zlib.decompress(body)) for version, body in rows)
            return _cut_page(
                ((_read_training(*row), len(row[1])) for row in bodies), limit, max_bytes
            )

    async def update_spec(self, training: Training) -> Training:
        with self._write(is_stopping=training.is_cancelling) as changes:
            current = self._current(training)
            grown = current.spec != training.spec
            return self._replace(
                msgspec.structs.replace(
                    current,
                    spec=training.spec,
                    deletion_requested_at=training.deletion_requested_at,
                    generation=current.generation + grown,
                ),
                changes,
            )

    async def update_status(
        self,
        training: Training,
        status: Status,
        events: Sequence[Event] = (),
        attempts: Sequence[AttemptStatus] = (),
    ) -> Training:
        is_stopping = training.is_cancelling or status.phase.is_terminal
        with self._write(is_stopping=is_stopping) as changes:
            current = self._current(training)
            for event in events:
                self._add_event(current.uid, event)
            self._add_attempts(current.uid, attempts)
            return self._replace(msgspec.structs.replace(current, status=status), changes)

    async def remove(self, training: Training) -> None:
        with self._write(is_stopping=True) as changes:
            missing = self._db.execute(
                "delete from trainings where namespace = ? and name = ? and uid = ?",
                (*training.key, training.uid),
            ).rowcount
            if missing:
                self._log(training, changes, is_removed=True)
                for table in ("events", "sources", "attempts"):
                    self._db.execute(f"delete from {table} where uid = ?", (training.uid,))
                self._drop_code(training.uid)

    async def record(self, key: Key, event: Event) -> None:
        with self._write():
            row = self._db.execute(
                "select uid from trainings where namespace = ? and name = ?", key
            ).fetchone()
            if row is None:
                raise NotFound("training", key[1])
            self._add_event(row[0], event)

    async def events(self, key: Key, *, since: float | None = None) -> Sequence[Event]:
        training = await self.get(key)
        with translate_errors(self._path):
            rows = self._db.execute(
                "select id, at, type, reason, message, count from events "
                "where uid = ? and at >= ? order by at desc, id desc",
                (training.uid, since or 0.0),
            ).fetchall()
        return [
            Event(id=id, at=at, type=kind, reason=reason, message=message, count=count)
            for id, at, kind, reason, message, count in rows
        ]

    async def attempts(self, key: Key) -> Sequence[AttemptStatus]:
        training = await self.get(key)
        with translate_errors(self._path):
            rows = self._db.execute(
                "select body from attempts where uid = ? order by rank, attempt", (training.uid,)
            ).fetchall()
        return [_ATTEMPT.decode(row[0]) for row in rows]

    def watch(self, after: int, key: Key | None = None) -> AsyncIterator[Change]:
        return self._feed.follow(self, after, key)

    async def source(self, training: Training) -> bytes:
        with translate_errors(self._path):
            row = self._db.execute(
                "select content from sources where uid = ?", (training.uid,)
            ).fetchone()
        if row is None:
            raise NotFound("source of training", training.name)
        return bytes(row[0])

    async def code(self, training: Training) -> bytes:
        with translate_errors(self._path):
            row = self._db.execute(
                "select content from codes join code_users using (digest) where uid = ?",
                (training.uid,),
            ).fetchone()
        if row is None:
            raise NotFound("code of training", training.name)
        return bytes(row[0])

    async def version(self) -> int:
        with translate_errors(self._path):
            row = self._db.execute(
                "select seq from sqlite_sequence where name = 'changes'"
            ).fetchone()
        return int(row[0]) if row else 0

    @contextlib.contextmanager
    def _write(self, *, is_stopping: bool = False) -> Iterator[Changes]:
        """One transaction; the changes put into the list are published once it is durable.

        On a full disk only what stops a training may use the reserve.
        """
        changes: Changes = []
        with self._record_full_disk(), translate_errors(self._path):
            self._before_write(is_stopping)
            self._db.execute("begin immediate")
            try:
                yield changes
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise
        self._after_write()
        if not is_stopping:
            self.stale = None
        for change in changes:
            self._feed.publish(change)
        if not is_stopping and self._logged_bytes > self._log_bytes:
            self._trim()

    def _before_write(self, is_stopping: bool) -> None:
        self._check_there()
        if not is_stopping and not has_room(self._path.parent):
            raise sqlite3.OperationalError("the disk is full")

    def _after_write(self) -> None:
        if self._wal is None:
            with contextlib.suppress(OSError):
                self._wal = self._wal_path.stat()
        for reserve, path in zip(self._reserves, (self._path, self._wal_path), strict=True):
            reserve.renew(path)

    @contextlib.contextmanager
    def _record_full_disk(self) -> Iterator[None]:
        try:
            yield
        except Temporary as error:
            since = time.time() if self.stale is None else self.stale[0]
            self.stale = (since, str(error))
            raise

    def _check_there(self) -> None:
        """Raises Permanent if the file or its write-ahead log was deleted or replaced: SQLite would
        write on, into the deleted one."""
        if not _is_same(self._path, self._file):
            what = f"{self._path} is"
        elif self._wal is not None and not _is_same(self._wal_path, self._wal):
            what = f"{self._wal_path} is"
            with contextlib.suppress(sqlite3.Error):  # from the open file: only its name is gone
                self._db.execute("pragma wal_checkpoint(truncate)")
                what = f"{self._wal_path} (what it held is saved) is"
        else:
            return
        text = (
            f"{what} gone or was replaced while it was in use: this control plane starts "
            f"and stops nothing any more, and ranks run on alone; stop it (kill {os.getpid()})"
        )
        if not self._is_lost:
            self._is_lost = True
            log.error("%s", text)
        raise Permanent(text)

    def check_files(self) -> bool:
        """Whether the files are where they were. Logs, once, that they were deleted or replaced."""
        try:
            self._check_there()
        except Permanent:
            return False
        return True

    def _without_code(self, training: Training) -> Training:
        """The training with digests for its code, which is stored once: not with every status."""
        spec = training.spec
        if spec.source is not None:
            row = (training.uid, spec.source.content)
            self._db.execute("insert into sources values (?, ?)", row)
        if spec.code is not None:
            digest = spec.code.digest
            if not spec.code.is_digest:
                row = (digest, spec.code.content)
                self._db.execute("insert or ignore into codes values (?, ?)", row)
            elif not self._db.execute("select 1 from codes where digest = ?", (digest,)).fetchone():
                raise NotFound("code of training", training.name)
            self._db.execute("insert into code_users values (?, ?)", (training.uid, digest))
        return msgspec.structs.replace(training, spec=spec.by_digest())

    def _drop_code(self, uid: str) -> None:
        """Removes the training's claim on its code, and the code if nobody else has one."""
        row = self._db.execute("select digest from code_users where uid = ?", (uid,)).fetchone()
        if row is not None:
            self._db.execute("delete from code_users where uid = ?", (uid,))
            self._db.execute(
                "delete from codes where digest = ?1 "
                "and not exists (select 1 from code_users where digest = ?1)",
                row,
            )

    def _created_with(self, idempotency_key: str | None, training: Training) -> Training | None:
        """The training that an earlier create with this key stored. Raises Conflict if its name is
        another."""
        if idempotency_key is None:
            return None
        row = self._db.execute(
            "select version, body from trainings where namespace = ? and idempotency_key = ?",
            (training.namespace, idempotency_key),
        ).fetchone()
        if row is None:
            return None
        existing = decode_training(*row)
        if existing.name != training.name:
            raise Conflict(
                f"this idempotency key made the training {existing.name!r}, not {training.name!r}"
            )
        return existing

    def _current(self, training: Training) -> Training:
        row = self._db.execute(
            "select version, body from trainings where namespace = ? and name = ? and uid = ?",
            (*training.key, training.uid),
        ).fetchone()
        if row is None:
            raise NotFound("training", training.name)
        current = decode_training(*row)
        if current.resource_version != training.resource_version:
            raise Conflict(
                f"training {training.name!r} was changed since version "
                f"{training.resource_version}: read it again"
            )
        return current

    def _replace(self, training: Training, changes: Changes) -> Training:
        stored, body = self._log(training, changes)
        self._db.execute(
            "update trainings set version = ?, phase = ?, is_settled = ?, body = ? "
            "where namespace = ? and name = ?",
            (stored.resource_version, stored.status.phase, stored.is_settled, body, *stored.key),
        )
        return stored

    def _log(
        self, training: Training, changes: Changes, *, is_removed: bool = False
    ) -> tuple[Training, bytes]:
        """The training with the version of this write, which is logged, and its stored form."""
        body = encode_training(training)
        version = self._db.execute(
            "insert into changes (namespace, name, is_removed, body) values (?, ?, ?, ?)",
            (*training.key, is_removed, body),
        ).lastrowid
        assert version is not None
        self._logged_bytes += len(body)
        stored = msgspec.structs.replace(training, resource_version=version)
        changes.append(Change(version=version, training=stored, is_removed=is_removed))
        return stored, body

    def logged(self, after: int, key: Key | None) -> Iterator[Change]:
        namespace, name = key or ("", "")
        while True:
            with translate_errors(self._path):
                rows = self._db.execute(
                    "select version, is_removed, body from changes where version > ?1 and "
                    "?2 in ('', namespace) and ?3 in ('', name) order by version limit 100",
                    (after, namespace, name),
                ).fetchall()
            for version, is_removed, body in rows:
                after = version
                training = decode_training(version, body)
                yield Change(version=version, training=training, is_removed=bool(is_removed))
            if len(rows) < 100:
                return

    def check_retained(self, after: int) -> None:
        with translate_errors(self._path):
            oldest, newest = self._db.execute(
                "select min(version), (select seq from sqlite_sequence where name = 'changes') "
                "from changes"
            ).fetchone()
        first = (newest or 0) + 1 if oldest is None else oldest
        if after < first - 1 or after > (newest or 0):
            raise Gone(after, first - 1)

    def _trim(self) -> None:
        """Drops the older half of the log. The trainings themselves are in another table."""
        with translate_errors(self._path):
            self._db.execute(
                "delete from changes where version <= (select version from changes "
                "order by version limit 1 offset (select count(*) / 2 from changes))"
            )
            row = self._db.execute("select total(length(body)) from changes").fetchone()
        self._logged_bytes = int(row[0])

    def _add_event(self, uid: str, event: Event) -> None:
        """Adds the event, or counts it onto the newest one if that says the same."""
        self.outbox.post_stored(uid, event)
        last = self._db.execute(
            "select id, type, reason, message from events where uid = ? order by id desc limit 1",
            (uid,),
        ).fetchone()
        if last is not None and last[1:] == (event.type, event.reason, event.message):
            self._db.execute(
                "update events set count = count + 1, at = ? where id = ?", (event.at, last[0])
            )
            return
        self._db.execute(
            "insert into events (uid, at, type, reason, message) values (?, ?, ?, ?, ?)",
            (uid, event.at, event.type, event.reason, event.message),
        )
        self._db.execute(
            "delete from events where uid = ?1 and id <= (select id from events where uid = ?1 "
            "order by id desc limit 1 offset ?2)",
            (uid, MAX_EVENTS),
        )

    def _add_attempts(self, uid: str, attempts: Sequence[AttemptStatus]) -> None:
        self._db.executemany(
            "insert or replace into attempts values (?, ?, ?, ?)",
            [(uid, a.rank, a.attempt, encode(a)) for a in attempts],
        )
        self._db.executemany(
            "delete from attempts where uid = ?1 and rank = ?2 and attempt <= (select attempt "
            "from attempts where uid = ?1 and rank = ?2 order by attempt desc limit 1 offset ?3)",
            [(uid, rank, MAX_ATTEMPTS) for rank in {a.rank for a in attempts}],
        )


def _cut_page(sized: Iterator[tuple[Training, int]], limit: int, max_bytes: int) -> TrainingPage:
    """The first of these trainings, given with their sizes, in order of name. Reads one more, to
    know whether there are more."""
    items: list[Training] = []
    left = max_bytes
    for training, size in sized:
        left -= size
        if len(items) == limit or (items and left < 0):
            return TrainingPage(items, items[-1].name)
        items.append(training)
    return TrainingPage(items)


def encode_training(training: Training) -> bytes:
    """Its JSON through zlib: 10,000 ranks are 2 to 6 MB of it, and nearly the same each."""
    return zlib.compress(encode(training))


def decode_training(version: int, body: bytes) -> Training:
    return _read_training(version, zlib.decompress(body))


def _read_training(version: int, content: bytes) -> Training:
    """`version` is the one of the write, which was not known when it was encoded."""
    training = _TRAINING.decode(content)
    return msgspec.structs.replace(training, resource_version=version)


def _is_same(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), file)
    except OSError:
        return False


def _create_locked(path: Path) -> int:
    """A lock by which this process alone uses the file; it ends with the process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise Permanent(f"cannot open {path}: {error.strerror}") from error
    lock = acquire_lock(path)
    with contextlib.suppress(OSError):  # SQLite reports it better
        # It holds the environment of ranks. The files that SQLite adds get the same mode.
        make_private_file(path)
    return lock


def acquire_lock(path: Path) -> int:
    """The lock of a store that is there. Its file names this process, if it can be written."""
    try:
        try:
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            lock = os.open(f"{path}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Permanent(f"cannot open {path}.lock: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(lock, 32).decode(errors="replace").strip()
        os.close(lock)
        name = owner if os.path.exists(f"/proc/{owner or 'none'}") else "unknown"
        raise Permanent(
            f"{path} is in use by process {name}: only one control plane per state directory"
        ) from error
    with contextlib.suppress(OSError):  # a disk that is full, or mounted read-only
        pid = str(os.getpid()).encode()
        os.pwrite(lock, pid, 0)  # over the one before, which takes no space
        os.ftruncate(lock, len(pid))
    return lock


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """SQLite's errors as atoll's: a full disk is Temporary, a broken file Permanent."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error) or "disk I/O" in str(error):
            raise Temporary(f"cannot write {path}: {error}: free some space") from error
        raise Permanent(f"cannot use {path}: {error}") from error
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.IntegrityError):
            raise
        raise Permanent(f"{path} is not a sound atoll store: {error}") from error


# The SQLite store without a file, for as long as the process lives.

NO_FILE = Path(":memory:")


class MemoryStore(SQLiteStore):
    """The Store of `core/ports.py` in memory only. It may be used by any one thread at a time."""

    def __init__(self, *, log_bytes: int = LOG_BYTES) -> None:
        self._path = NO_FILE
        self._log_bytes = log_bytes
        self._logged_bytes = 0
        self._feed = Feed()
        self._db = sqlite3.connect(NO_FILE, isolation_level=None, check_same_thread=False)
        prepare(self._db, NO_FILE, is_owner=True)
        self.outbox = Outbox(lambda: self._db, self._write, lambda: translate_errors(NO_FILE))

    def close(self) -> None:
        self._feed.close()
        self._db.close()

    def _without_code(self, training: Training) -> Training:
        """A launch of another process brings only the digest of its code."""
        code = training.spec.code
        if code is not None and code.is_digest:
            row = (code.digest, code.content)
            self._db.execute("insert or ignore into codes values (?, ?)", row)
        return super()._without_code(training)

    def _before_write(self, is_stopping: bool) -> None:
        """There is no file to check, and no disk that could be full."""

    def _after_write(self) -> None:
        """There is no file to reserve space for."""
