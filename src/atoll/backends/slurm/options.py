"""What a caller may say about how ranks run under Slurm, checked before anything is submitted."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from atoll.backends.base import BackendOptions
from atoll.backends.launch import ETCD_BACKEND
from atoll.core.checks import Pattern
from atoll.core.errors import ValidationError
from atoll.core.ports import NO_STALL_RESTART, ignore, refuse
from atoll.core.spec import TrainingSpec

Container = Literal["pyxis", "apptainer"]

SbatchValue = Annotated[str, Pattern(r"[^\s'\"\\#;`$]+", "expected one word, as sbatch takes it")]
TIMES = r"(?i)\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}|UNLIMITED|INFINITE"
Time = Annotated[str, Pattern(TIMES, "expected minutes, or [days-]hours:minutes:seconds")]
AbsolutePath = Annotated[str, Pattern(r"[/~]\S*", "expected an absolute path without spaces")]
Line = Annotated[str, Pattern(r".*\S.*", "expected one line")]
LINES = r"(-[a-zA-Z]|--[a-z][a-z-]*)([ =].*)?"
SbatchLine = Annotated[str, Pattern(LINES, "expected an option of sbatch, such as --exclusive")]
# Lines that decide which job is which rank's, or that it runs once.
OURS = frozenset(
    {
        *("--array", "-a", "--job-name", "-J", "--requeue", "--no-requeue", "--wrap", "--parsable"),
        *("--output", "-o", "--error", "-e", "--open-mode", "--chdir", "-D", "--ntasks", "-n"),
        *("--nodes", "-N", "--test-only", "--wait", "-W", "--hold", "-H", "--clusters", "-M"),
    }
)
NAMED = ("partition", "account", "qos", "constraint", "reservation", "time", "gres")
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
    refuse(
        "gpu_count",
        lambda spec, options: f"expected 0: the executor's gres already asks for {options.gres!r}",
        when=lambda spec, options: bool(re.search(r"(^|,)gpu\b", options.gres or "")),
    ),
    NO_STALL_RESTART,
    refuse("exec", "it runs no commands in jobs: log in to the host, which 'atoll status' names"),
    ignore("bench", "links are not measured under Slurm"),
    ignore("gpu_models", "gpu_count is 0", when=lambda spec, options: not spec.resources.gpu_count),
)


class SlurmOptions(BackendOptions, frozen=True):
    """The options of Slurm. Unset means: as the cluster does it by default."""

    SUPPORTS = SUPPORTS
    LABEL = "Slurm"
    OWN_VARIABLES = ("SLURM_",)

    # That all hosts see under this path; unset: the state directory.
    folder: AbsolutePath | None = None
    partition: SbatchValue | None = None
    account: SbatchValue | None = None
    qos: SbatchValue | None = None
    constraint: SbatchValue | None = None
    reservation: SbatchValue | None = None
    time: Time | None = None  # as sbatch takes it: minutes, 12:00:00, 2-00:00:00
    gres: SbatchValue | None = None  # beside the GPUs that a training asks for
    gpu_types: dict[str, str] = {}  # gres types by GPU name; others are written in lower case
    sbatch: list[SbatchLine] = []  # more lines for sbatch, such as "--exclusive"
    prologue: list[Line] = []  # shell lines before each rank, such as "module load cuda"
    container: Container | None = None  # what runs the image of a training
    container_mounts: list[Line] = []  # host:container[:flags]
    python: str | None = None  # on the hosts, for the wrapper and for sources; unset: this one
    conf: AbsolutePath | None = None  # SLURM_CONF; unset: as in the environment
    array_size: Annotated[int, Meta(ge=1, le=4_000_000)] = 1000  # at most MaxArraySize
    # A wrapper without a heartbeat for this long is lost: NFS may hide heartbeats for seconds.
    heartbeat_timeout_s: Annotated[float, Meta(ge=2, le=3600)] = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for at, line in enumerate(self.sbatch):
            name = re.split("[ =]", line)[0]
            if name in OURS:
                raise ValidationError(f"sbatch[{at}]", line, f"expected another: atoll sets {name}")
            if (own := name.lstrip("-")) in NAMED:
                expected = f"expected as the option {own} of its own"
                raise ValidationError(f"sbatch[{at}]", line, expected)
        if self.container is None and self.container_mounts:
            expected = "expected none without container = 'pyxis' or 'apptainer'"
            raise ValidationError("container_mounts", self.container_mounts, expected)

    def check(self, spec: TrainingSpec) -> None:
        super().check(spec)
        if spec.image is None and self.container is not None:
            raise ValidationError("image", None, f"expected an image for {self.container} to run")
