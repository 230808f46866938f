"""What a backend with records is built on: its options, and where things of a training are.

Either all hosts see one folder (`FolderBackend`), or they see nothing together but an object store
(`StoreBackend`). A backend adds `start_jobs`, `list_jobs` and `stop_jobs` to one of them.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta

from atoll import agent
from atoll.agent.inspector import CLOSE_S
from atoll.agent.metric_sinks import METRICS
from atoll.agent.process import STACKS_S
from atoll.agent.wrapper import Folder
from atoll.backends.folder_logs import FolderLogs
from atoll.backends.launch import TORCHRUN_VARIABLES, RankLayout
from atoll.backends.reader import RESULTS
from atoll.backends.recorded import RecordedBackend
from atoll.backends.records import AttemptKey, Json, Timing
from atoll.core.checks import ENV_PATTERN, Pattern, check_fields, is_text
from atoll.core.errors import Temporary, ValidationError, missing_package
from atoll.core.executors import PlaneContext
from atoll.core.model import SpecModel
from atoll.core.ports import NO_STALL_RESTART, Limit, check_supported, refuse
from atoll.core.spec import TrainingSpec
from atoll.core.status import LogLine, Training
from atoll.core.stores import store_uri
from atoll.files.ownership import check_directory, make_private
from atoll.files.writing import write_file
from atoll.logs.bucket import ObjectLogs
from atoll.objectstore.bucket import Bucket

WRAPPER = "atoll.pyz"  # the wrapper as one file that any Python 3.7 or later runs
WRAPPER_PARTS = {
    "__main__.py": "wrapper.py",
    **{
        name: name
        for name in ("process.py", "records.py", "unpack.py", "machine_use.py", "metric_sinks.py")
    },
    **{
        name: name
        for name in ("inspector.py", "stacks.py", "stack_text.py", "hook/sitecustomize.py")
    },
}
ZIP_DATE = (2020, 1, 1, 0, 0, 0)  # the same files make the same bytes
RECORDS, LOGS = "records", "logs"
SOURCE = "source.file"  # among the records of a store, and removed with them
RANKS = "atoll-ranks"  # the prefix in a store under which each training has one of its own
FETCHED = "/tmp/atoll"  # the folder of a rank for what it fetches from a store
LOG_FILE = f"{0:020d}.log"  # as `logs/segments.py` names a log that is never cut
TIMES_FILE = f"{0:020d}.times"  # as `logs/segments.py` names its times


Limits = tuple[Limit, ...]

# By which a job is found, and which attempt it is: tags or labels of the backend.
UID, RANK, ATTEMPT = "atoll-uid", "atoll-rank", "atoll-attempt"


def wrapper_file() -> bytes:
    """`agent/wrapper.py` and the files that it needs as an archive that Python runs."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for name, source in WRAPPER_PARTS.items():
            text = Path(agent.__path__[0], source).read_bytes()
            archive.writestr(zipfile.ZipInfo(name, ZIP_DATE), text)
    return data.getvalue()


def labels_of(uid: str, key: AttemptKey) -> dict[str, str]:
    return {UID: uid, RANK: str(key[0]), ATTEMPT: str(key[1])}


def key_of(labels: Mapping[str, str] | None) -> AttemptKey | None:
    """Which attempt a job is, by its labels; None for what is none of ours."""
    rank, attempt = (labels or {}).get(RANK, ""), (labels or {}).get(ATTEMPT, "")
    return (int(rank), int(attempt)) if rank.isdigit() and attempt.isdigit() else None


def separate_jobs(jobs: str, instead: str = "'atoll stacks' shows where ranks are") -> Limits:
    """What no service can do whose jobs do not reach each other. `instead`: of `atoll exec`."""
    alone = f"expected none: {jobs} do not reach each other"
    return (
        refuse("mesh", alone),
        refuse("bench", alone),
        refuse(
            "rendezvous_backend",
            f"expected 'none': {jobs} meet in an object store alone",
            when=lambda spec, options: spec.rendezvous.backend in ("etcd-v2", "static"),
        ),
        NO_STALL_RESTART,
        refuse("exec", f"it cannot run commands in {jobs}: {instead}"),
    )


