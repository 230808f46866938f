"""`atoll run` and `atoll rerun`: what ranks run, its training, and following it or not."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import click

from atoll.cli.options import (
    CONFIG,
    Duration,
    FloatField,
    HeadedCommand,
    HeadedOption,
    IntField,
    json_option,
    name_argument,
)
from atoll.core.errors import ValidationError
from atoll.sdk.endpoint import is_local_executor

if TYPE_CHECKING:
    from atoll.core.spec import Code
    from atoll.core.status import Training
    from atoll.sdk.client import Client

TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
RUN_ID_VARIABLE = "ATOLL_RUN_ID"


class Launch(NamedTuple):
    """A training as the command line describes it."""

    name: str
    options: dict[str, Any]


class SpecOption(NamedTuple):
    """An option of `deploy_distributed` on the command line."""

    flags: tuple[str, ...]
    option: str
    kind: Any  # int and float have the bounds of the field
    help: str
    default: str = ""  # as the help shows it; the value itself comes from the spec
    variable: str | None = None


# Below the headings of the help, in their order.
SPEC_OPTIONS: dict[str, tuple[SpecOption, ...]] = {
    "Time limits": (
        SpecOption(
            ("--deadline",),
            "deadline_s",
            Duration(),
            "How long the training may run before it is stopped, such as 90s, 30m or 2h.",
            "no limit",
        ),
        SpecOption(
            ("--start-grace",),
            "start_grace_s",
            Duration(),
            "How long to wait for all ranks before starting with fewer.",
            "30s",
        ),
        SpecOption(
            ("--stop-grace",),
            "stop_grace_s",
            Duration(),
            "Time between asking a rank to stop and killing it.",
            "10s",
        ),
        SpecOption(
            ("--stall-timeout",),
            "stall_s",
            Duration(),
            "Report a rank as stalled after this long without output, metrics or CPU use.",
            "never",
        ),
        SpecOption(
            ("--stall-restart",),
            "stall_restart",
            bool,
            "Restart a stalled rank; each restart counts towards --max-restarts.",
        ),
        SpecOption(
            ("--max-restarts",),
            "max_restarts",
            int,
            "Number of times a failed rank is restarted.",
            "0",
        ),
        SpecOption(
            ("--ttl",),
            "ttl_seconds",
            Duration(),
            "How long to keep the record after the training has ended.",
            "no limit",
        ),
    ),
    "Resources of each rank": (
        SpecOption(
            ("--executor",),
            "executor",
            str,
            "Name of the executor to run on, as 'atoll executors' lists it.",
            "the control plane's",
        ),
        SpecOption(("--image",), "image", str, "Container image."),
        SpecOption(("--cpu",), "cpu", str, "CPUs, such as 2 or 500m."),
        SpecOption(("--memory",), "memory", str, "Memory, such as 4Gi."),
        SpecOption(("--gpus",), "gpu_count", int, "Number of GPUs.", "0"),
    ),
    "Rendezvous and object store": (
        SpecOption(
            ("--rendezvous",),
            "rendezvous_backend",
            str,
            "How ranks find each other: c10d, static, etcd-v2 or none.",
            "c10d; none for one rank without torchrun",
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
            "Name of the DiLoCo run in the object store: a later training with the same name "
            "resumes it. Also read from ATOLL_RUN_ID.",
            "a new run",
            RUN_ID_VARIABLE,
        ),
    ),
    "Network": (
        SpecOption(
            ("--mesh",),
            "mesh",
            bool,
            "Start the ranks only when their hosts reach each other over the mesh. Images with an "
            "older shim need --rendezvous etcd-v2.",
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
    ),
}

# The flags that errors name, by the field of the spec.
FLAGS = {row.option: row.flags[0] for rows in SPEC_OPTIONS.values() for row in rows} | {
    "name": "--name",
    "working_dir": "--workdir",
    "world_size.min": "--min",
    "world_size.target": "-n",
    "world_size.max": "--max",
    "pip_packages": "--pip",
}


def _set_slots(ctx: click.Context, param: click.Parameter, slots: int | None) -> int | None:
    """For `open_client`, and for a control plane that this process starts."""
    if slots is not None:
        from atoll.sdk.endpoint import SLOTS

        os.environ[SLOTS] = str(slots)
        _SLOTS.append(slots)
    return slots


_SLOTS: list[int] = []  # as the command line has it


def open_client() -> Client:
    """A client of the control plane, which has the slots that the command line asks for."""
    from atoll.sdk.client import Client

    client = Client()
    if _SLOTS:
        client.set_limits(slots=_SLOTS[-1])
    _note_unused_config(client)
    return client


def _note_unused_config(client: Client) -> None:
    """A control plane that runs already has read its file: what another one has for it is not used,
    and nobody would know."""
    from atoll.sdk import flows
    from atoll.sdk.config import VARIABLE, find_own, read

    if not os.environ.get(VARIABLE) or os.environ.get("ATOLL_URL"):
        return
    config = read(find_own())
    if not config.is_for_plane:
        return
    used = client.run(flows.executors()).config
    if used != config.path:
        click.echo(
            f"atoll: the control plane runs with {used or 'no atoll.toml'}: of {config.path} only "
            "[defaults] are used. After 'atoll stop', the next command starts it with this file",
            err=True,
        )


def _headed(heading: str, *options: HeadedOption) -> list[click.Parameter]:
    for option in options:
        option.heading = heading
    return list(options)


def _spec_option(row: SpecOption) -> HeadedOption:
    kinds: dict[Any, Any] = {int: IntField, float: FloatField}
    if row.kind is bool:
        return HeadedOption([*row.flags, row.option], is_flag=True, default=None, help=row.help)
    kind = kinds[row.kind](row.option) if row.kind in kinds else row.kind
    return HeadedOption(
        [*row.flags, row.option],
        type=kind,
        help=row.help,
        show_default=row.default or None,
        envvar=row.variable,
    )


def _world_option(flags: Sequence[str], field: str, help: str, default: str) -> HeadedOption:
    kind = IntField(f"world_size.{field}")
    return HeadedOption([*flags, field], type=kind, help=help, show_default=default)


def run_parameters() -> list[click.Parameter]:
    parameters: list[click.Parameter] = [
        click.Argument(["command"], nargs=-1, type=click.UNPROCESSED)
    ]
    parameters += _headed(
        "World",
        _world_option(["--ranks", "-n"], "target", "Number of ranks to start.", "1"),
        HeadedOption(
            ["--replicas"],
            type=IntField("world_size.target"),
            help="Number of DiLoCo replicas to start: as --ranks, with --rendezvous none.",
        ),
        _world_option(["--min"], "min", "Smallest number of ranks to run with.", "same as --ranks"),
        _world_option(["--max"], "max", "Largest number of ranks to scale to.", "same as --ranks"),
        HeadedOption(
            ["--name"], help="Name of the training.", show_default="generated from the command"
        ),
        HeadedOption(
            ["--replace"],
            is_flag=True,
            default=None,
            help="Stop and remove a training of this name first.",
        ),
        HeadedOption(
            ["--label", "-l", "labels"],
            multiple=True,
            help="NAME=VALUE to find the training by; may be repeated. Trainings with the same "
            "'group' are one row of 'atoll ps'.",
        ),
        HeadedOption(
            ["--set", "settings"],
            multiple=True,
            help="NAME=VALUE that you vary, for lists and charts; may be repeated. Flags of the "
            "command are settings already. The command does not change.",
        ),
    )
    parameters += _headed(
        "Code and environment",
        HeadedOption(
            ["--env", "-e"],
            multiple=True,
            help="Variable for the ranks: K or a pattern such as 'AWS_*' passes on what is set "
            "here, K=V sets it; may be repeated. K=V is visible in `ps`: for secrets use K or "
            "--env-file.",
        ),
        HeadedOption(
            ["--env-file", "env_files"],
            multiple=True,
            type=click.Path(path_type=Path),
            help="File of K=V lines for the ranks; may be repeated. --env takes precedence.",
        ),
        HeadedOption(
            ["--pip", "pip_packages"],
            multiple=True,
            help="Package to install for the ranks; may be repeated.",
        ),
        HeadedOption(
            ["--module", "-m", "is_module"],
            is_flag=True,
            help="COMMAND names a Python module, as for `python -m`.",
        ),
        HeadedOption(
            ["--workdir", "-C", "working_dir"],
            help="Directory in which the ranks start.",
            show_default="the current directory",
        ),
        HeadedOption(
            ["--no-code", "has_no_code"],
            is_flag=True,
            help="Send no code, because the image has it. By default, ranks on other machines get "
            "the working directory, without what .gitignore and .atollignore exclude.",
        ),
    )
    for heading, rows in SPEC_OPTIONS.items():
        parameters += _headed(heading, *map(_spec_option, rows))
    parameters += _headed(
        "Control plane",
        HeadedOption(["--config"], **CONFIG),
        HeadedOption(
            ["--slots"],
            type=click.IntRange(1, 10_000),
            callback=_set_slots,
            expose_value=False,
            help="Set the largest number of ranks at once on this machine, for all trainings, as "
            "'atoll limits' does.",
            show_default="as it is",
        ),
    )
    parameters += _headed(
        "Output",
        HeadedOption(
            ["--detach", "-d", "is_detached"],
            is_flag=True,
            help="Print the name of the training and return; 'atoll logs -f NAME' follows it.",
        ),
        HeadedOption(
            ["--timeout"],
            type=Duration(),
            help="How long to follow the training; it keeps running after that.",
            show_default="no limit",
        ),
        HeadedOption(
            ["--rm", "is_removed"], is_flag=True, help="Remove the record when it has ended."
        ),
        HeadedOption(
            ["--dry-run", "is_dry"],
            is_flag=True,
            help="Print what would be submitted, and exit: the script for sbatch, objects for "
            "kubectl, requests to Modal, SageMaker or Hugging Face.",
        ),
        HeadedOption(["--json", "is_json"], is_flag=True, help="Print JSON instead of text."),
    )
    return parameters


# Everything after the first argument that is no option belongs to the ranks.
@click.command(
    cls=HeadedCommand, params=run_parameters(), context_settings={"allow_interspersed_args": False}
)
def run(
    command: tuple[str, ...],
    is_detached: bool,
    timeout: float | None,
    is_removed: bool,
    is_dry: bool,
    is_json: bool,
    **values: Any,
) -> None:
    """Start a training, follow its logs, and exit as it ended.

    Exit code: 0 succeeded, 1 failed, 2 bad usage, 124 --timeout or --deadline passed, 130 cancelled
    by Ctrl-C. The first Ctrl-C cancels the training, the second leaves at once.
    """
    if is_detached and (is_removed or timeout is not None):
        flag = "--rm" if is_removed else "--timeout"
        raise click.UsageError(f"{flag} and --detach exclude each other: use --ttl or --deadline")
    launch = read_launch(command, **values)
    try:
        if is_dry:
            print(_preview(launch), end="")
        elif is_detached:
            _start(launch, is_json=is_json)
        else:
            _follow(launch, timeout, is_removed=is_removed, is_json=is_json)
    except ValidationError as error:
        from atoll.core.problem import rename_fields

        raise rename_fields(error, FLAGS) from error


def read_launch(
    command: tuple[str, ...],
    *,
    target: int | None,
    replicas: int | None,
    min: int | None,
    max: int | None,
    name: str | None,
    env: tuple[str, ...],
    env_files: tuple[Path, ...],
    pip_packages: tuple[str, ...],
    is_module: bool,
    has_no_code: bool,
    labels: tuple[str, ...],
    settings: tuple[str, ...],
    **values: Any,
) -> Launch:
    """The training that the options describe, with the defaults of atoll.toml."""
    from atoll.core.settings import parse_pair, parse_value
    from atoll.sdk.config import with_defaults

    if not command:
        raise click.UsageError("nothing to run: atoll run -n 4 -- python train.py")
    options = {option: value for option, value in values.items() if value is not None}
    options |= {"command": list(command), "env": read_variables(env, env_files)}
    options["labels"] = dict(parse_pair("--label", text) for text in labels)
    pairs = (parse_pair("--set", text) for text in settings)
    options["settings"] = {name: parse_value(value) for name, value in pairs}
    uri = options.get("rendezvous_uri", "")
    if uri and not urlsplit(uri).scheme and is_local_executor(options.get("executor")):
        options["rendezvous_uri"] = os.path.abspath(uri)
    if replicas is not None:
        if target is not None or options.get("rendezvous_backend", "none") != "none":
            raise click.UsageError("--replicas: not with --ranks or --rendezvous")
        target, options["rendezvous_backend"] = replicas, "none"
    if any(count is not None for count in (target, min, max)):
        options["world_size"] = _world_size(1 if target is None else target, min, max)
    if has_no_code:
        options["code"] = False
    if pip_packages:
        options["pip_packages"] = list(pip_packages)
    if note := misplaced(command, sys.argv):
        click.echo(f"atoll: {note}", err=True)
    options = with_defaults(options)
    if is_one_process(options):
        options["rendezvous_backend"] = "none"
    options["command"] = program(options["command"], options, is_module=is_module)
    return Launch(generate_name(options["command"]) if name is None else name, options)


def is_one_process(options: Mapping[str, Any]) -> bool:
    """Whether it is one rank for good that meets nobody: with RANK in its environment, scripts such
    as nanoGPT's would set up DDP."""
    world = options.get("world_size", 1)
    if (world if isinstance(world, int) else getattr(world, "max", None)) != 1:
        return False
    has_torchrun = any(word in part for part in options["command"] for word in TORCHRUN)
    is_asked = options.get("rendezvous_backend") is not None or options.get("mesh")
    return not has_torchrun and not is_asked


