"""Which hardware of a service holds a rank, from a table of what it has. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from atoll.core.errors import ValidationError
from atoll.core.spec import Resources


class GpuRow(NamedTuple):
    """Hardware of a service with `gpus` GPUs of a model, and the service's own name for it."""

    model: str
    memory_gb: int  # of each GPU
    gpus: int
    name: str


def rows(model: str, memory_gb: int, names: Mapping[int, str]) -> Iterable[GpuRow]:
    """The sizes in which a service has a model."""
    return (GpuRow(model, memory_gb, count, name) for count, name in names.items())


def check_model(field: str, model: object, table: Sequence[GpuRow], label: str) -> str:
    """The model as the table has it. Raises ValidationError for one that the service lacks."""
    name, known = str(model).upper(), list(dict.fromkeys(row.model for row in table))
    if not isinstance(model, str) or name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        raise ValidationError(field, model, f"{label} has no such GPU: {hint}")
    return name


def gpu_for(
    needs: Resources, table: Sequence[GpuRow], label: str, usual: str | None = None
) -> str | None:
    """The first row that has what a rank needs, of the models in their order; None if it names no
    model and there is no `usual` one, or needs no GPU.

    Raises ValidationError, naming the field, if there is none.
    """
    if needs.gpu_models and not needs.gpu_count:
        raise ValidationError("gpu_models", needs.gpu_models, "expected gpu_count above 0 too")
    models = needs.gpu_models or ([usual] if usual else [])
    if not needs.gpu_count or not models:
        return None
    names = [check_model("gpu_models", model, table, label) for model in models]
    least = needs.min_gpu_memory_gb or 0
    fit = [row for name in names for row in table if row.model == name and row.memory_gb >= least]
    if not fit:
        expected = f"expected less: no {' or '.join(names)} of {label} has so much"
        raise ValidationError("min_gpu_memory_gb", least, expected)
    for row in fit:
        if row.gpus >= needs.gpu_count:
            return row.name
    most = max(row.gpus for row in fit)
    expected = f"expected at most {most} {' or '.join(names)}: {label} has no more in one place"
    raise ValidationError("gpu_count", needs.gpu_count, expected)