Unspaced = Annotated[str, Pattern(r"\S+", "expected one word")]
EnvName = Annotated[str, Pattern(ENV_PATTERN, "expected the names of variables")]


class BackendOptions(SpecModel, frozen=True):
    """The options of an executor: what a user may write in `atoll.toml` or give to its class."""

    SUPPORTS: ClassVar[Sequence[Limit]] = ()
    LABEL: ClassVar[str] = ""  # what people call the backend
    OWN_VARIABLES: ClassVar[tuple[str, ...]] = ()  # how names begin that the backend itself sets
    PACKAGE: ClassVar[str] = ""  # its client library, which `EXTRA` of atoll brings
    EXTRA: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def check_installed(cls, name: str) -> None:
        """Raises RuntimeError, with what to type, if the client library is missing."""
        try:
            __import__(cls.PACKAGE or "atoll")
        except ModuleNotFoundError as error:
            raise missing_package(name, error, cls.EXTRA) from error

    def check(self, spec: TrainingSpec) -> None:
        """Raises ValidationError, naming the field, for what can never run with these options."""
        check_supported(spec, self.SUPPORTS, self)
        for name, value in spec.env.items():
            if self.OWN_VARIABLES and name.startswith(self.OWN_VARIABLES):
                expected = f"expected another name: {self.LABEL} sets those"
                raise ValidationError(f"env.{name}", value, expected)


class StoreOptions(BackendOptions, frozen=True):
    """The options of a backend whose ranks keep their records in an object store."""

    store: str | None = None  # records and logs of trainings that name no store of their own
    image: Any = None  # of trainings that name none
    python: Unspaced = "python3"  # in the image; runs the wrapper, and a `source`
    # Between two polls of the store, by ranks (are they to stop) and by this machine (do they run).
    # A heartbeat comes with every fifth. 2 s are about 0.6 requests a second and rank.
    poll_s: Annotated[float, Meta(ge=0.05, le=60)] = 2.0

    STORES: ClassVar[tuple[str, ...]] = ("s3://", "gs://", "az://")
    NEEDS_IMAGE: ClassVar[bool] = True  # the service has none of its own

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.store is not None:
            self.check_store("store", self.store)
        self._check_image(self.image)

    def check_store(self, field: str, uri: object) -> None:
        """Raises ValidationError for what is no store that ranks and this machine reach."""
        store_uri(field, uri)
        is_one = is_text(uri) and str(uri).startswith(self.STORES)
        if not is_one or not str(uri).partition("://")[2] or str(uri).split() != [uri]:
            raise ValidationError(field, uri, self._expected_store())

    def store_of(self, spec: TrainingSpec) -> str:
        """The store with the records of a training. Raises ValidationError if there is none."""
        uri = self.store or spec.rendezvous.uri
        if uri is None:
            expected = f"{self._expected_store()}; or the executor option store"
            raise ValidationError("rendezvous_uri", None, expected)
        self.check_store("rendezvous_uri", uri)
        return uri.rstrip("/")

    def hardware_of(self, spec: TrainingSpec) -> str | None:
        """What a rank runs on, in the service's words; None: whatever it has. Raises
        ValidationError, naming the field, for what the service lacks."""
        return None

    def check(self, spec: TrainingSpec) -> None:
        self.hardware_of(spec)
        if self.NEEDS_IMAGE and not (spec.image or self.image):
            expected = "expected an image, of the training or of the executor"
            raise ValidationError("image", spec.image, expected)
        self._check_image(spec.image)
        self.store_of(spec)
        super().check(spec)

    def _check_image(self, image: object) -> None:
        is_object = type(image).__module__.partition(".")[0] == self.PACKAGE
        is_name = is_text(image) and str(image).split() == [image]
        if image is not None and not is_object and not is_name:
            expected = "expected the name of an image in a registry"
            raise ValidationError("image", image, expected)

    def _expected_store(self) -> str:
        schemes = " or ".join(", ".join(self.STORES).rsplit(", ", 1))
        return f"expected {schemes}: a store that {self.LABEL} and this machine reach"


