"""`ps`, `status`, `logs`, `events` and `top`: commands that show trainings."""

from __future__ import annotations

import shutil
import sys
import time
from math import inf
from typing import Any

import click

from atoll.cli.options import json_option, name_argument
from atoll.cli.report import world_text
from atoll.cli.show import print_json, training_json
from atoll.cli.tables import ps_table, ranks_table, status_text
from atoll.cli.terminal import can_redraw
from atoll.core.errors import ValidationError
from atoll.core.status import Training
from atoll.sdk.client import Client

PHASES = click.Choice(["pending", "ready", "succeeded", "failed", "cancelled"])
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@click.command()
@click.option("--phase", type=PHASES, help="List only trainings in this phase.")
@click.option("--prefix", help="List only trainings whose name starts with this.")
@json_option
def ps(phase: str | None, prefix: str | None, is_json: bool) -> None:
    """List trainings, the newest first."""
    from atoll.cli.show import print_json, training_json
    from atoll.cli.tables import ps_table
    from atoll.sdk.client import Client

    trainings = [training.last for training in Client().list(phase=phase, prefix=prefix)]
    trainings.sort(key=lambda training: training.created_at, reverse=True)
    print_json([training_json(t) for t in trainings]) if is_json else print(ps_table(trainings))


@click.command()
@name_argument
@click.option(
    "--watch", "-w", "is_watched", is_flag=True, help="Show each change until the training ends."
)
@json_option
def status(name: str, is_watched: bool, is_json: bool) -> None:
    """Show one training: its world, its ranks, and how they ended."""
    from atoll.cli.follow import to_the_end
    from atoll.cli.look import Watched
    from atoll.cli.show import print_json, training_json
    from atoll.cli.tables import status_text
    from atoll.sdk.client import Client

    client = Client()
    training = client.get(name)
    if is_watched:
        display = Watched(is_json=is_json)
        client.run(to_the_end(training.last, display.see))
        display.close()
    else:
        print_json(training_json(training.last)) if is_json else print(status_text(training.last))


@click.command()
@name_argument
@click.option("--follow", "-f", "is_followed", is_flag=True, help="Follow until the training ends.")
@click.option(
    "--rank", type=click.IntRange(min=0), help="Print the lines of this rank only, without prefix."
)
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    help="Number of last lines to print of each rank.",
    show_default="all",
)
@json_option
def logs(name: str, is_followed: bool, rank: int | None, tail: int | None, is_json: bool) -> None:
    """Print the output of the ranks, also after the end."""
    from atoll.cli.report import LinePrinter
    from atoll.cli.show import print_json
    from atoll.sdk.client import Client

    training = Client().get(name)
    printer = LinePrinter(is_prefixed=rank is None)
    printer.width = len(str(training.last.spec.world_size.max - 1))
    lines = (
        training.logs(rank=rank, tail=tail, follow=True)
        if is_followed
        else training.logs(rank=rank, tail=tail)
    )
    for line in lines:
        print_json(line) if is_json else printer.print(line)


@click.command()
@name_argument
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    default=0,
    help="Rank whose result is printed.",
    show_default=True,
)
@json_option
def value(name: str, rank: int, is_json: bool) -> None:
    """Print the result of a rank as JSON.

    That is what its function returned, or what its program gave with atoll.give_result.
    """
    from atoll.cli.show import print_json
    from atoll.sdk.client import Client

    try:
        result = Client().get(name).value(rank)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    print_json({"rank": rank, "value": as_json(result)} if is_json else as_json(result))


def as_json(value: Any) -> Any:
    """The value with what JSON cannot hold as text."""
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    is_finite = isinstance(value, float) and value - value == 0
    return value if is_finite else str(value)