def _follow(launch: Launch, timeout: float | None, *, is_removed: bool, is_json: bool) -> None:
    _begin(launch)
    from atoll.cli.follow import Following, JsonReport, TextReport
    from atoll.cli.terminal import ignore_closed_output, leave
    from atoll.core.errors import Temporary

    ignore_closed_output()
    following = Following(launch.options.get("deadline_s"), timeout)
    client = open_client()
    training = client.deploy_distributed(launch.name, **launch.options)
    _print_code(training.last.spec.code)
    report = JsonReport() if is_json else TextReport()
    code = following.run(client, training, report)
    if is_removed:
        try:
            training.delete()
        except Temporary as error:  # the exit code is the training's
            report.note(str(error))
    leave(code)


def _start(launch: Launch, *, is_json: bool) -> None:
    # From here on an interrupt may come after the training was stored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _begin(launch)
    training = open_client().deploy_distributed(launch.name, **launch.options)
    _print_code(training.last.spec.code)
    _print_training(training.last, is_json=is_json)


@click.command()
@name_argument
@click.option(
    "--name", "new_name", help="Name of the new training.", show_default="NAME-r2, NAME-r3, …"
)
@click.option(
    "--ranks",
    "-n",
    type=IntField("world_size.target"),
    help="Number of ranks to start.",
    show_default="as before",
)
@click.option(
    "--env",
    "-e",
    "env",
    multiple=True,
    help="Variable to set, over those it had: K=V, or K to pass on what is set here.",
)
@click.option(
    "--follow", "-f", "is_followed", is_flag=True, help="Follow its logs and exit as it ended."
)
@json_option
def rerun(
    name: str,
    new_name: str | None,
    ranks: int | None,
    env: tuple[str, ...],
    is_followed: bool,
    is_json: bool,
) -> None:
    """Start a training again as a new one, and print its name.

    The control plane copies the spec and the code: nothing of this directory is sent.
    """
    from atoll.sdk.client import Client

    following = None
    if is_followed:
        from atoll.cli.follow import Following, JsonReport, TextReport

        following = Following()
    client = Client()
    training = client.get(name).rerun(new_name, world_size=ranks, env=read_variables(env, ()))
    if following is not None:
        from atoll.cli.terminal import leave

        leave(following.run(client, training, JsonReport() if is_json else TextReport()))
    _print_training(training.last, is_json=is_json)


