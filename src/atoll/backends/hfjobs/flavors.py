"""The hardware of Hugging Face Jobs, and which of it holds a rank. Pure."""

from __future__ import annotations

from atoll.core.errors import ValidationError
from atoll.core.spec import Resources

CPUS = ("cpu-basic", "cpu-upgrade", "cpu-performance", "cpu-xl")
# Model -> GB of its memory, and the flavor by the number of GPUs, as `JobHardware` of the client.
GPUS: dict[str, tuple[int, dict[int, str]]] = {
    "T4": (16, {1: "t4-small"}),
    "L4": (24, {1: "l4x1", 4: "l4x4"}),
    "L40S": (48, {1: "l40sx1", 4: "l40sx4", 8: "l40sx8"}),
    "A10G": (24, {1: "a10g-small", 2: "a10g-largex2", 4: "a10g-largex4"}),
    "A100": (80, {1: "a100-large", 4: "a100x4", 8: "a100x8"}),
    "H200": (141, {1: "h200", 2: "h200x2", 4: "h200x4", 8: "h200x8"}),
    "RTX-PRO-6000": (96, {n: f"rtx-pro-6000{f'x{n}' if n > 1 else ''}" for n in (1, 2, 4, 8)}),
}
OTHERS = ("t4-medium", "a10g-large")  # the same GPU with more CPUs
FLAVORS = {*CPUS, *OTHERS, *(each for _, counts in GPUS.values() for each in counts.values())}


def check_flavor(field: str, flavor: object) -> None:
    if flavor not in FLAVORS:
        raise ValidationError(field, flavor, f"expected one of {', '.join(sorted(FLAVORS))}")


def flavor_for(needs: Resources, usual: str | None) -> str:
    """The smallest flavor with the GPUs that a rank needs; `usual` if it names none.

    Raises ValidationError, naming the field, if there is none.
    """
    if not needs.gpu_models:
        if needs.gpu_count and (usual is None or usual in CPUS):
            expected = "expected gpu_models too, or the executor option flavor with a GPU"
            raise ValidationError("gpu_count", needs.gpu_count, expected)
        return usual or CPUS[0]
    if not needs.gpu_count:
        raise ValidationError("gpu_models", needs.gpu_models, "expected gpu_count above 0 too")
    most, least = 0, needs.min_gpu_memory_gb or 0
    for model in needs.gpu_models:
        if model.upper() not in GPUS:
            raise ValidationError("gpu_models", model, f"expected one of {', '.join(GPUS)}")
        memory, counts = GPUS[model.upper()]
        if memory < least:
            continue
        most = max(most, *counts)
        for count, flavor in counts.items():
            if count >= needs.gpu_count:
                return flavor
    if not most:
        raise ValidationError("min_gpu_memory_gb", least, "none of gpu_models has so much")
    raise ValidationError("gpu_count", needs.gpu_count, f"expected at most {most}: in one job")
