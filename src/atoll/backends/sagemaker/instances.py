"""Which instance holds a rank: by the name of its GPU, or by its CPUs and memory. Pure."""

from __future__ import annotations

from typing import NamedTuple

from atoll.core.errors import ValidationError
from atoll.core.spec import Resources
from atoll.core.text import parse_quantity


class GpuInstance(NamedTuple):
    gpus: int
    name: str


class CpuInstance(NamedTuple):
    cores: int
    gibibytes: int
    name: str


def _family(name: str, counts: dict[int, str]) -> list[GpuInstance]:
    return [GpuInstance(count, f"ml.{name}.{size}") for count, size in counts.items()]


_SMALL = {1: "xlarge", 4: "12xlarge", 8: "48xlarge"}
GPUS: dict[str, list[GpuInstance]] = {
    "A10G": _family("g5", _SMALL),
    "A100": _family("p4d", {8: "24xlarge"}),
    "A100-80GB": _family("p4de", {8: "24xlarge"}),
    "B200": _family("p6-b200", {8: "48xlarge"}),
    "H100": [*_family("p5", {1: "4xlarge", 8: "48xlarge"})],
    "H200": _family("p5en", {8: "48xlarge"}),
    "L4": _family("g6", _SMALL),
    "L40S": _family("g6e", _SMALL),
    "T4": _family("g4dn", {1: "xlarge", 4: "12xlarge"}),
    "V100": _family("p3", {1: "2xlarge", 4: "8xlarge", 8: "16xlarge"}),
}
CPUS = [
    CpuInstance(cores, memory, f"ml.m5.{size}")
    for cores, memory, size in (
        *((2, 8, "large"), (4, 16, "xlarge"), (8, 32, "2xlarge"), (16, 64, "4xlarge")),
        *((48, 192, "12xlarge"), (96, 384, "24xlarge")),
    )
]


def instance_for(needs: Resources, usual: str | None) -> str:
    """The smallest instance that has what a rank needs; `usual` if it names no GPU.

    Raises ValidationError, naming the field, if there is none.
    """
    if needs.min_gpu_memory_gb is not None and not needs.gpu_models:
        expected = "expected gpu_models, which says how much a GPU has"
        raise ValidationError("min_gpu_memory_gb", needs.min_gpu_memory_gb, expected)
    if needs.gpu_models:
        return _with_gpu(needs)
    if usual is not None:
        return usual
    if needs.gpu_count:
        expected = "expected gpu_models too, or the executor option instance_type"
        raise ValidationError("gpu_count", needs.gpu_count, expected)
    return _with_cpu(needs)


def _with_gpu(needs: Resources) -> str:
    if not needs.gpu_count:
        raise ValidationError("gpu_models", needs.gpu_models, "expected gpu_count above 0 too")
    for model in needs.gpu_models:
        if model.upper() not in GPUS:
            known = ", ".join(GPUS)
            expected = f"expected one of {known}; or the executor option instance_type"
            raise ValidationError("gpu_models", model, expected)
    for model in needs.gpu_models:
        for instance in GPUS[model.upper()]:
            if instance.gpus >= needs.gpu_count:
                return instance.name
    most = max(i.gpus for model in needs.gpu_models for i in GPUS[model.upper()])
    raise ValidationError("gpu_count", needs.gpu_count, f"expected at most {most}: on one instance")


def _with_cpu(needs: Resources) -> str:
    cores, memory = parse_quantity(needs.cpu or "0"), parse_quantity(needs.memory or "0") / 2**30
    for instance in CPUS:
        if instance.cores >= cores and instance.gibibytes >= memory:
            return instance.name
    field = "cpu" if cores > CPUS[-1].cores else "memory"
    expected = "expected at most 96 CPUs and 384Gi, or the executor option instance_type"
    raise ValidationError(field, getattr(needs, field), expected)
