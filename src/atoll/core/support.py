"""What a backend does not support of a spec: a table of limits for each, which is read here alone.

A limit refuses a training that could not do what it is for, or lets it run and says what has no
effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from atoll.core.bench import has_floor
from atoll.core.errors import ValidationError
from atoll.core.spec import TrainingSpec

Test = Callable[[TrainingSpec, Any], bool]  # of a spec and the options of an executor
Reason = str | Callable[[TrainingSpec, Any], str]


def always(spec: TrainingSpec, options: Any) -> bool:
    return True


class Limit(NamedTuple):
    """A field, by its name in Python, that a backend does not support, or not `when` this holds."""

    field: str
    reason: Reason
    when: Test
    is_refused: bool


def refuse(field: str, expected: Reason, *, when: Test = always) -> Limit:
    return Limit(field, expected, when, is_refused=True)


def ignore(field: str, reason: Reason, *, when: Test = always) -> Limit:
    return Limit(field, reason, when, is_refused=False)


NO_STALL_RESTART = refuse(
    "stall_restart", "expected none: this executor starts no rank again that stands still"
)


def optional_fields(spec: TrainingSpec) -> dict[str, object]:
    """What the spec asks for of those fields that some backend ignores."""
    needs, providers = spec.resources, spec.provider_filter
    chosen = providers.include or providers.exclude
    fields = {
        "image": spec.image,
        "cpu": needs.cpu,
        "memory": needs.memory,
        "gpu_count": needs.gpu_count,
        "gpu_models": needs.gpu_models,
        "min_gpu_memory_gb": needs.min_gpu_memory_gb,
        "topology_spread": "" if spec.topology_spread == "none" else spec.topology_spread,
        "bench": "" if spec.bench.mode == "off" else spec.bench.mode,
        "stall_s": spec.stall_s,
    }
    requested: dict[str, object] = {name: value for name, value in fields.items() if value}
    if chosen or providers.include is not None:  # none of the providers is a wish, too
        requested["provider_filter"] = chosen
    return requested


def check_supported(spec: TrainingSpec, limits: Sequence[Limit], options: Any) -> None:
    """Raises ValidationError, naming the first field that the backend refuses."""
    values = _all_fields(spec)
    for limit in limits:
        if limit.is_refused and limit.field in values and limit.when(spec, options):
            reason = _reason(limit, spec, options)
            raise ValidationError(limit.field, values[limit.field], reason)


def unsupported_fields(
    spec: TrainingSpec, limits: Sequence[Limit], options: Any
) -> dict[str, tuple[object, str]]:
    """Of what the spec asks for, what has no effect: the value and why, by field."""
    values = optional_fields(spec)
    return {
        limit.field: (values[limit.field], _reason(limit, spec, options))
        for limit in limits
        if not limit.is_refused and limit.field in values and limit.when(spec, options)
    }


def describe_unsupported(executor: str, fields: dict[str, tuple[object, str]]) -> str:
    """One line; empty without any."""
    by_reason: dict[str, list[str]] = {}
    for name, (value, reason) in fields.items():
        by_reason.setdefault(reason, []).append(f"{name} {_as_text(value)}")
    if not by_reason:
        return ""
    parts = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return f"{executor} does not honour {'; nor '.join(parts)}"


def _all_fields(spec: TrainingSpec) -> dict[str, object]:
    """What the spec asks for of all fields that a limit may name."""
    fields: dict[str, object] = {
        "mesh": spec.mesh,
        "bench_require_gbps": spec.bench.require_gbps if has_floor(spec) else None,
        "bench_placement": spec.bench.placement if has_floor(spec) else None,
        "rendezvous_backend": spec.rendezvous.backend,
        "code": spec.code and f"{spec.code.files} files",
        "stop_grace_s": spec.stop_grace_s,
        "deadline_s": spec.deadline_s,
        "stall_restart": spec.stall_restart,
    }
    return optional_fields(spec) | {name: value for name, value in fields.items() if value}


def _reason(limit: Limit, spec: TrainingSpec, options: Any) -> str:
    return limit.reason if isinstance(limit.reason, str) else limit.reason(spec, options)


def _as_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
