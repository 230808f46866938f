"""What SageMaker would refuse of a request, by botocore's own model of its API.

The client itself checks types, required and unknown members. Patterns, lengths, bounds and enums
are in its model too, and are checked here, before anything is created.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from atoll.backends.records import Json
from atoll.core.errors import ValidationError


class RequestFlaw(NamedTuple):
    path: str  # such as `ResourceConfig.InstanceType`, `Tags[2].Key`
    value: Any
    expected: str


def check_request(operation: str, request: Json, names: Mapping[str, str]) -> None:
    """Raises ValidationError for the first flaw. `names`: what callers call a part of a request."""
    for flaw in flaws_of(operation, request):
        part = re.sub(r"\[\d+\]", "", flaw.path)
        while part and part not in names:
            part = part.rpartition(".")[0]
        raise ValidationError(names.get(part, flaw.path), flaw.value, flaw.expected)


def flaws_of(operation: str, request: Json) -> Iterator[RequestFlaw]:
    from botocore.validate import ParamValidator

    shape = _model().operation_model(operation).input_shape
    yield from _walk(shape, request, "")
    report = ParamValidator().validate(request, shape)
    if report.has_errors():
        text = report.generate_report().replace("\n", "; ")
        yield RequestFlaw(operation, "…", f"expected another request: {text}")


@functools.cache
def _model() -> Any:
    import botocore.session

    return botocore.session.get_session().get_service_model("sagemaker")


def _walk(shape: Any, value: Any, path: str) -> Iterator[RequestFlaw]:
    match shape.type_name:
        case "structure":
            for name, member in value.items():
                yield from _walk(shape.members[name], member, f"{path}.{name}".lstrip("."))
        case "list":
            yield from _bounded(shape, len(value), value, path, " entries")
            for at, member in enumerate(value):
                yield from _walk(shape.member, member, f"{path}[{at}]")
        case "map":
            yield from _bounded(shape, len(value), value, path, " entries")
            for key, member in value.items():
                yield from _walk(shape.key, key, path)
                yield from _walk(shape.value, member, f"{path}.{key}")
        case "string":
            if shape.enum and value not in shape.enum:
                near = [word for word in shape.enum if word.split(".")[:2] == value.split(".")[:2]]
                known = ", ".join(near or shape.enum[:8])
                yield RequestFlaw(path, value, f"expected one of SageMaker's: {known}")
            yield from _bounded(shape, len(value), value, path, " characters")
            # Classes such as `\p{L}`, which Python lacks, become a little wider.
            pattern = re.sub(r"\\p\{\w+\}", r"\\w\\s", shape.metadata.get("pattern", ""))
            if pattern and not re.fullmatch(pattern, value, re.DOTALL):
                yield RequestFlaw(path, value, f"expected what fits {shape.metadata['pattern']}")
        case "integer" | "long" | "float" | "double":
            yield from _bounded(shape, value, value, path, "")


def _bounded(shape: Any, size: float, value: Any, path: str, unit: str) -> Iterator[RequestFlaw]:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if low is not None and size < low:
        yield RequestFlaw(path, value, f"expected at least {low}{unit}")
    if high is not None and size > high:
        yield RequestFlaw(path, value, f"expected at most {high}{unit}, got {size}")
