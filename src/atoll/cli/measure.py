"""`bench` and `estimate`: the measured link of a training, and the cost of a DiLoCo round."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from atoll.cli.options import json_option, name_argument
from atoll.core.errors import ValidationError
from atoll.core.escape import escape_control

_with_default = partial(click.option, show_default=True)


@click.command()
@name_argument
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the result to this .svg file as well.",
)
@json_option
def bench(name: str, plot: Path | None, is_json: bool) -> None:
    """Show the link between two hosts of a training."""
    from atoll.bench.plot import plot_svg, plot_text
    from atoll.cli.show import print_json
    from atoll.sdk.client import Client

    if plot is not None and plot.suffix.lower() != ".svg":
        raise ValidationError("--plot", str(plot), "expected a file name that ends in .svg")
    diagnostics = Client().get(name).bench_diagnostics
    message = escape_control(diagnostics.message or diagnostics.phase)
    if plot is not None and diagnostics.result is not None:
        plot.write_text(plot_svg(diagnostics.result.points, f"{name}: {diagnostics.message}"))
    if is_json:
        print_json(diagnostics)
        return
    result = diagnostics.result
    if result is None:
        print(f"{name}: no result: {message}")
        return
    print(f"{name}: {message}")
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
    from atoll.cli.show import print_json
    from atoll.diloco.estimate import estimate as estimated
    from atoll.diloco.estimate import table

    result = estimated(parameters=count(parameters), **settings)
    print_json(result) if is_json else print(table(result))


def count(text: str) -> int:
    """`7B`, `350M`, `1.3e9` as a whole number."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    try:
        return round(float(text[:-1]) * unit) if unit else round(float(text))
    except (ValueError, OverflowError):
        raise ValidationError("parameters", text, "expected a count: 1.3e9, 350M, 7B") from None
