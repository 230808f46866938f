from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll import ObjectStoreAllReduce
from atoll.core.errors import ValidationError
from atoll.diloco.codecs import CODECS
from atoll.diloco.estimate import Estimate, Prices, estimate, table


def example(**changes: object) -> Estimate:
    given = {
        "parameters": 10**9,
        "replicas": 16,
        "sync_every": 100,
        "step_s": 1.0,
        "link_gbps": 1.0,
        "latency_s": 0.0,
    }
    return estimate(**(given | changes))  # type: ignore[arg-type]


def test_an_upload_is_whole_and_a_mean_is_a_share() -> None:
    result = example(codec="fp32")
    assert result.bytes_up == (1 + 1 / 16) * 4 * 10**9
    assert result.bytes_down == 2 * 15 / 16 * 4 * 10**9
    assert result.bits_per_parameter == pytest.approx(94)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_a_round_moves_the_bytes_of_the_estimate(replicas: int, tmp_path: Path) -> None:
    values = np.ones(1 << 18, np.float32)

    def take_part(rank: int) -> tuple[int, int]:
        with ObjectStoreAllReduce(tmp_path, rank, replicas, min_replicas=replicas) as replica:
            replica.allreduce(values)
            report = replica.last_round
            assert report is not None
            return report.bytes_up, report.bytes_down

    with ThreadPoolExecutor(replicas) as pool:
        moved = np.mean(list(pool.map(take_part, range(replicas))), axis=0)
    result = example(codec="fp32", parameters=values.size, replicas=replicas)
    # Replicas that wait look more than once; what is found beside the values is small.
    assert moved == pytest.approx([result.bytes_up, result.bytes_down], rel=0.05)


def test_four_bits_at_sixteen_replicas_take_under_10_8_bits_both_ways() -> None:
    assert example(codec="e3m0").bits_per_parameter <= 10.8


def test_transfer_takes_the_bytes_over_the_link() -> None:
    assert example(codec="fp32").transfer_s == pytest.approx(94)
    assert example(codec="fp32", link_gbps=10.0).transfer_s == pytest.approx(9.4)


def test_what_overlap_covers_does_not_block() -> None:
    result = example(codec="e3m0", overlap_steps=99)
    assert result.blocked_s == 0
    assert result.utilisation == 1
    blocking = example(codec="e3m0")
    assert blocking.utilisation == pytest.approx(100 / (100 + blocking.round_s))


def test_fragments_share_the_overlap() -> None:
    complete = example(codec="fp32", overlap_steps=24)
    parts = example(codec="fp32", fragments=4, overlap_steps=24)
    assert parts.blocked_s < complete.blocked_s


def test_dollars_are_requests_and_bytes() -> None:
    price = Prices(put_1000=1000, get_1000=0, up_gb=0, down_gb=0)
    result = example(prices=price)
    assert result.dollars == result.puts + result.lists
    assert example(prices=Prices(down_gb=1)).dollars == pytest.approx(16 * 7.5)


def test_alone_costs_nothing() -> None:
    result = example(replicas=1)
    assert (result.requests, result.bytes_up, result.round_s, result.dollars) == (0, 0, 0, 0)
    assert result.utilisation == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parameters", 0),
        ("replicas", 0),
        ("codec", "int6"),
        ("prices", "gold"),
        ("step_s", 0),
        ("link_gbps", -1),
        ("overlap_steps", 100),
        ("fragments", 101),
    ],
)
def test_a_value_that_does_not_fit_is_named(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        example(**{field: value})


def test_the_table_has_a_line_for_each_figure() -> None:
    text = table(example(codec="e3m0"))
    assert "bytes up, each replica         478.1 MB" in text
    assert "compute utilisation" in text
    assert "$0.000" in text


def test_means_that_travel_in_a_finer_codec_are_counted_as_such() -> None:
    uploads, means = CODECS["int3"].bits, CODECS["int5"].bits
    result = example(codec="int3")
    assert result.bytes_up == pytest.approx(10**9 / 8 * (uploads + means / 16))
    assert result.bytes_down == pytest.approx(10**9 / 8 * (uploads + means) * 15 / 16)


def test_fragments_that_the_outer_loop_would_refuse_are_refused() -> None:
    with pytest.raises(ValidationError, match="sync_every: 100 .* multiple of 3"):
        example(fragments=3)


def test_a_ramp_costs_a_constant_number_of_rounds_and_seconds_are_steps() -> None:
    settings: dict[str, Any] = {"parameters": 10**9, "replicas": 4, "step_s": 0.5, "link_gbps": 1}
    plain = estimate(sync_every=30, **settings)
    ramp = estimate(sync_every=30, warmup="ramp", **settings)
    # Two rounds each of 1, 2, 4, 8 and 16 steps, while two of 30 would have been made.
    assert ramp.extra_rounds == pytest.approx(10 - 62 / 30)
    assert ramp.extra_bytes == round(ramp.extra_rounds * (plain.bytes_up + plain.bytes_down))
    assert (plain.extra_rounds, "warm-up" in table(plain)) == (0, False)
    assert "7.9 in the whole run" in table(ramp)
    assert estimate(sync_every="15s", **settings) == plain
    assert estimate(sync_every="15s", warmup="ramp", **settings).extra_rounds == pytest.approx(
        12 - 2 * 63 / 64
    )
    with pytest.raises(ValidationError, match="warmup: 'slow'"):
        estimate(sync_every=30, warmup="slow", **settings)
