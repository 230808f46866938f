"""`atoll metrics`, `atoll rounds` and `atoll estimate`: tables, CSV and curves."""

from __future__ import annotations

import csv
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.options import json_option, name_argument, since_option
from atoll.core.errors import ValidationError
from atoll.diloco.codecs import CODECS

if TYPE_CHECKING:
    from atoll.core.chart import Curve
    from atoll.sdk.training import MetricTable, RoundTable

AXES = ("step", "time")
MAX_LINES = 24  # a higher curve shows no more: a Braille cell has four rows


@click.command()
@name_argument
@click.argument("metrics", metavar="[METRIC]...", nargs=-1)
@click.option(
    "--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Print these ranks only."
)
@since_option("metrics")
@click.option("--csv", "is_csv", is_flag=True, help="Print every row as CSV.")
@click.option("--plot", "is_plotted", is_flag=True, help="Plot one METRIC.")
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Plot one METRIC to this file.",
)
@click.option(
    "--x",
    "axis",
    type=click.Choice(AXES),
    default="step",
    help="Horizontal axis of the plot.",
    show_default=True,
)
@json_option
def metrics(
    name: str,
    metrics: tuple[str, ...],
    ranks: tuple[int, ...],
    since: str | None,
    is_csv: bool,
    is_plotted: bool,
    svg: Path | None,
    axis: str,
    is_json: bool,
) -> None:
    """Print or plot the metrics of a training.

    Ranks report them with atoll.report. Without a METRIC, all of them; as text one line for each,
    with its newest value.
    """
    from atoll.cli.output import print_json, print_note
    from atoll.cli.trainings import check_svg, parse_time
    from atoll.core.metrics import check_names
    from atoll.sdk.client import Client
    from atoll.sdk.training import check_rank

    is_curve = is_plotted or svg is not None
    if is_curve + is_csv + is_json > 1:
        raise click.UsageError("expected one of --csv, --json and --plot")
    if is_curve and len(metrics) != 1:
        raise click.UsageError("--plot and --svg: expected one METRIC, such as loss")
    check_svg(svg)
    after = None if since is None else parse_time(since, time.time())
    training = Client().get(name)
    for rank in ranks:
        check_rank(training.last, rank, "--rank")
    table = training.metrics(metrics or None, after)
    is_unknown = False
    if not {*metrics} <= {*table["name"]}:  # an ended training is an error of the server's
        try:
            check_names(name, metrics, training.metrics()["name"])
        except ValidationError as error:
            is_unknown = True
            print_note(f"{error}; it runs, and may report it later")
    if ranks:
        table = select_ranks(table, ranks)
    if is_curve:
        _draw(name, metrics[0], table, axis, svg)
    elif is_json:
        print_json(dict(table))
    elif is_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    elif table["name"] or not is_unknown:
        print(_overview(table))


def select_ranks(table: MetricTable, ranks: Sequence[int]) -> MetricTable:
    rows = [row for row, rank in enumerate(table["rank"]) if rank in ranks]
    for name, column in table.items():
        table[name] = [column[row] for row in rows]
    return table


def _overview(table: MetricTable) -> str:
    from atoll.cli.output import table as format_table
    from atoll.core.text import escape_control

    lines = []
    for name in dict.fromkeys(table["name"]):
        rows = [row for row, each in enumerate(table["name"]) if each == name]
        newest = max(rows, key=lambda row: table["at"][row])
        step = table["step"][newest]
        lines.append(
            [
                escape_control(name),
                f"{table['value'][newest]:.6g}",
                "-" if step is None else str(step),
                f"{min(_finite(table['min'], rows), default=nan):.6g}",
                f"{max(_finite(table['max'], rows), default=nan):.6g}",
                str(len({table["rank"][row] for row in rows})),
                str(sum(table["count"][row] for row in rows)),
            ]
        )
    if not lines:
        return "nothing reported yet: call atoll.report(step=…, loss=…) in the ranks"
    text = format_table(["NAME", "LAST", "STEP", "MIN", "MAX", "RANKS", "POINTS"], lines)
    if table.skipped:
        text += f"\n{table.skipped} more metrics were reported and not stored: there are too many"
    if table.missed:
        text += f"\n{table.missed} batches of metrics were lost before they were stored"
    return text


def _finite(column: Sequence[float], rows: Sequence[int]) -> list[float]:
    """One NaN would be the lowest and the highest value of all."""
    return [column[row] for row in rows if isfinite(column[row])]


def _draw(name: str, metric: str, table: MetricTable, axis: str, path: Path | None) -> None:
    from atoll.core.chart import draw, draw_svg
    from atoll.core.text import escape_control

    curves = curves_of(table, axis)
    if not curves:
        expected = f"{name} has not reported it: 'atoll metrics {name}' lists what it has"
        raise ValidationError("metric", metric, expected)
    title = f"{escape_control(metric)} of {name}"
    if path is not None:
        path.write_text(draw_svg(curves, title, axis))
        print(path)
        return
    size = shutil.get_terminal_size((100, 24))
    print(title)
    print(draw(curves, size.columns, min(size.lines - 3, MAX_LINES), axis))


def curves_of(table: MetricTable, axis: str) -> list[Curve]:
    """One curve for each rank; the time is in seconds since the first point."""
    from atoll.core.chart import Curve

    start = min(table["at"], default=0.0)
    by_rank: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    rows = zip(
        table["rank"], table["process"], table["step"], table["at"], table["value"], strict=True
    )
    for rank, process, step, at, value in rows:
        x = at - start if axis == "time" else step
        if x is not None:
            xs, ys = by_rank.setdefault((rank, process), ([], []))
            xs.append(x)
            ys.append(value)
    return [
        Curve(f"rank {rank}" if not process else f"rank {rank}.{process}", xs, ys)
        for (rank, process), (xs, ys) in sorted(by_rank.items())
    ]


