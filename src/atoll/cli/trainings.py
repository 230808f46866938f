"""Commands on trainings: show them, change them, wait for them and remove them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from atoll.cli.follow import FAILED, SUCCEEDED, TIMED_OUT, LinePrinter, to_the_end
from atoll.cli.options import (
    json_option,
    name_argument,
    names_argument,
    since_option,
    timeout_option,
)
from atoll.cli.output import (
    attempts_table,
    bench_text,
    count_of,
    end_report,
    events_table,
    experiment_table,
    print_json,
    print_note,
    ps_json,
    ps_table,
    status_text,
    training_json,
    world_json,
    world_text,
)
from atoll.cli.terminal import can_redraw, screen
from atoll.core.errors import (
    BelowMinimumWorld,
    NotFound,
    Permanent,
    Temporary,
    ValidationError,
)
from atoll.core.metrics import LatestMetric
from atoll.core.select import AGGREGATES, FIELDS, Selection, parse_sort
from atoll.core.settings import GROUP
from atoll.core.status import Training
from atoll.core.text import parse_duration
from atoll.sdk import flows
from atoll.sdk.client import Client
from atoll.sdk.training import DistributedTraining, check_rank

PHASES = click.Choice(["pending", "ready", "succeeded", "failed", "cancelled"])
METRICS_AT_ONCE = 50  # trainings in one query: their names fit into a URL


@click.command()
@click.option("--phase", type=PHASES, help="List only trainings in this phase.")
@click.option("--prefix", help="List only trainings whose name starts with this.")
@click.option(
    "--group",
    help="Open a group: list its trainings with their settings and metrics.",
)
@click.option(
    "--label",
    "-l",
    "labels",
    multiple=True,
    help="List only trainings with this label: NAME or NAME=VALUE; may be repeated.",
)
@click.option(
    "--setting",
    "settings",
    multiple=True,
    help="List only trainings with this setting: lr, lr=0.1, 'lr>=0.1'; may be repeated.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    help="List only trainings whose metric is so: 'loss<2' tests the newest value, 'min:loss<2' "
    "the lowest, 'max:loss<2' the highest; may be repeated.",
)
@click.option(
    "--sort",
    help="Sort by age, name, phase, ran or ready, by label:NAME or setting:NAME, or by a metric: "
    "loss is its newest value, min:loss and max:loss the best. A leading - reverses the order.",
    show_default="age: the newest first",
)
@click.option("--all", "-a", "has_all", is_flag=True, help="List the trainings of groups as well.")
@json_option
def ps(
    phase: str | None,
    prefix: str | None,
    group: str | None,
    labels: tuple[str, ...],
    settings: tuple[str, ...],
    metrics: tuple[str, ...],
    sort: str | None,
    has_all: bool,
    is_json: bool,
) -> None:
    """List trainings, the newest first.

    Trainings of a group, such as those of a sweep, are one row; --group, --all and any condition
    open it. With --json they are always listed one by one.
    """
    order = parse_sort("--sort", sort or "age")
    is_open = bool(group or labels or settings or metrics or has_all) or order.kind != "field"
    if group is not None:
        labels = (*labels, f"{GROUP}={group}")
    client = Client()
    handles = client.list(
        phase=phase,
        prefix=prefix,
        labels=labels,
        settings=settings,
        metrics=metrics,
        sort=sort or "age",
    )
    trainings = [handle.last for handle in handles]
    selection = Selection.parse(settings=settings, metrics=metrics, sort=sort)
    names = selection.metric_names
    values: dict[str, dict[str, LatestMetric]] = {}
    if names or group is not None:
        values = read_metrics(client, trainings, names)
    if order.kind in AGGREGATES and trainings and not any(order.name in v for v in values.values()):
        raise ValidationError(
            "--sort",
            sort,
            f"no training has reported it: expected {', '.join(FIELDS)}, label:NAME, setting:NAME "
            "or the name of a metric, as 'atoll metrics NAME' lists them",
        )
    if is_json:
        print_json([ps_json(training, values.get(training.uid, {})) for training in trainings])
    elif is_open:
        has_settings = bool(group or settings) or order.kind == "setting"
        print(experiment_table(trainings, values, selection, has_settings=has_settings))
    else:
        print(ps_table(trainings))
    if not trainings and not is_json:
        is_filtered = any((phase, prefix, labels, settings, metrics))
        print_note("no training matches" if is_filtered else "no trainings: 'atoll run' starts one")


def read_metrics(
    client: Client, trainings: Sequence[Training], names: Sequence[str] = ()
) -> dict[str, dict[str, LatestMetric]]:
    """By uid and name, what these trainings reported under these names, or under all."""
    values: dict[str, dict[str, LatestMetric]] = {}
    for at in range(0, len(trainings), METRICS_AT_ONCE):
        some = [training.name for training in trainings[at : at + METRICS_AT_ONCE]]
        for metric in client.run(flows.newest_metrics(names, some)).items:
            values.setdefault(metric.uid, {})[metric.name] = metric
    return values


@click.command()
@name_argument
@click.option(
    "--watch", "-w", "is_watched", is_flag=True, help="Show each change until the training ends."
)
@click.option(
    "--attempts",
    "has_attempts",
    is_flag=True,
    help="Show the attempts of each rank instead: the newest and the 20 before it.",
)
@click.option("--rank", type=click.IntRange(min=0), help="With --attempts, show this rank only.")
@click.option(
    "--bench",
    "has_bench",
    is_flag=True,
    help="Show the measured link between two hosts of the training instead.",
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --bench, write the measurements to this .svg file as well.",
)
@json_option
def status(
    name: str,
    is_watched: bool,
    has_attempts: bool,
    rank: int | None,
    has_bench: bool,
    svg: Path | None,
    is_json: bool,
) -> None:
    """Show one training: its world, its ranks, and how they ended."""
    if is_watched + has_attempts + has_bench > 1:
        raise click.UsageError("expected one of --watch, --attempts and --bench")
    if rank is not None and not has_attempts:
        raise click.UsageError("--rank: expected only with --attempts")
    if svg is not None and not has_bench:
        raise click.UsageError("--svg: expected only with --bench")
    check_svg(svg)
    client = Client()
    training = client.get(name)
    check_rank(training.last, rank, "--rank")
    if has_attempts:
        attempts = training.attempts(rank)
        print_json(attempts) if is_json else print(attempts_table(attempts, time.time()))
    elif has_bench:
        _show_bench(training, svg, is_json=is_json)
    elif is_watched:
        _watch(client, training.last, is_json=is_json)
    else:
        print_json(training_json(training.last)) if is_json else print(status_text(training.last))


def check_svg(path: Path | None) -> None:
    if path is not None and path.suffix.lower() != ".svg":
        raise ValidationError("--svg", str(path), "expected a file name that ends in .svg")


def _show_bench(training: DistributedTraining, svg: Path | None, *, is_json: bool) -> None:
    diagnostics = training.bench_diagnostics
    if svg is not None and diagnostics.result is not None:
        from atoll.core.chart import link_svg

        title = f"{training.name}: {diagnostics.message}"
        svg.write_text(link_svg(diagnostics.result.points, title))
    print_json(diagnostics) if is_json else print(bench_text(training.name, diagnostics))


def _watch(client: Client, training: Training, *, is_json: bool) -> None:
    """Print each new state, then the last one in full: a screen cuts it off, a line omits most."""
    last: Training | None = None

    def show(now: Training) -> None:
        nonlocal last
        if last is not None and now.resource_version == last.resource_version:
            return
        last = now
        if is_json:
            print_json(training_json(now))
        elif draw is not None:
            draw(status_text(now))
        else:
            print(f"{now.name} {world_text(now)}", flush=True)

    def close() -> None:
        if last is not None and not is_json:
            print(status_text(last))

    draw = None
    with ExitStack() as stack:
        if can_redraw(sys.stdout) and not is_json:
            stack.callback(close)  # after Ctrl-C too
            draw = stack.enter_context(screen())
        client.run(to_the_end(training, show))
    if draw is None:
        close()


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
@since_option("lines")
@click.option("--grep", help="Print only lines that contain this text; the server searches.")
@click.option("--ignore-case", "-i", is_flag=True, help="With --grep, ignore upper and lower case.")
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
    """Print the output of the ranks, during and after the training.

    Lines of several ranks are sorted by time.
    """
    from atoll.sdk.wire import LogPosition, read_log

    if ignore_case and grep is None:
        raise ValidationError("--ignore-case", True, "expected only with --grep")
    if grep is not None and (not grep or "\n" in grep):
        raise ValidationError("--grep", grep, "expected a text of one line")
    after = None if since is None else parse_time(since, time.time())
    client = Client()
    training = client.get(name)
    highest = training.last.spec.world_size.max - 1
    check_rank(training.last, rank, "--rank")
    printer = LinePrinter(is_prefixed=rank is None, is_timed=is_timed, is_live=is_followed)
    printer.width = len(str(highest))
    filters: dict[str, Any] = {"since": after, "search": grep, "ignoreCase": ignore_case or None}
    ref = flows.TrainingRef(training.last.name, training.uid)
    position = LogPosition(ref, None if rank is None else [rank], tail, is_followed, filters)
    for line in read_log(client.wire, position):  # one by one: a log may be larger than the memory
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
    """Wait for a training and print its result as JSON.

    That is what its function returned, or what its program set with atoll.set_result; null if it
    set nothing. Exit code: 1 if the training did not succeed, 124 if --timeout passed.
    """
    client = Client()
    training = client.get(name).last
    check_rank(training, rank, "--rank")
    ref, states = flows.TrainingRef(training.name, training.uid), [training]
    try:
        client.run(flows.wait_until_end(ref, timeout, on_read=states.append))
        value = as_json(client.run(flows.result(ref, rank)))
    except BelowMinimumWorld as error:
        if states[-1].status.phase.is_terminal:
            raise
        print_note(str(error))
        raise SystemExit(TIMED_OUT) from error
    print_json({"rank": rank, "result": value} if is_json else value)


def as_json(value: Any) -> Any:
    """The value as JSON; what JSON cannot hold becomes text."""
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
@since_option("events")
@json_option
def events(name: str, since: str | None, is_json: bool) -> None:
    """Print the events of a training, the newest first."""
    after = None if since is None else parse_time(since, time.time())
    newest_first = Client().get(name).events(after)
    print_json(newest_first) if is_json else print(events_table(newest_first))


def parse_time(text: str, now: float) -> float:
    """Seconds since the epoch for `90s`, `10m`, `2026-01-31T12:00`, `1767225600`."""
    from datetime import datetime

    try:
        if text[-1:].isalpha():
            return max(0.0, now - parse_duration("--since", text))
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        expected = "expected 10m, 2h, 2026-01-31T12:00 or seconds since the epoch"
        raise ValidationError("--since", text, expected) from None


@click.command(context_settings={"ignore_unknown_options": True})  # a target of -1 is no option
@name_argument
@click.argument("target", type=int)
@click.option("--wait", "is_waited", is_flag=True, help="Wait until all of them are ready.")
@timeout_option
@json_option
def scale(name: str, target: int, is_waited: bool, timeout: float | None, is_json: bool) -> None:
    """Change the number of ranks of a running training to TARGET."""
    training = Client().get(name)
    before = training.last.spec.world_size.target
    training.scale(target)
    if is_waited:
        training.wait_until_target_world(timeout)
    if is_json:
        print_json({"name": name, "previousTarget": before, **world_json(training.last)})
    else:
        change = f"{before} -> {count_of(target, 'rank')} wanted"
        print(f"{name}: {change}{', all ready' if is_waited else ''}")


@click.command()
@name_argument
@click.option(
    "--for",
    "goal",
    type=click.Choice([*flows.WAITS]),
    default="complete",
    help="Goal to wait for.",
    show_default=True,
)
@timeout_option
@json_option
def wait(name: str, goal: str, timeout: float | None, is_json: bool) -> None:
    """Wait for a training to end, or for its ranks.

    Exit code: 0 goal reached, 1 failed or cancelled, 124 --timeout passed.
    """
    client = Client()
    states = [client.get(name).last]
    ref = flows.TrainingRef(states[0].name, states[0].uid)
    code, error_text = SUCCEEDED, ""
    try:
        client.run(
            flows.WAITS[goal](ref, timeout, on_read=lambda state: states.__setitem__(0, state))
        )
    except BelowMinimumWorld as error:
        is_late = not states[0].status.phase.is_terminal
        code, error_text = (TIMED_OUT, str(error)) if is_late else (FAILED, "")
    (last,) = states
    if is_json:
        print_json({"goal": goal, "exitCode": code, **training_json(last)})
    elif error_text:
        print_note(error_text)
    elif code == FAILED or goal == "complete":
        print(end_report(last), file=sys.stderr if code else sys.stdout)
    else:
        print(f"{name}: {count_of(last.status.world.ready, 'rank')} ready")
    raise SystemExit(code)


@click.command()
@names_argument(is_required=True)
@json_option
def cancel(names: tuple[str, ...], is_json: bool) -> None:
    """Stop the ranks of trainings. Their logs and records are kept."""
    client = Client()
    trainings = [client.get(name) for name in names]
    for training in trainings:
        training.cancel()
        phase = training.last.status.phase
        if not is_json:
            state = f"was already {phase.value}" if phase.is_terminal else "cancelling"
            print(f"{training.name}: {state}")
    if is_json:
        print_json([training_json(training.last) for training in trainings])


def _confirm_removal(running: list[str], *, can_ask: bool) -> None:
    """Raises unless the user agrees to stop what runs; nothing is removed then."""
    text = f"{', '.join(running)} {'is' if len(running) == 1 else 'are'} running"
    if not (can_ask and sys.stdin.isatty() and sys.stderr.isatty()):
        what = "it" if len(running) == 1 else "them"
        raise Permanent(
            f"{text}: --force stops and removes {what}, 'atoll cancel' only stops {what}"
        )
    if not click.confirm(f"{text}: stop and remove?", err=True):
        raise Permanent("nothing was removed")


@click.command()
@names_argument(is_required=False)
@click.option(
    "--finished", "is_finished", is_flag=True, help="Remove all trainings that have ended."
)
@click.option(
    "--force",
    "-f",
    "is_forced",
    is_flag=True,
    help="Stop and remove trainings that run, without a question.",
)
@json_option
def rm(names: tuple[str, ...], is_finished: bool, is_forced: bool, is_json: bool) -> None:
    """Remove trainings with their ranks, logs and records. A missing training is no error.

    On a terminal it asks before it stops one that runs; elsewhere that takes --force.
    """
    if bool(names) == is_finished:
        raise click.UsageError("give names, or --finished")
    client = Client()
    trainings = [t for t in client.list() if t.last.status.phase.is_terminal] if is_finished else []
    for name in names:
        try:
            trainings.append(client.get(name))
        except NotFound:
            if not is_json:
                print(f"{name}: not there")
    running = [t.name for t in trainings if not t.last.status.phase.is_terminal]
    if running and not is_forced:
        _confirm_removal(running, can_ask=not is_json)
    removed, remaining = [], []
    for training in trainings:
        try:
            training.delete()
        except Temporary as error:
            remaining.append(training.name)
            print(f"atoll: {error}", file=sys.stderr)
            continue
        removed.append(training.name)
        if not is_json:
            print(f"{training.name}: removed")
    if is_json:
        print_json({"removed": removed, **({"notRemoved": remaining} if remaining else {})})
    if remaining:
        raise SystemExit(1)
