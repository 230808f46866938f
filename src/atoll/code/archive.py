"""The archive of a project: its files, as git lists them, in one `.tar.gz` that travels to ranks.

The same files give the same bytes: order, times, owners and the bits of modes are fixed. What
cannot or should not travel is refused by its name before anything is sent.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from atoll.core.errors import ValidationError
from atoll.core.spec import MAX_CODE_BYTES, Code
from atoll.core.text import format_bytes

OWN_RULES = ".atollignore"
RULES = (".gitignore", OWN_RULES)
MAX_UNPACKED = 256 * 2**20  # as `agent/unpack.py` has it: more is data, or an environment
MAX_FILES = 20_000  # each is a request to a shared file system, on every host
NAMED = 3  # of the largest files, in a refusal
GIT_S = 60.0  # of a listing: a large repository on a cold NFS takes 10 to 20
LEVEL = 6  # of gzip: 9 takes three times as long for 1 %
WAY_OUT = f"list what is not code in {OWN_RULES}, or send none (--no-code, code=False)"


# Left out where git does not say what belongs to a project: what tools make, and secrets.
DEFAULTS = """\
.git
.hg/
.svn/
__pycache__/
*.py[cod]
.venv/
venv/
node_modules/
.mypy_cache/
.pytest_cache/
.ruff_cache/
.hypothesis/
.ipynb_checkpoints/
.tox/
.nox/
*.egg-info/
.DS_Store
.env
.netrc
.ssh/
.aws/
.kube/
.gnupg/
"""


class CodeFile(NamedTuple):
    """A file or link by its path from the root on, with `/`."""

    path: str
    size: int
    is_executable: bool = False
    link: str | None = None


def pack(root: str | os.PathLike[str], path: Sequence[str] = ()) -> Code | None:
    """The archive of the files below `root`; None if there are none.

    `path`: folders in which ranks look for modules; those outside of `root` are dropped.
    Raises ValidationError, with the largest files, for more than may travel.
    """
    top = os.path.realpath(root)
    files = files_of(top)
    if not files:
        return None
    unpacked = sum(file.size for file in files)
    if unpacked > MAX_UNPACKED or len(files) > MAX_FILES:
        raise _too_large(root, files, unpacked)
    content = write_archive(top, files)
    if len(content) > MAX_CODE_BYTES:
        raise _too_large(root, files, unpacked)
    return Code(
        content=content,
        size=len(content),
        unpacked=unpacked,
        files=len(files),
        path=within(top, path),
    )


def refusal_of(root: str | os.PathLike[str]) -> str:
    """Why this directory is sent only on demand; empty if it may be sent."""
    top = os.path.realpath(root)
    if top == os.path.sep:
        return f"{top} is the root of the machine"
    home = os.path.expanduser("~")
    return f"{top} is your home directory" if top == os.path.realpath(home) else ""


def within(root: str, path: Sequence[str]) -> list[str]:
    """Those of the folders that are below `root`, from there on; `.` for itself."""
    top = os.path.realpath(root)
    inside: list[str] = []
    for folder in path:
        location = os.path.realpath(folder or ".")
        if os.path.isdir(location) and (
            location == top or location.startswith(top.rstrip("/") + "/")
        ):
            own = os.path.relpath(location, top)
            if own not in inside and "site-packages" not in own.split("/"):
                inside.append(own)
    return inside


def files_of(root: str) -> list[CodeFile]:
    """What travels, in order of path: what git tracks or would, else what no rule leaves out."""
    listing = _listed_by_git(root)
    paths = _walk(root) if listing is None else _select(root, *listing)
    files = (_file(root, path) for path in sorted(set(paths)))
    return [file for file in files if file is not None]


def write_archive(root: str, files: Sequence[CodeFile]) -> bytes:
    """Raises ValidationError if a file cannot be read."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=LEVEL, mtime=0, filename="") as zip,
        tarfile.open(fileobj=zip, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for file in files:
            entry = tarfile.TarInfo(file.path)  # owner 0 without a name, time 0
            entry.mode = 0o755 if file.is_executable else 0o644
            if file.link is not None:
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, file.link, 0o777
                tar.addfile(entry)
                continue
            data = _content(root, file)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _content(root: str, file: CodeFile) -> bytes:
    try:
        return Path(root, file.path).read_bytes()
    except OSError as error:
        expected = f"cannot be read: {error.strerror}; {WAY_OUT}"
        raise ValidationError("code", file.path, expected) from error


def _listed_by_git(root: str) -> tuple[list[str], list[str]] | None:
    """What git tracks and what it would, from `root` on; None where it cannot tell."""
    listings = []
    for which in (["--cached"], ["--others", "--exclude-standard"]):
        command = ["git", "-C", root, "ls-files", "-z", *which]
        try:
            run = subprocess.run(command, capture_output=True, timeout=GIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if run.returncode:
            return None
        listings.append([os.fsdecode(path) for path in run.stdout.split(b"\0") if path])
    return listings[0], listings[1]


def _select(root: str, tracked: list[str], others: list[str]) -> Iterator[str]:
    """Without what `.atollignore` leaves out, and of what is not tracked without the usual."""
    usual = [read_rules(DEFAULTS)]
    own = list(_rule_files(root, "", (OWN_RULES,)))
    folders = {os.path.dirname(path) for path in (*tracked, *others)}
    for folder in sorted(folders - {""}):
        own += _rule_files(root, folder + "/", (OWN_RULES,))
    for path in tracked:
        if not is_inside_ignored(path, own):
            yield from _with_submodule(root, path)
    for path in others:
        if not is_inside_ignored(path, [*usual, *own]):
            yield from _with_submodule(root, path.rstrip("/"))


def _with_submodule(root: str, path: str) -> Iterator[str]:
    """The path itself, or the files of the repository that it is."""
    location = os.path.join(root, path)
    if os.path.isdir(location) and not os.path.islink(location):
        for inner in files_of(location):
            yield f"{path}/{inner.path}"
    else:
        yield path


def _walk(root: str) -> Iterator[str]:
    """Of a directory that git does not know."""
    yield from _walk_folder(root, "", [read_rules(DEFAULTS)], [0])


def _walk_folder(root: str, base: str, rules: list[RuleFile], count: list[int]) -> Iterator[str]:
    rules = [*rules, *_rule_files(root, base, RULES)]
    try:
        entries = sorted(os.scandir(os.path.join(root, base)), key=lambda entry: entry.name)
    except OSError as error:
        expected = f"cannot be read: {error.strerror}; {WAY_OUT}"
        raise ValidationError("code", base or root, expected) from error
    if base and any(entry.name == "pyvenv.cfg" for entry in entries):
        return  # an environment of Python, by whatever name
    for entry in entries:
        path = base + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if is_ignored(path, rules, is_folder=is_folder):
            continue
        count[0] += 1
        if count[0] > 4 * MAX_FILES:
            expected = f"expected a project of at most {MAX_FILES} files: {WAY_OUT}"
            raise ValidationError("code", root, expected)
        if is_folder:
            yield from _walk_folder(root, path + "/", rules, count)
        else:
            yield path


def _rule_files(root: str, base: str, names: Sequence[str]) -> Iterator[RuleFile]:
    for name in names:
        with contextlib.suppress(OSError):
            text = Path(root, base, name).read_text(errors="surrogateescape")
            yield read_rules(text, base)


def _file(root: str, path: str) -> CodeFile | None:
    """None for what is not there any more, and for what is neither a file nor a link."""
    location = os.path.join(root, path)
    try:
        path.encode()
    except UnicodeEncodeError as error:
        expected = f"expected a name in UTF-8; {WAY_OUT}"
        raise ValidationError("code", ascii(path), expected) from error
    try:
        mode = os.lstat(location)
    except OSError:
        return None
    if stat.S_ISLNK(mode.st_mode):
        return CodeFile(path, 0, link=_link(root, path))
    if not stat.S_ISREG(mode.st_mode):
        return None
    return CodeFile(path, mode.st_size, is_executable=bool(mode.st_mode & 0o100))


def _link(root: str, path: str) -> str:
    """Where the link leads, from its own folder on. Raises ValidationError if that is outside."""
    location = os.path.join(root, path)
    target = os.readlink(location)
    folder = os.path.dirname(location)
    aim = os.path.normpath(os.path.join(folder, target))
    if os.path.isabs(target):
        aim = os.path.realpath(target)
    is_inside = f"{aim}/".startswith(f"{root.rstrip('/')}/")
    if not is_inside or not f"{os.path.realpath(location)}/".startswith(f"{root.rstrip('/')}/"):
        expected = f"expected no link that leads out of {root}; {WAY_OUT}"
        raise ValidationError("code", f"{path} -> {target}", expected)
    return os.path.relpath(aim, folder)


def _too_large(root: object, files: Sequence[CodeFile], unpacked: int) -> ValidationError:
    largest = sorted(files, key=lambda file: -file.size)[:NAMED]
    names = ", ".join(f"{file.path} ({format_bytes(file.size)})" for file in largest)
    return ValidationError(
        "code",
        str(root),
        f"expected at most {MAX_FILES} files, {format_bytes(MAX_UNPACKED)}, and "
        f"{format_bytes(MAX_CODE_BYTES)} packed, got {len(files)} files with "
        f"{format_bytes(unpacked)}; the largest: {names}; {WAY_OUT}",
    )


class RuleFile(NamedTuple):
    """The patterns of one file; `base` is its folder, `""` for the root, else with a `/` behind."""

    base: str
    patterns: GitIgnoreSpec

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """Whether the path is to be left out; None if no pattern fits it."""
        if not path.startswith(self.base):
            return None
        own = path[len(self.base) :] + ("/" if is_folder else "")
        return self.patterns.check_file(own).include


def read_rules(text: str, base: str = "") -> RuleFile:
    return RuleFile(base, GitIgnoreSpec.from_lines(_valid(text.splitlines())))


def is_ignored(path: str, files: Iterable[RuleFile], *, is_folder: bool = False) -> bool:
    """Whether the last of these files with a pattern for the path leaves it out."""
    verdict = None
    for file in files:
        own = file.verdict(path, is_folder=is_folder)
        verdict = verdict if own is None else own
    return bool(verdict)


def is_inside_ignored(path: str, files: Iterable[RuleFile]) -> bool:
    """Whether a file or one of the folders that it is in is left out."""
    files = list(files)
    parts = path.split("/")
    folders = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
    return is_ignored(path, files) or any(is_ignored(f, files, is_folder=True) for f in folders)


def _valid(lines: Iterable[str]) -> Iterator[str]:
    """The lines without those that are no pattern: git passes over them, pathspec raises."""
    for line in lines:
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:
            continue
        yield line
