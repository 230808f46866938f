"""`atoll series` and `atoll plot`: what ranks reported, as a table and as a curve."""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from atoll.cli.options import json_option, name_argument

if TYPE_CHECKING:
    from atoll.cli.plot import Curve
    from atoll.sdk.columns import MetricTable

AXES = ("step", "time")


@click.command()
@name_argument
@click.argument("series", nargs=-1)
@click.option("--rank", type=click.IntRange(min=0), help="Print this rank only.")
@click.option("--csv", "is_csv", is_flag=True, help="Print every row as CSV.")
@json_option
def series(
    name: str, series: tuple[str, ...], rank: int | None, is_csv: bool, is_json: bool
) -> None:
    """Print what the ranks of a training reported (atoll.report).

    Without names of SERIES, all of them. As text: one line for each name, with its last values.
    """
    from atoll.cli.show import print_json
    from atoll.sdk.client import Client

    table = Client().get(name).metrics(series or None, rank=rank)
    if is_json:
        print_json(dict(table))
    elif is_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    else:
        print(_overview(table))


def _overview(table: MetricTable) -> str:
    from atoll.cli.show import table as aligned
    from atoll.core.escape import escape_control

    rows = []
    names = list(dict.fromkeys(table["name"]))
    for name in names:
        places = [at for at, each in enumerate(table["name"]) if each == name]
        ranks = {table["rank"][at] for at in places}
        last = max(places, key=lambda at: table["at"][at])
        low = min(table["min"][at] for at in places)
        high = max(table["max"][at] for at in places)
        points = sum(table["count"][at] for at in places)
        step = table["step"][last]
        rows.append(
            [
                escape_control(name),
                f"{table['value'][last]:.6g}",
                "-" if step is None else str(step),
                f"{low:.6g}",
                f"{high:.6g}",
                str(len(ranks)),
                str(points),
            ]
        )
    if not rows:
        return "nothing reported yet: call atoll.report(step=…, loss=…) in the ranks"
    shown = aligned(["NAME", "LAST", "STEP", "MIN", "MAX", "RANKS", "POINTS"], rows)
    if table.skipped:
        shown += f"\n{table.skipped} more figures were told and not kept"
    if table.missed:
        shown += f"\n{table.missed} batches of figures were lost before they were kept"
    return shown


@click.command()
@name_argument
@click.argument("series")
@click.option("--rank", type=click.IntRange(min=0), multiple=True, help="Draw these ranks only.")
@click.option(
    "--x",
    "axis",
    type=click.Choice(AXES),
    default="step",
    help="What is to the right.",
    show_default=True,
)
@click.option(
    "--svg", "svg_path", type=click.Path(dir_okay=False, path_type=Path), help="Write an SVG file."
)
def plot(name: str, series: str, rank: tuple[int, ...], axis: str, svg_path: Path | None) -> None:
    """Draw what the ranks reported as SERIES, such as loss, in the terminal or as SVG."""
    from atoll.cli.plot import draw, svg
    from atoll.core.escape import escape_control
    from atoll.sdk.client import Client

    table = Client().get(name).metrics([series])
    curves = curves_of(table, axis, rank)
    if not curves:
        raise click.ClickException(
            f"{name} has reported no {escape_control(series)!r}: "
            f"'atoll series {name}' lists what there is"
        )
    title = f"{escape_control(series)} of {name}"
    if svg_path is not None:
        svg_path.write_text(svg(curves, title, axis, (960, 540)))
        print(svg_path)
        return
    size = shutil.get_terminal_size((100, 24))
    print(title)
    print(draw(curves, size.columns, min(size.lines - 3, 24), axis))


def curves_of(table: MetricTable, axis: str, ranks: tuple[int, ...] = ()) -> list[Curve]:
    """One curve for each rank; the time is in seconds since the first point."""
    from atoll.cli.plot import Curve

    start = min(table["at"], default=0.0)
    by_rank: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    rows = zip(
        table["rank"], table["process"], table["step"], table["at"], table["value"], strict=True
    )
    for rank, process, step, at, value in rows:
        if ranks and rank not in ranks:
            continue
        x = at - start if axis == "time" else step
        if x is not None:
            xs, ys = by_rank.setdefault((rank, process), ([], []))
            xs.append(x)
            ys.append(value)
    return [
        Curve(f"rank {rank}" if not process else f"rank {rank}.{process}", xs, ys)
        for (rank, process), (xs, ys) in sorted(by_rank.items())
    ]
