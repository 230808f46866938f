"""How values are cut: whatever the sizes and processes, every value is carried exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.diloco.codecs import get_codec
from atoll.diloco.packing import TensorSpec
from atoll.diloco.round.cells import Cut, RunLayout, Share, overlap
from atoll.diloco.round.objects import Manifest

sizes = st.one_of(st.integers(0, 300), st.integers(0, 3_000_000))
codecs = st.sampled_from(["fp32", "bf16", "int8", "int4", "sparse"])
worlds = st.integers(1, 20)
processes = st.integers(1, 9)


@given(sizes, worlds, codecs, processes)
def test_processes_carry_every_value_once_and_each_one_span(
    size: int, world: int, codec: str, count: int
) -> None:
    cut = Cut.of(size, world, [get_codec(codec)])
    shares = [Share(cut, process, count) for process in range(count)]
    assert [share.start for share in shares[1:]] == [share.stop for share in shares[:-1]]
    assert (shares[0].start, shares[-1].stop) == (0, size)
    carried = [cell for share in shares for cell in share.cells]
    assert carried == list(range(cut.cells))
    for share in shares:
        dealt = sorted(cell for shard in range(world) for cell in share.cells_of(shard))
        assert dealt == list(share.cells)
        assert sum(cut.sizes[cell] for cell in share.cells) == share.size


@given(sizes, worlds, processes, processes)
def test_what_two_replicas_have_in_common_of_a_shard_is_one_run_of_cells(
    size: int, world: int, ours: int, theirs: int
) -> None:
    cut = Cut.of(size, world, [get_codec("fp32")])
    for shard in range(world):
        found: list[int] = []
        for process in range(ours):
            for other in range(theirs):
                spans = (
                    Share(cut, process, ours).cells_of(shard),
                    Share(cut, other, theirs).cells_of(shard),
                )
                common = overlap(*spans)
                assert list(common) == sorted({*spans[0]} & {*spans[1]})
                found += common
        assert found == list(Share(cut).cells_of(shard))


@given(sizes, worlds, processes)
def test_the_manifest_cuts_as_the_layout_does(size: int, world: int, count: int) -> None:
    cut = Cut.of(size, world, [get_codec("int4")])
    manifest = Manifest(0, "0" * 32, "flat", cut.shards, cut.cells, world, ())
    for shard in range(world):
        for process in range(count):
            share = Share(cut, process, count)
            assert manifest.span(shard, process, count) == share.cells_of(shard)


def layout(*shapes: tuple[int, ...], world: int = 2, codec: str = "fp32") -> RunLayout:
    specs = tuple(TensorSpec("float32", shape) for shape in shapes)
    return RunLayout((specs,), world, codec, codec, "mean")


def test_the_first_difference_is_named() -> None:
    mine = layout((2, 3), (4,))
    assert mine.difference(layout((2, 3), (5,))) == (
        "tensor 1 is float32[5] there and float32[4] here"
    )
    assert mine.difference(layout((2, 3))) == "1 tensors there and 2 here"
    assert mine.difference(layout((2, 3), (4,), world=3)) == "world is 3 there and 2 here"
    assert mine.difference(layout((2, 3), (4,), codec="int8")) == (
        "codec is 'int8' there and 'fp32' here"
    )
    assert mine.digest == layout((2, 3), (4,)).digest != layout((3, 2), (4,)).digest
