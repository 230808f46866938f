"""The options of Hugging Face Jobs, checked before anything is created."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from atoll.backends.base import EnvName, StoreOptions, separate_jobs
from atoll.backends.hfjobs.flavors import CPUS, FLAVORS, flavor_for
from atoll.core.errors import ValidationError
from atoll.core.ports import ignore, refuse
from atoll.core.spec import TrainingSpec

MAX_S = 30 * 86_400  # a month: the longest that anybody waits for a job that is stuck
SUPPORTS = (
    *separate_jobs("jobs of Hugging Face"),
    refuse("provider_filter", "expected none: Hugging Face chooses the place"),
    ignore("topology_spread", "Hugging Face places the jobs"),
    refuse(
        "gpu_count",
        "expected gpu_models too, or the executor option flavor with a GPU",
        when=lambda spec, options: (
            not spec.resources.gpu_models and (options.flavor or CPUS[0]) in CPUS
        ),
    ),
    *(
        ignore(field, lambda spec, options: f"ranks have what {options.hardware_of(spec)} has")
        for field in ("cpu", "memory", "min_gpu_memory_gb")
    ),
)


class HFJobsOptions(StoreOptions, frozen=True):
    """The options of HFJobsExecutor."""

    SUPPORTS = SUPPORTS
    LABEL, PACKAGE, EXTRA = "Hugging Face Jobs", "huggingface_hub", "hfjobs"
    OWN_VARIABLES = ("JOB_ID", "ACCELERATOR", "CPU_CORES")

    namespace: str | None = None  # a user or an organisation; unset: whose token it is
    flavor: str | None = None  # the hardware of trainings that ask for no GPU, such as cpu-upgrade
    env: dict[EnvName, str] = {}  # of the jobs
    secrets: list[
        EnvName
    ] = []  # variables of this machine that jobs get as secrets, by their names
    # After which Hugging Face ends a job; by default it does after half an hour.
    max_runtime_s: Annotated[int, Meta(ge=60, le=MAX_S)] = 7 * 86_400
    requests: Annotated[int, Meta(ge=1, le=100)] = 8  # at once: few for the Hub's rate limit

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flavor is not None and self.flavor not in FLAVORS:
            expected = f"expected one of {', '.join(sorted(FLAVORS))}"
            raise ValidationError("flavor", self.flavor, expected)

    def hardware_of(self, spec: TrainingSpec) -> str:
        """The flavor of a rank."""
        return flavor_for(spec.resources, self.flavor)