def _print_training(training: Training, *, is_json: bool) -> None:
    if is_json:
        from atoll.cli.output import print_json, training_json

        print_json(training_json(training))
    else:
        print(training.display_name)


def _preview(launch: Launch) -> str:
    """What the executor would submit. Starts nothing and asks no server."""
    from atoll.backends.local.state import state_dir
    from atoll.core.config import in_file, options_of
    from atoll.core.errors import ValidationError
    from atoll.core.executors import LOCAL, PlaneContext, load
    from atoll.core.ports import describe_unsupported, unsupported_fields
    from atoll.core.status import Training
    from atoll.sdk.config import read_for_plane, resolve_spec

    spec, config = resolve_spec(launch.name, launch.options), read_for_plane()
    name = spec.executor or config.defaults.get("executor", LOCAL)
    if name not in config.executors:
        known = ", ".join(config.executors)
        raise ValidationError("executor", name, f"expected one of {known}")
    wanted = config.executors[name]
    kind: Any = load(wanted.kind)
    where = Path(config.path).parent if config.path else Path()
    training = Training(namespace="default", uid="0" * 32, spec=spec)
    try:
        options = options_of(kind.options_type, dict(wanted.options))
    except ValidationError as error:
        raise in_file(config.path, error, f"executors.{name}") from error
    preview: str | None = kind.preview(options, PlaneContext(state_dir(), "", where), training)
    if preview is None:
        remedy = "this machine starts ranks itself. Use --executor with another kind"
        raise click.UsageError(f"--dry-run: {name!r} submits nothing: {remedy}")
    unsupported = unsupported_fields(spec, kind.SUPPORTS, options)
    if note := describe_unsupported(name, unsupported):
        click.echo(f"atoll: {note}", err=True)
    return preview


