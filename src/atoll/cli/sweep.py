"""`atoll sweep`: a training of a script for each of many settings, as one group."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from atoll.cli.options import HeadedCommand, HeadedOption
from atoll.cli.run import (
    FLAGS,
    Launch,
    check_folder,
    open_client,
    read_launch,
    run_parameters,
    stem_of,
)
from atoll.core.describe import describe_end
from atoll.core.errors import ValidationError
from atoll.core.phase import Phase

if TYPE_CHECKING:
    from atoll.core.settings import Settings
    from atoll.core.status import Training
    from atoll.sdk.client import Client
    from atoll.sdk.search import StopRule
    from atoll.sdk.sweep import SweepRun

POLL_S = 2.0  # between two reads of the metrics: ranks report every second
_DIGEST_CHARS = 5  # of the name of a sweep: the same command and settings have the same name
# Options of `run` that a sweep does not have, or has as another.
_NOT_OF_SWEEP = {"settings", "name", "replace", "is_detached", "timeout", "is_removed", "is_dry"}


def sweep_parameters() -> list[click.Parameter]:
    own = [
        HeadedOption(
            ["--set", "space"],
            multiple=True,
            help="Values to try: lr=0.1,0.3 tries each with each of the others; with --samples "
            "also ranges: lr=1e-4..1e-1:log, width=32..256. The script gets --lr=0.1, or the "
            "value in place of {lr}. true is --lr, false is nothing; in place of {lr}, they are "
            "True and False.",
        ),
        HeadedOption(
            ["--from", "path"],
            type=click.Path(path_type=Path),
            help="File with one setting a row: CSV with a header, JSON lines or a JSON list.",
        ),
        HeadedOption(
            ["--samples"],
            type=click.IntRange(1, 100_000),
            help="Number of random combinations to try instead of all.",
        ),
        HeadedOption(
            ["--seed"],
            type=int,
            help="Seed for --samples: another seed draws other combinations.",
            show_default="0",
        ),
        HeadedOption(
            ["--jobs", "-j", "at_once"],
            type=click.IntRange(1, 10_000),
            help="Largest number of trainings at once.",
            show_default="number of CPUs",
        ),
        HeadedOption(
            ["--stop-when", "stop"],
            multiple=True,
            help="Stop a training early: 'loss>5@500' if its loss is above 5 at step 500 or "
            "later. A value that is not a number stops it, too. May be repeated.",
        ),
        HeadedOption(
            ["--name"],
            help="Name of the sweep: the group of its trainings.",
            show_default="generated from the command and the settings",
        ),
        HeadedOption(["--dry-run", "is_dry"], is_flag=True, help="Print the settings and exit."),
    ]
    for option in own:
        option.heading = "Sweep"
    shared = [each for each in run_parameters() if each.name not in _NOT_OF_SWEEP]
    return [shared[0], *own, *shared[1:]]


@click.command(
    cls=HeadedCommand,
    params=sweep_parameters(),
    context_settings={"allow_interspersed_args": False},
)
def sweep(
    command: tuple[str, ...],
    space: tuple[str, ...],
    path: Path | None,
    samples: int | None,
    seed: int | None,
    at_once: int | None,
    stop: tuple[str, ...],
    name: str | None,
    is_dry: bool,
    is_json: bool,
    **values: Any,
) -> None:
    """Run a script with many settings and compare them.

    Each combination of settings is a training of its own. The same command again resumes: what
    succeeded, runs or was stopped early is not run again, what failed or was cancelled is.
    'atoll ps --group NAME' shows the table at any time.

    Exit code: 0 all succeeded or were stopped early, 1 one failed, 2 bad usage, 130 by Ctrl-C. The
    first Ctrl-C cancels what runs, the second leaves at once.
    """
    from atoll.sdk.search import StopRule, setting_names
    from atoll.sdk.sweep import Job

    if not command:
        raise click.UsageError("nothing to run: atoll sweep --set lr=0.1,0.3 train.py")
    all_settings = read_settings(space, path, samples, seed)
    rules = [StopRule.parse(text) for text in stop]
    launch = read_launch(command, name="x", settings=(), **values)
    group = name or _generate_name(command, all_settings)
    names = setting_names(group, all_settings)
    jobs = [Job(at, names[at], dict(each)) for at, each in enumerate(all_settings)]
    if is_dry:
        _print_jobs(jobs, is_json=is_json)
        return
    try:
        _run(launch, group, jobs, at_once, rules, is_json=is_json)
    except ValidationError as error:
        from atoll.core.problem import rename_fields

        raise rename_fields(error, {**FLAGS, "concurrency": "--jobs"}) from error


def read_settings(
    space: Sequence[str], path: Path | None, samples: int | None, seed: int | None
) -> list[Settings]:
    from atoll.sdk.search import combine, grid, parse_file, parse_space, sample

    parsed = parse_space(space)
    if not parsed and path is None:
        raise click.UsageError("nothing to vary: expected --set lr=0.1,0.3 or --from FILE")
    if samples is not None and not parsed:
        raise click.UsageError("--samples: expected --set with it")
    if seed is not None and samples is None:
        raise click.UsageError("--seed: expected --samples with it")
    listed: list[Settings] = []
    if path is not None:
        try:
            listed = parse_file(str(path), path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "expected text in UTF-8"
            raise ValidationError("--from", str(path), f"cannot be read: {why}") from error
        if not listed:
            raise ValidationError("--from", str(path), "expected at least one row")
    varied = grid(parsed) if samples is None else sample(parsed, samples, seed or 0)
    return combine(listed, varied if parsed else [])


def _generate_name(command: Sequence[str], all_settings: Sequence[Settings]) -> str:
    import hashlib
    import json

    text = json.dumps([list(command), list(all_settings)])
    return f"{stem_of(command)}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]}"


def _print_jobs(jobs: Sequence[Any], *, is_json: bool) -> None:
    from atoll.cli.output import print_json, table
    from atoll.core.settings import setting_text

    if is_json:
        print_json([{"name": job.name, "settings": job.settings} for job in jobs])
        return
    names = list(dict.fromkeys(name for job in jobs for name in job.settings))
    rows = [
        (job.name, *(setting_text(job.settings.get(name, "-")) for name in names)) for job in jobs
    ]
    print(table(("NAME", *(name.upper() for name in names)), rows))


def _run(
    launch: Launch,
    group: str,
    jobs: Sequence[Any],
    at_once: int | None,
    rules: Sequence[Any],
    *,
    is_json: bool,
) -> None:
    from atoll.cli.terminal import leave
    from atoll.core.settings import GROUP
    from atoll.sdk.config import resolve_training
    from atoll.sdk.search import render_command
    from atoll.sdk.sweep import SweepRun

    def resolve(job: Any) -> Any:
        return resolve_training(
            job.name,
            {
                **launch.options,
                "command": render_command(launch.options["command"], job.settings),
                "labels": {GROUP: group, **launch.options["labels"]},
                "settings": job.settings,
            },
        )

    check_folder(launch.options)
    resolve(jobs[0])  # refuses bad options before anything is sent
    client = open_client()
    view = View(client, group, rules, is_json=is_json)
    run = SweepRun(
        client,
        jobs,
        resolve,
        at_once,
        stop=rules,
        on_change=lambda: view.show(run),
        poll_s=POLL_S,
    )
    interrupt = Interrupt()
    with view:
        try:
            client.run(run.run())
        except KeyboardInterrupt:
            view.note("cancelling what runs; press Ctrl-C again to leave at once")
            _cancel(client, run)
    view.end(run)
    leave(exit_code(run, interrupt.number))


class Interrupt:
    """The first Ctrl-C or SIGTERM ends the sweep, the second leaves at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> NoReturn:
        if self.number is not None:
            # Nothing may be waited for here, not even a request under way.
            os.write(2, b"\r\natoll: left; the trainings are being cancelled\n")
            os._exit(128 + number)
        self.number = number
        raise KeyboardInterrupt


