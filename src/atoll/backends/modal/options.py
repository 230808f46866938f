"""What a caller may say about how ranks run on Modal, checked before anything is created."""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Any

from msgspec import Meta

from atoll.backends.base import StoreOptions, separate_jobs
from atoll.backends.modal.gpus import gpu_name, gpu_of
from atoll.core.checks import check_strings, is_text
from atoll.core.errors import ValidationError
from atoll.core.model import SpecModel
from atoll.core.ports import ignore, refuse
from atoll.core.spec import TrainingSpec
from atoll.core.text import parse_quantity

MAX_LIFETIME_S = 86_400  # of a sandbox
MIN_LIFETIME_S = 60
MIB = 2**20
# As the client checks the names of its objects.
OBJECT_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
SUPPORTS = (
    *separate_jobs("sandboxes of Modal"),
    refuse(
        "provider_filter", "expected none: the executor options cloud and region choose the place"
    ),
    ignore("topology_spread", "Modal places sandboxes, see the options region and cloud"),
    ignore(
        "min_gpu_memory_gb",
        "gpu_count is 0",
        when=lambda spec, options: not spec.resources.gpu_count,
    ),
    ignore(
        "gpu_models",
        "a sandbox names one model, and has the first of these",
        when=lambda spec, options: len(spec.resources.gpu_models) > 1,
    ),
)


class Bucket(SpecModel, frozen=True):
    """A bucket that ranks see as a folder. `secret` has its credentials."""

    bucket: str
    prefix: str | None = None
    endpoint: str | None = None  # of R2, Google's or another store with S3's interface
    secret: str | None = None
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

    app: str = "atoll"
    environment: str | None = None
    registry_secret: str | None = None  # with the credentials of the registry
    secrets: list[str] = []  # by name: their values are variables of the ranks
    volumes: dict[str, str] = {}  # path -> volume
    buckets: dict[str, Bucket] = {}  # path -> bucket
    region: str | list[str] | None = None
    cloud: str | None = None
    gpu: str | None = None  # the model, for trainings that only say how many
    cpu: Annotated[float, Meta(ge=0.125, le=1024)] | None = None  # cores
    memory: Annotated[int, Meta(ge=128, le=10**8)] | None = None  # MiB
    lifetime_s: Annotated[int, Meta(ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S)] = MAX_LIFETIME_S
    creates: Annotated[int, Meta(ge=1, le=1000)] = 64  # at once: each may wait 21 min for room

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("app", "environment", "registry_secret"):
            if (name := getattr(self, field)) is not None:
                check_object_name(field, name)
        check_strings("secrets", self.secrets)
        for at, secret in enumerate(self.secrets):
            check_object_name(f"secrets[{at}]", secret)
        self._check_mounts()
        check_image("image", self.image)
        regions = [self.region] if isinstance(self.region, str) else self.region
        if regions is not None:
            check_strings("region", regions)
        if regions is not None and not all(regions or [""]):
            raise ValidationError("region", self.region, "expected a region such as 'us-east'")
        for field in ("python", "cloud"):
            value = getattr(self, field)
            if value is not None and (not is_text(value) or not value):
                raise ValidationError(field, value, "expected text")
        if self.gpu is not None:
            gpu_name("gpu", self.gpu)

    def _check_mounts(self) -> None:
        for field in ("volumes", "buckets"):
            mounts = getattr(self, field)
            if not isinstance(mounts, dict):
                raise ValidationError(field, mounts, "expected paths, and what is mounted there")
            for path in mounts:
                is_plain = is_text(path) and posixpath.abspath(path) == path
                if not is_plain or path in ("/", "/root", "/tmp"):
                    raise ValidationError(
                        field, path, "expected an absolute path, not '/', '/root' or '/tmp'"
                    )
        for at, (path, name) in enumerate(self.volumes.items()):
            check_object_name(f"volumes.{path}", name)
            if name in list(self.volumes.values())[:at]:
                expected = "expected a volume once: Modal mounts it in one place"
                raise ValidationError(f"volumes.{path}", name, expected)
        both = sorted(set(self.volumes) & set(self.buckets))
        if both:
            raise ValidationError("buckets", both[0], "expected another path: a volume is there")
        for path, bucket in self.buckets.items():
            self._check_bucket(f"buckets.{path}", bucket)

    def _check_bucket(self, field: str, bucket: Any) -> None:
        if not isinstance(bucket, Bucket):
            raise ValidationError(field, bucket, "expected a Bucket: bucket, prefix, secret, …")
        if not is_text(bucket.bucket) or not bucket.bucket:
            raise ValidationError(f"{field}.bucket", bucket.bucket, "expected the bucket's name")
        if bucket.prefix is not None and not bucket.prefix.endswith("/"):
            raise ValidationError(f"{field}.prefix", bucket.prefix, "expected one that ends in '/'")
        if bucket.secret is not None:
            check_object_name(f"{field}.secret", bucket.secret)
        if bucket.requester_pays and bucket.secret is None:
            raise ValidationError(f"{field}.requester_pays", True, "expected a secret too")

    def check(self, spec: TrainingSpec) -> None:
        check_image("image", spec.image)
        super().check(spec)
        gpu_of(spec.resources, self.gpu)
        cores_of(spec, self)
        mebibytes_of(spec, self)


def check_object_name(field: str, name: object) -> None:
    """As the client does it when it is too late."""
    if not isinstance(name, str) or not OBJECT_NAME.fullmatch(name):
        expected = "expected 1 to 64 letters, digits, '-', '_' or '.', as Modal names its objects"
        raise ValidationError(field, name, expected)


def check_image(field: str, image: object) -> None:
    if image is None or type(image).__module__.partition(".")[0] == "modal":
        return
    if not is_text(image) or not image or str(image).split() != [image]:
        raise ValidationError(
            field, image, "expected the name of an image in a registry, or a modal.Image"
        )


def cores_of(spec: TrainingSpec, options: ModalOptions) -> float | None:
    if spec.resources.cpu is None:
        return options.cpu
    cores = parse_quantity(spec.resources.cpu)
    if cores < 0.125:
        raise ValidationError("cpu", spec.resources.cpu, "expected at least 125m on Modal")
    return cores


def mebibytes_of(spec: TrainingSpec, options: ModalOptions) -> int | None:
    if spec.resources.memory is None:
        return options.memory
    mebibytes = parse_quantity(spec.resources.memory) / MIB
    if mebibytes < 128:
        raise ValidationError("memory", spec.resources.memory, "expected at least 128Mi on Modal")
    return round(mebibytes)
