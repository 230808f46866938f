"""The Python code and the shell command that start the same training again. Pure.

Values of environment variables may be secrets: the code reads them from the environment of the
person who runs it.
"""

from __future__ import annotations

import shlex
from typing import Any

from atoll.core.escape import escape_control
from atoll.core.executors import LOCAL
from atoll.core.spec import BenchSpec, TrainingSpec

# Flags of `atoll run` by option of `deploy_distributed`; a test holds them to the command itself.
FLAGS = {
    "max_restarts": "--max-restarts",
    "deadline_s": "--deadline",
    "rendezvous_backend": "--rendezvous",
    "rendezvous_uri": "--uri",
    "run_id": "--run-id",
    "bench": "--bench",
    "bench_require_gbps": "--bench-require-gbps",
    "bench_placement": "--bench-placement",
    "executor": "--executor",
    "image": "--image",
    "cpu": "--cpu",
    "memory": "--memory",
    "gpu_count": "--gpus",
    "working_dir": "--workdir",
    "start_grace_s": "--start-grace",
    "stop_grace_s": "--stop-grace",
    "ttl_seconds": "--ttl",
    "stall_s": "--stall-timeout",
    "stall_restart": "--stall-restart",
    "mesh": "--mesh",
}
SECTIONS = {"resources": "", "rendezvous": "rendezvous_"}
# Fields without an option of their own: the name, what runs, and what the user does not set.
_NOT_OPTIONS = (
    "name",
    "world_size",
    "command",
    "args",
    "source",
    "code",
    "bench",
    "cancel",
    *SECTIONS,
)


class Variable:
    """An environment variable, read where the code runs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"os.environ[{self.name!r}]"


def options_of(spec: TrainingSpec) -> dict[str, Any]:
    """The options of `deploy_distributed` that differ from their defaults, and what runs."""
    options: dict[str, Any] = {"command": spec.command, "world_size": spec.world_size}
    if spec.args:
        options["args"] = spec.args
    for section, prefix in SECTIONS.items():
        options |= _changed(getattr(spec, section), prefix)
    if spec.bench.mode != BenchSpec().mode:
        bench = _changed(spec.bench, "bench_")
        options |= {"bench": bench.pop("bench_mode"), **bench}
    changed = _changed(spec, "")
    options |= {name: value for name, value in changed.items() if name not in _NOT_OPTIONS}
    for name in ("env", "nccl_env"):
        if name in options:
            options[name] = {variable: Variable(variable) for variable in options[name]}
    if spec.code is None and spec.executor not in (None, LOCAL):
        options["code"] = False
    return options


def _changed(part: Any, prefix: str) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    defaults = zip(part.__struct_fields__[::-1], part.__struct_defaults__[::-1], strict=False)
    usual = {name: getattr(default, "factory", lambda d=default: d)() for name, default in defaults}
    fields = {name: getattr(part, name) for name in part.__struct_fields__}
    return {
        prefix + name: value
        for name, value in fields.items()
        if name not in usual or value != usual[name]
    }


def python_of(spec: TrainingSpec, name: str) -> str:
    """A call of `deploy_distributed`; empty if the client sent the code itself."""
    if spec.source is not None:
        return ""
    lines = [f"    {option}={_literal(value)}," for option, value in options_of(spec).items()]
    call = ["training = atoll.Client().deploy_distributed(", f"    {name!r},", *lines, ")"]
    needs_os = any(isinstance(value, dict) for value in options_of(spec).values())
    return "\n".join([*(["import os"] if needs_os else []), "import atoll", "", *call])


def _literal(value: Any) -> str:
    """A Python literal; structs of the spec are names of `atoll`."""
    return f"atoll.{value!r}" if hasattr(value, "__struct_fields__") else repr(value)


def shell_of(spec: TrainingSpec, name: str) -> str:
    """A call of `atoll run`; empty if that has no option for some field of the spec."""
    if spec.source is not None:
        return ""
    options, size = options_of(spec), spec.world_size
    command = [*options.pop("command"), *options.pop("args", ())]
    del options["world_size"]
    argv = ["--name", name, "-n", str(size.target)]
    argv += ["--min", str(size.min), "--max", str(size.max)]
    if options.pop("code", True) is False:
        argv.append("--no-code")
    for variable in options.pop("env", ()):
        argv += ["--env", variable]
    for package in options.pop("pip_packages", ()):
        argv += ["--pip", package]
    for option, value in options.items():
        if option not in FLAGS:
            return ""
        argv += [FLAGS[option]] if value is True else [FLAGS[option], str(value)]
    # A terminal would act on pasted control characters instead of passing them on.
    text = "".join([*argv, *command]).replace("\n", "").replace("\t", "")
    if escape_control(text) != text:
        return ""
    return shlex.join(["atoll", "run", *argv, "--", *command])
