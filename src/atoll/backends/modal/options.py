"""What a caller may say about how ranks run on Modal, checked before anything is created."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from atoll.backends.base import StoreOptions, Unspaced, separate_jobs
from atoll.backends.hardware import check_model, gpu_for, rows
from atoll.core.checks import Pattern
from atoll.core.errors import ValidationError
from atoll.core.model import SpecModel
from atoll.core.ports import ignore, refuse
from atoll.core.spec import TrainingSpec
from atoll.core.text import parse_quantity

MAX_LIFETIME_S = 86_400  # of a sandbox
MIN_LIFETIME_S = 60
MIN_CPU, MIN_MIB = 0.125, 128  # the least that Modal takes
MIB = 2**20
# Model, GB of memory, most in one sandbox, and Modal's name, as its documentation has them.
GPUS = [
    row
    for model, memory_gb, most, name in (
        *(("T4", 16, 8, "T4"), ("L4", 24, 8, "L4"), ("L40S", 48, 8, "L40S")),
        *(("A10", 24, 4, "A10"), ("A10G", 24, 4, "A10")),
        *(("A100", 40, 8, "A100"), ("A100", 80, 8, "A100-80GB")),
        *(("A100-40GB", 40, 8, "A100-40GB"), ("A100-SXM4-40GB", 40, 8, "A100-40GB")),
        *(("A100-80GB", 80, 8, "A100-80GB"), ("A100-SXM4-80GB", 80, 8, "A100-80GB")),
        ("RTX-PRO-6000", 96, 8, "RTX-PRO-6000"),
        *(("H100", 80, 8, "H100"), ("H100!", 80, 8, "H100!")),  # never an H200 in its place
        *(("H200", 141, 8, "H200"), ("B200", 192, 8, "B200")),
        ("B200+", 192, 8, "B200+"),  # or a B300
    )
    for row in rows(
        model, memory_gb, {n: f"{name}:{n}".removesuffix(":1") for n in range(1, most + 1)}
    )
]
SUPPORTS = (
    *separate_jobs("sandboxes of Modal", "'modal container exec' does, with the host of the rank"),
    refuse(
        "provider_filter", "expected none: the executor options cloud and region choose the place"
    ),
    refuse(
        "cpu",
        "expected at least 125m on Modal",
        when=lambda spec, options: parse_quantity(spec.resources.cpu or "1") < MIN_CPU,
    ),
    refuse(
        "memory",
        "expected at least 128Mi on Modal",
        when=lambda spec, options: parse_quantity(spec.resources.memory or "1Gi") < MIN_MIB * MIB,
    ),
    refuse(
        "gpu_count",
        "expected gpu_models too: Modal has no GPU of any kind",
        when=lambda spec, options: not (spec.resources.gpu_models or options.gpu),
    ),
    ignore("topology_spread", "Modal places sandboxes, see the options region and cloud"),
    ignore(
        "min_gpu_memory_gb",
        "gpu_count is 0",
        when=lambda spec, options: not spec.resources.gpu_count,
    ),
    ignore(
        "gpu_models",
        "a sandbox names one model, and has the first of these that fits",
        when=lambda spec, options: len(spec.resources.gpu_models) > 1,
    ),
)
# As the client checks the names of its objects, when it is too late.
NAMES = "[a-zA-Z0-9_.-]{1,64}"
ObjectName = Annotated[str, Pattern(NAMES, "expected 1 to 64 letters, digits, '-', '_' or '.'")]
PATHS = r"(?!/(root|tmp)$)(/(?!\.\.?(/|$))[^/]+)+"
MountPath = Annotated[str, Pattern(PATHS, "expected an absolute path, not /, /root or /tmp")]


class Bucket(SpecModel, frozen=True):
    """A bucket that ranks see as a folder. `secret` has its credentials."""

    bucket: Annotated[str, Pattern(".+", "expected the bucket's name")]
    prefix: Annotated[str, Pattern(".*/", "expected one that ends in '/'")] | None = None
    endpoint: str | None = None  # of R2, Google's or another store with S3's interface
    secret: ObjectName | None = None
    role: str | None = None  # to assume by OIDC, in place of a secret
    read_only: bool = False
    requester_pays: bool = False
    force_path_style: bool = False


class ModalOptions(StoreOptions, frozen=True):
    """The options of ModalExecutor. Unset means: as Modal does it by default."""

    SUPPORTS = SUPPORTS
    LABEL, PACKAGE, EXTRA = "Modal", "modal", "modal"
    OWN_VARIABLES = ("MODAL_",)
    NEEDS_IMAGE = False  # without one, Modal's own: a name in a registry, or a modal.Image

    app: ObjectName = "atoll"
    environment: ObjectName | None = None
    registry_secret: ObjectName | None = None  # with the credentials of the registry
    secrets: list[ObjectName] = []  # by name: their values are variables of the ranks
    volumes: dict[MountPath, ObjectName] = {}  # path -> volume
    buckets: dict[MountPath, Bucket] = {}  # path -> bucket
    region: Unspaced | list[Unspaced] | None = None
    cloud: Unspaced | None = None
    gpu: str | None = None  # the model, for trainings that only say how many
    cpu: Annotated[float, Meta(ge=MIN_CPU, le=1024)] | None = None  # cores
    memory: Annotated[int, Meta(ge=MIN_MIB, le=10**8)] | None = None  # MiB
    lifetime_s: Annotated[int, Meta(ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S)] = MAX_LIFETIME_S
    creates: Annotated[int, Meta(ge=1, le=1000)] = 64  # at once: each may wait 21 min for room

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.region == []:
            raise ValidationError("region", self.region, "expected a region such as 'us-east'")
        if self.gpu is not None:
            check_model("gpu", self.gpu, GPUS, self.LABEL)
        first = {name: path for path, name in reversed(self.volumes.items())}
        for path, name in self.volumes.items():
            if path != first[name]:
                expected = "expected a volume once: Modal mounts it in one place"
                raise ValidationError(f"volumes.{path}", name, expected)
        for path, bucket in self.buckets.items():
            if path in self.volumes:
                raise ValidationError("buckets", path, "expected another path: a volume is there")
            if bucket.requester_pays and bucket.secret is None:
                field = f"buckets.{path}.requester_pays"
                raise ValidationError(field, True, "expected a secret too")

    def hardware_of(self, spec: TrainingSpec) -> str | None:
        """The GPUs of one rank: `H100:2`."""
        return gpu_for(spec.resources, GPUS, self.LABEL, usual=self.gpu)
