"""What a caller may say about how ranks run on SageMaker, checked before anything is created."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from atoll.backends.base import StoreOptions, separate_jobs
from atoll.backends.sagemaker.instances import instance_for
from atoll.core.checks import Pattern
from atoll.core.errors import ValidationError
from atoll.core.model import SpecModel
from atoll.core.ports import ignore, refuse
from atoll.core.spec import TrainingSpec

STOP_S = 120  # between SageMaker's SIGTERM and its SIGKILL
MAX_S = 28 * 86_400  # of a job
WARM_S = 21_600
SUPPORTS = (
    refuse(
        "stop_grace_s",
        f"expected at most {STOP_S}: SageMaker kills a job that long after SIGTERM",
        when=lambda spec, options: spec.stop_grace_s > STOP_S,
    ),
    refuse(
        "deadline_s",
        f"expected at most {MAX_S}: 28 days, as long as a job may run",
        when=lambda spec, options: (spec.deadline_s or 0) > MAX_S,
    ),
    *separate_jobs("training jobs"),
    refuse(
        "provider_filter", "expected none: the executor options region and subnets choose the place"
    ),
    ignore("topology_spread", "each rank is a job of its own, which SageMaker places"),
    refuse(
        "min_gpu_memory_gb",
        "expected gpu_models, which says how much a GPU has",
        when=lambda spec, options: not spec.resources.gpu_models,
    ),
    refuse(
        "gpu_count",
        "expected gpu_models too, or the executor option instance_type",
        when=lambda spec, options: not (spec.resources.gpu_models or options.instance_type),
    ),
    *(
        ignore(
            field,
            lambda spec, options: f"ranks have what an {options.hardware_of(spec)} has",
            when=lambda spec, options: bool(spec.resources.gpu_models or options.instance_type),
        )
        for field in ("cpu", "memory")
    ),
    ignore(
        "gpu_count",
        lambda spec, options: f"ranks have what an {options.hardware_of(spec)} has",
        when=lambda spec, options: bool(options.instance_type and not spec.resources.gpu_models),
    ),
)
InputMode = Literal["File", "FastFile", "Pipe"]
S3Uri = Annotated[
    str, Pattern(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/\S*)?", "expected s3://bucket/prefix")
]


TagName = Annotated[
    str, Pattern(r"(?!atoll-|aws:)[\s\S]*", "expected another name: it is reserved")
]


class InputChannel(SpecModel, frozen=True):
    """Data in S3 that ranks find in `/opt/ml/input/data/NAME`."""

    uri: S3Uri
    mode: InputMode = "File"
    content_type: str | None = None


class SageMakerOptions(StoreOptions, frozen=True):
    """The options of SageMakerExecutor. Unset means: as SageMaker does it by default."""

    SUPPORTS = SUPPORTS
    LABEL, PACKAGE, EXTRA = "SageMaker", "boto3", "sagemaker"
    OWN_VARIABLES = ("SAGEMAKER_", "SM_", "TRAINING_JOB_")
    STORES = ("s3://",)

    store: S3Uri | None = None
    role: str = ""  # the ARN of the role that jobs run as
    region: str | None = None
    profile: str | None = None  # of the AWS configuration files
    instance_type: str | None = None  # of ranks that name no GPU
    volume_gb: Annotated[int, Meta(ge=1, le=16_384)] = 30
    kms_key: str | None = None  # for the volume and the output
    output: S3Uri | None = None  # where SageMaker puts /opt/ml/model; unset: in the store
    subnets: list[str] = []
    security_groups: list[str] = []
    is_spot: bool = False
    max_wait_s: Annotated[int, Meta(ge=1, le=MAX_S)] | None = None  # with the time it runs
    max_runtime_s: Annotated[int, Meta(ge=60, le=MAX_S)] = 86_400
    checkpoints: S3Uri | None = None  # S3; a folder of it for each rank
    checkpoint_path: Annotated[str, Pattern("/.*", "expected an absolute path")] = (
        "/opt/ml/checkpoints"
    )
    warm_pool_s: Annotated[int, Meta(ge=1, le=WARM_S)] | None = None
    tags: dict[TagName, str] = {}
    channels: dict[str, InputChannel] = {}
    env: dict[str, str] = {}  # of the job, where values have 512 characters
    install: str | None = None  # for pip: the URL or path of a wheel
    capacity_pause_s: Annotated[float, Meta(ge=0.05, le=3600)] = 60.0
    starts: Annotated[int, Meta(ge=1, le=100)] = 8  # requests at once

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.subnets) != bool(self.security_groups):
            field = "security_groups" if self.subnets else "subnets"
            raise ValidationError(field, [], "expected subnets and security_groups, or neither")
        if self.is_spot and self.warm_pool_s is not None:
            expected = "expected none with is_spot: SageMaker keeps no spot instances"
            raise ValidationError("warm_pool_s", self.warm_pool_s, expected)
        if self.max_wait_s is not None and not self.is_spot:
            raise ValidationError("max_wait_s", self.max_wait_s, "expected only with is_spot")
        if self.max_wait_s is not None and self.max_wait_s < self.max_runtime_s:
            expected = f"expected at least max_runtime_s, which is {self.max_runtime_s}"
            raise ValidationError("max_wait_s", self.max_wait_s, expected)

    def check(self, spec: TrainingSpec) -> None:
        """Raises ValidationError if this training cannot run with these options."""
        if not self.role:
            expected = "expected the executor option role: the ARN that jobs run as"
            raise ValidationError("role", self.role, expected)
        super().check(spec)
        from atoll.backends.sagemaker.render import check_job

        check_job(spec, self)

    def hardware_of(self, spec: TrainingSpec) -> str:
        """The type of the instance that a rank has."""
        return instance_for(spec.resources, self.instance_type)
