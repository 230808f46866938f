"""The pure parts of the all-reduce: decisions, names, envelopes, pace."""

from __future__ import annotations

import tracemalloc
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from atoll.core.errors import ValidationError
from atoll.diloco.allreduce import manifest, wire
from atoll.diloco.allreduce.keys import Keys, parse_attempt, parse_round, parse_upload
from atoll.diloco.allreduce.layout import Layout, describe, difference, split
from atoll.diloco.allreduce.pace import FIRST_GRACE_S, MIN_GRACE_S, History, poll_pause
from atoll.diloco.packing import TensorSpec, are_apart, as_vector, flatten, unflatten

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("uploaded", "expected", "least", "is_over", "members"),
    [
        ([0, 1, 2], [0, 1, 2], 2, False, [0, 1, 2]),
        ([0, 1], [0, 1, 2], 2, False, None),
        ([0, 1], [0, 1, 2], 2, True, [0, 1]),
        ([0], [0, 1, 2], 2, True, None),
        ([3, 0, 1], [0, 1], 2, False, [0, 1, 3]),
        ([], [], 1, True, None),
    ],
)
def test_a_roster_needs_a_quorum_and_everyone_expected_or_the_end_of_the_grace(
    uploaded: list[int], expected: list[int], least: int, is_over: bool, members: Any
) -> None:
    assert manifest.decide(uploaded, expected, least, is_grace_over=is_over).members == members


def test_of_two_uploads_of_a_rank_the_newest_unblamed_one_is_taken() -> None:
    keys = Keys("run")
    old, new = (keys.upload(4, 1, nonce * 16, 1.0, "f" * 16) for nonce in "ab")
    other = keys.upload(3, 1, "c" * 16, 1.0, "f" * 16)
    listing = [
        (key, NOW + timedelta(seconds=age), parse_upload(key))
        for age, key in enumerate([other, old, new])
    ]
    assert manifest.check(listing, 4, [])[1].key == new  # type: ignore[arg-type]
    assert manifest.check(listing, 4, [new])[1].key == old  # type: ignore[arg-type]
    assert manifest.check(listing, 4, [new, old]) == {}  # type: ignore[arg-type]


def test_members_own_their_shard_and_the_orphans_are_shared_out() -> None:
    assert manifest.owners([0, 1, 2, 3], 4, 9) == [0, 1, 2, 3]
    assert manifest.owners([1, 3], 5, 0) == [1, 1, 3, 3, 1]
    assert manifest.owners([1, 3], 5, 1) == [3, 1, 1, 3, 3]


def test_no_member_weighs_beyond_measure() -> None:
    assert manifest.bounded({0: 1.0, 1: 3.0, 2: 1e18}) == {0: 1.0, 1: 3.0, 2: 300.0}
    assert manifest.bounded({0: 5.0, 1: 1e18}) == {0: 5.0, 1: 500.0}
    assert manifest.bounded({0: 1e-30, 1: 1e-30, 2: 7.0}) == {0: 1e-30, 1: 1e-30, 2: 7.0}
    assert manifest.bounded({0: 1e-30}) == {0: 1e-30}


@pytest.mark.parametrize("weight", [1.0, 0.1, 123456.789, 5e-324, 1e300])
def test_names_carry_round_rank_and_the_exact_weight(weight: float) -> None:
    key = Keys("run").upload(12, 3, "ab" * 8, weight, "0" * 16)
    name = parse_upload(key)
    assert name is not None
    assert (name.round, name.rank, name.weight, name.layout) == (12, 3, weight, "0" * 16)
    assert parse_round(key) == 12
    noted = Keys("run").upload(12, 3, "ab" * 8, weight, "0" * 16, 4, "x12")
    assert (parse_upload(noted) or name)[2:] == (3, "ab" * 8, weight, "0" * 16, 0, 4, "x12", "")
    assert parse_attempt(Keys("00000077.0001").shard(5, 2, 9)) == (5, 2)


