"""The spec of a training. Every error names the field, the value and what was expected.

Field names in errors are those of Python: `world_size.min`. `fields.py` knows their other names.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from atoll.core.checks import (
    TEXT,
    check_bounds,
    check_choice,
    check_env,
    check_name,
    check_run_id,
    check_strings,
    is_text,
)
from atoll.core.errors import TooLarge, ValidationError
from atoll.core.model import SpecModel, encode
from atoll.core.settings import Setting, check_labels, check_settings, name_label
from atoll.core.text import check_memory, check_quantity

DIGEST = b"sha256:"
MAX_SPEC_BYTES = 2**20  # as JSON and without the content of its source and its code
MAX_CODE_BYTES = 16 * 2**20  # packed: source code, not data; it travels with every create
MAX_WORLD = 10_000  # the largest that benches and stores are tried with
MAX_SECONDS = 10 * 365 * 86_400  # ten years: a number beyond is a typing error
MAX_GPUS = 1024  # of one rank: no machine has as many
URI_PATTERN = r"^(file|memory|s3|gs|az)://\S*$"

RankCount = Annotated[int, Meta(ge=1, le=MAX_WORLD)]
GpuCount = Annotated[int, Meta(ge=0, le=MAX_GPUS)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
IntegerSeconds = Annotated[int, Meta(ge=0, le=MAX_SECONDS)]
Deadline = Annotated[float, Meta(ge=0.001, le=MAX_SECONDS)]
StallSeconds = Annotated[float, Meta(ge=1, le=MAX_SECONDS)]
RankNumber = Annotated[int, Meta(ge=0, le=2**31 - 1)]
LineCount = Annotated[int, Meta(ge=0, le=10_000_000)]
# Target of a scale; whether it is within `[min, max]` is checked against each training.
ScaleTarget = Annotated[int, Meta(ge=-(2**31), le=2**31)]

BenchMode = Literal["off", "on-start"]
BenchPlacement = Literal["preferred", "strict"]
RendezvousBackend = Literal["etcd-v2", "c10d", "static", "none"]
TopologySpread = Literal["pack", "provider-aware", "region-aware", "none"]
SourceKind = Literal["script", "function", "shell"]

_URI = re.compile(URI_PATTERN)


class WorldSize(SpecModel, frozen=True):
    """How many ranks: never fewer than `min`, never more than `max`, `target` wanted now."""

    option_prefix: ClassVar[str] = "world_size."

    min: RankCount
    """The training is pending while fewer ranks than this can run."""
    target: RankCount
    """Number of ranks wanted now. `kubectl scale` changes it."""
    max: RankCount
    """The training may be scaled up to this many ranks."""

    def __post_init__(self) -> None:
        check_bounds(self, self.option_prefix)
        if self.min > self.target:
            raise ValidationError(
                "world_size.min", self.min, f"expected at most world_size.target ({self.target})"
            )
        if self.target > self.max:
            raise ValidationError(
                "world_size.target", self.target, f"expected at most world_size.max ({self.max})"
            )


class ProviderFilter(SpecModel, frozen=True):
    """Providers to use. `include=None` is any; `include=[]` is none and is refused."""

    option_prefix: ClassVar[str] = "provider_filter."

    include: list[str] | None = None
    """Use only these providers; unset means any."""
    exclude: list[str] = []
    """Use none of these providers."""

    def __post_init__(self) -> None:
        if self.include is not None:
            check_strings("provider_filter.include", self.include)
            if not self.include:
                raise ValidationError(
                    "provider_filter.include", [], "expected at least one provider, or None for any"
                )
        check_strings("provider_filter.exclude", self.exclude)
        both = sorted(set(self.include or ()) & set(self.exclude))
        if both:
            raise ValidationError(
                "provider_filter.exclude", both, "expected none of provider_filter.include"
            )


class Resources(SpecModel, frozen=True):
    """What one rank needs. Quantities as Kubernetes writes them: `"500m"`, `"32Gi"`."""

    cpu: str | None = None
    """CPUs of each rank, as a Kubernetes quantity: 500m, 2."""
    memory: str | None = None
    """Memory of each rank, as a Kubernetes quantity: 4Gi."""
    gpu_count: GpuCount = 0
    """GPUs of each rank."""
    gpu_models: list[str] = []
    """Acceptable GPU models; empty means any."""
    min_gpu_memory_gb: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Minimum memory of each GPU, in GB."""

    def __post_init__(self) -> None:
        check_quantity("cpu", self.cpu)
        check_memory("memory", self.memory)
        check_bounds(self)
        check_strings("gpu_models", self.gpu_models)


