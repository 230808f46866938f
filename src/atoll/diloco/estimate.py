"""The cost of a DiLoCo round, before it runs: bytes, requests, seconds, utilisation, dollars.

Every replica writes its pseudo-gradient, reads its share of the others', writes the mean of that
share, and reads the other means. Two replicas read each other's, and no mean is written.
"""

from __future__ import annotations

from typing import TypeVar

from atoll.core.checks import check_int, check_number
from atoll.core.errors import ValidationError
from atoll.core.model import Model
from atoll.diloco.codecs import CODECS, CodecRow
from atoll.diloco.periods import NO_WARMUP, RAMP, check_warmup, read_periods

T = TypeVar("T")


class Prices(Model, frozen=True):
    """Dollars for requests (LIST is billed as PUT) and for bytes in and out of the store."""

    put_1000: float = 0.0
    get_1000: float = 0.0
    up_gb: float = 0.0
    down_gb: float = 0.0


PRICES = {
    "free": Prices(),
    "s3": Prices(put_1000=0.005, get_1000=0.0004),  # within one region
    "s3-internet": Prices(put_1000=0.005, get_1000=0.0004, down_gb=0.09),
    "s3-express": Prices(put_1000=0.00113, get_1000=0.00003, up_gb=0.0032, down_gb=0.0006),
    "r2": Prices(put_1000=0.0045, get_1000=0.00036),
}


class Estimate(Model, frozen=True):
    """One outer round, in which every parameter is synchronised once. Bytes are per replica."""

    bytes_up: int
    bytes_down: int
    bits_per_parameter: float  # up and down together
    puts: int  # of all replicas, as all requests and dollars
    gets: int
    lists: int
    codec_s: float
    transfer_s: float
    latency_s: float
    round_s: float
    compute_s: float
    blocked_s: float
    utilisation: float
    dollars: float
    extra_rounds: float = 0.0  # of the warm-up, in the whole run, beside those of full periods
    extra_bytes: int = 0  # up and down, in the whole run

    @property
    def requests(self) -> int:
        return self.puts + self.gets + self.lists


# Waits on the store that follow one another in a round: upload, list, manifest, the others' shares,
# the mean's share, the other shares.
TRIPS = 6


def estimate(
    *,
    parameters: int,
    replicas: int,
    sync_every: int | str,
    step_s: float,
    link_gbps: float,
    codec: str = "fp32",
    warmup: str = NO_WARMUP,
    fragments: int = 1,
    overlap_steps: int = 0,
    latency_s: float = 0.03,
    prices: Prices | str = "s3",
) -> Estimate:
    """The cost of one round. Raises ValidationError naming the argument that does not fit.

    Each replica has a link of its own, used one way at a time; the store is assumed to be faster.
    """
    check_int("parameters", parameters, 1, 10**15)
    check_int("replicas", replicas, 1, 10**6)
    check_number("step_s", step_s, 1e-9, 1e9)
    periods = read_periods(sync_every)
    check_warmup(warmup)
    steps = max(1, round(periods.clock_s / step_s)) if periods.clock_s else periods.every[0][1]
    check_int("fragments", fragments, 1, steps)
    if steps % fragments and not periods.clock_s:
        raise ValidationError("sync_every", steps, f"expected a multiple of {fragments}")
    check_int("overlap_steps", overlap_steps, 0, steps // fragments - 1)
    periods = periods._replace(fragments=fragments)
    extra = 0.0
    if warmup == RAMP and replicas > 1:
        extra = periods._replace(ramp=periods.full_ramp).extra_rounds(steps)
    check_number("link_gbps", link_gbps, 1e-6, 1e6)
    check_number("latency_s", latency_s, 0, 3600)
    row = _choose("codec", codec, CODECS)
    price = _choose("prices", prices, PRICES) if isinstance(prices, str) else prices
    alone = replicas == 1
    means = CODECS[row.mean_codec or codec]
    size, mean_size = (0.0 if alone else parameters * each.bits / 8 for each in (row, means))
    up, down = size, size
    if replicas > 2:
        up += mean_size / replicas
        down = (size + mean_size) * (replicas - 1) / replicas
    puts, gets, lists = (0, 0, 0) if alone else _requests(replicas, fragments)
    codec_s = 0.0 if alone else _codec_seconds(parameters, replicas, row)
    transfer_s = (up + down) * 8 / (link_gbps * 1e9)
    waits_s = 0.0 if alone else TRIPS * latency_s * fragments
    round_s = codec_s + transfer_s + waits_s
    blocked_s = max(0.0, round_s - overlap_steps * step_s * fragments)
    compute_s = steps * step_s
    moved_gb = replicas * up / 1e9, replicas * down / 1e9
    return Estimate(
        bytes_up=round(up),
        bytes_down=round(down),
        bits_per_parameter=(up + down) * 8 / parameters,
        puts=puts,
        gets=gets,
        lists=lists,
        codec_s=codec_s,
        transfer_s=transfer_s,
        latency_s=waits_s,
        round_s=round_s,
        compute_s=compute_s,
        blocked_s=blocked_s,
        utilisation=compute_s / (compute_s + blocked_s),
        dollars=(
            (puts + lists) * price.put_1000 / 1000
            + gets * price.get_1000 / 1000
            + moved_gb[0] * price.up_gb
            + moved_gb[1] * price.down_gb
        ),
        extra_rounds=extra,
        extra_bytes=round(extra * (up + down)),
    )


def table(result: Estimate) -> str:
    """The estimate as lines of text for a terminal."""
    rows = [
        ("bytes up, each replica", _bytes(result.bytes_up)),
        ("bytes down, each replica", _bytes(result.bytes_down)),
        ("bits per parameter, both ways", f"{result.bits_per_parameter:.2f}"),
        (
            "requests, all replicas",
            f"{result.requests} ({result.puts} PUT, {result.gets} GET, {result.lists} LIST)",
        ),
        ("encoding and decoding", _seconds(result.codec_s)),
        ("transfer", _seconds(result.transfer_s)),
        ("store latency", _seconds(result.latency_s)),
        ("round", _seconds(result.round_s)),
        ("of it not hidden", _seconds(result.blocked_s)),
        ("compute between rounds", _seconds(result.compute_s)),
        ("compute utilisation", f"{result.utilisation:.1%}"),
        ("store, a round", f"${result.dollars:.6f}"),
    ]
    if result.extra_rounds:
        rows += [
            ("rounds more, by the warm-up", f"{result.extra_rounds:.1f} in the whole run"),
            ("bytes more, each replica", f"{_bytes(result.extra_bytes)} in the whole run"),
        ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _requests(replicas: int, fragments: int) -> tuple[int, int, int]:
    puts = 2 * replicas + 1
    # The shares, and requests for what is not there yet: measured, about five for each replica.
    gets = 2 * replicas * (replicas - 1) + 5 * replicas
    return fragments * puts, fragments * gets, fragments * replicas


def _codec_seconds(parameters: int, replicas: int, row: CodecRow) -> float:
    """A replica encodes all values and the mean of its share, and decodes all values twice."""
    megabytes = parameters * 4 / 1e6
    encoded = megabytes * (1 + 1 / replicas)
    return encoded / row.encode_mb_s + 2 * megabytes / row.decode_mb_s


def _choose(field: str, name: str, among: dict[str, T]) -> T:
    if name not in among:
        raise ValidationError(field, name, "expected " + " or ".join(map(repr, among)))
    return among[name]


def _bytes(amount: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.4g} {unit}"
        amount /= 1000
    return f"{amount:.4g} TB"


def _seconds(amount: float) -> str:
    return f"{amount:.3g} s"
