"""Which instance holds a rank: by the name of its GPU, or by its CPUs and memory. Pure."""

from __future__ import annotations

from atoll.backends.hardware import gpu_for, rows
from atoll.core.errors import ValidationError
from atoll.core.spec import Resources
from atoll.core.text import parse_quantity

_SMALL = {1: "xlarge", 4: "12xlarge", 8: "48xlarge"}
# Model, GB of its memory, family of instances, and the size of an instance by its GPUs.
GPUS = [
    row
    for model, memory_gb, family, sizes in (
        ("A10G", 24, "g5", _SMALL),
        ("A100", 40, "p4d", {8: "24xlarge"}),
        ("A100", 80, "p4de", {8: "24xlarge"}),
        ("A100-80GB", 80, "p4de", {8: "24xlarge"}),
        ("B200", 180, "p6-b200", {8: "48xlarge"}),
        ("H100", 80, "p5", {1: "4xlarge", 8: "48xlarge"}),
        ("H200", 141, "p5en", {8: "48xlarge"}),
        ("L4", 24, "g6", _SMALL),
        ("L40S", 48, "g6e", _SMALL),
        ("T4", 16, "g4dn", {1: "xlarge", 4: "12xlarge"}),
        ("V100", 16, "p3", {1: "2xlarge", 4: "8xlarge", 8: "16xlarge"}),
    )
    for row in rows(model, memory_gb, {n: f"ml.{family}.{size}" for n, size in sizes.items()})
]
# Cores, GiB of memory, name.
CPUS = [
    *((2, 8, "ml.m5.large"), (4, 16, "ml.m5.xlarge"), (8, 32, "ml.m5.2xlarge")),
    *((16, 64, "ml.m5.4xlarge"), (48, 192, "ml.m5.12xlarge"), (96, 384, "ml.m5.24xlarge")),
]


def instance_for(needs: Resources, usual: str | None) -> str:
    """The smallest instance that has what a rank needs; `usual` if it names no GPU.

    Raises ValidationError, naming the field, if there is none.
    """
    if name := gpu_for(needs, GPUS, "SageMaker") or usual:
        return name
    cores, memory = parse_quantity(needs.cpu or "0"), parse_quantity(needs.memory or "0") / 2**30
    for has_cores, has_memory, name in CPUS:
        if has_cores >= cores and has_memory >= memory:
            return name
    field = "cpu" if cores > CPUS[-1][0] else "memory"
    expected = "expected at most 96 CPUs and 384Gi, or the executor option instance_type"
    raise ValidationError(field, getattr(needs, field), expected)