MAX_ROWS = 40  # the newest rounds, as many as fit a tall terminal
HEADER = ("ROUND", "TIME", "IN", "MISSING", "LATE", "JOINED", "LEFT", "UP", "DOWN", "HIDDEN",
          "BLOCKED", "BITS", "TOKENS")  # fmt: skip


@click.command()
@name_argument
@click.option("--csv", "is_csv", is_flag=True, help="Print every round as CSV.")
@json_option
def rounds(name: str, is_csv: bool, is_json: bool) -> None:
    """Print the outer rounds of a DiLoCo training.

    Each row has the members of a round and what it cost; as text only the newest rounds. UP and
    DOWN are the bytes of all replicas, HIDDEN and BLOCKED the seconds of the slowest, BITS the bits
    sent per parameter in both directions. Unknown values are dashes.
    """
    from atoll.cli.output import print_json
    from atoll.sdk.client import Client

    table = Client().get(name).rounds()
    if is_json:
        columns = {**table, "summary": table.summary, "why": table.why, "dropped": table.dropped}
        print_json(columns)
    elif is_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(table)
        writer.writerows([*map(_plain, row)] for row in zip(*table.values(), strict=True))
    else:
        print(as_text(name, table))


def as_text(name: str, table: RoundTable) -> str:
    from atoll.cli.output import format_time, shorten
    from atoll.cli.output import table as aligned
    from atoll.core.rounds import describe_counts
    from atoll.core.text import limited_spans

    if table.summary is None:
        return f"{name} has no outer rounds: DiLoCo makes the first one after its first period"

    def ranks(column: str, at: int) -> str:
        return shorten(limited_spans(table[column][at], 8), 40) or "-"

    count = len(table["round"])
    is_cut = len({*table["fragment"]}) > 1
    rows = []
    for at in range(max(0, count - MAX_ROWS), count):
        number, fragment = table["round"][at], table["fragment"][at]
        out = sorted({*table["missing"][at], *table["rejected"][at]} - {*table["late"][at]})
        when, error = table["at"][at], table["error"][at]
        rows.append(
            [
                f"{number}.{fragment}" if is_cut else str(number),
                "-" if when is None else format_time(when),
                ranks("members", at) if table["members"][at] else f"void: {shorten(error, 60)}",
                shorten(limited_spans(out, 8), 40) or "-",
                ranks("late", at),
                ranks("joined", at),
                ranks("left", at),
                _size(table["bytes_up"][at]),
                _size(table["bytes_down"][at]),
                _short_number(table["hidden_s"][at], "s"),
                _short_number(table["blocked_s"][at], "s"),
                _short_number(table["bits_per_parameter"][at]),
                _short_number(table["tokens"][at] or None),
            ]
        )
    lines = [f"{table.summary.message} ({table.why})"]
    lines += [each.message for each in table.summary.slow]
    if table.summary.tokens:
        lines.append(f"{table.summary.tokens:.6g} tokens")
    if table.summary.ranks:
        counts = {each.rank: each.rounds for each in table.summary.ranks}
        lines.append(f"rounds that each rank took part in: {describe_counts(counts)}")
    return "\n".join([*lines, aligned(HEADER, rows)])


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    value, units = float(size), "BkMGT"
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g}{units[0] if units[0] != 'B' else ' B'}"


def _short_number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.3g}{unit}"


def _plain(cell: Any) -> Any:
    """Lists as their items with spaces between."""
    return " ".join(map(str, cell)) if isinstance(cell, list) else cell


_with_default = partial(click.option, show_default=True)


@click.command()
@click.option(
    "--parameters", required=True, help="Number of parameters of the model: 1.3e9, 350M, 7B."
)
@click.option("--step-s", type=float, required=True, help="Seconds that one inner step takes.")
@click.option(
    "--link-gbps", type=float, required=True, help="Bandwidth of each replica's link in Gbit/s."
)
@_with_default("--replicas", "-n", default=4, help="Number of replicas.")
@_with_default(
    "--sync-every", default="100", help="Number of inner steps in a round, or seconds as 60s."
)
@_with_default("--warmup", default="ramp", help="Warm-up of the periods: ramp or none.")
@_with_default(
    "--codec",
    default="fp32",
    help=f"Codec of the gradients: {' or '.join(', '.join(CODECS).rsplit(', ', 1))}.",
)
@_with_default(
    "--fragments", default=1, help="Number of fragments of the model that synchronise in turn."
)
@_with_default(
    "--overlap-steps", default=0, help="Number of inner steps during the transfer of a round."
)
@_with_default("--latency-s", default=0.03, help="Latency of a request to the store in seconds.")
@_with_default(
    "--prices",
    default="s3",
    help="Price list of the store: free, s3, s3-internet, s3-express or r2.",
)
@json_option
def estimate(parameters: str, sync_every: str, is_json: bool, **settings: Any) -> None:
    """Estimate the bytes, seconds and dollars of a round."""
    from atoll.cli.output import print_json
    from atoll.diloco.estimate import estimate as estimate_round
    from atoll.diloco.estimate import table

    every = int(sync_every) if sync_every.isdigit() else sync_every
    result = estimate_round(parameters=parse_count(parameters), sync_every=every, **settings)
    print_json(result) if is_json else print(table(result))


def parse_count(text: str) -> int:
    """`7B`, `350M`, `1.3e9` as a whole number."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    try:
        return round(float(text[:-1]) * unit) if unit else round(float(text))
    except (ValueError, OverflowError):
        raise ValidationError("parameters", text, "expected a count: 1.3e9, 350M, 7B") from None
