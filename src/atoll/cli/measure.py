"""`bench` and `estimate`: links as measured, rounds as they will cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from atoll.cli.options import json_option, name_argument
from atoll.core.errors import ValidationError


@click.command()
@name_argument
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw it, to this .svg file.",
)
@json_option
def bench(name: str, plot: Path | None, is_json: bool) -> None:
    """Show the link between two hosts that a training measured."""
    from atoll.bench.plot import plot_svg, plot_text
    from atoll.cli.show import print_json
    from atoll.sdk.client import Client

    if plot is not None and plot.suffix.lower() != ".svg":
        raise ValidationError("--plot", str(plot), "expected a file name that ends in .svg")
    told = Client().get(name).bench_diagnostics
    if plot is not None and told.result is not None:
        plot.write_text(plot_svg(told.result.points, f"{name}: {told.message}"))
    if is_json:
        print_json(told)
        return
    result = told.result
    if result is None:
        print(f"{name}: no result: {told.message or told.phase}")
        return
    print(f"{name}: {told.message}")
    rows = {
        "bus bandwidth, p10": (result.busbw_gbps_p10, "Gbit/s"),
        "bus bandwidth, p50": (result.busbw_gbps_p50, "Gbit/s"),
        "bus bandwidth, p90": (result.busbw_gbps_p90, "Gbit/s"),
        "algorithm bandwidth, p50": (result.algbw_gbps_p50, "Gbit/s"),
        "latency at 1 MiB": (result.latency_us_at_1mib, "us"),
    }
    for what, (value, unit) in rows.items():
        print(f"  {what:<26}{'not measured' if value is None else f'{value:.3g} {unit}'}")
    print(plot_text(result.points), end="")


@click.command()
@click.option("--parameters", required=True, help="Of the model: 1.3e9, 350M, 7B.")
@click.option("--step-s", type=float, required=True, help="Seconds of one inner step.")
@click.option("--link-gbps", type=float, required=True, help="Each replica's link, Gbit/s.")
@click.option("--replicas", "-n", type=int, default=4, help="Replicas; 4 if not given.")
@click.option("--sync-every", type=int, default=100, help="Inner steps of a round; 100.")
@click.option("--codec", default="fp32", help="fp32, bf16, int8, int5, int4, e3m0, int3, sparse.")
@click.option("--fragments", type=int, default=1, help="Parts synchronised in turn; 1.")
@click.option("--overlap-steps", type=int, default=0, help="Steps done during a round; 0.")
@click.option("--latency-s", type=float, default=0.03, help="Of one request; 0.03.")
@click.option("--prices", default="s3", help="free, s3, s3-internet, s3-express, r2.")
@json_option
def estimate(parameters: str, is_json: bool, **given: Any) -> None:
    """Say what a DiLoCo round costs in bytes, seconds and dollars."""
    from atoll.cli.show import print_json
    from atoll.diloco.estimate import estimate as estimated
    from atoll.diloco.estimate import table

    result = estimated(parameters=count(parameters), **given)
    print_json(result) if is_json else print(table(result))


def count(text: str) -> int:
    """`7B`, `350M`, `1.3e9` as a whole number."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    try:
        return round(float(text[:-1]) * unit) if unit else round(float(text))
    except (ValueError, OverflowError):
        raise ValidationError("parameters", text, "expected a count: 1.3e9, 350M, 7B") from None
