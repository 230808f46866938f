"""Any number of processes cuts the vector into shares that fit together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.diloco.allreduce.layout import UNIT, Layout, cells_of
from atoll.diloco.allreduce.share import Share
from atoll.diloco.codecs import CODECS
from atoll.diloco.packing import TensorSpec

SIZES = st.one_of(st.integers(0, 300), st.integers(1000, 40_000_000))


def layout_of(size: int, shards: int, codec: str) -> Layout:
    cells = cells_of(size // shards, (codec, codec))
    return Layout((TensorSpec("float32", (size,)),), shards, codec, codec, "", cells)


@given(SIZES, st.integers(1, 20), st.integers(1, 9), st.sampled_from(sorted(CODECS)))
def test_the_processes_of_a_replica_carry_every_value_once(
    size: int, shards: int, processes: int, codec: str
) -> None:
    layout = layout_of(size, shards, codec)
    shares = [Share(layout, process, processes) for process in range(processes)]
    intervals = sorted(interval for share in shares for interval in share.intervals)
    assert sum(share.size for share in shares) == size
    assert all(a[1] == b[0] for a, b in zip(intervals, intervals[1:], strict=False))
    for share in shares:
        assert sum(stop - start for start, stop in share.intervals) == share.size
        for shard in range(shards):
            assert sum(share.cell_sizes(shard)) == share.section_size(shard)
            assert share.within(shard, share.cells) == (0, share.section_size(shard))


@given(SIZES, st.integers(1, 20), st.sampled_from(sorted(set(CODECS) - {"fp32"})))
def test_no_block_of_a_lossy_codec_is_cut(size: int, shards: int, codec: str) -> None:
    layout = layout_of(size, shards, codec)
    for shard in range(shards):
        assert all(at % UNIT == 0 for at in layout.cell_bounds(shard)[:-1])


def test_large_models_are_shared_evenly() -> None:
    layout = layout_of(124_000_000, 16, "int4")
    for processes in (2, 3, 4, 8, 16):
        sizes = [Share(layout, p, processes).size for p in range(processes)]
        assert max(sizes) < 1.35 * np.mean(sizes)


def test_a_place_of_the_row_is_a_place_of_the_vector() -> None:
    share = Share(layout_of(1000, 3, "fp32"), 1, 2)
    locations = [share.location(at) for at in range(share.size)]
    assert locations == [at for start, stop in share.intervals for at in range(start, stop)]
