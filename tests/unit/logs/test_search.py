from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.status import LogMatch
from atoll.logs import search
from atoll.logs.search import LogSearch, lines_around
from atoll.logs.segments import LogWriter, read_log


def log(folder: Path, data: bytes, max_bytes: int | None = None, step: int = 50) -> None:
    writer = LogWriter(folder, max_bytes=max_bytes)
    for at in range(0, len(data), step):
        writer.write(data[at : at + step])
    writer.close()


def hits(search: LogSearch, step_bytes: int = 1 << 20) -> list[LogMatch]:
    found = []
    while (step := search.step(step_bytes)) is not None:
        found += step
    return found


def test_every_line_is_found_once_with_its_place(tmp_path: Path) -> None:
    log(tmp_path / "0", b"Loss 1\nother\nloss 2 loss\n\nend loss")
    log(tmp_path / "1", b"loss\n")
    found = hits(LogSearch(tmp_path, "loss"))
    assert [(hit.rank, hit.text) for hit in found] == [
        (0, "loss 2 loss"),
        (0, "end loss"),
        (1, "loss"),
    ]
    for hit in found:
        data, _ = read_log(tmp_path / str(hit.rank), hit.start or 0, (hit.at or 0) - hit.start)
        assert data.decode().removesuffix("\n") == hit.text
    blind = hits(LogSearch(tmp_path, "LOSS", ranks=[0], is_case_blind=True))
    assert [hit.text for hit in blind] == ["Loss 1", "loss 2 loss", "end loss"]
    assert hits(LogSearch(tmp_path, "none")) == []
    later = LogSearch(tmp_path, "loss", offsets={0: found[0].at or 0, 1: 99})
    assert [hit.text for hit in hits(later)] == ["end loss"]


def test_letters_that_change_their_length_do_not_move_a_place(tmp_path: Path) -> None:
    log(tmp_path / "0", "\u0130\u0130 x\nneedle \u00c9T\u00c9\n".encode() + b"\xff NEEDLE\n")
    found = hits(LogSearch(tmp_path, "needle", is_case_blind=True))
    assert [hit.text for hit in found] == ["needle \u00c9T\u00c9", "\ufffd NEEDLE"]


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.text(alphabet="ab", max_size=9), max_size=40),
    step_bytes=st.integers(1, 60),
    segment=st.sampled_from([40, 10_000]),
)
def test_steps_find_what_a_plain_search_finds(
    tmp_path_factory: object, lines: list[str], step_bytes: int, segment: int
) -> None:
    folder = tmp_path_factory.mktemp("log")  # type: ignore[attr-defined]
    log(folder / "0", "\n".join(lines).encode(), segment * 8 * 100, step=7)
    before = search.CHUNK_BYTES, search.LONG_LINE
    search.CHUNK_BYTES = search.LONG_LINE = 16
    try:
        found = hits(LogSearch(folder, "ab"), step_bytes)
    finally:
        search.CHUNK_BYTES, search.LONG_LINE = before
    assert [hit.text for hit in found] == [line for line in lines if "ab" in line]


def test_a_line_longer_than_a_step_is_found(tmp_path: Path) -> None:
    log(tmp_path / "0", b"x" * 3_000_000 + b" needle\nshort needle\n", step=100_000)
    found = hits(LogSearch(tmp_path, "needle"), 100_000)
    assert found[-1].text == "short needle"
    assert len(found) == 2
    assert all(len(hit.text) <= search.EXCERPT_BYTES for hit in found)


def test_lines_around_a_place(tmp_path: Path) -> None:
    log(tmp_path / "3", b"".join(b"line %d\n" % n for n in range(100)) + b"no end")
    (hit,) = hits(LogSearch(tmp_path, "line 50"))

    def around(at: int | None, before: int, after: int) -> list[str]:
        return [line.text for line in lines_around(tmp_path, 3, at or 0, before, after)]

    assert around(hit.start, 2, 3) == ["line 48", "line 49", "line 50", "line 51", "line 52"]
    assert around(0, 5, 1) == ["line 0"]
    assert around(10**9, 2, 5) == ["line 99", "no end"]
    assert around(hit.at, 0, 1) == ["line 51"]
    assert around(hit.at, 1, 0) == ["line 50"]