def check_folder(options: Mapping[str, Any]) -> None:
    """Raises ValidationError for a directory that ranks on this machine cannot start in."""
    folder = options.get("working_dir")
    is_here = is_local_executor(options.get("executor")) and not os.environ.get("ATOLL_URL")
    if folder and is_here and not os.path.isdir(folder):
        raise ValidationError("--workdir", folder, "expected a directory: there is none")


def _begin(launch: Launch) -> None:
    """Start the control plane while the rest is loaded, unless the training is refused."""
    from atoll.sdk.config import resolve_spec
    from atoll.sdk.endpoint import begin, is_local_executor, local_fields

    check_folder(launch.options)
    spec = resolve_spec(launch.name, launch.options)
    if is_local_executor(spec.executor) and not os.environ.get("ATOLL_URL"):
        local_fields(spec)
    begin()


def _print_code(code: Code | None) -> None:
    """Print how much of the working directory is sent with the training."""
    if code is not None:
        from atoll.core.text import format_bytes

        files = "1 file" if code.files == 1 else f"{code.files} files"
        sizes = f"{format_bytes(code.unpacked)}, {format_bytes(code.size)} packed"
        click.echo(f"atoll: code: {files}, {sizes}, sha256 {code.digest[:12]}", err=True)


def _world_size(ranks: int, low: int | None, high: int | None) -> Any:
    from atoll.core.spec import WorldSize

    low, high = ranks if low is None else low, ranks if high is None else high
    if not low <= ranks <= high:
        text = f"expected --min <= -n <= --max, got {low}, {ranks}, {high}"
        raise click.UsageError(text)
    return WorldSize(min=low, target=ranks, max=high)


