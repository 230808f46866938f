"""`atoll top`: what runs, with CPU, memory, round and loss, on a screen of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.options import Duration, json_option
from atoll.core.executors import LOCAL
from atoll.core.text import format_bytes

if TYPE_CHECKING:
    from atoll.core.executors import ResourceUse
    from atoll.core.metrics import LatestMetric, MetricValue
    from atoll.core.status import Training
    from atoll.sdk.client import Client

LOSS, CPU, MEMORY = "loss", "machine/cpu", "machine/memory"
HEADER = ("NAME", "PHASE", "READY", "RAN", "ROUND", "CPU", "MEMORY", "LOSS", "", "COMMAND")
RANKS = ("RANK", "PHASE", "HOST", "RESTARTS", "RAN", "CPU", "MEMORY", "MESSAGE")
RESOURCES_EVERY_S = 5.0  # all executors are probed for it
ACTIVE_READ = 20  # trainings that are read one by one, for their rounds
MAX_ENDED = 10  # the newest: the screen is for what runs
BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
SPARK = 12  # columns of the curve


@click.command()
@click.option(
    "--interval",
    type=Duration(0.05, 3600),
    default="1s",
    help="Time between two refreshes.",
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
    """Show all trainings and their ranks, live.

    q or Ctrl-C quits.
    """
    from atoll.cli.output import print_json
    from atoll.cli.terminal import can_redraw, keyboard, screen
    from atoll.sdk.client import Client

    is_screen = can_redraw(sys.stdout) and not is_json and count != 1
    left: float = inf if is_screen else 1
    left = left if count is None else count
    snapshot = Snapshot(Client())
    if not is_screen:
        while left > 0:
            snapshot.read()
            print_json(snapshot.json()) if is_json else print(snapshot.text(), flush=True)
            left -= 1
            if left > 0:
                time.sleep(interval)
        return
    with keyboard() as is_left, screen() as draw:
        while left > 0:
            snapshot.read()
            draw(snapshot.text(hint="q quits"))
            left -= 1
            if left > 0 and is_left(interval):
                return


class Snapshot:
    """What was read last. Trainings that are over are read again only when one more is."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.alive: list[Training] = []
        self.over: list[Training] | None = None
        self.metrics: dict[tuple[str, str], LatestMetric] = {}  # by uid and name
        self.resources: Sequence[ResourceUse] = ()  # of this machine
        self._resources_at = -inf

    def read(self) -> None:
        from atoll.core.errors import AtollError
        from atoll.sdk import flows

        if time.monotonic() - self._resources_at > RESOURCES_EVERY_S:
            self._resources_at = time.monotonic()
            items = self._client.run(flows.executors()).items
            self.resources = next((e.resources for e in items if e.name == LOCAL), ())
        before = {training.uid for training in self.alive}
        if self.over is None:
            self._split(self._client.run(flows.list_all()))
        else:
            active = [t for p in ("pending", "ready") for t in self._client.run(flows.list_all(p))]
            if before - {training.uid for training in active}:
                self._split(self._client.run(flows.list_all()))
            else:
                self.alive = _newest_first(active)
        self.alive[:ACTIVE_READ] = [self._with_rounds(each) for each in self.alive[:ACTIVE_READ]]
        running = [training.name for training in self.alive[:ACTIVE_READ]]
        ended = [training.name for training in (self.over or [])[:MAX_ENDED]]
        self.metrics = {}
        try:
            for names, has_ranks in ((running, True), (ended, False)):
                if names:
                    flow = flows.newest_metrics((LOSS, CPU, MEMORY), names, ranks=has_ranks)
                    for metric in self._client.run(flow).items:
                        self.metrics[metric.uid, metric.name] = metric
        except AtollError:
            self.metrics = {}  # the trainings are shown all the same

    def _split(self, trainings: Sequence[Training]) -> None:
        self.alive = _newest_first([t for t in trainings if not t.status.phase.is_terminal])
        self.over = _newest_first([t for t in trainings if t.status.phase.is_terminal])

    def _with_rounds(self, training: Training) -> Training:
        """With its rounds."""
        from atoll.core.errors import NotFound
        from atoll.sdk import flows

        try:
            return self._client.run(flows.get(training.name))
        except NotFound:
            return training

    def json(self) -> list[dict[str, Any]]:
        from atoll.cli.output import full, training_json

        out = []
        for training in (*self.alive, *(self.over or [])):
            own = [metric for (uid, _), metric in self.metrics.items() if uid == training.uid]
            metrics = {metric.name: full(metric) for metric in own}
            out.append({**training_json(training), "metrics": metrics, "round": round_of(training)})
        return out

    def text(self, hint: str = "") -> str:
        """Active trainings first, then those that are over; the ranks of the active ones below."""
        from atoll.cli import output

        now, over = time.time(), self.over or []
        running = sum(rank.phase == "Running" for t in self.alive for rank in t.status.ranks)
        counts = f"{len(self.alive)} active, {running} ranks running, {len(over)} over"
        head = f"{time.strftime('%H:%M:%S')}  {counts}" + (f"  {hint}" if hint else "")
        rows = [self._row(training, now) for training in self.alive + over[:MAX_ENDED]]
        if self.resources:
            head += f"\nadmitted: {self._resources_text()}"
        parts = [head, output.table(HEADER, rows)]
        parts += [
            f"{training.display_name}\n{self._ranks(training, now)}"
            for training in self.alive
            if training.status.ranks
        ]
        return "\n\n".join(parts)

    def _resources_text(self) -> str:
        """`1 of 2 cpu, 1 GiB of 4 GiB memory`: counted when ranks start, not measured."""
        return ", ".join(
            f"{use.text(use.used)} of {use.text(use.total)} {use.name}" for use in self.resources
        )

    def _row(self, training: Training, now: float) -> tuple[str, ...]:
        from atoll.cli import output

        loss = self.metrics.get((training.uid, LOSS))
        is_over = training.status.phase.is_terminal
        number = round_of(training)
        return (
            output.name_cell(training),
            output.phase_cell(training),
            output.ready_cell(training),
            output.ran_cell(training, now),
            "-" if number is None else str(number),
            "-" if is_over else cores(_sum(self.metrics.get((training.uid, CPU)))),
            "-" if is_over else size(_sum(self.metrics.get((training.uid, MEMORY)))),
            "-" if loss is None else f"{float(loss.value):.4g}",
            "" if loss is None else spark(loss.spark, bars()),
            output.shorten(output.command_cell(training), 40),
        )

    def _ranks(self, training: Training, now: float) -> str:
        from atoll.cli import output
        from atoll.cli.output import alive_for

        use = {n: _of_ranks(self.metrics.get((training.uid, n))) for n in (CPU, MEMORY)}
        rows = [
            (
                str(rank.rank),
                rank.phase,
                rank.node or "-",
                str(rank.restarts),
                alive_for(rank, now),
                cores(use[CPU].get(rank.rank)) if rank.is_alive else "-",
                size(use[MEMORY].get(rank.rank)) if rank.is_alive else "-",
                rank.message,
            )
            for rank in training.status.ranks
        ]
        return output.table(RANKS, rows)


