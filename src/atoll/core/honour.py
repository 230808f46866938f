"""What an executor will not honour of a spec, in one line. Each backend has a table of it."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.core.spec import TrainingSpec


def asked(spec: TrainingSpec) -> dict[str, object]:
    """What the spec asks for of those fields that some executor does not honour."""
    needs, providers = spec.resources, spec.provider_filter
    fields = {
        "image": spec.image,
        "cpu": needs.cpu,
        "memory": needs.memory,
        "gpu_count": needs.gpu_count,
        "gpu_models": needs.gpu_models,
        "min_gpu_memory_gb": needs.min_gpu_memory_gb,
        "provider_filter": providers.include or providers.exclude,
        "topology_spread": "" if spec.topology_spread == "none" else spec.topology_spread,
        "bench": "" if spec.bench.mode == "off" else spec.bench.mode,
        "stall_s": spec.stall_s,
    }
    return {name: value for name, value in fields.items() if value}


def not_honoured(executor: str, spec: TrainingSpec, table: Mapping[str, str]) -> str:
    """The line for `table`, which has a reason for each field without effect; empty if the spec
    asks for none of them."""
    values = asked(spec)
    by_reason: dict[str, list[str]] = {}
    for name, why in table.items():
        if name in values:
            by_reason.setdefault(why, []).append(f"{name} {_shown(values[name])}")
    if not by_reason:
        return ""
    parts = [f"{', '.join(names)}: {why}" for why, names in by_reason.items()]
    return f"{executor} does not honour {'; nor '.join(parts)}"


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
