"""The hardware of Hugging Face Jobs, and which of it holds a rank. Pure."""

from __future__ import annotations

from atoll.backends.hardware import gpu_for, rows
from atoll.core.spec import Resources

CPUS = ("cpu-basic", "cpu-upgrade", "cpu-performance", "cpu-xl")
# Model, GB of its memory, and the flavor by the number of GPUs, as `JobHardware` of the client.
GPUS = [
    *rows("T4", 16, {1: "t4-small"}),
    *rows("L4", 24, {1: "l4x1", 4: "l4x4"}),
    *rows("L40S", 48, {1: "l40sx1", 4: "l40sx4", 8: "l40sx8"}),
    *rows("A10G", 24, {1: "a10g-small", 2: "a10g-largex2", 4: "a10g-largex4"}),
    *rows("A100", 80, {1: "a100-large", 4: "a100x4", 8: "a100x8"}),
    *rows("H200", 141, {1: "h200", 2: "h200x2", 4: "h200x4", 8: "h200x8"}),
    *rows("RTX-PRO-6000", 96, {1: "rtx-pro-6000"}),
    *rows("RTX-PRO-6000", 96, {n: f"rtx-pro-6000x{n}" for n in (2, 4, 8)}),
]
OTHERS = ("t4-medium", "a10g-large")  # the same GPU with more CPUs
FLAVORS = {*CPUS, *OTHERS, *(row.name for row in GPUS)}


def flavor_for(needs: Resources, usual: str | None) -> str:
    """The smallest flavor with the GPUs that a rank needs; `usual` if it names none."""
    return gpu_for(needs, GPUS, "Hugging Face") or usual or CPUS[0]