def _newest_first(trainings: Sequence[Training]) -> list[Training]:
    return sorted(trainings, key=lambda training: training.created_at, reverse=True)


def round_of(training: Training) -> int | None:
    """How many outer rounds are committed; None where there are none."""
    summary = getattr(training, "rounds", None)
    return None if summary is None else int(summary.rounds)


def _of_ranks(metric: LatestMetric | None) -> Mapping[int, float]:
    if metric is None:
        return {}
    return {int(rank): float(value) for rank, value in metric.ranks.items()}


def _sum(metric: LatestMetric | None) -> float | None:
    each = _of_ranks(metric)
    return sum(each.values()) if each else None


def cores(value: float | None) -> str:
    """`85%`, `750%`: of one core."""
    return "-" if value is None or not isfinite(value) else f"{value * 100:.0f}%"


def size(value: float | None) -> str:
    """`812M`, `19.6G`."""
    if value is None or not isfinite(value):
        return "-"
    return format_bytes(value).replace(" ", "").removesuffix("iB")


def bars() -> str:
    """What stdout can write."""
    try:
        BARS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_BARS
    return BARS


def spark(values: Sequence[MetricValue], bars: str = BARS, width: int = SPARK) -> str:
    """A curve of one line. What is not finite is a gap."""
    numbers = [v if isinstance(v, int | float) and isfinite(v) else None for v in values]
    if len(numbers) > width:
        numbers = [numbers[at * (len(numbers) - 1) // (width - 1)] for at in range(width)]
    known = [number for number in numbers if number is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    last = len(bars) - 1

    def bar(number: float | None) -> str:
        if number is None:
            return " "
        return bars[round((number - low) / span * last) if span and isfinite(span) else 0]

    return "".join(map(bar, numbers))