# 32 letters that are not mistaken for each other: a byte picks all equally often.
_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"
_SUFFIX = 5  # 32**5 names: 1,000 trainings of one script collide once in 67 sweeps
_MAX_NAME = 63  # of a DNS label
# Programs that only run something else, so that they say little about a training.
_RUNNERS = re.compile(
    r"(python|pypy)[\d.]*|torchrun|accelerate|deepspeed|(ba|z)?sh|env|uv|nice|nohup|time|timeout"
)
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_SCRIPTS = (".py", ".sh", ".bash")


def program(
    command: Sequence[str], options: Mapping[str, Any], *, is_module: bool = False
) -> list[str]:
    """The command, with the caller's Python before a script or module in Python.

    Raises ValidationError for a program that ranks on this machine cannot run.
    """
    argv = list(command)
    is_local = is_local_executor(options.get("executor"))
    python = (sys.executable or "python3") if is_local else "python"
    if is_module:
        return [python, "-m", *argv]
    if argv and is_local:
        _check(argv[0], Path(options.get("working_dir") or "", argv[0]))
    return [python, *argv] if argv and argv[0].endswith(".py") else argv


def _check(argument: str, path: Path) -> None:
    expected = ""
    if len(argument.split()) > 1 and not path.exists():
        expected = "a program: this is one argument. Remove the quotes, or put 'sh -c' before it"
    elif _ASSIGNED.match(argument) and not path.exists():
        expected = f"a program: set variables with -e {argument}"
    elif argument.endswith(".ipynb"):
        expected = "a .py: 'jupyter nbconvert --to script' makes one of a notebook"
    elif argument.endswith(".py") and not path.is_file():
        expected = f"a file: there is none at {path.absolute()}"
    elif "/" in argument or argument in (".", ".."):
        if path.is_dir():
            expected = "a program or a .py: this is a directory"
        elif path.is_file() and not argument.endswith(".py") and not os.access(path, os.X_OK):
            expected = "a program: this file is not executable. Put its interpreter before it"
    if expected:
        raise ValidationError("command", argument, f"expected {expected}")


