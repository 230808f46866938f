"""What SageMaker would refuse of a request, by botocore's own model of its API.

The client itself checks types, required and unknown members. Patterns, lengths, bounds and enums
are in its model too, and are checked here, before anything is created.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from atoll.backends.sagemaker.options import SageMakerOptions
from atoll.backends.sagemaker.render import NAMES, render_job
from atoll.core.errors import ValidationError
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training

Json = dict[str, Any]


class RequestFlaw(NamedTuple):
    path: str  # such as `ResourceConfig.InstanceType`, `Tags[2].Key`
    value: Any
    expected: str


def check_job(spec: TrainingSpec, options: SageMakerOptions) -> None:
    """Raises ValidationError for what SageMaker would refuse of the longest request of a spec."""
    longest = (spec.world_size.max - 1, spec.max_restarts)
    untried = Training(namespace="x", uid="0" * 32, spec=spec)
    request = render_job(untried, longest, options, region=options.region or "")
    check_request("CreateTrainingJob", request, NAMES)


def check_request(operation: str, request: Json, names: Mapping[str, str]) -> None:
    """Raises ValidationError for the first flaw. `names`: what callers call a part of a request."""
    for flaw in flaws_of(operation, request):
        plain = re.sub(r"\[\d+\]", "", flaw.path)
        parts = [plain[:end] for end in _ends(plain)]
        name = next((names[part] for part in reversed(parts) if part in names), flaw.path)
        raise ValidationError(name, flaw.value, flaw.expected)


def flaws_of(operation: str, request: Json) -> Iterator[RequestFlaw]:
    from botocore.validate import ParamValidator

    shape = _input_shape(operation)
    yield from _walk(shape, request, "")
    report = ParamValidator().validate(request, shape)
    if report.has_errors():
        text = report.generate_report().replace("\n", "; ")
        yield RequestFlaw(operation, "…", f"expected another request: {text}")


@functools.cache
def _model() -> Any:
    import botocore.session

    return botocore.session.get_session().get_service_model("sagemaker")


def _input_shape(operation: str) -> Any:
    return _model().operation_model(operation).input_shape


def _walk(shape: Any, value: Any, path: str) -> Iterator[RequestFlaw]:
    kind = shape.type_name
    if kind == "structure":
        for name, member in value.items():
            yield from _walk(shape.members[name], member, f"{path}.{name}" if path else name)
    elif kind == "list":
        yield from _bounded(shape, len(value), value, path, "entries")
        for at, member in enumerate(value):
            yield from _walk(shape.member, member, f"{path}[{at}]")
    elif kind == "map":
        yield from _bounded(shape, len(value), value, path, "entries")
        for key, member in value.items():
            yield from _walk(shape.key, key, path)
            yield from _walk(shape.value, member, f"{path}.{key}")
    elif kind == "string":
        yield from _text(shape, value, path)
    elif kind in ("integer", "long", "float", "double"):
        yield from _bounded(shape, value, value, path, "")


def _text(shape: Any, value: str, path: str) -> Iterator[RequestFlaw]:
    if shape.enum and value not in shape.enum:
        near = [word for word in shape.enum if word.split(".")[:2] == value.split(".")[:2]]
        detail = ", ".join(near or shape.enum[:8])
        yield RequestFlaw(path, value, f"expected one of SageMaker's: {detail}")
    yield from _bounded(shape, len(value), value, path, "characters")
    pattern = shape.metadata.get("pattern")
    if pattern and not _compiled(pattern).fullmatch(value):
        yield RequestFlaw(path, value, f"expected what fits {pattern}")


def _bounded(shape: Any, size: float, value: Any, path: str, unit: str) -> Iterator[RequestFlaw]:
    detail = f" {unit}" if unit else ""
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if low is not None and size < low:
        yield RequestFlaw(path, value, f"expected at least {low}{detail}")
    if high is not None and size > high:
        yield RequestFlaw(path, value, f"expected at most {high}{detail}, got {size}")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Classes such as `\\p{L}`, which Python lacks, become a little wider."""
    return re.compile(re.sub(r"\\p\{\w+\}", r"\\w\\s", pattern), re.DOTALL)


def _ends(path: str) -> list[int]:
    return [*(at for at, letter in enumerate(path) if letter == "."), len(path)]