@pytest.mark.parametrize(
    "name",
    ["x", "run/up/00000001/hello", "run/up/a/00001.ab.0x1p0.cd", "run/up/00000001/00001." * 2],
)
def test_names_nobody_would_choose_are_not_parsed(name: str) -> None:
    assert parse_upload(name) is None


@pytest.mark.parametrize("size", [0, 1, 100, wire.FOLD_BYTES, 3 * wire.FOLD_BYTES + 17])
def test_an_envelope_opens_only_whole_unchanged_and_in_its_place(size: int) -> None:
    body = np.random.default_rng(size).bytes(size)
    location = wire.fence("here")
    sealed = wire.seal(wire.SECTION, location, body)
    assert bytes(wire.unseal(wire.SECTION, location, sealed)) == body
    bad = [(wire.SHARD, location, sealed), (wire.SECTION, wire.fence("there"), sealed)]
    bad += [(wire.SECTION, location, sealed[:-1]), (wire.SECTION, location, sealed + b"x")]
    for at in np.random.default_rng(1).integers(0, len(sealed), 40):
        flipped = bytearray(sealed)
        flipped[at] ^= 1 << int(at) % 8
        bad.append((wire.SECTION, location, bytes(flipped)))
    if size > 2 * wire.FOLD_BYTES:  # blocks that changed places
        fold, start = wire.FOLD_BYTES, wire.SEAL.size
        blocks = sealed[start : start + fold], sealed[start + fold : start + 2 * fold]
        swapped = sealed[:start] + blocks[1] + blocks[0] + sealed[start + 2 * fold :]
        bad.append((wire.SECTION, location, swapped))
    for kind, where, data in bad:
        with pytest.raises(wire.Corrupt):
            wire.unseal(kind, where, data)


@pytest.mark.parametrize("lengths", [[wire.UNIT_BYTES * 2, wire.UNIT_BYTES, 100], [7, 40_000, 0]])
def test_any_change_of_a_cell_shows(lengths: list[int]) -> None:
    location, data = wire.fence("here"), np.random.default_rng(0).bytes(sum(lengths))
    sums = wire.cell_sums(wire.SECTION, location, data, lengths)
    starts = wire.section_offsets(lengths)
    for start, length, total in zip(starts, lengths, sums, strict=False):
        cell = data[start : start + length]
        assert wire.cell_sums(wire.SECTION, location, cell, [length]) == [total]
        for at in np.random.default_rng(1).integers(0, max(length, 1), 40 if length else 0):
            changed = bytearray(cell)
            changed[at] ^= 1 << int(at) % 8
            assert wire.cell_sums(wire.SECTION, location, changed, [length]) != [total]
        if length >= 2 * wire.UNIT_BYTES:
            unit = wire.UNIT_BYTES
            swapped = cell[unit : 2 * unit] + cell[:unit] + cell[2 * unit :]
            assert wire.cell_sums(wire.SECTION, location, swapped, [length]) != [total]
    for kind, where in ((wire.SHARD, location), (wire.SECTION, wire.fence("there"))):
        assert not set(sums) & set(wire.cell_sums(kind, where, data, lengths))
    cells = wire.CellTable(tuple(lengths), tuple(sums))
    wire.check_cells(wire.SECTION, location, cells, memoryview(data))
    with pytest.raises(wire.Corrupt, match="bytes instead of"):
        wire.check_cells(wire.SECTION, location, cells, memoryview(data)[:-1])


