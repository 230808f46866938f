"""The names of a field: in Python, on the wire, as an option of the command line.

Errors are raised with the name in `deploy_distributed` (`gpu_count`); on the wire the field is
`resources.gpuCount`. An error that crosses that border is renamed, also the fields in its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec.structs import fields

from atoll.core.checks import Bounds, field_bounds
from atoll.core.errors import ValidationError
from atoll.core.model import SpecModel
from atoll.core.spec import (
    BenchSpec,
    ProviderFilter,
    RendezvousSpec,
    Resources,
    Source,
    TrainingSpec,
    WorldSize,
)

_SECTIONS: Mapping[str, type[SpecModel]] = {
    "world_size": WorldSize,
    "source": Source,
    "resources": Resources,
    "provider_filter": ProviderFilter,
    "bench": BenchSpec,
    "rendezvous": RendezvousSpec,
}
_SHORT = {"bench_mode": "bench"}
_NAME = re.compile(r"\w+(?:\.\w+)*")


def _names() -> Iterator[tuple[str, str]]:
    for field in fields(TrainingSpec):
        yield field.name, field.encode_name
    for section, kind in _SECTIONS.items():
        wire = TrainingSpec.__struct_encode_fields__[TrainingSpec.__struct_fields__.index(section)]
        for part in fields(kind):
            name = f"{kind.option_prefix}{part.name}"
            yield _SHORT.get(name, name), f"{wire}.{part.encode_name}"


def option_bounds() -> dict[str, Bounds]:
    """The bounds of every number in a spec, by its name in Python."""
    kinds: list[type[SpecModel]] = [TrainingSpec, *_SECTIONS.values()]
    return {
        f"{kind.option_prefix}{name}": bounds
        for kind in kinds
        for name, bounds in field_bounds(kind).items()
    }


ON_WIRE: Mapping[str, str] = dict(_names())
IN_PYTHON: Mapping[str, str] = {wire: python for python, wire in ON_WIRE.items()}


def rename_fields(error: ValidationError, names: Mapping[str, str]) -> ValidationError:
    """The same error with the fields under these names. A field not among them keeps its name."""

    def rename_match(match: re.Match[str]) -> str:
        # A plain word such as "command" may be an ordinary word of the sentence.
        name = match[0]
        is_plain = name.isalpha() and name.islower()
        return name if is_plain else names.get(name, name)

    expected = _NAME.sub(rename_match, error.expected)
    return ValidationError(_rename_field(error.field, names), error.value, expected)


def _rename_field(field: str, names: Mapping[str, str]) -> str:
    """The new name of a field, or of a part of one: `nccl_env.A`, `gpu_models[0]`."""
    for end in [len(field), *(at for at in range(len(field))[::-1] if field[at] in ".[")]:
        known, suffix = field[:end], field[end:]
        if known in names:
            name = names[known]
            # `bench.surprise` is in the section `bench`, not in the option of that name.
            is_section = suffix.startswith(".") and name.startswith(f"{known}.")
            return field if is_section else name + suffix
    return field
