"""The options of `deploy_distributed`, and the spec built from them. Sends nothing."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from atoll.code.functions import pickle_function
from atoll.core.checks import check_timeout
from atoll.core.errors import ValidationError
from atoll.core.executors import LOCAL
from atoll.core.settings import Setting
from atoll.core.spec import (
    BenchSpec,
    ProviderFilter,
    RendezvousSpec,
    Resources,
    Source,
    TrainingSpec,
    WorldSize,
)
from atoll.core.stores import store_uri
from atoll.core.text import parse_duration
from atoll.sdk.effects import Pack

Wait = Literal["min", "target"]


class DeployOptions(TypedDict, total=False):
    """The options of `Client.deploy_distributed`, which describes them."""

    command: Sequence[str] | None
    source: str | Path | Callable[..., Any] | None
    args: Sequence[str] | None
    image: str | None
    env: Mapping[str, str] | None
    working_dir: str | Path | None
    code: bool | None
    cpu: str | int | float | None
    memory: str | None
    gpu_count: int | None
    gpu_models: Sequence[str] | None
    min_gpu_memory_gb: int | None
    world_size: WorldSize | int | None
    provider_filter: ProviderFilter | None
    topology_spread: str | None
    nccl_env: Mapping[str, str] | None
    bench: str | None
    bench_placement: str | None
    bench_require_gbps: float | None
    rendezvous_backend: str | None
    rendezvous_uri: str | None
    run_id: str | None
    pip_packages: Sequence[str] | None
    max_restarts: int | None
    start_grace_s: float | str | None
    stop_grace_s: float | str | None
    deadline_s: float | str | None
    ttl_seconds: int | str | None
    stall_s: float | str | None
    stall_restart: bool | None
    executor: str | None
    mesh: bool | None
    replace: bool | None
    labels: Mapping[str, str] | None
    settings: Mapping[str, Setting] | None
    wait: Wait | None
    timeout: float | None


# Options that take `30s`, `5m` or `2h` as well as seconds.
DURATIONS = ("start_grace_s", "stop_grace_s", "deadline_s", "ttl_seconds", "stall_s")
WAIT_TIMEOUT_S = 600.0  # pulling a large image takes minutes


def wait_of(options: Mapping[str, Any]) -> tuple[Wait | None, float]:
    """What to wait for after the create, and how long. Raises ValidationError."""
    wait, timeout = options.get("wait"), options.get("timeout")
    if wait not in (None, "min", "target"):
        raise ValidationError("wait", wait, "expected 'min' or 'target', or nothing")
    timeout = WAIT_TIMEOUT_S if timeout is None else timeout
    check_timeout(timeout)
    return wait, timeout


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ValidationError for a name that is no option."""
    for option, value in options.items():
        _check_known(option, value)


def spec_of(name: str, options: DeployOptions) -> TrainingSpec:
    """The spec. Raises ValidationError that names the wrong option. `None` means unset."""
    remaining: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    check_options(remaining)
    _check_code(remaining.pop("code", True))
    for option in ("replace", "wait", "timeout"):  # of the call, not of the training
        remaining.pop(option, None)

    def take(*names: str) -> dict[str, Any]:
        return {name: remaining.pop(name) for name in names if name in remaining}

    for option in DURATIONS:
        if isinstance(remaining.get(option), str):
            remaining[option] = _seconds(option, remaining[option])
    if type(remaining.get("cpu")) in (int, float):
        remaining["cpu"] = f"{remaining['cpu']:g}"
    sections: dict[str, Any] = {
        "resources": Resources(
            **_as_json(take("cpu", "memory", "gpu_count", "gpu_models", "min_gpu_memory_gb"))
        ),
        "bench": _bench(take("bench", "bench_placement", "bench_require_gbps")),
        "rendezvous": _rendezvous(take("rendezvous_backend", "rendezvous_uri")),
    }
    # A section that equals its default is not sent.
    changed = {name: part for name, part in sections.items() if part != type(part)()}
    return TrainingSpec(
        name=name,
        world_size=world_of(remaining.pop("world_size", 1)),
        source=_source(remaining.pop("source", None)),
        **changed,
        **_as_json(_spec_fields(remaining)),
    )


def _seconds(option: str, text: str) -> float:
    seconds = parse_duration(option, text)
    return int(seconds) if seconds.is_integer() else seconds  # `ttl_seconds` refuses fractions


