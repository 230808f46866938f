"""The place beside a state directory that is full: of this user alone, and the same for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.backends.local import spare


@pytest.fixture
def offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(spare, "PLACES", (str(first), str(second)))
    return first, second


def test_the_first_place_is_taken_and_seen_again(
    offsets: tuple[Path, Path], tmp_path: Path
) -> None:
    where = tmp_path / "state"
    assert list(spare.spare_directories(where)) == []
    directory = spare.make_spare(where)
    assert directory == offsets[0] / str(where)[1:]
    assert directory.stat().st_mode & 0o777 == 0o700
    assert list(spare.spare_directories(where)) == [directory]
    assert spare.make_spare(where) == directory
    assert list(directory.iterdir()) == []


def test_each_state_directory_has_its_own_whatever_its_spelling(
    offsets: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    directory = spare.make_spare(tmp_path / "state")
    assert spare.make_spare(tmp_path / "link" / "state") == directory
    assert spare.make_spare(tmp_path / "other") != directory


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o720])
def test_a_directory_open_to_others_is_not_used(
    offsets: tuple[Path, Path], tmp_path: Path, mode: int
) -> None:
    spare.make_spare(tmp_path / "state")
    offsets[0].chmod(mode)
    assert list(spare.spare_directories(tmp_path / "state")) == []
    assert spare.make_spare(tmp_path / "state") == offsets[1] / str(tmp_path)[1:] / "state"


def test_a_link_is_not_followed(offsets: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    offsets[0].symlink_to(tmp_path / "elsewhere")
    assert spare.make_spare(tmp_path / "state").is_relative_to(offsets[1])


def test_the_directory_of_another_user_is_not_used(
    offsets: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare.make_spare(tmp_path / "state")
    uid = offsets[0].stat().st_uid
    monkeypatch.setattr(spare.os, "geteuid", lambda: uid + 1)
    assert list(spare.spare_directories(tmp_path / "state")) == []


def test_no_place_at_all_is_an_error(
    offsets: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in offsets:
        place.write_text("in the way")
    with pytest.raises(OSError, match="File exists"):
        spare.make_spare(tmp_path / "state")
