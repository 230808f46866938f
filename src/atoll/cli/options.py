"""Options that several commands share, and the table of what a training can be started with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import click

from atoll.cli.programs import generated, misplaced, program
from atoll.core.errors import ValidationError
from atoll.sdk.endpoint import is_here

Body = TypeVar("Body", bound=Callable[..., None])


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return complete(incomplete)


name_argument = click.argument("name", shell_complete=_complete)


def names_argument(*, is_required: bool) -> Callable[[Body], Body]:
    return click.argument("names", nargs=-1, required=is_required, shell_complete=_complete)


json_option = click.option("--json", "is_json", is_flag=True, help="Print JSON instead of text.")
timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    help="Seconds to wait before giving up.",
    show_default="no limit",
)


FAR = 1_000_000  # a bound above this is left out of the help; the spec still checks it


class _OfField:
    """A range with the bounds of a field, read when first needed: the types load slowly."""

    min: Any
    max: Any

    def __init__(self, field: str) -> None:
        super().__init__()
        self._field = field

    def _read(self) -> None:
        from atoll.core.fields import option_bounds

        bounds = option_bounds()[self._field]
        self.min, self.max = bounds.low, bounds.high if bounds.high < FAR else None

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        self._read()
        return super().convert(value, param, ctx)  # type: ignore[misc]

    def _describe_range(self) -> str:
        self._read()
        return super()._describe_range()  # type: ignore[misc, no-any-return]


class WholeNumber(_OfField, click.IntRange):
    """A whole number within the bounds of a field."""


class Number(_OfField, click.FloatRange):
    """A number within the bounds of a field."""


class Launch(NamedTuple):
    """A training as the command line describes it."""

    name: str
    options: dict[str, Any]
    timeout: float | None


class SpecOption(NamedTuple):
    """An option of `deploy_distributed` on the command line."""

    flags: tuple[str, ...]
    option: str
    kind: type
    help: str
    default: str = ""  # as the help shows it; the value itself comes from the spec
    variable: str | None = None


RUN_ID_VARIABLE = "ATOLL_RUN_ID"

SET = (
    SpecOption(
        ("--max-restarts",), "max_restarts", int, "Number of times a failed rank is restarted.", "0"
    ),
    SpecOption(
        ("--timeout",),
        "deadline_s",
        float,
        "Seconds that the training may run before it is stopped.",
        "no limit",
    ),
    SpecOption(
        ("--rendezvous",),
        "rendezvous_backend",
        str,
        "Backend by which ranks find each other: c10d, static, etcd-v2; none: they do not.",
        "c10d",
    ),
    SpecOption(
        ("--uri",),
        "rendezvous_uri",
        str,
        "Object store that the ranks share: file://, s3://, gs:// or az://.",
    ),
    SpecOption(
        ("--run-id",),
        "run_id",
        str,
        "Name of the run in the object store, as DiLoCo uses it: a later training with the same "
        "name goes on where this one ended. ATOLL_RUN_ID if not given.",
        "a new run",
        RUN_ID_VARIABLE,
    ),
    SpecOption(
        ("--bench",),
        "bench",
        str,
        "When to measure the link between two hosts: off or on-start.",
        "off",
    ),
    SpecOption(
        ("--bench-require-gbps",),
        "bench_require_gbps",
        float,
        "Lowest measured bandwidth in Gbit/s with which the training may start.",
    ),
    SpecOption(
        ("--bench-placement",),
        "bench_placement",
        str,
        "Hosts to measure: those of ranks only (strict), or others if needed (preferred).",
        "preferred",
    ),
    SpecOption(
        ("--executor",),
        "executor",
        str,
        "Name of the executor to run on, as 'atoll executors' lists it.",
        "the control plane's",
    ),
    SpecOption(("--image",), "image", str, "Container image of the ranks."),
    SpecOption(("--cpu",), "cpu", str, "CPUs of each rank, such as 2 or 500m."),
    SpecOption(("--memory",), "memory", str, "Memory of each rank, such as 4Gi."),
    SpecOption(("--gpus",), "gpu_count", int, "Number of GPUs of each rank.", "0"),
    SpecOption(
        ("--workdir", "-C"),
        "working_dir",
        str,
        "Directory in which the ranks start.",
        "the current directory",
    ),
    SpecOption(
        ("--start-grace",),
        "start_grace_s",
        float,
        "Seconds to wait for all ranks before starting with fewer.",
        "30",
    ),
    SpecOption(
        ("--stop-grace",),
        "stop_grace_s",
        float,
        "Seconds between asking a rank to stop and killing it.",
        "10",
    ),
    SpecOption(
        ("--ttl",),
        "ttl_seconds",
        int,
        "Seconds to keep the record after the training has ended.",
        "no limit",
    ),
    SpecOption(
        ("--stall-s",),
        "stall_s",
        float,
        "Seconds without a line, a report or CPU after which a rank is told of.",
        "never",
    ),
)


# The world: flags, parameter, field of its size, help, default. The last comes first in the help.
WORLD: tuple[tuple[tuple[str, ...], str, str, str, str], ...] = (
    (("--max",), "high", "max", "Largest number of ranks to scale to.", "same as --ranks"),
    (("--min",), "low", "min", "Smallest number of ranks to run with.", "same as --ranks"),
    (("--ranks", "-n"), "ranks", "target", "Number of ranks to start.", "1"),
)


# Those of them that errors name, by their field.
FLAGS = {row.option: row.flags[0] for row in SET} | {
    "name": "--name",
    "world_size.min": "--min",
    "world_size.target": "-n",
    "world_size.max": "--max",
    "pip_packages": "--pip",
}


def launches(body: Callable[..., None]) -> Callable[..., None]:
    """Adds all options of a training to the command `body(launch, …)`, besides its own."""

    @wraps(body)
    def run(
        command: tuple[str, ...],
        ranks: int | None,
        low: int | None,
        high: int | None,
        name: str | None,
        env: tuple[str, ...],
        env_files: tuple[Path, ...],
        pip_packages: tuple[str, ...],
        mesh: bool,
        stall_restart: bool,
        has_no_code: bool,
        **values: Any,
    ) -> None:
        from atoll.sdk.config import with_defaults

        mine = {option: values.pop(option) for option in own if option in values}
        options = {option: value for option, value in values.items() if value is not None}
        options |= {"command": _command(command), "env": variables_of(env, env_files)}
        uri = options.get("rendezvous_uri", "")
        if uri and not urlsplit(uri).scheme and is_here(options.get("executor")):
            options["rendezvous_uri"] = os.path.abspath(uri)
        if any(count is not None for count in (ranks, low, high)):
            options["world_size"] = _world_size(1 if ranks is None else ranks, low, high)
        if mesh:
            options["mesh"] = True
        if stall_restart:
            options["stall_restart"] = True
        if has_no_code:
            options["code"] = False
        if pip_packages:
            options["pip_packages"] = list(pip_packages)
        if words := misplaced(command, sys.argv):
            click.echo(f"atoll: {words}", err=True)
        chosen = generated(command) if name is None else name
        options = with_defaults(options)
        try:
            options["command"] = program(options["command"], options)
            body(Launch(chosen, options, options.get("deadline_s")), **mine)
        except ValidationError as error:
            from atoll.core.fields import rename_fields

            raise rename_fields(error, FLAGS) from error

    own = [parameter.name for parameter in getattr(body, "__click_params__", ())]
    ranges: dict[Any, Callable[[str], Any]] = {int: WholeNumber, float: Number}
    for row in reversed(SET):
        accepted = ranges[row.kind](row.option) if row.kind in ranges else row.kind
        click.option(
            *row.flags,
            row.option,
            type=accepted,
            help=row.help,
            show_default=row.default or None,
            envvar=row.variable,
        )(run)
    stall_help = "Start a rank again that --stall-s tells of, out of --max-restarts."
    click.option("--stall-restart", is_flag=True, help=stall_help)(run)
    mesh_help = (
        "Start the ranks only when their hosts reach each other over the mesh. "
        "Images with an older shim need --rendezvous etcd-v2."
    )
    click.option("--mesh", is_flag=True, help=mesh_help)(run)
    code_help = (
        "Send no code: the image has it. By default the working directory travels to ranks that "
        "run elsewhere, without what .gitignore and .atollignore leave out."
    )
    click.option("--no-code", "has_no_code", is_flag=True, help=code_help)(run)
    pip_help = "Package to install for the ranks; may be repeated."
    click.option("--pip", "pip_packages", multiple=True, help=pip_help)(run)
    file_help = "File of K=V lines for the ranks; may be repeated, and --env wins."
    click.option(
        "--env-file", "env_files", multiple=True, type=click.Path(path_type=Path), help=file_help
    )(run)
    env_help = (
        "Variable of the ranks: K or a pattern such as 'AWS_*' passes on what is set here, K=V "
        "sets it; may be repeated. K=V is visible in `ps`: for secrets give K, or --env-file."
    )
    click.option("--env", "-e", multiple=True, help=env_help)(run)
    name_help = "Name of the training."
    click.option("--name", help=name_help, show_default="generated from the command")(run)
    for flags, parameter, field, text, default in WORLD:
        count = WholeNumber(f"world_size.{field}")
        click.option(*flags, parameter, type=count, help=text, show_default=default)(run)
    click.argument("command", nargs=-1, type=click.UNPROCESSED)(run)
    return run


def _command(command: Sequence[str]) -> list[str]:
    if not command:
        raise click.UsageError("nothing to run: atoll run -n 4 -- python train.py")
    return list(command)


def _world_size(ranks: int, low: int | None, high: int | None) -> Any:
    from atoll.core.spec import WorldSize

    low, high = ranks if low is None else low, ranks if high is None else high
    if not low <= ranks <= high:
        text = f"expected --min <= -n <= --max, got {low}, {ranks}, {high}"
        raise click.UsageError(text)
    return WorldSize(min=low, target=ranks, max=high)


def variables_of(words: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    from atoll.cli.envfile import read_env_file

    env: dict[str, str] = {}
    for path in files:
        env |= read_env_file(path)
    for word in words:
        env |= _variable(word)
    return env


def _variable(word: str) -> dict[str, str]:
    name, has_value, value = word.partition("=")
    if has_value:
        return {name: value}
    matches = {key: os.environ[key] for key in os.environ if fnmatchcase(key, name)}
    if not matches:
        expected = "expected K=V, or the name or pattern of variables that are set here"
        raise ValidationError("--env", word, expected)
    return matches


def complete(incomplete: str) -> list[str]:
    """Names of trainings with this prefix. Asks a running control plane and never starts one."""
    import os

    from atoll.core.errors import AtollError

    try:
        if not os.environ.get("ATOLL_URL"):
            from atoll.backends.local.state import state_dir
            from atoll.sdk.embedded import running

            if running(state_dir()) is None:
                return []
        from atoll.sdk.client import Client

        with Client() as client:
            return [training.name for training in client.list(prefix=incomplete)]
    except (AtollError, OSError):
        return []