def _check_code(value: object) -> None:
    if not isinstance(value, bool):
        raise ValidationError("code", value, "expected True, or False to send none")


def pack_of(spec: TrainingSpec, options: Mapping[str, Any]) -> Pack | None:
    """The part of the caller's directory to send with a training whose ranks run elsewhere.

    Without `working_dir` it is the current one. A `working_dir` that is not here is one of the
    image, and nothing travels.
    """
    if options.get("code") is False or spec.executor == LOCAL:
        return None
    from atoll.code.archive import refusal_of  # imported here: local trainings do not need it

    root = spec.working_dir or os.getcwd()
    if not os.path.isdir(root):
        return None
    if spec.working_dir is None and (why := refusal_of(root)):
        if spec.executor is None and not os.environ.get("ATOLL_URL"):
            return None  # of one's own control plane, whose ranks run here by default
        import logging

        message = "no code is sent: %s; working_dir names another directory, code=False none"
        logging.getLogger(__name__).warning(message, why)
        return None
    if spec.source is None:
        folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    else:
        folders = [spec.source.directory or "", *sys.path]
    return Pack(root, tuple(os.path.abspath(folder) for folder in folders if folder))


def _check_known(option: str, value: Any) -> None:
    if option in DeployOptions.__annotations__:
        return
    near = difflib.get_close_matches(option, DeployOptions.__annotations__, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    raise ValidationError(option, value, f"there is no such option{hint}")


def _as_json(options: dict[str, Any]) -> dict[str, Any]:
    """The options with tuples as lists and mappings as dicts, as JSON has them."""
    return {
        name: list(value)
        if isinstance(value, tuple)
        else dict(value)
        if isinstance(value, Mapping)
        else value
        for name, value in options.items()
    }


def _spec_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Options that are fields of the spec, with `working_dir` absolute."""
    if isinstance(options.get("working_dir"), str | Path):
        options["working_dir"] = os.path.abspath(options["working_dir"])
    providers = options.get("provider_filter")
    if providers is not None and not isinstance(providers, ProviderFilter):
        raise ValidationError(
            "provider_filter", providers, "expected ProviderFilter(include=…, exclude=…)"
        )
    return options


def world_of(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return WorldSize(min=value, target=value, max=value)
    return value


def _bench(options: dict[str, Any]) -> BenchSpec:
    mode = options.get("bench", "off")
    if mode == "off":
        return BenchSpec()
    return BenchSpec(
        mode=mode,
        placement=options.get("bench_placement", "preferred"),
        require_gbps=options.get("bench_require_gbps"),
    )


def _rendezvous(options: dict[str, Any]) -> RendezvousSpec:
    fields = {name.removeprefix("rendezvous_"): value for name, value in options.items()}
    if "uri" in fields:
        fields["uri"] = store_uri("rendezvous_uri", fields["uri"])
    return RendezvousSpec(**fields)


def _source(value: Any) -> Source | None:
    if value is None:
        return None
    if isinstance(value, str | Path):
        return script_source(Path(value))
    if callable(value):
        return function_source(value)
    raise ValidationError("source", value, "expected the path of a script, or a function")


# Base64 makes this a third larger: with the other fields it fits into a request of 64 MiB.
MAX_BYTES = 44 * 2**20


def script_source(path: Path) -> Source:
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = f"cannot read this script: {error.strerror}"
        raise ValidationError("source", str(path), reason) from error
    _check_size(path, content)
    return Source(
        kind="script",
        content=content,
        filename=path.name,
        directory=str(path.resolve().parent),
    )


def function_source(function: Callable[..., Any]) -> Source:
    """The function by value; what it imports, a rank imports from the same `sys.path`."""
    content = pickle_function("source", function)
    _check_size(function, content)
    return Source(kind="function", content=content, filename="function.pkl", directory=_start())


def _start() -> str | None:
    """The directory this program imports its own modules from."""
    first = sys.path[0] if sys.path else ""
    return str(Path(first).resolve()) if Path(first).is_dir() else None


def _check_size(what: object, content: bytes) -> None:
    if len(content) > MAX_BYTES:
        raise ValidationError(
            "source",
            what,
            f"expected at most {MAX_BYTES // 2**20} MiB, got {len(content) / 2**20:.0f}: "
            "read large data from a file or an object store",
        )
