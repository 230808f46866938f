"""What of a directory travels, and that the same files are always the same bytes."""

from __future__ import annotations

import hashlib
import io
import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest

from atoll.code import archive
from atoll.code.archive import files_of, pack, refusal_of, within
from atoll.core.errors import ValidationError
from atoll.core.spec import Code


def write(root: Path, *paths: str) -> None:
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {path}\n")


def names(root: Path) -> list[str]:
    return [file.path for file in files_of(str(root))]


def code_of(root: Path) -> Code:
    code = pack(root)
    assert code is not None
    return code


def git(root: Path, *words: str) -> None:
    setting = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(root), *setting, *words], check=True, capture_output=True)


def test_of_a_repository_what_git_tracks_and_what_it_would(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, "train.py", "pkg/model.py", "new.py", "out/a.bin", "tracked.bin", "gone.py")
    (tmp_path / ".gitignore").write_text("*.bin\nout/\n")
    git(tmp_path, "add", "-f", "train.py", "tracked.bin", "gone.py", ".gitignore")
    (tmp_path / "gone.py").unlink()
    assert names(tmp_path) == [".gitignore", "new.py", "pkg/model.py", "tracked.bin", "train.py"]


def test_of_a_folder_in_a_repository_only_that_folder_under_the_rules_of_all(
    tmp_path: Path,
) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("*.bin\n")
    write(tmp_path, "other/b.py", "sub/a.py", "sub/x.bin")
    assert names(tmp_path / "sub") == ["a.py"]


def test_atollignore_leaves_out_what_git_tracks(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, "train.py", "docs/a.md", "docs/deep/b.md", "big/c.py", "big/d.txt")
    (tmp_path / ".atollignore").write_text("docs/\n.atollignore\n")
    (tmp_path / "big/.atollignore").write_text("*\n!c.py\n")
    git(tmp_path, "add", "-A")
    assert names(tmp_path) == ["big/c.py", "train.py"]


def test_without_git_the_rules_hold_too_and_what_tools_make_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "a.bin", "data/x", "data/keep.py", "__pycache__/a.pyc")
    write(tmp_path, "myenv/pyvenv.cfg", "myenv/lib/x.py", ".env", ".git/config")
    (tmp_path / ".gitignore").write_text("*.bin\n")
    (tmp_path / "data/.atollignore").write_text("*\n!keep.py\n")
    os.mkfifo(tmp_path / "pipe")
    assert names(tmp_path) == [".gitignore", "data/keep.py", "train.py"]


def test_a_submodule_and_a_repository_inside_travel_with_their_own_rules(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    write(inner, "lib.py", "lib.bin")
    (inner / ".gitignore").write_text("*.bin\n")
    git(tmp_path, "init", "-q", str(inner))
    git(inner, "add", "-A")
    git(inner, "commit", "-qm", "a")
    git(tmp_path, "init", "-q", str(outer))
    write(outer, "train.py")
    git(outer, "submodule", "add", "-q", str(inner), "third/inner")
    write(outer, "third/inner/made.bin")
    expected = [".gitmodules", "third/inner/.gitignore", "third/inner/lib.py", "train.py"]
    assert names(outer) == expected


def test_the_same_files_are_the_same_bytes(tmp_path: Path) -> None:
    paths = [f"p{number}/m{number}.py" for number in range(20)]
    digests = set()
    for turn in range(3):
        root = tmp_path / str(turn)
        random.Random(turn).shuffle(paths)
        write(root, *paths)
        for number, path in enumerate(paths):
            os.utime(root / path, (turn * 1000, turn * 1000 + number))
            os.chmod(root / path, 0o600 if turn else 0o664)
        os.chmod(root / "p0/m0.py", 0o700 if turn else 0o755)
        digests.add(code_of(root).digest)
    assert len(digests) == 1
    (root / "p0/m0.py").write_text("other")
    assert code_of(root).digest not in digests


def test_the_archive_holds_what_was_counted(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "run.sh")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link.py").symlink_to("a.py")
    code = code_of(tmp_path)
    with tarfile.open(fileobj=io.BytesIO(code.content)) as tar:
        entries = {entry.name: entry for entry in tar}
    assert code.digest == hashlib.sha256(code.content).hexdigest()
    assert (code.files, code.unpacked, code.size) == (3, 16, len(code.content))
    assert entries["run.sh"].mode == 0o755
    assert entries["a.py"].mode == 0o644
    assert entries["link.py"].linkname == "a.py"


def test_a_link_out_of_the_directory_is_refused_by_its_name(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write(root, "a.py", "sub/b.py")
    write(tmp_path, "outside")
    (root / "sub/up").symlink_to("../a.py")
    (root / "sub/whole").symlink_to(root / "a.py")
    (root / "dangling").symlink_to("nowhere")
    links = {file.path: file.link for file in files_of(str(root)) if file.link}
    assert links == {"sub/up": "../a.py", "sub/whole": "../a.py", "dangling": "nowhere"}
    (root / "data").symlink_to(tmp_path / "outside")
    with pytest.raises(ValidationError, match=r"data -> /.*leads out of.*\.atollignore"):
        pack(root)
    (root / ".atollignore").write_text("data\n")
    pack(root)


def test_too_much_is_refused_with_the_largest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "train.py", "data/s.bin")
    (tmp_path / "data/m.bin").write_bytes(os.urandom(20_000))
    with (tmp_path / "data/huge.bin").open("wb") as file:
        file.truncate(archive.MAX_UNPACKED)  # of no bytes on the disk
    with pytest.raises(ValidationError) as caught:
        pack(tmp_path)
    words = str(caught.value)
    assert "data/huge.bin (256 MiB), data/m.bin (19.5 KiB), data/s.bin" in words
    assert "4 files with 256 MiB" in words
    assert ".atollignore" in words
    assert "--no-code" in words
    (tmp_path / "data/huge.bin").unlink()
    monkeypatch.setattr(archive, "MAX_CODE_BYTES", 10_000)
    with pytest.raises(
        ValidationError, match=r"9.8 KiB packed, .* largest: data/m.bin \(19.5 KiB\)"
    ):
        pack(tmp_path)
    monkeypatch.setattr(archive, "MAX_FILES", 2)
    with pytest.raises(ValidationError, match="expected at most 2 files"):
        pack(tmp_path)


def test_nothing_to_send_and_a_file_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    assert pack(tmp_path) is None
    write(tmp_path, "a.py")
    file = archive.CodeFile("b.py", 1)
    with pytest.raises(ValidationError, match=r"'b\.py' is not valid: cannot be read"):
        archive.write_archive(str(tmp_path), [file])


def test_home_and_the_whole_machine_are_not_sent_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "home" in refusal_of(tmp_path)
    assert "root of the machine" in refusal_of("/")
    (tmp_path / "project").mkdir()
    assert refusal_of(tmp_path / "project") == ""


def test_folders_of_modules_are_those_inside(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "lib/site-packages").mkdir(parents=True)
    folders = [
        str(tmp_path / "src"),
        "/usr/lib",
        str(tmp_path),
        str(tmp_path / "lib/site-packages"),
    ]
    assert within(str(tmp_path), list(map(str, folders))) == ["src", "."]
