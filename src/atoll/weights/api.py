"""Publisher and Follower: the machine over a real store, with torch's tensors and folders.

A request that fails for good ends the call with the client's error; what was open is settled by the
next call. Threads that call one at the same time take turns.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from atoll.core.checks import check_int, check_timeout
from atoll.core.errors import BackendError, NotFound, Permanent, Temporary, ValidationError
from atoll.files.writing import write_file
from atoll.objectstore import ObjectStore
from atoll.objectstore.effects import Create, Delete, Get, List, Put, StoreError
from atoll.weights.group import Gather, GroupMachine, Owners, TorchProcesses
from atoll.weights.machine import PublisherMachine, Reader
from atoll.weights.records import Damaged, Row, VersionRecord
from atoll.weights.replicas import ReplicaMachine, Round, Sleep
from atoll.weights.reports import ChannelReports
from atoll.weights.state import (
    Tensors,
    TensorsSource,
    TensorValue,
    Threads,
    load_files,
    state_of,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.weights")

R = TypeVar("R")
NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]

# How often a follower asks for the next version: a version takes longer than this to load. A folder
# answers at once.
POLL_S, FOLDER_POLL_S = 1.0, 0.05
STATE = ".atoll-state"  # beside the files of a version in a folder; loaders pass it over
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
OWNED = ".atoll-weights"  # an empty file in folders whose versions `write` may delete
MAX_THREADS = 8  # beyond it memory is the limit, not cores
MAX_EXTRA_BYTES = 64 << 20  # of one file beside the tensors; a tokenizer has 20 MB at the most
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {name: dtype for dtype, name in DTYPES.items()}
MAX_NUMBER = 9_999_999_999  # numbers have ten digits in keys
PAIRS = "expected names with their tensors, such as model.named_parameters()"
RESERVED_NAME = "__metadata__"  # of the header of a safetensors file
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_WRITTEN = re.compile(r"v[0-9]{1,10}|\.v[0-9]{1,10}\.[0-9a-f]+|\.current\.[0-9a-f]+")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|index\.json)|atoll\.json")


@dataclass(frozen=True)
class Version:
    """One version of the weights. `number` orders versions; `step` is the publisher's label.

    `changed`: values that differ from the version before; `bytes`: what was uploaded for it.
    """

    number: int
    step: int | None
    changed: int
    bytes: int


def _version(record: VersionRecord) -> Version:
    return Version(record.number, record.step, record.changed, record.bytes)


class StoreDriver:
    """Performs the requests of a machine; those of a group, with its other processes."""

    def __init__(
        self, uri: str | os.PathLike[str], processes: TorchProcesses | None = None
    ) -> None:
        self.store = ObjectStore.open(uri)
        self.processes = processes
        self._is_without_lease = False
        self._lock = threading.RLock()  # a signal handler may close what the same thread uses

    @property
    def poll_s(self) -> float:
        return FOLDER_POLL_S if self.store.is_folder else POLL_S

    def run(self, steps: Generator[Any, Any, R]) -> R:
        with self._lock:
            return self._run(steps)

    def _run(self, steps: Generator[Any, Any, R]) -> R:
        answer: Any = None
        problem: Exception | None = None
        while True:
            try:
                effect = steps.send(answer) if problem is None else steps.throw(problem)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except StoreError as error:
                raise error.__cause__ or error from None
            answer, problem = None, None
            try:
                answer = self.perform(effect)
            except BackendError as error:
                problem = StoreError(str(error))
                problem.__cause__ = error

    def perform(self, effect: Any) -> Any:
        match effect:
            case Put(key, body) if key.startswith("lease/"):
                return self._lease(partial(self.store.put, key, body))
            case Delete(keys) if all(key.startswith("lease/") for key in keys):
                return self._lease(partial(self.store.delete, keys))
            case Put(key, body):
                # A record names it later, so it must outlast a loss of power as the record does.
                return self.store.put(key, body, is_durable=True)
            case Create(key, body):
                return self.store.create(key, body)
            case Get(key):
                try:
                    return self.store.get(key)
                except NotFound:
                    return None
            case List(prefix, after):
                rows = self.store.list(prefix.rstrip("/"), after or None)
                return [Row(row.key, row.modified.timestamp(), row.size) for row in rows]
            case Delete(keys):
                return self.store.delete(keys)
            case Gather(value):
                assert self.processes is not None
                return self.processes.gather(value)
            case Sleep(seconds):
                return time.sleep(seconds)
        raise TypeError(f"no effect: {effect!r}")

    def _lease(self, request: Callable[[], None]) -> None:
        """A follower that may only read goes on without a lease: what it needs may be deleted, so
        that it waits for a full copy. Nothing else depends on it."""
        try:
            request()
        except Permanent as error:
            if not self._is_without_lease:
                log.warning("following without a lease, so versions may be skipped: %s", error)
            self._is_without_lease = True


def _check_options(full_every: int, keep: int, dtype: Any) -> None:
    if dtype is not None and str(dtype).removeprefix("torch.") not in DTYPES:
        raise ValidationError("dtype", dtype, "expected a type of torch, such as torch.bfloat16")
    if isinstance(dtype, str):
        raise ValidationError("dtype", dtype, f"expected torch.{dtype.removeprefix('torch.')}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValidationError("dtype", dtype, "expected a floating point type: it is for weights")
    check_int("full_every", full_every, 1, MAX_NUMBER)
    check_int("keep", keep, 0, MAX_NUMBER)


def _threads() -> Threads:
    return Threads(min(len(os.sched_getaffinity(0)), MAX_THREADS))


class Publisher:
    """Publishes versions to `uri`; whoever published there before is fenced.

    `dtype`: floating point tensors are published as this. `files`: a folder, or paths of files
    (`config.json`, tokenizer), which go with every full copy. `full_every`: a full copy after so
    many versions. `keep`: so many versions stay for followers that are behind without a lease.
    `process_group`: all its processes make a Publisher and publish together, each its share.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
        full_every: int = 25,
        keep: int = 8,
        process_group: Any = None,
    ) -> None:
        _check_options(full_every, keep, dtype)
        self._dtype = dtype
        self._extra = _read_files(files)
        processes = None if process_group is None else TorchProcesses(process_group)
        self._driver = StoreDriver(uri, processes)
        self._threads = _threads()
        run = self._threads.run
        who = secrets.token_hex(8)
        self._reports = ChannelReports(self._driver.store.uri, "publisher", who)
        self._machine = PublisherMachine(
            who,
            lambda each: load_files(each, run),
            time.monotonic,
            full_every,
            keep,
        )
        self._group: GroupMachine | None = None
        self._is_leader = processes is None or processes.rank == 0  # it alone reports
        if processes is None:
            self._driver.store.require_conditional_writes("probe")
            self._driver.run(self._machine.open())
            base = self._machine.base
            if isinstance(base, Tensors) and base.extra != self._extra:
                self._machine.base = None  # a delta has no files: the first version is full
            return
        self._owners = Owners(processes.rank, processes.size)
        machine = self._machine if self._is_leader else None
        self._group = GroupMachine(processes.rank, machine, state_of)

        def check() -> None:
            self._driver.store.require_conditional_writes("probe")

        self._driver.run(self._group.open(check))

    def publish(self, named_tensors: NamedTensors, step: int | None = None) -> Version:
        """Publish these tensors; returns when the version is committed.

        Raises Temporary if the store does not answer: train on, the next publish has everything.
        Raises Superseded, for good, if another publisher came. The iterator is read to its end
        whatever happens, since other processes may take part in each of its steps.
        """
        items = _pairs(named_tensors)

        def drain() -> None:
            for item in items:
                _gather(item[-1] if isinstance(item, tuple) else item)

        gathered = ((name, _gather(tensor)) for name, tensor in _checked(items))
        own = gathered if self._group is None else self._owners.select(gathered)
        values = ((name, _value(name, each, self._dtype)) for name, each in own)
        source = TensorsSource(values, self._extra, self._threads.run)
        try:
            if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
                raise ValidationError("step", step, "expected a whole number or None")
            if self._group is not None:
                record = self._driver.run(self._group.publish(source, step, drain))
            else:
                record = self._driver.run(self._machine.publish(source, step))
            if self._is_leader:
                self._reports.add(record)
            return _version(record)
        finally:
            drain()

    def close(self) -> None:
        """Learn whether a publish without an answer was committed, and commit it if it was not."""
        try:
            if self._group is not None:
                self._driver.run(self._group.settle())
            elif not self._machine.successor:
                self._driver.run(self._machine.settle())
        finally:
            self._threads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ReplicaPublisher:
    """What the replicas of a DiLoCo run publish to `uri` with: each makes one, and all call
    `diloco.publish(weights)` after the same rounds.

    The arguments are those of `Publisher`, but that every `full_every`th number is a full copy
    instead of a delta: it, too, is uploaded in shares.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
        full_every: int = 25,
        keep: int = 8,
    ) -> None:
        _check_options(full_every, keep, dtype)
        self._dtype, self._extra = dtype, _read_files(files)
        self._counts = full_every, keep
        self._driver = StoreDriver(uri)
        self._threads = _threads()
        self._machine: ReplicaMachine | None = None
        self._driver.store.require_conditional_writes("probe")

    def take(self, named_tensors: Iterable[tuple[str, Any]]) -> Tensors:
        """A copy of these tensors, in the types that are published; reads the whole iterator."""
        values = ((name, _value(name, each, self._dtype)) for name, each in _checked(named_tensors))
        try:
            return TensorsSource(values, self._extra, self._threads.run).copy()
        finally:
            for _ in named_tensors:
                pass

    def publish(
        self,
        values: Tensors,
        *,
        run: str,
        who: str,
        members: tuple[str, ...],
        round: int,
        step: int,
        timeout: float,
    ) -> Version | None:
        """Publish what `take` took, as `DiLoCo.publish` calls it: `who` is one of the `members` of
        this round of the run, all of which have these values.
        """
        machine = self._machine
        if machine is None or machine.run != run:
            load = partial(load_files, run=self._threads.run)
            machine = ReplicaMachine(who, load, time.monotonic, *self._counts)
            machine.run, machine.poll_s = run, self._driver.poll_s
            self._machine = machine
            self._reports = ChannelReports(self._driver.store.uri, "publisher", who)
        state = values.state
        what = Round(round, members, step, timeout)
        record = self._driver.run(machine.publish_round(values, what))
        if record is None:
            return None
        if record.state != state:
            log.warning("version %d has other values than this replica", record.number)
        if record.publisher == who:
            self._reports.add(record)
        return _version(record)

    def close(self) -> None:
        """Learn whether a publish without an answer was committed, and commit it if it was not."""
        try:
            if self._machine is not None and not self._machine.successor:
                self._driver.run(self._machine.settle())
        finally:
            self._threads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Follower:
    """Follows the versions at `uri`. `name` is what `atoll weights` shows; by default the host's.

    The host copy is verified before it is used: its values are the publisher's, bit for bit.
    """

    def __init__(self, uri: str | os.PathLike[str], *, name: str | None = None) -> None:
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ValidationError("name", name, "expected letters, digits, '-' and '_', at most 63")
        host = name or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:40] or "follower"
        self._driver = StoreDriver(uri)
        self._threads = _threads()
        run = self._threads.run
        follower = f"{host}.{secrets.token_hex(6)}"
        self._reports = ChannelReports(self._driver.store.uri, "follower", follower)
        self._reader = Reader(follower, lambda each: load_files(each, run), time.monotonic)
        self._last = 0  # the newest number that it had
        self._returned = 0  # by `next`

    @property
    def version(self) -> Version | None:
        """The version in the host copy."""
        record = self._reader.record
        return _version(record) if record and record.number >= self._last else None

    def next(self, timeout: float = 0, number: int | None = None) -> Version | None:
        """Go to the newest version; None if there is no newer one within `timeout` seconds.

        With `number`, to exactly that one: all processes of one engine must load the same, so the
        caller names it. Raises ValidationError if it has been passed. Nothing outside the host copy
        changes.
        """
        if number is not None:
            check_int("number", number, max(self._last, 1), MAX_NUMBER)
        check_timeout(timeout)
        self._threads.check_open()
        deadline = time.monotonic() + timeout
        while True:
            if not self._last:
                self._reports.add(None)
            self._reports.renew()  # also while the store does not answer
            before = self._last
            if number is None or number != before or self.version is None:
                self._driver.run(self._reader.advance(number))
            version = self.version
            if version is not None:
                self._last = version.number
                self._reports.add(self._reader.record)
                is_new = version.number > self._returned
                if version.number == number or (number is None and is_new):
                    self._returned = version.number
                    return version
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, self._driver.poll_s))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the host copy. The next `next` changes them: clone what you keep."""
        return {name: _tensor(each) for name, each in self._copy().tensors.items()}

    def copy_into(self, module: torch.nn.Module) -> None:
        """Copy all tensors into the module of the same names and shapes.

        Raises ValidationError, with nothing copied, if one of them does not fit.
        """
        import torch

        tensors, state = self.tensors(), module.state_dict(keep_vars=True)
        missing = [name for name, _ in module.named_parameters() if name not in tensors]
        if missing:
            raise ValidationError("module", missing[0], "the version has no such tensor")
        for name, tensor in tensors.items():
            if name not in state:
                raise ValidationError(
                    "module", name, "expected a tensor of this name in the module"
                )
            if state[name].shape != tensor.shape:
                raise ValidationError(
                    "module", name, f"expected the shape {tuple(tensor.shape)} of the version"
                )
            if state[name].is_meta:
                raise ValidationError("module", name, "expected a tensor that has memory")
        with torch.no_grad():
            for name, tensor in tensors.items():
                state[name].copy_(tensor)

    def write(self, folder: str | os.PathLike[str]) -> str:
        """Write `FOLDER/vN`, which `from_pretrained` reads, and point the link `current` to it.

        Returns the path of `FOLDER/vN`. The version before stays, for whoever reads it; older ones
        are deleted first, so there is never more than two. Raises ValidationError if the folder has
        files that are not from here.
        """
        copy, version = self._copy(), self.version
        assert version is not None
        root = own_folder(folder)
        target, link = root / f"v{version.number}", root / "current"
        with open(root / OWNED, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one of several processes writes it, for all
            before = os.readlink(link) if link.is_symlink() else ""
            if not _is_version(target, copy.state):
                _remove_others(root, {target.name, before})
                _write_version(copy, target)
            if before != target.name:
                draft = root / f".current.{secrets.token_hex(4)}"
                draft.symlink_to(target.name)
                draft.rename(link)
        return str(target)

    def verify(self) -> None:
        """Read the whole host copy again; raises Damaged if its memory has changed.

        It is dropped then: `next` loads and returns the version again.
        """
        copy = self._copy()
        try:
            copy.verify()
        except Damaged:
            self._reader.copy = self._reader.record = None
            self._returned = 0
            raise

    def close(self) -> None:
        """Drop the lease."""
        self._reports.close()
        try:
            self._driver.run(self._reader.leave())
        except Temporary:
            pass  # it ends by itself
        finally:
            self._threads.close()

    def _copy(self) -> Tensors:
        copy = self._reader.copy
        if self.version is None or not isinstance(copy, Tensors):
            raise Damaged("there is no version yet: call next() until it returns one")
        return copy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def own_folder(folder: str | os.PathLike[str]) -> Path:
    """Make the folder for versions, or check that it was made here: old versions are deleted in it.

    Raises ValidationError.
    """
    root = Path(folder).absolute()  # an engine that is told the path may work elsewhere
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not (root / OWNED).exists():
            other = next(root.iterdir(), None)
            if other is not None and other.name != OWNED:
                expected = "expected an empty folder, or one that versions were written to"
                raise ValidationError("folder", str(root), f"{expected}: {other.name!r} is in it")
            (root / OWNED).touch()
        link = root / "current"
        if link.exists() and not link.is_symlink():
            raise ValidationError("folder", str(root), "expected 'current' in it to be a link")
    except OSError as error:
        expected = f"expected a folder that can be made: {error.strerror}"
        raise ValidationError("folder", str(root), expected) from error
    return root


def _mark_of(state: str) -> str:
    """What says that a folder has this version: that of another channel may have the same number.

    Files are not forced to the disk, so those of another boot may have lost what they held.
    """
    return f"{state} {BOOT_ID.read_text().strip()}"


def _is_version(folder: Path, state: str) -> bool:
    try:
        return (folder / STATE).read_text() == _mark_of(state)
    except OSError:
        return False


def _write_version(copy: Tensors, target: Path) -> None:
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        draft.mkdir()
        for name, pieces in copy.files():
            write_file(draft / name, list(pieces), mode=0o644, is_durable=False)
        write_file(draft / STATE, [_mark_of(copy.state).encode()], mode=0o644, is_durable=False)
        if target.exists():  # of another channel
            target.rename(target.with_name(f".{target.name}.{secrets.token_hex(4)}"))
        draft.rename(target)
    except OSError:  # such as a full disk: what was written would keep it full
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _remove_others(root: Path, kept: set[str]) -> None:
    """Remove versions but these, and what a process that was killed had begun."""
    for path in root.iterdir():
        if path.name not in kept and _WRITTEN.fullmatch(path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


# -- Tensors


def _gather(tensor: Any) -> Any:
    """The tensor whole: every process of a sharded model takes part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _pairs(named_tensors: NamedTensors) -> Iterator[Any]:
    try:
        return iter(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    except TypeError:
        raise ValidationError("named_tensors", type(named_tensors).__name__, PAIRS) from None


def _checked(items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Raises ValidationError for a name that safetensors does not have, and for no tensors at all:
    followers would drop those they have."""
    is_empty = True
    for item in items:
        is_empty = False
        if not isinstance(item, tuple) or len(item) != 2:
            raise ValidationError("named_tensors", type(item).__name__, PAIRS)
        name, tensor = item
        if not isinstance(name, str) or name in ("", RESERVED_NAME):
            raise ValidationError(
                "named_tensors", name, f"expected text that is not empty nor {RESERVED_NAME!r}"
            )
        if not name.isascii() and name != name.encode("utf-8", "replace").decode():
            raise ValidationError("named_tensors", ascii(name), "expected a name in UTF-8")
        yield name, tensor
    if is_empty:
        expected = "expected at least one tensor; an iterator can be read only once"
        raise ValidationError("named_tensors", None, expected)


def _value(name: str, tensor: Any, dtype: Any) -> TensorValue:
    """A copy of the tensor in host memory: the caller's may be used again for the next one."""
    if not hasattr(tensor, "detach"):
        array = np.array(tensor, order="C")
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        kind = _kind_of(name, array.dtype.name)
        value = TensorValue(kind, array.shape, array.reshape(-1).view(np.uint8))
        if dtype is None or array.dtype.kind != "f":
            return value
        tensor = _tensor(value)
    import torch

    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    kind = _kind_of(name, str(dtype).removeprefix("torch."))
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        what = "meta" if tensor.is_meta else tensor.layout
        raise ValidationError(f"named_tensors[{name!r}]", str(what), "expected a dense tensor")
    copy = tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
    return TensorValue(kind, tuple(copy.shape), copy.reshape(-1).view(torch.uint8).numpy())


def _kind_of(name: str, dtype: str) -> str:
    if dtype not in DTYPES:
        expected = f"expected one of {', '.join(DTYPES)}"
        raise ValidationError(f"named_tensors[{name!r}]", dtype, expected)
    return DTYPES[dtype]


def _tensor(value: TensorValue) -> torch.Tensor:
    import torch

    dtype = getattr(torch, _NAMES[value.dtype])
    if not value.data.size:
        return torch.empty(value.shape, dtype=dtype)
    return torch.from_numpy(value.data).view(dtype).reshape(value.shape)


def _read_files(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None,
) -> dict[str, bytes]:
    """What goes with full copies: the files of a folder that are no weights, or those named."""
    if files is None:
        return {}
    if isinstance(files, str | os.PathLike):
        folder = Path(files)
        if not folder.is_dir():
            raise ValidationError(
                "files", os.fspath(files), "expected a folder, or a list of files"
            )
        paths = [each for each in sorted(folder.iterdir()) if each.is_file()]
        paths = [each for each in paths if not _WEIGHTS.fullmatch(each.name)]
        paths = [each for each in paths if not each.name.startswith(".")]
    else:
        try:
            paths = [Path(each) for each in files]
        except TypeError as error:
            raise ValidationError(
                "files", files, "expected a folder, or a list of files"
            ) from error
    extra: dict[str, bytes] = {}
    for path in paths:
        if not _FILE.fullmatch(path.name) or _WEIGHTS.fullmatch(path.name) or path.name in extra:
            raise ValidationError("files", path.name, "expected plain names, each once, no weights")
        try:
            if path.stat().st_size > MAX_EXTRA_BYTES:
                raise ValidationError(
                    "files", str(path), f"expected at most {MAX_EXTRA_BYTES} bytes"
                )
            extra[path.name] = path.read_bytes()
        except OSError as error:
            raise ValidationError(
                "files", str(path), f"expected a file: {error.strerror}"
            ) from error
    return extra
