"""What ranks do with an archive before their command starts."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from atoll.agent import unpack as module
from atoll.agent.unpack import Refused, read_archive, unpack
from atoll.code.archive import pack

FILE = module.__file__


def archive_of(*entries: tarfile.TarInfo, data: bytes = b"x") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for entry in entries:
            entry.size = len(data) if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


def run(
    archive: Path, root: Path, *command: str, digest: str = "", path: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    data = archive.read_bytes() if archive.is_file() else b""
    digest = digest or hashlib.sha256(data).hexdigest()
    words = [sys.executable, "-S", "-I", FILE, "--digest", digest]
    words += ["--path", path] if path else []
    words += [str(archive), str(root), "--", *command]
    return subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src/deep").mkdir(parents=True)
    (root / "src/model.py").write_text("NAME = 'a model'\n")
    (root / "src/deep/data.txt").write_text("data\n")
    (root / "run.sh").write_text("#!/bin/sh\ncat src/deep/data.txt\n")
    (root / "run.sh").chmod(0o755)
    (root / "link.txt").symlink_to("src/deep/data.txt")
    archive = tmp_path / "code.tar.gz"
    code = pack(root)
    assert code is not None
    archive.write_bytes(code.content)
    return archive


def test_the_command_starts_in_the_root_with_everything_there(tmp_path: Path) -> None:
    archive, root = project(tmp_path), tmp_path / "ranks/0"
    root.parent.mkdir()
    done = run(archive, root, "./run.sh")
    assert (done.returncode, done.stdout) == (0, "data\n"), done.stderr
    assert (root / "link.txt").read_text() == "data\n"
    words = "import os, model; print(model.NAME, os.getcwd(), os.environ['PWD'])"
    done = run(archive, root, sys.executable, "-c", words, path="src")
    assert done.stdout == f"a model {root} {root}\n", done.stderr


def test_an_archive_in_parts_is_put_together_in_order(tmp_path: Path) -> None:
    data = project(tmp_path).read_bytes()
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "..data").mkdir()  # as in the volumes of Kubernetes
    for number in range(3):
        size = len(data) // 3 + 1
        (parts / f"{number:03}").write_bytes(data[number * size : (number + 1) * size])
    digest = hashlib.sha256(data).hexdigest()
    assert read_archive(str(parts), digest) == data
    done = run(parts, tmp_path / "root", "./run.sh", digest=digest)
    assert done.stdout == "data\n", done.stderr


def test_another_archive_than_the_one_deployed_is_refused(tmp_path: Path) -> None:
    archive, errors = project(tmp_path), tmp_path / "error.json"
    done = run(
        archive,
        tmp_path / "root",
        "true",
        digest="0" * 64,
        TORCHELASTIC_ERROR_FILE=str(errors),
    )
    assert done.returncode == 126
    assert "its digest is another one" in done.stderr
    assert not (tmp_path / "root").exists()
    assert "digest" in json.loads(errors.read_text())["message"]["message"]


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([entry("../out")], "leads out of the directory"),
        ([entry("/tmp/out")], "leads out of the directory"),
        ([entry("a/../../out")], "leads out of the directory"),
        ([entry("l", tarfile.SYMTYPE, "/etc")], "leads out of the directory"),
        ([entry("l", tarfile.SYMTYPE, "../..")], "leads out of the directory"),
        ([entry("d/l", tarfile.SYMTYPE, "../../x")], "leads out of the directory"),
        ([entry("l", tarfile.SYMTYPE, "d"), entry("d/x"), entry("l/y")], "through a link"),
        ([entry("a"), entry("a")], "twice"),
        ([entry("dev", tarfile.CHRTYPE)], "neither a file nor a link"),
        ([entry("hard", tarfile.LNKTYPE, "/etc/passwd")], "neither a file nor a link"),
    ],
)
def test_what_would_be_written_elsewhere_is_refused_whole(
    tmp_path: Path, entries: list[tarfile.TarInfo], why: str
) -> None:
    root = tmp_path / "in/root"
    with pytest.raises(Refused, match=why):
        unpack(archive_of(*entries), str(root))
    assert os.listdir(tmp_path / "in") == []
    assert not (tmp_path / "in/out").exists()


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNPACKED", 10)
    with pytest.raises(Refused, match="more than 10 bytes"):
        unpack(archive_of(entry("a"), entry("b"), data=b"123456"), str(tmp_path / "root"))


def test_rubbish_with_the_right_digest_is_told_in_one_line(tmp_path: Path) -> None:
    for data in (b"rubbish", gzip.compress(b"rubbish"), gzip.compress(b"x" * 600)[:20]):
        archive = tmp_path / "rubbish"
        archive.write_bytes(data)
        done = run(archive, tmp_path / "root", "true")
        assert done.returncode == 126
        assert done.stderr.startswith("atoll: the code could not be unpacked: ")
        assert done.stderr.count("\n") == 1


def test_ranks_that_share_a_folder_unpack_it_once(tmp_path: Path) -> None:
    archive, root = project(tmp_path), tmp_path / "root"
    running = [
        subprocess.Popen(
            [sys.executable, "-S", "-I", FILE, "--digest"]
            + [hashlib.sha256(archive.read_bytes()).hexdigest(), str(archive), str(root)]
            + ["--", "sh", "-c", "cat src/model.py"],
            stdout=subprocess.PIPE,
        )
        for _ in range(6)
    ]
    assert {rank.communicate()[0] for rank in running} == {b"NAME = 'a model'\n"}
    assert sorted(os.listdir(tmp_path)) == ["code.tar.gz", "project", "root"]


def test_a_command_that_is_not_there_is_told_of_as_in_a_shell(tmp_path: Path) -> None:
    done = run(project(tmp_path), tmp_path / "root", "nonesuch")
    assert done.returncode == 127
    assert done.stderr == "atoll: nonesuch: No such file or directory\n"


def test_bad_usage_is_told(tmp_path: Path) -> None:
    assert run(tmp_path, tmp_path, digest="short").returncode == 2


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([entry("a"), entry("a/b")], "a is a file and a folder"),
        ([entry("a/b"), entry("a")], "a is a file and a folder"),
        ([entry("a/b"), entry("a", tarfile.SYMTYPE, "c")], "a is a file and a folder"),
        ([entry("d/" * 3000 + "f")], "nested too deep"),
    ],
)
def test_an_archive_that_contradicts_itself_is_refused_in_one_line(
    tmp_path: Path, entries: list[tarfile.TarInfo], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        module.unpack_or_refuse(archive_of(*entries), str(tmp_path / "root"))
    assert list(tmp_path.iterdir()) == []
