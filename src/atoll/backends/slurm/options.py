"""What a caller may say about how ranks run under Slurm, checked before anything is submitted."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from atoll.backends.base import BackendOptions
from atoll.backends.launch import ETCD_BACKEND
from atoll.core.checks import check_bounds, check_choice, check_strings
from atoll.core.errors import ValidationError
from atoll.core.ports import NO_STALL_RESTART, ignore, no_way_into, refuse
from atoll.core.spec import TrainingSpec

Container = Literal["pyxis", "apptainer"]

_TOKEN = re.compile(r"[^\s'\"\\#;`$]+")
_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_LINE = re.compile(r"(-[a-zA-Z]|--[a-z][a-z-]*)([ =].*)?")
# Lines that decide which job is which rank's, or that it runs once.
OURS = frozenset(
    {
        *("--array", "-a", "--job-name", "-J", "--requeue", "--no-requeue", "--wrap", "--parsable"),
        *("--output", "-o", "--error", "-e", "--open-mode", "--chdir", "-D", "--ntasks", "-n"),
        *("--nodes", "-N", "--test-only", "--wait", "-W", "--hold", "-H", "--clusters", "-M"),
    }
)
NAMED = ("partition", "account", "qos", "constraint", "reservation", "gres")
SUPPORTS = (
    refuse(
        "image",
        "expected none, or an executor with container = 'pyxis' or 'apptainer'",
        when=lambda spec, options: options.container is None,
    ),
    refuse(
        "rendezvous_backend",
        "expected 'c10d', 'static' or 'none': atoll runs no etcd under Slurm",
        when=lambda spec, options: spec.rendezvous.backend == ETCD_BACKEND,
    ),
    refuse("mesh", "expected False: Slurm has no etcd for its keys"),
    refuse("bench_require_gbps", "expected none: links are not measured under Slurm"),
    refuse("provider_filter", "expected none: choose nodes by partition and constraint"),
    refuse("topology_spread", "expected 'none': Slurm places the ranks of an array by itself"),
    refuse("min_gpu_memory_gb", "expected none: ask for a GPU by its name"),
    refuse(
        "gpu_models",
        "expected one model: Slurm takes no alternatives",
        when=lambda spec, options: len(spec.resources.gpu_models) > 1,
    ),
    NO_STALL_RESTART,
    *no_way_into("jobs of Slurm: log in to the host, which 'atoll status' names"),
    ignore("bench", "links are not measured under Slurm"),
    ignore("gpu_models", "gpu_count is 0", when=lambda spec, options: not spec.resources.gpu_count),
)


class SlurmOptions(BackendOptions, frozen=True):
    """The options of Slurm. Unset means: as the cluster does it by default."""

    SUPPORTS = SUPPORTS
    LABEL = "Slurm"
    OWN_VARIABLES = ("SLURM_",)

    folder: str | None = None  # that all hosts see under this path; unset: the state directory
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time: str | None = None  # as sbatch takes it: minutes, 12:00:00, 2-00:00:00
    gres: str | None = None  # beside the GPUs that a training asks for
    gpu_types: dict[str, str] = {}  # gres types by GPU name; others are written in lower case
    sbatch: list[str] = []  # more lines for sbatch, such as "--exclusive"
    prologue: list[str] = []  # shell lines before each rank, such as "module load cuda"
    container: Container | None = None  # what runs the image of a training
    container_mounts: list[str] = []  # host:container[:flags]
    python: str | None = None  # on the hosts, for the wrapper and for sources; unset: this one
    conf: str | None = None  # SLURM_CONF; unset: as in the environment
    array_size: Annotated[int, Meta(ge=1, le=4_000_000)] = 1000  # at most MaxArraySize
    # A wrapper without a heartbeat for this long is lost: NFS may hide heartbeats for seconds.
    heartbeat_timeout_s: Annotated[float, Meta(ge=2, le=3600)] = 20.0

    def __post_init__(self) -> None:
        check_bounds(self)
        for field in NAMED:
            value = getattr(self, field)
            if value is not None and not _TOKEN.fullmatch(value):
                raise ValidationError(field, value, "expected one word, as sbatch takes it")
        if self.time is not None and not _TIME.fullmatch(self.time):
            expected = "expected minutes, hours:minutes:seconds or days-hours:minutes:seconds"
            raise ValidationError("time", self.time, expected)
        for field in ("folder", "conf"):
            value = getattr(self, field)
            if value is not None and (not value.startswith(("/", "~")) or re.search(r"\s", value)):
                raise ValidationError(field, value, "expected an absolute path without spaces")
        for field in ("sbatch", "prologue", "container_mounts"):
            check_strings(field, getattr(self, field))
            for at, line in enumerate(getattr(self, field)):
                if "\n" in line or not line.strip():
                    raise ValidationError(f"{field}[{at}]", line, "expected one line")
        for at, line in enumerate(self.sbatch):
            self._check_line(f"sbatch[{at}]", line)
        if self.container is not None:
            check_choice("container", self.container, Container)
        elif self.container_mounts:
            expected = "expected none without container = 'pyxis' or 'apptainer'"
            raise ValidationError("container_mounts", self.container_mounts, expected)

    @staticmethod
    def _check_line(field: str, line: str) -> None:
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValidationError(field, line, "expected an option of sbatch, such as --exclusive")
        if match[1] in OURS:
            raise ValidationError(field, line, f"expected another option: atoll sets {match[1]}")
        if match[1].lstrip("-") in (*NAMED, "time"):
            name = match[1].lstrip("-")
            raise ValidationError(field, line, f"expected as the option {name} of its own")

    def check(self, spec: TrainingSpec) -> None:
        super().check(spec)
        gpus = spec.resources.gpu_count
        if spec.image is None and self.container is not None:
            raise ValidationError("image", None, f"expected an image for {self.container} to run")
        if gpus and self.gres and re.search(r"(^|,)gpu\b", self.gres):
            expected = f"expected 0: the executor's gres already asks for {self.gres!r}"
            raise ValidationError("gpu_count", gpus, expected)