def _cancel(client: Client, run: SweepRun) -> None:
    """Cancels what runs, also what was stored while the signal came, and waits for the ends."""
    from atoll.core.errors import AtollError, NotFound
    from atoll.core.settings import dns_label
    from atoll.sdk import flows

    for job in run.jobs:
        known = run.trainings.get(job.at)
        if known is not None and known.status.phase.is_terminal:
            continue
        try:
            known = client.run(flows.get(dns_label(job.name)))
        except NotFound:
            if known is None:
                break  # jobs begin in their order: no later one was stored
            continue
        run.trainings[job.at] = known
        if not known.status.phase.is_terminal:
            client.run(flows.cancel(flows.TrainingRef(known.name, known.uid)))
    for at, training in list(run.trainings.items()):
        if not training.status.phase.is_terminal:
            ref = flows.TrainingRef(training.name, training.uid)
            with contextlib.suppress(AtollError):
                client.run(flows.wait_until_end(ref, None, on_read=_keep(run, at)))
    run.running.clear()


def _keep(run: SweepRun, at: int) -> Callable[[Training], None]:
    def keep(training: Training) -> None:
        run.trainings[at] = training

    return keep


def exit_code(run: SweepRun, signal_number: int | None) -> int:
    if signal_number is not None:
        return 128 + signal_number
    phases = {at: training.status.phase.value for at, training in run.trainings.items()}
    has_failed = any(phase != "succeeded" and at not in run.stopped for at, phase in phases.items())
    return 1 if has_failed else 0


