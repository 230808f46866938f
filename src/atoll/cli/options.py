"""Options and arguments that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from atoll.core.errors import AtollError, ValidationError

Body = TypeVar("Body", bound=Callable[..., None])

# The largest bound that the help prints: larger ones guard against typing errors only.
MAX_BOUND_IN_HELP = 1_000_000


class Duration(click.ParamType[float]):
    """A duration in seconds, written as `30s`, `5m`, `2h` or a number of seconds."""

    name = "duration"

    def __init__(self, min: float = 0.0, max: float = math.inf) -> None:
        self.min, self.max = min, max

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        from atoll.core.text import DURATION_EXAMPLES, parse_duration

        try:
            seconds = parse_duration("", value)
        except ValidationError:
            self.fail(f"{value!r} is not a duration: expected {DURATION_EXAMPLES}", param, ctx)
        if not self.min <= seconds <= self.max:
            self.fail(f"{value!r}: expected {self.min:g}s to {self.max:g}s", param, ctx)
        # Fields that hold whole seconds refuse floats.
        is_integer = math.isfinite(seconds) and seconds == int(seconds)
        return int(seconds) if is_integer else seconds


class _BoundedByField:
    """A range with the bounds of a field, read when first needed: the types load slowly."""

    min: Any
    max: Any

    def __init__(self, field: str) -> None:
        super().__init__()
        self._field = field

    def _read(self) -> None:
        from atoll.core.problem import option_bounds

        bounds = option_bounds()[self._field]
        self.min, self.max = bounds.low, bounds.high if bounds.high < MAX_BOUND_IN_HELP else None

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        self._read()
        return super().convert(value, param, ctx)  # type: ignore[misc]

    def _describe_range(self) -> str:
        self._read()
        return super()._describe_range()  # type: ignore[misc, no-any-return]


class IntField(_BoundedByField, click.IntRange):
    """An integer within the bounds of a field."""


class FloatField(_BoundedByField, click.FloatRange):
    """A number within the bounds of a field."""


class HeadedOption(click.Option):
    """An option below a heading of the help."""

    def __init__(self, *arguments: Any, heading: str = "Options", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.heading = heading


class HeadedCommand(click.Command):
    """A command whose help lists its options below headings, in the order of the options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                heading = getattr(parameter, "heading", "Output")
                records.setdefault(heading, []).append(record)
        for heading, rows in records.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return complete(incomplete)


def complete(incomplete: str) -> list[str]:
    """Names of trainings with this prefix. Asks a running control plane and never starts one."""
    try:
        if not os.environ.get("ATOLL_URL"):
            from atoll.backends.local.state import state_dir
            from atoll.sdk.endpoint import running

            if running(state_dir()) is None:
                return []
        from atoll.sdk.client import Client

        with Client() as client:
            return [training.name for training in client.list(prefix=incomplete)]
    except (AtollError, OSError):
        return []


name_argument = click.argument("name", shell_complete=_complete)


def names_argument(*, is_required: bool) -> Callable[[Body], Body]:
    return click.argument("names", nargs=-1, required=is_required, shell_complete=_complete)


json_option = click.option("--json", "is_json", is_flag=True, help="Print JSON instead of text.")
timeout_option = click.option(
    "--timeout",
    type=Duration(),
    help="How long to wait before giving up, such as 30s or 5m.",
    show_default="no limit",
)


def since_option(noun: str) -> Callable[[Body], Body]:
    return click.option(
        "--since",
        help=f"Print only {noun} since then: 10m, 2h, an ISO time or seconds since the epoch.",
    )


def _use_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Everything in this process, and a control plane that it starts, reads this file."""
    if path is not None:
        if not path.is_file():
            raise ValidationError("--config", str(path), "expected a file: there is none")
        os.environ["ATOLL_CONFIG"] = str(path.absolute())
    return path


CONFIG: dict[str, Any] = {
    "type": Path,
    "callback": _use_config,
    "expose_value": False,
    "is_eager": True,
    "help": "Configuration file to use instead of ATOLL_CONFIG, ./atoll.toml and the user's own.",
}
config_option = click.option("--config", **CONFIG)
