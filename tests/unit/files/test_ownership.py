"""Files and directories that another user could change are refused, those of root are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.core.errors import Permanent
from atoll.files.ownership import check_directory, check_entries, make_private, private, read_own

OTHER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "folder"
    place.mkdir(mode=0o755)
    return place


def refusal(path: Path) -> str:
    with pytest.raises(Permanent) as refused:
        read_own(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def refused_directory(path: Path) -> str:
    with pytest.raises(Permanent) as refused:
        check_directory(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_file_of_the_user_is_read_through_links_of_the_user(folder: Path) -> None:
    (folder / "file").write_bytes(b"mine")
    (folder / "link").symlink_to("file")
    assert read_own(folder / "file") == b"mine"
    assert read_own(folder / "link") == b"mine"
    with pytest.raises(FileNotFoundError):
        read_own(folder / "missing")
    (folder / "round").symlink_to("round")
    with pytest.raises(OSError, match="Too many levels"):
        read_own(folder / "round")


@needs_root
def test_a_file_of_another_user_is_refused_for_root_too(folder: Path) -> None:
    file = folder / "file"
    file.write_bytes(b"theirs")
    os.chown(file, OTHER, OTHER)
    words = refusal(file)
    assert words.startswith(f"{file} is not used: it belongs to nobody (uid 65534)")
    assert "root (uid 0)" in words
    assert "--config" in words


@needs_root
def test_a_link_of_another_user_is_refused_wherever_it_leads(folder: Path) -> None:
    (folder / "file").write_bytes(b"mine")
    link = folder / "link"
    link.symlink_to("file")
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    assert "belongs to nobody" in refusal(link)


@pytest.mark.parametrize("mode", [0o646, 0o666, 0o602])
def test_a_file_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    file = folder / "file"
    file.touch()
    file.chmod(mode)
    assert f"others can write it (mode {mode:o})" in refusal(file)
    assert f"chmod go-w {file}" in refusal(file)


@needs_root
def test_a_group_may_write_only_if_the_user_is_alone_in_it(folder: Path) -> None:
    file = folder / "file"
    file.touch()
    file.chmod(0o664)
    assert read_own(file) == b""
    os.chown(file, 0, OTHER)
    assert "others can write it (mode 664)" in refusal(file)


@needs_root
def test_a_file_in_a_directory_of_others_is_refused(folder: Path) -> None:
    file = folder / "file"
    file.touch()
    folder.chmod(0o777)
    assert f"others can write {folder} (mode 777)" in refusal(file)
    folder.chmod(0o1777)
    assert read_own(file) == b""
    folder.chmod(0o755)
    os.chown(folder, OTHER, OTHER)
    assert f"{folder} belongs to nobody (uid 65534), who can write it" in refusal(file)


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "file", 0o600)
    assert read_own(folder / "file") == b""


def test_a_directory_of_the_user_and_one_to_be_made_are_good(folder: Path) -> None:
    check_directory(folder)
    check_directory(folder / "a" / "b")
    (folder / "link").symlink_to(folder)
    check_directory(folder / "link" / "a")
    folder.chmod(0o1777)
    (folder / "mine").mkdir(mode=0o700)
    check_directory(folder / "mine")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert f"others can write to it (mode {mode:o})" in refused_directory(folder)
    assert f"chmod go-w {folder}" in refused_directory(folder)


def test_a_directory_that_others_can_replace_is_refused(folder: Path) -> None:
    inner = folder / "between" / "inner"
    inner.mkdir(parents=True, mode=0o700)
    folder.chmod(0o777)
    for place in (inner, inner / "new"):
        words = refused_directory(place)
        assert f"others can write {folder} (mode 777)" in words
        assert "ATOLL_STATE_DIR" in words


def test_a_link_on_the_way_leads_to_what_is_checked(folder: Path, tmp_path: Path) -> None:
    (folder / "inner").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("folder/inner/../inner")
    check_directory(tmp_path / "link")
    folder.chmod(0o777)
    assert f"others can write {folder}" in refused_directory(tmp_path / "link")


@needs_root
def test_a_directory_or_link_of_another_user_is_refused(folder: Path) -> None:
    inner, link = folder / "inner", folder / "link"
    inner.mkdir(mode=0o700)
    link.symlink_to(inner)
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    assert f"{link} belongs to nobody (uid 65534)" in refused_directory(link)
    os.chown(inner, OTHER, OTHER)
    assert "it belongs to nobody (uid 65534)" in refused_directory(inner)
    assert f"{inner} belongs to nobody (uid 65534)" in refused_directory(inner / "new")


@needs_root
def test_what_others_left_in_a_directory_is_refused(folder: Path) -> None:
    planted = folder / "ranks" / "planted"
    planted.mkdir(parents=True)
    check_entries(folder)
    os.chown(planted, OTHER, OTHER)
    with pytest.raises(Permanent, match=f"{planted} belongs to nobody"):
        check_entries(folder)


def test_what_is_made_is_private_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        make_private(folder / "a" / "b" / "c")
        make_private(folder / "a" / "b")
        with open(folder / "file", "w", opener=private):
            pass
    finally:
        os.umask(before)
    made = [folder / "a", folder / "a/b", folder / "a/b/c", folder / "file"]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700, 0o700, 0o700, 0o600]
    with pytest.raises(FileExistsError):
        make_private(folder / "file")


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_directory_in_it_that_others_can_write_is_refused(folder: Path, is_linked: bool) -> None:
    inner = folder / "ranks"
    if is_linked:
        (folder / "elsewhere").mkdir()
        state = folder / "state"
        state.mkdir(mode=0o700)
        (state / "ranks").symlink_to(folder / "elsewhere")
        folder, inner = state, folder / "elsewhere"
    else:
        inner.mkdir()
    inner.chmod(0o700)
    check_entries(folder)
    inner.chmod(0o777)
    with pytest.raises(Permanent, match="ranks is not used: others can write to it"):
        check_entries(folder)
