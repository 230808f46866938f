"""`ps`, `status`, `logs`, `events` and `attempts`: commands that show trainings."""

from __future__ import annotations

import sys
import time
from shutil import get_terminal_size
from typing import Any

import click

from atoll.cli.options import json_option, name_argument, timeout_option
from atoll.cli.report import world_text
from atoll.cli.screen import fitted
from atoll.cli.show import print_json, training_json
from atoll.cli.tables import ps_table, status_text
from atoll.cli.terminal import can_redraw
from atoll.core.errors import BelowMinimumWorld, ResultError, ValidationError
from atoll.core.status import Training
from atoll.sdk import flows
from atoll.sdk.client import Client
from atoll.sdk.flows import Who

PHASES = click.Choice(["pending", "ready", "succeeded", "failed", "cancelled"])
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@click.command()
@click.option("--phase", type=PHASES, help="List only trainings in this phase.")
@click.option("--prefix", help="List only trainings whose name starts with this.")
@click.option(
    "--sort",
    help="Sort by age, name, phase, ran or ready, or by what ranks reported last, such as loss. "
    "With a - before it the other way round.",
    show_default="age: the newest first",
)
@json_option
def ps(phase: str | None, prefix: str | None, sort: str | None, is_json: bool) -> None:
    """List trainings, the newest first."""
    from atoll.cli.order import ordered
    from atoll.cli.show import print_json, training_json
    from atoll.sdk.client import Client

    client = Client()
    trainings = [training.last for training in client.list(phase=phase, prefix=prefix)]
    trainings, newest_metrics = ordered(client, trainings, sort)
    if is_json:
        each = [(training_json(t), newest_metrics.get(t.uid)) for t in trainings]
        print_json([shown if f is None else {**shown, "figure": f} for shown, f in each])
    else:
        print(ps_table(trainings, newest_metrics))


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
@click.option(
    "--since", help="Print only lines since then: 10m, 2h, an ISO time or seconds since the epoch."
)
@click.option("--grep", help="Print only lines that contain this text; the server searches.")
@click.option("--ignore-case", "-i", is_flag=True, help="With --grep, letters in either case.")
@click.option(
    "--timestamps", "-t", "is_timed", is_flag=True, help="Print the time of each line before it."
)
@json_option
def logs(
    name: str,
    is_followed: bool,
    rank: int | None,
    tail: int | None,
    since: str | None,
    grep: str | None,
    ignore_case: bool,
    is_timed: bool,
    is_json: bool,
) -> None:
    """Print the output of the ranks, also after the end.

    Lines of several ranks are in the order of their times.
    """
    from atoll.cli.report import LinePrinter
    from atoll.cli.show import print_json
    from atoll.sdk.flows import Who
    from atoll.sdk.logs import LogPosition, lines

    if ignore_case and grep is None:
        raise ValidationError("--ignore-case", True, "expected only with --grep")
    if grep is not None and (not grep or "\n" in grep):
        raise ValidationError("--grep", grep, "expected a text of one line")
    after = None if since is None else moment(since, time.time())
    client = Client()
    training = client.get(name)
    highest = training.last.spec.world_size.max - 1
    if rank is not None and rank > highest:
        raise ValidationError("--rank", rank, f"expected at most {highest}: the ranks of {name}")
    printer = LinePrinter(is_prefixed=rank is None, is_timed=is_timed, is_live=is_followed)
    printer.width = len(str(highest))
    chosen: dict[str, Any] = {"since": after, "search": grep, "ignoreCase": ignore_case or None}
    who = Who(training.name, training.uid)
    position = LogPosition(who, None if rank is None else [rank], tail, is_followed, chosen)
    for line in lines(client.wire, position):  # one by one: a log may be larger than the memory
        print_json(line) if is_json else printer.print(line)


@click.command()
@name_argument
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    default=0,
    help="Rank whose result to print.",
    show_default=True,
)
@timeout_option
@json_option
def result(name: str, rank: int, timeout: float | None, is_json: bool) -> None:
    """Wait for the end of a training and print the result of a rank as JSON.

    That is what its function returned, or what its program set with atoll.set_result; null if it
    set nothing. Exit code: 1 if the training did not succeed, 124 if --timeout passed.
    """
    from atoll.cli.follow import TIMED_OUT
    from atoll.cli.show import print_json, says

    client = Client()
    training = client.get(name)
    highest = training.last.spec.world_size.max - 1
    if rank > highest:
        raise ValidationError("--rank", rank, f"expected at most {highest}: the ranks of {name}")
    who, newest = Who(training.name, training.uid), [training.last]
    try:
        client.run(flows.wait_until_end(who, timeout, on_read=newest.append))
        value = as_json(client.run(flows.result(who, rank)))
    except ResultError as error:
        raise click.ClickException(str(error)) from error
    except BelowMinimumWorld as error:
        if newest[-1].status.phase.is_terminal:
            raise
        says(str(error))
        raise SystemExit(TIMED_OUT) from error
    print_json({"rank": rank, "result": value} if is_json else value)


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

    after = None if since is None else moment(since, time.time())
    newest_first = Client().get(name).events(after)
    print_json(newest_first) if is_json else print(events_table(newest_first[::-1]))


@click.command()
@name_argument
@click.option("--rank", type=click.IntRange(min=0), help="Print the attempts of this rank only.")
@json_option
def attempts(name: str, rank: int | None, is_json: bool) -> None:
    """Print the attempts of the ranks: when each started, when and how it ended.

    Of each rank the newest attempt and the 20 before it.
    """
    from atoll.cli.show import print_json
    from atoll.cli.tables import attempts_table

    known = Client().get(name).attempts(rank)
    print_json(known) if is_json else print(attempts_table(known, time.time()))


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
            print(_CLEAR + fitted(status_text(training), get_terminal_size()), end="", flush=True)
        else:
            print(f"{training.name} {world_text(training)}", flush=True)

    def close(self) -> None:
        """Prints the last state in full: a screen cuts it off, and single lines leave most out."""
        if self._last is not None and not self._is_json:
            print((_CLEAR if self._is_screen else "") + status_text(self._last))
