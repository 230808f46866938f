"""What uploads say: in their names, and which of them may be in a round."""

from __future__ import annotations

import pytest

from atoll.diloco.allreduce.keys import Keys, parse_upload
from atoll.diloco.allreduce.note import (
    DataNote,
    DataRound,
    ManifestData,
    SaidUpload,
    UploadHeader,
    UploadNote,
    read_note,
    sift,
    write_note,
)
from atoll.diloco.data.ledger import Terms, make_terms

TERMS = make_terms(1000, period=10, world=2, fragments=1)
BASE = "0123456789abcdef"


class Clerk:
    """Holds the positions 0 to 99 for every rank."""

    rank = 0

    def __init__(self, has_ledger: bool = True) -> None:
        self._has_ledger = has_ledger

    def after(self, round: DataRound) -> str:
        return ""

    def data(self) -> ManifestData | None:
        return ManifestData(3, BASE, TERMS, 2) if self._has_ledger else None

    def refuses(self, rank: int, data: DataNote) -> str | None:
        return "not held" if data.took and data.took[-1][1] > 100 else None

    def problem(self, round: DataRound | None) -> str | None:
        return None


def header(rank: int, note: UploadNote, terms: Terms = TERMS) -> SaidUpload:
    return SaidUpload(rank, read_note(write_note(note)), lambda: UploadHeader(note, terms).full)


@pytest.mark.parametrize(
    "note",
    [
        UploadNote(0),
        UploadNote(10**9, 1234.5),
        UploadNote(7, 1e18, DataNote((), 0, "89abcdef")),
        UploadNote(7, 0.1, DataNote(((0, 5), (36**5, 36**5 + 1)), 3200, "89abcdef", 17)),
    ],
)
def test_a_name_tells_what_an_upload_says(note: UploadNote) -> None:
    key = Keys("run").upload(3, 1, "ab" * 8, 0.1, "c" * 16, 4, "p1", write_note(note))
    name = parse_upload(key)
    assert name is not None
    assert (name.weight, name.processes, name.note) == (0.1, 4, "p1")
    assert read_note(name.header) == note


def test_a_name_is_never_too_long() -> None:
    many = tuple((7**18 + 100 * at, 7**18 + 100 * at + 63) for at in range(9))
    note = UploadNote(10**9, 1 / 3, DataNote(many, 10**9, BASE, 10**15))
    key = Keys("run").upload(3, 1, "ab" * 8, 1 / 3, "c" * 16, 99999, "p" * 60, write_note(note))
    assert len(key.rpartition("/")[2]) < 245
    name = parse_upload(key)
    assert name is not None
    cut = read_note(name.header)
    assert cut is not None
    assert cut.data is not None
    assert cut.data.took is None
    good = sift(Clerk(), [header(0, UploadNote(1, 0, DataNote(((0, 1),), 1, BASE)))], 0)
    assert good.notes[0] is not None


@pytest.mark.parametrize("text", ["", "C", "C1", "Cx-zz", "C1-nan", "C1-inf", "C1--0x1p+0", "D"])
def test_text_that_is_no_note_is_none(text: str) -> None:
    assert read_note(text) is None


def test_ranges_that_the_name_has_no_room_for_are_read_from_the_footer() -> None:
    many = tuple((10 * at, 10 * at + 3) for at in range(8))
    note = UploadNote(1, 0.0, DataNote(many, 5, BASE))
    sifted = sift(Clerk(), [header(1, note)], 0)
    assert sifted.notes == {1: note}


def test_a_claim_on_what_is_not_held_is_left_out_and_the_others_go_on() -> None:
    good = UploadNote(1, 0.0, DataNote(((0, 4),), 5, BASE[:8]))
    bad = UploadNote(1, 0.0, DataNote(((90, 104),), 5, BASE[:8]))
    stale = UploadNote(1, 0.0, DataNote(((0, 4),), 5, "f" * 8))
    clerk = Clerk()
    sifted = sift(clerk, [header(0, good), header(1, bad)], 0)
    assert set(sifted.notes) == {0}
    assert sifted.refused == {1: "not held"}
    assert not sifted.error
    assert sift(clerk, [header(0, stale)], 0).error == ""


def test_an_upload_whose_footer_cannot_be_read_is_left_out() -> None:
    stale = UploadNote(1, 0.0, DataNote(((0, 4),), 5, "f" * 8))
    upload = SaidUpload(1, read_note(write_note(stale)), lambda: b"rubbish")
    sifted = sift(Clerk(), [upload], 0)
    assert sifted.notes == {}
    assert set(sifted.refused) == {1}


@pytest.mark.parametrize(
    ("terms", "messages"),
    [
        (make_terms(999, period=10, world=2, fragments=1), "length is 999 in rank 1 and 1000"),
        (make_terms(1000, period=10, world=2, fragments=1, seed=4), "seed is 4 in rank 1 and 0"),
        (make_terms(1000, period=10, world=4, fragments=1), "sync_every of ranks 1 and 0 differs"),
    ],
)
def test_other_data_is_an_error_for_all(terms: Terms, messages: str) -> None:
    note = UploadNote(1, 0.0, DataNote((), 5, "f" * 8))
    assert messages in sift(Clerk(), [header(1, note, terms)], 0).error


def test_who_shares_and_who_does_not_is_named() -> None:
    with_data, without = UploadNote(1, 0.0, DataNote((), 5, BASE)), UploadNote(1)
    messages = "rank {} shares its data by diloco.shard(), rank {} does not"
    assert sift(Clerk(), [header(1, without)], 0).error == messages.format(0, 1)
    assert sift(Clerk(has_ledger=False), [header(1, with_data)], 0).error == messages.format(1, 0)
    assert sift(None, [header(1, with_data)], 0).error == messages.format(1, 0)
    assert sift(None, [header(1, without)], 0).notes == {1: without}