@click.command()
@name_argument
@click.option(
    "--since", help="Print only events since then: 10m, 2h, an ISO time or seconds since the epoch."
)
@json_option
def events(name: str, since: str | None, is_json: bool) -> None:
    """Print the events of a training.

    The newest event is last; with --json it is first.
    """
    from atoll.cli.show import print_json
    from atoll.cli.tables import events_table
    from atoll.sdk.client import Client

    after = None if since is None else moment(since, time.time())
    newest_first = Client().get(name).events(after)
    print_json(newest_first) if is_json else print(events_table(newest_first[::-1]))


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(0.05, 3600),
    default=1.0,
    help="Seconds between two refreshes.",
    show_default=True,
)
@click.option(
    "--count",
    "-c",
    type=click.IntRange(min=1),
    help="Number of refreshes before exiting.",
    show_default="no limit on a terminal, else 1",
)
@json_option
def top(interval: float, count: int | None, is_json: bool) -> None:
    """Show all trainings and their ranks, and refresh until Ctrl-C."""
    from atoll.cli.look import look_again
    from atoll.sdk.client import Client

    look_again(Client(), interval, count, is_json=is_json)


def moment(text: str, now: float) -> float:
    """Seconds since the epoch for `90s`, `10m`, `2026-01-31T12:00`, `1767225600`."""
    from datetime import datetime

    try:
        if text[-1:] in UNITS and text[:-1]:
            return max(0.0, now - float(text[:-1]) * UNITS[text[-1]])
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        expected = "expected 10m, 2h, 2026-01-31T12:00 or seconds since the epoch"
        raise ValidationError("--since", text, expected) from None


_CLEAR = "\x1b[H\x1b[J"


class Watched:
    """Prints each new state of one training."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._is_screen = can_redraw(sys.stdout) and not is_json
        self._version = -1
        self._last: Training | None = None

    def see(self, training: Training) -> None:
        if training.resource_version == self._version:
            return
        self._version, self._last = training.resource_version, training
        if self._is_json:
            print_json(training_json(training))
        elif self._is_screen:
            print(_CLEAR + fitted(status_text(training)), end="", flush=True)
        else:
            print(f"{training.name} {world_text(training)}", flush=True)

    def close(self) -> None:
        """Prints the last state in full: a screen cuts it off, and single lines leave most out."""
        if self._last is not None and not self._is_json:
            print((_CLEAR if self._is_screen else "") + status_text(self._last))


def look_again(client: Client, interval_s: float, count: int | None, *, is_json: bool) -> None:
    """Prints all trainings `count` times. None is no limit on a terminal, and once elsewhere."""
    is_screen = can_redraw(sys.stdout) and not is_json
    left: float = inf if is_screen else 1
    left = left if count is None else count
    while left > 0:
        trainings = [training.last for training in client.list()]
        if is_json:
            print_json([training_json(t) for t in trainings])
        elif is_screen:
            print(_CLEAR + fitted(top_text(trainings)), end="", flush=True)
        else:
            print(top_text(trainings), flush=True)
        left -= 1
        if left > 0:
            time.sleep(interval_s)
    if is_screen:
        print()


def top_text(trainings: list[Training]) -> str:
    """Active trainings first, then those that are over; the ranks of the active ones below."""
    now = time.time()
    alive = [t for t in trainings if not t.status.phase.is_terminal]
    over = [t for t in trainings if t.status.phase.is_terminal]
    for group in (alive, over):
        group.sort(key=lambda training: training.created_at, reverse=True)
    running = sum(rank.phase == "Running" for t in alive for rank in t.status.ranks)
    counts = f"{len(alive)} active, {running} ranks running, {len(over)} over"
    head = f"{time.strftime('%H:%M:%S')}  {counts}"
    parts = [head, ps_table(alive + over[:10])]
    parts += [f"{t.name}\n{ranks_table(t, now)}" for t in alive if t.status.ranks]
    return "\n\n".join(parts)


def fitted(text: str) -> str:
    """As much of the text as the screen holds, so that the next drawing starts at the top."""
    width, height = shutil.get_terminal_size()
    lines = text.split("\n")
    if len(lines) >= height:
        lines = [*lines[: height - 2], f"… {len(lines) - height + 2} more lines"]
    # A cut within a coloured cell would leave the colour on.
    return "\n".join(line if "\x1b" in line else line[:width] for line in lines)