class View:
    """The table of a sweep: redrawn on a terminal, elsewhere a line for each change."""

    def __init__(
        self, client: Client, group: str, rules: Sequence[StopRule], *, is_json: bool
    ) -> None:
        self._client = client
        self._group = group
        self._rules = rules
        self._is_json = is_json
        self._draw: Callable[[str], None] | None = None
        self._phases: dict[int, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> View:
        from atoll.cli.terminal import can_redraw, screen

        if can_redraw(sys.stdout) and not self._is_json:
            self._draw = self._stack.enter_context(screen())
        return self

    def __exit__(self, *raised: object) -> None:
        self._draw = None
        self._stack.close()

    def note(self, text: str) -> None:
        from atoll.cli.output import print_note

        if self._draw is None:
            print_note(text)

    def show(self, run: SweepRun) -> None:
        if self._draw is not None:
            trainings = [run.trainings[at] for at in sorted(run.trainings)]
            table = self._table(trainings, self._metrics(trainings))
            self._draw(f"{self._head(run)}\n\n{table}")
            return
        for at, training in run.trainings.items():
            phase = training.status.phase.value or "new"
            if self._phases.get(at) != phase and phase not in ("new", "pending"):
                self._phases[at] = phase
                self.note(_change(run, at))

    def end(self, run: SweepRun) -> None:
        self._read_again(run)
        trainings = [run.trainings[at] for at in sorted(run.trainings)]
        metrics = self._metrics(trainings)
        for line in unused_rules(self._rules, metrics):
            self.note(line)
        if self._is_json:
            self._print_json(run, metrics)
            return
        print(self._table(trainings, metrics))
        for at in sorted(run.stopped):
            print(f"{run.trainings[at].display_name}: stopped early: {run.stopped[at]}")
        for line in failure_lines(run):
            print(line)
        self.note(self._last_line(run))

    def _last_line(self, run: SweepRun) -> str:
        not_started = len(run.jobs) - len(run.trainings)
        if not not_started:
            return self._head(run)
        counts = f"{len(run.trainings)} of {len(run.jobs)} over, {not_started} not started"
        return f"sweep {self._group}: {counts}: the same command continues"

    def _read_again(self, run: SweepRun) -> None:
        """Ranks send their last metrics and settings as they end: both are newest now."""
        from atoll.core.errors import AtollError
        from atoll.sdk import flows

        for at, training in run.trainings.items():
            with contextlib.suppress(AtollError):
                run.trainings[at] = self._client.run(flows.get(training.name))

    def _head(self, run: SweepRun) -> str:
        ended = sum(each.status.phase.is_terminal for each in run.trainings.values())
        waiting = len(run.jobs) - len(run.trainings)
        counts = f"{ended} of {len(run.jobs)} over, {len(run.running)} running, {waiting} waiting"
        return f"sweep {self._group}: {counts}"

    def _table(self, trainings: Sequence[Training], metrics: Any) -> str:
        from atoll.cli.output import experiment_table

        return experiment_table(trainings, metrics, has_settings=True)

    def _metrics(self, trainings: Sequence[Training]) -> Any:
        from atoll.cli.trainings import read_metrics
        from atoll.core.errors import AtollError

        with contextlib.suppress(AtollError):  # the table is shown without them
            return read_metrics(self._client, trainings)
        return {}

    def _print_json(self, run: SweepRun, metrics: Any) -> None:
        from atoll.cli.output import print_json, ps_json

        items = [
            {
                **ps_json(run.trainings[at], metrics.get(run.trainings[at].uid, {})),
                "stopped": run.stopped.get(at),
            }
            for at in sorted(run.trainings)
        ]
        waiting = [job.name for job in run.jobs if job.at not in run.trainings]
        print_json({"group": self._group, "items": items, "notStarted": waiting})


def _change(run: SweepRun, at: int) -> str:
    training = run.trainings[at]
    if training.status.phase is Phase.FAILED:
        return describe_end(training)
    if at in run.stopped:
        return f"{training.display_name} stopped early: {run.stopped[at]}"
    return f"{training.display_name} {training.status.phase.value}"


def unused_rules(
    rules: Sequence[StopRule], metrics: Mapping[str, Mapping[str, object]]
) -> list[str]:
    """A line for each rule whose metric no training has reported; `metrics` are by uid and name."""
    names = {name for each in metrics.values() for name in each}
    if not names:
        return []
    known = ", ".join(sorted(name for name in names if "/" not in name)) or "none"
    return [
        f"--stop-when {rule}: no training reported {rule.metric!r}; they reported {known}"
        for rule in rules
        if rule.metric not in names
    ]


def failure_lines(run: SweepRun) -> list[str]:
    """Why trainings failed, a line for all that failed alike."""
    alike: dict[str, list[str]] = {}
    for at in sorted(run.trainings):
        training = run.trainings[at]
        if training.status.phase is Phase.FAILED:
            end = describe_end(training).removeprefix(training.display_name)
            alike.setdefault(end, []).append(training.display_name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}{end}: "
        f"'atoll logs {names[0]}' has more"
        for end, names in alike.items()
    ]
