"""What the user asked for. Every refusal names the field, the value and what would be right.

Field names in errors are those of Python: `world_size.min`. `fields.py` knows their other names.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

import msgspec

from atoll.core.checks import (
    TEXT,
    check_choice,
    check_env,
    check_int,
    check_name,
    check_number,
    check_strings,
    is_text,
)
from atoll.core.errors import ValidationError
from atoll.core.model import SpecModel

DIGEST = b"sha256:"
MAX_WORLD = 10_000
MAX_SECONDS = 10 * 365 * 86_400

BenchMode = Literal["off", "on-start"]
BenchPlacement = Literal["preferred", "strict"]
RendezvousBackend = Literal["etcd-v2", "c10d", "static"]
TopologySpread = Literal["pack", "provider-aware", "region-aware", "none"]
SourceKind = Literal["script", "function", "shell"]

_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
_URI = re.compile(r"(file|memory|s3|gs|az)://\S*")


class WorldSize(SpecModel, frozen=True):
    """How many ranks: never fewer than `min`, never more than `max`, `target` wanted now."""

    min: int
    target: int
    max: int

    def __post_init__(self) -> None:
        for field in ("min", "target", "max"):
            check_int(f"world_size.{field}", getattr(self, field), 1, MAX_WORLD)
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

    include: list[str] | None = None
    exclude: list[str] = []

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
    memory: str | None = None
    gpu_count: int = 0
    gpu_models: list[str] = []
    min_gpu_memory_gb: int | None = None

    def __post_init__(self) -> None:
        for field in ("cpu", "memory"):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, str) and _QUANTITY.fullmatch(value)):
                raise ValidationError(
                    field, value, "expected a quantity such as '2', '500m', '4Gi'"
                )
        check_int("gpu_count", self.gpu_count, 0, 1024)
        check_strings("gpu_models", self.gpu_models)
        if self.min_gpu_memory_gb is not None:
            check_int("min_gpu_memory_gb", self.min_gpu_memory_gb, 1, 100_000)


class BenchSpec(SpecModel, frozen=True):
    """Whether the link between two hosts is measured at the start, and where."""

    mode: BenchMode = "off"
    placement: str = "preferred"
    require_gbps: float | None = None

    def __post_init__(self) -> None:
        check_choice("bench", self.mode, BenchMode)
        if self.mode == "off":
            return
        check_choice("bench_placement", self.placement, BenchPlacement)
        if self.require_gbps is not None:
            check_number("bench_require_gbps", self.require_gbps, 0.0, 1e6)


class RendezvousSpec(SpecModel, frozen=True):
    """How ranks find each other, and the object store they may meet in."""

    backend: RendezvousBackend = "c10d"
    uri: str | None = None

    def __post_init__(self) -> None:
        check_choice("rendezvous_backend", self.backend, RendezvousBackend)
        if self.uri is not None and not (is_text(self.uri) and _URI.fullmatch(self.uri)):
            raise ValidationError(
                "rendezvous_uri", self.uri, "expected file://, memory://, s3://, gs:// or az://"
            )


class Source(SpecModel, frozen=True):
    """Code shipped with the training instead of a command: a Python or shell script, or a pickled
    function."""

    kind: SourceKind
    content: bytes
    filename: str = "source.py"
    directory: str | None = None  # where its modules are, if the rank can see that directory

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
        return self.content.startswith(DIGEST) and len(self.content) == len(DIGEST) + 64

    def by_digest(self) -> Source:
        """With its digest in place of the code, for where it is only talked about."""
        if self.is_digest:
            return self
        digest = hashlib.sha256(self.content).hexdigest().encode()
        return msgspec.structs.replace(self, content=DIGEST + digest)


class TrainingSpec(SpecModel, frozen=True):
    """One training as the user wants it. Only `world_size.target` and `cancel` change later."""

    name: str
    world_size: WorldSize
    command: list[str] | None = None
    source: Source | None = None
    args: list[str] = []
    image: str | None = None
    env: dict[str, str] = {}
    working_dir: str | None = None
    resources: Resources = Resources()
    provider_filter: ProviderFilter = ProviderFilter()
    topology_spread: TopologySpread = "none"
    nccl_env: dict[str, str] = {}
    bench: BenchSpec = BenchSpec()
    rendezvous: RendezvousSpec = RendezvousSpec()
    mesh: bool = False
    pip_packages: list[str] = []
    max_restarts: int = 0
    start_grace_s: float = 30.0
    stop_grace_s: float = 10.0
    deadline_s: float | None = None
    ttl_seconds: int | None = None
    executor: str | None = None  # unset until stored: the default of the control plane
    cancel: bool = False

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if not isinstance(self.world_size, WorldSize):
            raise ValidationError(
                "world_size", self.world_size, "expected WorldSize(min=…, target=…, max=…)"
            )
        self._check_what_runs()
        for field in ("env", "nccl_env"):
            check_env(field, getattr(self, field))
        check_choice("topology_spread", self.topology_spread, TopologySpread)
        check_int("max_restarts", self.max_restarts, 0, 1_000_000)
        check_number("start_grace_s", self.start_grace_s, 0, MAX_SECONDS)
        check_number("stop_grace_s", self.stop_grace_s, 0, 3600)
        if self.deadline_s is not None:
            check_number("deadline_s", self.deadline_s, 0.001, MAX_SECONDS)
        if self.ttl_seconds is not None:
            check_int("ttl_seconds", self.ttl_seconds, 0, MAX_SECONDS)
        if self.executor is not None:
            check_name("executor", self.executor)
        for field in ("mesh", "cancel"):
            if not isinstance(getattr(self, field), bool):
                raise ValidationError(field, getattr(self, field), "expected True or False")

    def _check_what_runs(self) -> None:
        if (self.command is None) == (self.source is None):
            given = "both" if self.command is not None else None
            raise ValidationError("command", given, "expected either a command or a source")
        if self.command is not None:
            check_strings("command", self.command)
            if not self.command or not self.command[0]:
                raise ValidationError("command", self.command, "expected a program to run")
        check_strings("args", self.args)
        check_strings("pip_packages", self.pip_packages)
        for field in ("image", "working_dir"):
            value = getattr(self, field)
            if value is not None and (not value or not is_text(value)):
                raise ValidationError(field, value, TEXT)
        if self.working_dir is not None and not self.working_dir.startswith("/"):
            raise ValidationError("working_dir", self.working_dir, "expected an absolute path")
