"""`atoll rounds`: the outer rounds of a training."""

from __future__ import annotations

import csv
import sys
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.options import json_option, name_argument

if TYPE_CHECKING:
    from atoll.sdk.columns import RoundTable

SHOWN = 40  # rounds, as text
HEADER = ("ROUND", "TIME", "IN", "MISSING", "LATE", "JOINED", "LEFT", "UP", "DOWN", "HIDDEN",
          "BLOCKED", "BITS", "TOKENS")  # fmt: skip


@click.command()
@name_argument
@click.option("--csv", "is_csv", is_flag=True, help="Print every round as CSV.")
@json_option
def rounds(name: str, is_csv: bool, is_json: bool) -> None:
    """Print the outer rounds of a DiLoCo training: who was in each, and what it cost.

    As text: the newest rounds. UP and DOWN are bytes of all replicas, HIDDEN and BLOCKED seconds
    of the slowest, BITS those a parameter, both ways. What is unknown is a dash.
    """
    from atoll.cli.show import print_json
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
    from atoll.cli.show import clock, shortened
    from atoll.cli.show import table as aligned
    from atoll.core.rank_ranges import limited_spans
    from atoll.core.rounds import describe_counts

    if table.summary is None:
        return f"{name} has had no outer round; they are those of atoll.diloco.DiLoCo"

    def ranks(column: str, at: int) -> str:
        return shortened(limited_spans(table[column][at], 8), 40) or "-"

    count = len(table["round"])
    is_cut = len({*table["fragment"]}) > 1
    rows = []
    for at in range(max(0, count - SHOWN), count):
        number, fragment = table["round"][at], table["fragment"][at]
        out = sorted({*table["missing"][at], *table["blamed"][at]} - {*table["late"][at]})
        when, error = table["at"][at], table["error"][at]
        rows.append(
            [
                f"{number}.{fragment}" if is_cut else str(number),
                "-" if when is None else clock(when),
                ranks("members", at) if table["members"][at] else f"void: {shortened(error, 60)}",
                shortened(limited_spans(out, 8), 40) or "-",
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
    lines = [f"{table.summary.words} ({table.why})"]
    if table.summary.tokens:
        lines.append(f"{table.summary.tokens:.6g} tokens seen")
    if table.summary.ranks:
        counts = {each.rank: each.rounds for each in table.summary.ranks}
        lines.append(f"rounds taken part in: {describe_counts(counts)}")
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
