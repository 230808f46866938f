"""`atoll rounds` and `atoll estimate`: the outer rounds of a training, and the cost of one."""

from __future__ import annotations

import csv
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.options import json_option, name_argument
from atoll.core.errors import ValidationError

if TYPE_CHECKING:
    from atoll.sdk.columns import RoundTable


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
    from atoll.core.rank_ranges import limited_spans
    from atoll.core.rounds import describe_counts

    if table.summary is None:
        return f"{name} has had no outer round; they are those of atoll.diloco.DiLoCo"

    def ranks(column: str, at: int) -> str:
        return shorten(limited_spans(table[column][at], 8), 40) or "-"

    count = len(table["round"])
    is_cut = len({*table["fragment"]}) > 1
    rows = []
    for at in range(max(0, count - MAX_ROWS), count):
        number, fragment = table["round"][at], table["fragment"][at]
        out = sorted({*table["missing"][at], *table["blamed"][at]} - {*table["late"][at]})
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
    lines = [f"{table.summary.words} ({table.why})"]
    if table.summary.tokens:
        lines.append(f"{table.summary.tokens:.6g} tokens")
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
@_with_default("--sync-every", default=100, help="Number of inner steps in a round.")
@_with_default(
    "--codec",
    default="fp32",
    help="Codec of the gradients: fp32, bf16, int8, int5, int4, e3m0, int3 or sparse.",
)
@_with_default("--fragments", default=1, help="Number of model parts synchronised in turn.")
@_with_default("--overlap-steps", default=0, help="Number of inner steps done during a round.")
@_with_default("--latency-s", default=0.03, help="Seconds that one request to the store takes.")
@_with_default(
    "--prices",
    default="s3",
    help="Price list of the store: free, s3, s3-internet, s3-express or r2.",
)
@json_option
def estimate(parameters: str, is_json: bool, **settings: Any) -> None:
    """Estimate the bytes, seconds and dollars of a round."""
    from atoll.cli.output import print_json
    from atoll.diloco.estimate import estimate as estimate_round
    from atoll.diloco.estimate import table

    result = estimate_round(parameters=parse_count(parameters), **settings)
    print_json(result) if is_json else print(table(result))


def parse_count(text: str) -> int:
    """`7B`, `350M`, `1.3e9` as a whole number."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    try:
        return round(float(text[:-1]) * unit) if unit else round(float(text))
    except (ValueError, OverflowError):
        raise ValidationError("parameters", text, "expected a count: 1.3e9, 350M, 7B") from None