# Options of `run` that are easily typed in the wrong place, and that few scripts have.
_OURS = {
    "-n",
    "--ranks",
    "--replicas",
    "--min",
    "--max",
    "--gpus",
    "--max-restarts",
    "--rendezvous",
    "--uri",
}
_OURS |= {"--run-id", "--executor", "--dry-run", "--env-file"}


def misplaced(command: Sequence[str], typed: Sequence[str]) -> str:
    """A note on options of atoll that went to the script because they follow it; empty if there
    are none, or if `typed` has a `--`."""
    if not command or not command[0].endswith(".py") or "--" in typed:
        return ""
    passed = [argument for argument in command[1:] if argument.partition("=")[0] in _OURS]
    if not passed:
        return ""
    remedy = f"for atoll, put it before {command[0]}; '--' before the script hides this note"
    return f"{passed[0]} goes to {command[0]}: {remedy}"


def generate_name(command: Sequence[str]) -> str:
    """A DNS label made of the program's name and a random suffix."""
    return f"{stem_of(command)[: _MAX_NAME - 1 - _SUFFIX].rstrip('-')}-{_random()}"


def _random() -> str:
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(_SUFFIX))


def stem_of(command: Sequence[str]) -> str:
    """`train` for `python train.py --lr 3`, `nanogpt-train` for `python -m nanogpt.train`."""
    stem = next(filter(None, map(_label, _candidates(command))), None)
    return stem or (_label(command[0]) if command else "") or "training"


def _candidates(command: Sequence[str]) -> Iterator[str]:
    """Arguments that may be the program, the likeliest first."""
    argv = _argv(command)
    for before, argument in argv:
        if before == "-m":
            yield argument.replace(".", "-")
        elif argument.endswith(_SCRIPTS) and _is_program(argument):
            yield PurePath(argument).stem
    for before, argument in argv:
        is_value = before.startswith("-") and "=" not in before  # such as `--nproc-per-node 2`
        if not is_value and _is_program(argument):
            yield PurePath(argument).stem


def _argv(command: Sequence[str]) -> list[tuple[str, str]]:
    """Each argument with the one before it, up to the first program that is no runner, or to code
    on the command line."""
    argv = []
    for before, argument in zip(["", *command], command, strict=False):
        if before == "-c":
            break
        argv.append((before, argument))
        if not before.startswith("-") and _is_program(argument):
            if argument.endswith(_SCRIPTS) or not argv[1:]:
                break
    return argv


def _is_program(argument: str) -> bool:
    if argument.startswith("-") or "=" in argument or not re.search("[A-Za-z]", argument):
        return False
    return not _RUNNERS.fullmatch(PurePath(argument).name)


def _label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", PurePath(text).name.lower()).strip("-")


def read_variables(argv: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    """The environment that `--env` and `--env-file` describe."""
    env: dict[str, str] = {}
    for path in files:
        env |= read_env_file(path)
    for argument in argv:
        env |= _variable(argument)
    return env


def _variable(argument: str) -> dict[str, str]:
    name, has_value, value = argument.partition("=")
    if has_value:
        return {name: value}
    matches = {key: os.environ[key] for key in os.environ if fnmatchcase(key, name)}
    if not matches:
        expected = "expected K=V, or the name or pattern of variables that are set here"
        raise ValidationError("--env", argument, expected)
    return matches


ENV_FILE = "--env-file"


def read_env_file(path: Path) -> dict[str, str]:
    """Variables of a file of `K=V` lines, as for `docker run --env-file`, with quotes and comments.

    Raises ValidationError that names the file and the line, and never shows a value.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValidationError(ENV_FILE, str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValidationError(ENV_FILE, str(path), "expected a text file in UTF-8") from error
    env: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").lstrip()
        if not text or text.startswith("#"):
            continue
        name, has_value, value = text.partition("=")
        if not has_value or not name.strip().isidentifier():
            raise ValidationError(ENV_FILE, str(path), f"line {number}: expected K=V")
        env[name.strip()] = _value(value.strip(), path, number)
    return env


def _value(text: str, path: Path, number: int) -> str:
    quote = text[:1]
    if quote not in ("'", '"'):
        return text.partition(" #")[0].rstrip()
    inside, end, remainder = text[1:].partition(quote)
    if not end or (remainder.strip() and not remainder.lstrip().startswith("#")):
        expected = f"line {number}: expected a closing {quote} at the end of the value"
        raise ValidationError(ENV_FILE, str(path), expected)
    return inside
