"""Options that several commands share, and the table of what a training can be started with."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

import click

from atoll.core.errors import ValidationError

Body = TypeVar("Body", bound=Callable[..., None])


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return complete(incomplete)


name_argument = click.argument("name", shell_complete=_complete)


def names_argument(*, is_required: bool) -> Callable[[Body], Body]:
    return click.argument("names", nargs=-1, required=is_required, shell_complete=_complete)


json_option = click.option("--json", "is_json", is_flag=True, help="Print JSON, for programs.")
timeout_option = click.option(
    "--timeout", type=click.FloatRange(min=0), help="Seconds to wait; for ever if not given."
)


FAR = 1_000_000  # a bound that nobody meets: left out of the help, kept by the spec


class _OfField:
    """A range that is the bounds of a field, read when first needed: the types load slowly."""

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


# Flags, the option of `deploy_distributed` they set, type, help.
SET: tuple[tuple[tuple[str, ...], str, Any, str], ...] = (
    (("--max-restarts",), "max_restarts", int, "Times a failed rank is started again."),
    (("--timeout",), "deadline_s", float, "Seconds after which a running training is stopped."),
    (("--rendezvous",), "rendezvous_backend", str, "How ranks meet: c10d, static, etcd-v2."),
    (("--uri",), "rendezvous_uri", str, "Object store of the ranks: file://, s3://, gs://, az://."),
    (("--bench",), "bench", str, "Measure the link between hosts: off, on-start."),
    (("--bench-require-gbps",), "bench_require_gbps", float, "Start only over a link this fast."),
    (("--bench-placement",), "bench_placement", str, "Where to measure: preferred, strict."),
    (("--executor",), "executor", str, "Where to run, by name; see 'atoll executors'."),
    (("--image",), "image", str, "Container image, where ranks have one."),
    (("--cpu",), "cpu", str, "CPUs of a rank: 2, 500m."),
    (("--memory",), "memory", str, "Memory of a rank: 4Gi."),
    (("--gpus",), "gpu_count", int, "GPUs of a rank."),
    (("--workdir", "-C"), "working_dir", str, "Where ranks start; here if not given."),
    (("--start-grace",), "start_grace_s", float, "Seconds until fewer than -n ranks may start."),
    (("--stop-grace",), "stop_grace_s", float, "Seconds from asking a rank to stop to killing it."),
    (("--ttl",), "ttl_seconds", int, "Seconds to keep the record after the end."),
)


# The world: flags, parameter, field of its size, default, help. The last comes first in the help.
WORLD: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("--max",), "high", "max", "Most ranks to scale to; -n if not given."),
    (("--min",), "low", "min", "Fewest ranks to go on with; -n if not given."),
    (("--ranks", "-n"), "ranks", "target", "Ranks wanted; 1 if not given."),
)


# Those of them that errors name, by their field.
FLAGS = {option: flags[0] for flags, option, _, _ in SET} | {
    "name": "--name",
    "world_size.min": "--min",
    "world_size.target": "-n",
    "world_size.max": "--max",
    "pip_packages": "--pip",
}


def launches(body: Callable[..., None]) -> Callable[..., None]:
    """Gives `body(launch, …)` all the options of a training, besides its own."""

    @wraps(body)
    def run(
        command: tuple[str, ...],
        ranks: int | None,
        low: int | None,
        high: int | None,
        name: str | None,
        env: tuple[str, ...],
        pip_packages: tuple[str, ...],
        mesh: bool,
        **given: Any,
    ) -> None:
        from atoll.sdk.config import with_defaults

        mine = {option: given.pop(option) for option in own if option in given}
        options = {option: value for option, value in given.items() if value is not None}
        options |= {"command": list(_command(command)), "env": dict(map(_variable, env))}
        if any(count is not None for count in (ranks, low, high)):
            options["world_size"] = _world_size(1 if ranks is None else ranks, low, high)
        if mesh:
            options["mesh"] = True
        if pip_packages:
            options["pip_packages"] = list(pip_packages)
        chosen = generated(command) if name is None else name
        options = with_defaults(options)
        try:
            body(Launch(chosen, options, options.get("deadline_s")), **mine)
        except ValidationError as error:
            from atoll.core.fields import renamed

            raise renamed(error, FLAGS) from error

    own = [parameter.name for parameter in getattr(body, "__click_params__", ())]
    ranges: dict[Any, Callable[[str], Any]] = {int: WholeNumber, float: Number}
    for flags, option, kind, text in reversed(SET):
        accepted = ranges[kind](option) if kind in ranges else kind
        click.option(*flags, option, type=accepted, help=text)(run)
    click.option("--mesh", is_flag=True, help="Gate the start on the network.")(run)
    click.option("--pip", "pip_packages", multiple=True, help="Package that ranks need.")(run)
    click.option("--env", "-e", multiple=True, help="K=V, or K to pass on its value here.")(run)
    click.option("--name", help="Made from the command if not given.")(run)
    for flags, name_here, field, text in WORLD:
        count = WholeNumber(f"world_size.{field}")
        click.option(*flags, name_here, type=count, help=text)(run)
    click.argument("command", nargs=-1, type=click.UNPROCESSED)(run)
    return run


def _command(command: Sequence[str]) -> Sequence[str]:
    if not command:
        raise click.UsageError("nothing to run: atoll run -n 4 -- python train.py")
    return command


def _world_size(ranks: int, low: int | None, high: int | None) -> Any:
    from atoll.core.spec import WorldSize

    low, high = ranks if low is None else low, ranks if high is None else high
    if not low <= ranks <= high:
        text = f"expected --min <= -n <= --max, got {low}, {ranks}, {high}"
        raise click.UsageError(text)
    return WorldSize(min=low, target=ranks, max=high)


def _variable(text: str) -> tuple[str, str]:
    name, has_value, value = text.partition("=")
    if not has_value:
        if name not in os.environ:
            raise ValidationError("--env", text, "expected K=V, or a variable that is set here")
        value = os.environ[name]
    return name, value


_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # 32 of them: a byte picks all equally often
_SUFFIX = 5
# Programs that only run something else, so that they say little about a training.
_RUNNERS = re.compile(r"(python|pypy)[\d.]*|torchrun|accelerate|bash|sh|env|uv|nice|time")


def generated(command: Sequence[str]) -> str:
    """A DNS label: what is run, and a random end."""
    return f"{_stem(command)[: 62 - _SUFFIX].rstrip('-')}-{_random()}"


def _random() -> str:
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(_SUFFIX))


def _stem(command: Sequence[str]) -> str:
    """`train` for `python train.py --lr 3`, `nanogpt-train` for `python -m nanogpt.train`."""
    found = next(filter(None, map(_label, _candidates(command))), None)
    return found or (_label(command[0]) if command else "") or "training"


def _candidates(command: Sequence[str]) -> Iterator[str]:
    """Words that may be the program, the likeliest first."""
    for before, word in zip(["", *command], command, strict=False):
        if before == "-m":
            yield word.replace(".", "-")
            return
        if before == "-c":
            return
        if word.startswith("-") or "=" in word:
            continue
        if word.endswith(".py") or not _RUNNERS.fullmatch(PurePath(word).name):
            yield PurePath(word).stem
            return


def _label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", PurePath(text).name.lower()).strip("-")


def complete(incomplete: str) -> list[str]:
    """Names that begin so, if a control plane is there to ask; never starts one."""
    import os

    from atoll.core.errors import AtollError

    try:
        if not os.environ.get("ATOLL_URL"):
            from atoll.sdk.embedded import running, state_dir

            if running(state_dir()) is None:
                return []
        from atoll.sdk.client import Client

        with Client() as client:
            return [training.name for training in client.list(prefix=incomplete)]
    except (AtollError, OSError):
        return []