class BenchSpec(SpecModel, frozen=True):
    """Whether the link between two hosts is measured at the start, and where."""

    option_prefix: ClassVar[str] = "bench_"

    mode: BenchMode = "off"
    """`on-start` measures the link between two hosts at the start; `off` does not."""
    placement: str = "preferred"
    """`strict` waits for two hosts that run ranks; `preferred` takes what there is."""
    require_gbps: Annotated[float, Meta(ge=0, le=1_000_000)] | None = None
    """Fail the training if the link is slower than this, in Gbit/s."""

    def __post_init__(self) -> None:
        check_choice("bench", self.mode, BenchMode)
        check_bounds(self, self.option_prefix)
        if self.mode != "off":
            check_choice("bench_placement", self.placement, BenchPlacement)

    @property
    def has_floor(self) -> bool:
        """Whether ranks start only if the link is fast enough."""
        return self.mode != "off" and self.require_gbps is not None


class RendezvousSpec(SpecModel, frozen=True):
    """How ranks find each other, and the object store they may meet in."""

    option_prefix: ClassVar[str] = "rendezvous_"

    backend: RendezvousBackend = "c10d"
    """How ranks find each other. `none`: each rank is a world of its own."""
    uri: str | None = None
    """Object store in which ranks meet: s3://bucket/prefix."""

    def __post_init__(self) -> None:
        check_choice("rendezvous_backend", self.backend, RendezvousBackend)
        if self.uri is not None and not (is_text(self.uri) and _URI.fullmatch(self.uri)):
            raise ValidationError(
                "rendezvous_uri", self.uri, "expected file://, s3://, gs:// or az://"
            )
        if self.uri is not None and self.uri.startswith("memory:"):
            expected = "expected a store that all ranks reach: memory:// is within one process"
            raise ValidationError("rendezvous_uri", self.uri, expected)


class Source(SpecModel, frozen=True):
    """Code shipped with the training instead of a command: a Python or shell script, or a pickled
    function."""

    option_prefix: ClassVar[str] = "source."

    kind: SourceKind
    """What `content` is."""
    content: bytes
    """The code itself, in base64."""
    filename: str = "source.py"
    """Name of the file in which ranks find the code."""
    directory: str | None = None
    """Directory of its modules, if ranks can see that directory."""

    def __post_init__(self) -> None:
        check_choice("source.kind", self.kind, SourceKind)
        if not isinstance(self.content, bytes) or not self.content:
            raise ValidationError("source", self.content, "expected code, got nothing")
        if "/" in self.filename or self.filename in ("", ".", "..") or not is_text(self.filename):
            raise ValidationError("source.filename", self.filename, "expected a plain file name")
        where = self.directory
        if where is not None and not (is_text(where) and where.startswith("/")):
            raise ValidationError("source.directory", where, "expected an absolute path")

    @property
    def is_digest(self) -> bool:
        return _is_digest(self.content)

    def by_digest(self) -> Source:
        """The source with its digest in place of the code, for places that do not run it."""
        return msgspec.structs.replace(self, content=_digest(self.content))


