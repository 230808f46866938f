"""The GPUs that Modal has, and how it calls them. Pure."""

from __future__ import annotations

import difflib

from atoll.core.errors import ValidationError
from atoll.core.spec import Resources

# Name -> (GB of memory, most in one sandbox), as Modal's documentation has them.
GPUS = {
    "T4": (16, 8),
    "L4": (24, 8),
    "A10": (24, 4),
    "L40S": (48, 8),
    "A100": (40, 8),
    "A100-40GB": (40, 8),
    "A100-80GB": (80, 8),
    "RTX-PRO-6000": (96, 8),
    "H100": (80, 8),
    "H100!": (80, 8),  # never an H200 in its place
    "H200": (141, 8),
    "B200": (192, 8),
    "B200+": (192, 8),  # or a B300
}
OTHER_NAMES = {"A10G": "A10", "A100-SXM4-40GB": "A100-40GB", "A100-SXM4-80GB": "A100-80GB"}


def gpu_of(needs: Resources, default: str | None) -> str | None:
    """The GPUs of one rank in Modal's words: `H100:2`. Raises ValidationError for none it has.

    Of several models the first is taken: a sandbox cannot name alternatives.
    """
    if not needs.gpu_count:
        if needs.gpu_models:
            raise ValidationError("gpu_models", needs.gpu_models, "expected gpu_count above 0 too")
        return None
    model = needs.gpu_models[0] if needs.gpu_models else default
    if model is None:
        raise ValidationError(
            "gpu_count", needs.gpu_count, "expected gpu_models too: Modal has no GPU of any kind"
        )
    name = gpu_name("gpu_models", model)
    least = needs.min_gpu_memory_gb
    if least is not None and name == "A100" and GPUS[name][0] < least <= GPUS["A100-80GB"][0]:
        name = "A100-80GB"
    memory, most = GPUS[name]
    if least is not None and memory < least:
        raise ValidationError("min_gpu_memory_gb", least, f"a {name} of Modal has {memory} GB")
    if needs.gpu_count > most:
        raise ValidationError(
            "gpu_count", needs.gpu_count, f"a sandbox of Modal has at most {most} {name}"
        )
    return name if needs.gpu_count == 1 else f"{name}:{needs.gpu_count}"


def gpu_name(field: str, model: object) -> str:
    """Modal's name of a GPU. Raises ValidationError for one that it does not have."""
    name = str(model).upper()
    name = OTHER_NAMES.get(name, name)
    if not isinstance(model, str) or name not in GPUS:
        near = difflib.get_close_matches(name, GPUS, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}?" if near else "expected one of " + ", ".join(GPUS)
        raise ValidationError(field, model, f"Modal has no such GPU: {hint}")
    return name