@pytest.mark.parametrize("cells", [1, 2, 7])
@pytest.mark.parametrize("units", [0, 1, 5])
def test_sums_are_the_same_however_much_is_summed_at_a_time(
    units: int, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may sum with less memory, or with more."""
    lengths = [units * wire.UNIT_BYTES] * (cells - 1) + [units * wire.UNIT_BYTES + 100]
    data = np.random.default_rng(0).bytes(sum(lengths))
    observed = set()
    for most in (1, 2, 3, 100):
        monkeypatch.setattr(wire, "SUMMED_BYTES", most * wire.UNIT_BYTES)
        observed.add(tuple(wire.cell_sums(wire.SECTION, wire.fence("here"), data, lengths)))
    assert len(observed) == 1


def test_a_layout_says_what_differs_first() -> None:
    def layout(*shapes: tuple[int, ...], codec: str = "fp32", shards: int = 2) -> Any:
        tensors = [np.zeros(shape, "f4") for shape in shapes]
        return describe(tensors, shards=shards, codec=codec, down_codec="fp32", name="")

    here = layout((2,), (3, 4))
    assert difference(here, layout((2,), (4, 3))) == (
        "tensor 1 is float32[4, 3] there and float32[3, 4] here"
    )
    assert "tensor 1 (float32[3, 4]) exists only here" in difference(here, layout((2,)))
    assert "codec is 'int8' there" in difference(here, layout((2,), (3, 4), codec="int8"))
    assert "world_size is 3 there" in difference(here, layout((2,), (3, 4), shards=3))
    assert here.fingerprint != layout((2,), (4, 3)).fingerprint
    assert type(here).unpack(here.pack()) == here


def test_tensors_survive_being_cut_into_any_parts() -> None:
    tensors = [
        np.arange(5.0, dtype="f4"),
        np.zeros((0, 3), "f4"),
        np.ones((2, 2), "f2"),
        np.float64(7),
    ]
    arrays = [np.asarray(t) for t in tensors]
    layout = describe(arrays, shards=13, codec="fp32", down_codec="fp32", name="")
    flat = np.empty(layout.size, "f4")
    flatten(arrays, flat)
    for got, gave in zip(unflatten(flat, arrays), arrays, strict=True):
        assert got.dtype == gave.dtype
        np.testing.assert_array_equal(got, gave)
    assert [part.shape for part in split(flat, layout)] == [a.shape for a in arrays]


CUT: dict[str, Any] = {"shards": 2, "codec": "fp32", "down_codec": "fp32", "name": ""}


def test_a_known_layout_is_taken_for_tensors_like_its_own_only() -> None:
    arrays = [np.zeros((2, 3), "f4"), np.zeros(4, "f8")]
    known = describe(arrays, **CUT)
    tensors = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.float64)]
    assert describe(arrays, **CUT, known=known) is known
    assert describe(tensors, **CUT, known=known) is known
    arrays[0].resize((3, 2))  # the same object: only what it is now counts
    tensors[1].data = torch.zeros(4)
    others = [arrays, tensors, arrays[:1], [np.zeros((2, 3), "f8"), np.zeros(4, "f4")]]
    for other in others:
        assert describe(other, **CUT, known=known) == describe(other, **CUT) != known
    assert describe(arrays, **CUT | {"shards": 3}, known=describe(arrays, **CUT)).shards == 3
    for bad in (torch.zeros(4, dtype=torch.float64, device="meta"), torch.zeros(4).to_sparse()):
        with pytest.raises(ValidationError, match="expected a dense tensor"):
            describe([tensors[0], bad.to(torch.float64)], **CUT, known=known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_of_torch_come_back_as_they_were(dtype: torch.dtype) -> None:
    tensors = [
        torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).to(dtype)),
        torch.zeros(0, 3, dtype=dtype),
        torch.tensor(7.0, dtype=dtype),
        torch.arange(6.0).reshape(2, 3).t().to(dtype),
        torch.arange(4.0, dtype=dtype)._neg_view(),
    ]
    flat = np.empty(17, "f4")
    flatten(tensors, flat)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 0, 3, 1, 4, 2, 5, 0, -1, -2, -3]
    got = unflatten(flat, tensors)
    for mine, theirs in zip(got, tensors, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine, theirs)
    # What was used in a graph is not changed by a step that is made with another of them.
    weight = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    loss = (weight * got[0]).sum()
    got[3].add_(1)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, got[0])


def test_tensors_of_two_kinds_are_one_vector() -> None:
    tensors = [np.ones(2, "f2"), torch.full((2,), 2.0), np.float64(3), torch.ones(1).bfloat16()]
    flat = np.empty(6, "f4")
    flatten(tensors, flat)
    assert flat.tolist() == [1, 1, 2, 2, 3, 1]
    assert [type(each) for each in unflatten(flat, tensors)] == [
        *(np.ndarray, torch.Tensor, np.ndarray, torch.Tensor)
    ]


def test_memory_is_one_vector_if_the_tensors_follow_each_other() -> None:
    complete = np.arange(12, dtype="f4")
    pieces = [complete[:3], complete[3:9].reshape(2, 3), complete[9:]]
    for cut in (pieces, [torch.from_numpy(piece) for piece in pieces]):
        vector = as_vector(cut)
        assert vector is not None
        assert vector.tolist() == complete.tolist()
        assert not are_apart(vector, cut)
        assert not are_apart(vector[:3], cut)
        assert are_apart(vector[3:9], [cut[0], cut[2]])
        assert as_vector([cut[0], cut[2]]) is None
        assert as_vector([cut[1], cut[0]]) is None
        assert as_vector([cut[0], cut[1], cut[1]]) is None
    assert as_vector([complete[::2]]) is None
    assert as_vector([complete.astype("f8")]) is None
    assert as_vector([]) is None
    assert are_apart(complete, [np.ones(4, "f8"), np.ones((2, 2), "f4")])


def test_the_grace_is_learnt_from_the_rounds() -> None:
    history = History()
    assert history.straggler_grace() == FIRST_GRACE_S
    history.note_spread(0.01)
    assert history.straggler_grace() == MIN_GRACE_S
    history.note_spread(2.0)
    assert history.straggler_grace() == 8.0
    history.note_late(3, 10.0)
    assert history.straggler_grace() == 20.0
    assert History(grace_s=1.5).straggler_grace() == 1.5


def test_looks_become_rarer_and_the_first_waits_until_it_is_worth_it() -> None:
    assert poll_pause(0.0, 1.0) == pytest.approx(0.9)
    assert poll_pause(0.0, 0.0) == 0.02
    assert poll_pause(0.95, 1.0) == pytest.approx(0.3)
    assert poll_pause(3.0, 0.0) == 0.2
    assert poll_pause(1000.0, 0.0) == 2.0
    elapsed, looks = 0.0, 0
    while elapsed < 10:
        elapsed, looks = elapsed + poll_pause(elapsed, 0.0), looks + 1
    assert looks < 50


def test_a_layout_that_would_expand_without_end_is_refused_and_costs_little_memory() -> None:
    one = describe([np.zeros(1, np.float32)], shards=1, codec="fp32", down_codec="fp32", name="")
    spec = b'["float32",[1]],'
    text = msgspec.json.encode(one).replace(spec[:-1], spec * (64 << 20 >> 4) + spec[:-1])
    bomb = zlib.compress(text, 9)
    del text
    tracemalloc.start()
    with pytest.raises(ValueError, match="expands to more than"):
        Layout.unpack(bomb)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


def test_more_tensors_than_a_peer_would_unpack_are_refused_before_anything_is_sent() -> None:
    many = Layout((TensorSpec("float32", (1000, 1000)),) * 400_000, 2, "fp32", "fp32")
    with pytest.raises(ValidationError, match=r"400000 tensors.*at most 8 MiB"):
        many.pack()


def test_a_footer_that_claims_gigabytes_is_corrupt() -> None:
    with pytest.raises(wire.Corrupt, match="more than"):
        wire.footer_length(memoryview(b"\xff" * 8))