class Code(SpecModel, frozen=True):
    """The directory that a training was deployed from, as `code/archive.py` packs it. Ranks start
    in its root."""

    option_prefix: ClassVar[str] = "code."

    content: bytes
    """The archive, or its digest, in base64."""
    size: Annotated[int, Meta(ge=1, le=MAX_CODE_BYTES)]
    """Size of the archive in bytes."""
    unpacked: Annotated[int, Meta(ge=0, le=2**40)]
    """Size of its files in bytes."""
    files: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Number of its files."""
    path: list[str] = []
    """Folders of the code that ranks also import modules from."""

    def __post_init__(self) -> None:
        check_bounds(self, self.option_prefix)
        if not isinstance(self.content, bytes) or not self.content:
            raise ValidationError("code.content", self.content, "expected an archive, got nothing")
        if not self.is_digest and len(self.content) != self.size:
            expected = f"expected {len(self.content)}, the bytes of code.content"
            raise ValidationError("code.size", self.size, expected)
        check_strings("code.path", self.path)
        for folder in self.path:
            if folder.startswith("/") or ".." in folder.split("/"):
                raise ValidationError("code.path", folder, "expected folders of the code")

    @property
    def is_digest(self) -> bool:
        return _is_digest(self.content)

    @property
    def digest(self) -> str:
        """Of the archive, in hexadecimal."""
        return self.by_digest().content.removeprefix(DIGEST).decode()

    def by_digest(self) -> Code:
        """The code with its digest in place of the archive."""
        return msgspec.structs.replace(self, content=_digest(self.content))


def _is_digest(content: bytes) -> bool:
    return content.startswith(DIGEST) and len(content) == len(DIGEST) + 64


def _digest(content: bytes) -> bytes:
    if _is_digest(content):
        return content
    import hashlib

    return DIGEST + hashlib.sha256(content).hexdigest().encode()


class TrainingSpec(SpecModel, frozen=True):
    """One training as the user wants it. Only `world_size.target` and `cancel` change later."""

    name: str
    """Unique in its namespace: a DNS label, made of displayName where that is none."""
    world_size: WorldSize
    """Number of ranks: at least min, at most max, target of them now."""
    command: list[str] | None = None
    """Program that every rank runs, with its arguments. Set either this or source."""
    source: Source | None = None
    """Code that is shipped with the training and run by every rank."""
    code: Code | None = None
    """Directory that the training was deployed from; ranks start in its root."""
    args: list[str] = []
    """Arguments added to the command, or passed to the source."""
    image: str | None = None
    """Container image of the ranks."""
    env: dict[str, str] = {}
    """Environment variables of the ranks; those that atoll sets are refused."""
    working_dir: str | None = None
    """Directory that ranks start in, as an absolute path."""
    resources: Resources = Resources()
    """What each rank needs."""
    provider_filter: ProviderFilter = ProviderFilter()
    """Providers of machines that may be used."""
    topology_spread: TopologySpread = "none"
    """How ranks are spread over hosts, providers and regions."""
    nccl_env: dict[str, str] = {}
    """Environment variables for NCCL; they override those in env."""
    bench: BenchSpec = BenchSpec()
    """Whether to measure the link between two hosts at the start."""
    rendezvous: RendezvousSpec = RendezvousSpec()
    """How ranks find each other."""
    run_id: str | None = None
    """Run in the object store that the training begins or continues."""
    mesh: bool = False
    """Make ranks wait until every host can reach every other."""
    pip_packages: list[str] = []
    """Python packages to install before a rank starts."""
    max_restarts: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """How often a failed rank is restarted."""
    start_grace_s: Seconds = 30.0
    """After this many seconds, min ranks may start without the others."""
    stop_grace_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """Seconds between asking a rank to stop and killing it."""
    deadline_s: Deadline | None = None
    """Fail the training this many seconds after its ranks were started."""
    ttl_seconds: IntegerSeconds | None = None
    """Delete the training this many seconds after its end."""
    stall_s: StallSeconds | None = None
    """Report a rank as stalled after this many seconds without output, metrics or CPU."""
    stall_restart: bool = False
    """Restart a stalled rank; this counts towards maxRestarts."""
    executor: str | None = None
    """Name of the executor that runs the ranks."""
    display_name: str | None = None
    """The name as it was given, where that is no DNS label; lists show it."""
    labels: dict[str, str] = {}
    """Names and values to find the training by. Those with one `group` are one row of a list."""
    settings: dict[str, Setting] = {}
    """What was varied: names with numbers, texts, true or false."""
    cancel: bool = False
    """`true` stops the ranks and keeps the record. It cannot be undone."""

    def __post_init__(self) -> None:
        self._check_names()
        if not isinstance(self.world_size, WorldSize):
            raise ValidationError(
                "world_size", self.world_size, "expected WorldSize(min=…, target=…, max=…)"
            )
        self._check_what_runs()
        for field in ("env", "nccl_env"):
            check_env(field, getattr(self, field))
        check_choice("topology_spread", self.topology_spread, TopologySpread)
        check_bounds(self)
        if self.executor is not None:
            check_name("executor", self.executor)
        if self.run_id is not None:
            check_run_id("run_id", self.run_id)
        for field in ("mesh", "cancel", "stall_restart"):
            if not isinstance(getattr(self, field), bool):
                raise ValidationError(field, getattr(self, field), "expected True or False")
        if self.stall_restart and (self.stall_s is None or not self.max_restarts):
            what = "stall_s" if self.stall_s is None else "max_restarts of 1 or more"
            raise ValidationError("stall_restart", True, f"expected {what} with it")

    def _check_names(self) -> None:
        """A name that is no DNS label becomes one, and stays as the name that is shown."""
        label = name_label("name", self.name)
        if label != self.name:
            msgspec.structs.force_setattr(self, "display_name", self.name)
            msgspec.structs.force_setattr(self, "name", label)
        elif self.display_name is not None:
            name_label("display_name", self.display_name)
        check_labels("labels", self.labels)
        check_settings("settings", self.settings)

    def _check_what_runs(self) -> None:
        if (self.command is None) == (self.source is None):
            value = "both" if self.command is not None else None
            raise ValidationError("command", value, "expected either a command or a source")
        if self.command is not None:
            check_strings("command", self.command)
            if not self.command or not self.command[0]:
                raise ValidationError("command", self.command, "expected a program to run")
        check_strings("args", self.args)
        check_strings("pip_packages", self.pip_packages)
        for at, package in enumerate(self.pip_packages):
            if not package.strip():
                expected = "expected a package, such as 'einops' or 'einops==0.8.1'"
                raise ValidationError(f"pip_packages[{at}]", package, expected)
        for field in ("image", "working_dir"):
            value = getattr(self, field)
            if value is not None and (not value or not is_text(value)):
                raise ValidationError(field, value, TEXT)
        if self.working_dir is not None and not self.working_dir.startswith("/"):
            raise ValidationError("working_dir", self.working_dir, "expected an absolute path")
        if self.working_dir is not None and self.code is not None:
            expected = "expected none: ranks start in the root of the code"
            raise ValidationError("working_dir", self.working_dir, expected)

    @property
    def needs_etcd(self) -> bool:
        """For its rendezvous, or for the keys of the mesh gate."""
        return self.mesh or self.rendezvous.backend == "etcd-v2"

    def by_digest(self) -> TrainingSpec:
        """The spec with digests in place of its source and code."""
        if self.source is None and self.code is None:
            return self
        source = self.source and self.source.by_digest()
        return msgspec.structs.replace(
            self, source=source, code=self.code and self.code.by_digest()
        )


def check_spec_size(spec: TrainingSpec) -> None:
    """Raises TooLarge, naming the largest field, for a spec of more than `MAX_SPEC_BYTES`.

    Not a check of the constructor: larger ones that a release before has stored stay readable.
    """
    sizes = {name: len(encode(_bare(getattr(spec, name)))) for name in spec.__struct_fields__}
    total = sum(sizes.values())
    if total > MAX_SPEC_BYTES:
        field = max(sizes, key=sizes.__getitem__)
        raise TooLarge(
            field,
            f"{sizes[field]} bytes",
            f"expected a spec of at most {MAX_SPEC_BYTES} bytes (1 MiB) without its source, "
            f"got {total}: read large data from a file or an object store",
        )


def _bare(value: object) -> object:
    """The value without the content of a source or of code."""
    if isinstance(value, Source):
        return [value.filename, value.directory]
    return value.path if isinstance(value, Code) else value


def may_start(able: int, world: WorldSize, *, is_grace_over: bool) -> bool:
    """Whether `able` ranks are enough: all of them together, or `min` after the start grace."""
    return able >= world.target or (is_grace_over and able >= world.min)