class FolderBackend(FolderLogs, RecordedBackend):
    """All hosts see one folder, in which each training has one of its own."""

    def __init__(
        self, options: Any, root: Path, *, clock: Callable[[], float] | None = None
    ) -> None:
        super().__init__(options, clock=clock)
        self.root = root

    @classmethod
    def from_options(cls, options: Any, state_dir: Path) -> Self:
        own = getattr(options, "folder", None)
        return cls(options, Path(os.path.expanduser(own)) if own else state_dir / cls.name)

    def check_folder(self) -> None:
        """Raises ValidationError if this user can neither use nor make the folder, and Permanent if
        others can put files into it."""
        there = next(path for path in (self.root, *self.root.parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            expected = "expected a folder that this user can write to, and that all hosts see"
            raise ValidationError("folder", str(self.root), expected)
        check_directory(self.root)  # what is in it runs as this user on other hosts

    def folder_of(self, training: Training) -> Path:
        return self.root / training.uid

    def record_store_of(self, training: Training) -> Folder:
        return Folder(str(self.folder_of(training) / RECORDS))

    def result_store(self, training: Training) -> Folder:
        return Folder(str(self.folder_of(training) / RESULTS))

    def layout_in(self, folder: Path, python: str, *, has_atoll: bool) -> RankLayout:
        """`has_atoll`: ranks run with this very Python and its packages."""
        return RankLayout(
            python=python,
            shell="/bin/sh",
            source=str(folder / "source"),
            packages=str(folder / "packages") if has_atoll else None,
            has_atoll=has_atoll,
            rendezvous_uri=f"file://{folder}/rendezvous",
            metrics_uri=(folder / METRICS).as_uri(),
            runs_uri=(self.root.parent / "runs").absolute().as_uri(),
            meeting=None,
        )

    def launch(self, training: Training) -> Json:
        # By the wrapper, as it is its output that is the log. A path may hold braces.
        folder = str(self.log_folder(training)).replace("{", "{{").replace("}", "}}")
        return {**super().launch(training), "times": f"{folder}/{{rank}}/{TIMES_FILE}"}

    async def prepare(self, training: Training) -> None:
        try:
            await asyncio.to_thread(self._prepare, training)
        except OSError as error:
            where = self.folder_of(training)
            raise Temporary(f"cannot write to {where}: {error.strerror}") from error

    def _prepare(self, training: Training) -> None:
        folder, source = self.folder_of(training), training.spec.source
        for name in (RECORDS, RESULTS, LOGS):
            make_private(folder / name)
        write_file(folder / WRAPPER, wrapper_file())
        if source is not None:
            make_private(folder / "source")
            write_file(folder / "source" / source.filename, source.content)

    async def clear(self, training: Training, *, with_logs: bool) -> None:
        folder = self.folder_of(training)
        # What ranks stored stays until the training is deleted, as their logs do: its rounds are
        # read after the end, and its checkpoints are the user's.
        names = (RECORDS, "source", "packages", WRAPPER)
        for path in [folder] if with_logs else [folder / name for name in names]:
            if path.is_dir():
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def log_folder(self, training: Training) -> Path:
        return self.folder_of(training) / LOGS


class StoreBackend(RecordedBackend):
    """Hosts see nothing together but an object store, where each training has one prefix.

    Ranks do not reach each other. `options` are `StoreOptions`. A subclass has `render`, too.
    """

    has_network = False
    unclaimed_hint = "does its image have Python and atoll[store], and does it reach the store?"
    options: StoreOptions

    def __init__(self, options: StoreOptions, *, clock: Callable[[], float] | None = None) -> None:
        super().__init__(options, clock=clock)
        self.timing = timing_of(options.poll_s)
        self._buckets: dict[str, Bucket] = {}

    @staticmethod
    def render(training: Training, key: AttemptKey, options: Any) -> Json:
        """What the backend is sent for one attempt of a rank. Pure."""
        raise NotImplementedError

    @classmethod
    def preview(cls, options: Any, home: PlaneContext, training: Training) -> str | None:
        """What the backend is sent for the first attempts, as JSON. It is not asked."""
        options.check(training.spec)
        ranks = range(training.spec.world_size.target)
        created = [cls.render(training, (rank, 0), options) for rank in ranks]
        return json.dumps(created, indent=2, default=repr) + "\n"

    def prefix(self, training: Training, part: str = "") -> str:
        return prefix_of(training, self.options, part)

    def record_store_of(self, training: Training) -> Bucket:
        if training.uid not in self._buckets:
            self._buckets[training.uid] = Bucket.open(self.prefix(training, RECORDS))
        return self._buckets[training.uid]

    def result_store(self, training: Training) -> Bucket:
        return Bucket.open(self.prefix(training, RESULTS))

    def rank_layout(self, training: Training) -> RankLayout:
        return RankLayout(
            python=self.options.python,
            shell="/bin/sh",
            source=f"{FETCHED}/{training.uid}",
            packages=None,
            has_atoll=True,
            rendezvous_uri=self.prefix(training, "rendezvous"),
            runs_uri=f"{self.options.store_of(training.spec)}/{RANKS}/runs",
            meeting=None,
            metrics_uri=self.prefix(training, METRICS),
        )

    def launch(self, training: Training) -> Json:
        launch, source = super().launch(training), training.spec.source
        # A torchrun in a rank is one of its own: there is nobody it could meet.
        alone = {name for name in TORCHRUN_VARIABLES if name not in training.spec.env}
        where = {} if source is None else {f"{FETCHED}/{training.uid}/{source.filename}": SOURCE}
        return {
            **launch,
            "env": {name: value for name, value in launch["env"].items() if name not in alone},
            "unset": sorted({*launch["unset"], *alone}),
            "files": where,
            "logs": self.prefix(training, LOGS),
            "poll_s": self.options.poll_s,
            "heartbeat_s": self.options.poll_s * 5,
        }

    async def prepare(self, training: Training) -> None:
        if (source := training.spec.source) is not None:
            await self._put_bytes(training, SOURCE, source.content)

    async def clear(self, training: Training, *, with_logs: bool) -> None:
        if with_logs:
            everything = Bucket.open(self.prefix(training))
            names = await asyncio.to_thread(everything.entries)
            await asyncio.to_thread(everything.delete, list(names))
            self._buckets.pop(training.uid, None)

    async def log_offsets(
        self, training: Training, tail: int, *, ranks: Sequence[int] | None = None
    ) -> dict[int, int]:
        return await self._logs_of(training, ranks).offsets(tail)

    def logs_after(
        self,
        training: Training,
        offsets: Mapping[int, int],
        *,
        ranks: Sequence[int] | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        return self._logs_of(training, ranks).lines(offsets, follow)

    def _logs_of(self, training: Training, ranks: Sequence[int] | None) -> ObjectLogs:
        prefix = self.prefix(training, LOGS)
        wanted = range(training.spec.world_size.max) if ranks is None else ranks
        return ObjectLogs(lambda rank: Bucket.open(f"{prefix}/{rank}"), list(wanted))


def prefix_of(training: Training, options: StoreOptions, part: str = "") -> str:
    """Where in the store something of the training is; all of it, if `part` is empty."""
    store = options.store_of(training.spec)
    return f"{store}/{RANKS}/{training.uid}/{part}".rstrip("/")


def wrapper_command(training: Training, key: AttemptKey, options: StoreOptions) -> list[str]:
    """What a job runs where atoll is installed: it finds all it needs under the records' URI."""
    records = prefix_of(training, options, RECORDS)
    return [options.python, "-m", "atoll.agent.wrapper", records, *map(str, key)]


def timing_of(poll_s: float) -> Timing:
    """A heartbeat comes with every fifth poll; a wrapper that misses three of them is lost, but not
    sooner than in a folder: a host with too much to do is none that is gone. A wrapper that stops
    its rank has the time to take its stacks and to store them."""
    return Timing(
        observe_s=poll_s,
        settle_s=0.5 + 2 * poll_s,
        heartbeat_timeout_s=max(1.0 + 17 * poll_s, Timing().heartbeat_timeout_s),
        cause_wait_s=0.5 + 2 * poll_s,
        stop_wait_s=STACKS_S + CLOSE_S + 4 * poll_s,
    )
