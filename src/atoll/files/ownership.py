"""Whose files atoll obeys: those of the user and of root, where nobody else can change them.

A configuration chooses programs, and a state directory holds commands and a token. Whoever can
write one of them can run programs as its user, so both are checked before they are used. For root
the files of other users are refused, too: they are those users' to change.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from atoll.core.errors import Permanent

ROOT = 0
MAX_LINKS = 40  # as the kernel has it, see path_resolution(7)
ACL = "system.posix_acl_access"
REMEDY = "choose a directory of your own (ATOLL_STATE_DIR, --state-dir)"
EVERY_USER = ["0", "0", "4294967295"]  # the map of users outside of any user namespace


def read_own(path: Path) -> bytes:
    """The content of a file that chooses what runs as this user.

    Raises Permanent if somebody other than this user and root owns it, can write it or can put
    another one in its place, and OSError if it cannot be read. Directories further up do not
    matter: who replaces one of those cannot make files that belong to this user.
    """
    location = path.absolute()
    for _ in range(MAX_LINKS):
        fault = _fault(location.parent, location.parent.stat())
        if fault:
            raise Permanent(
                f"{path} is not used: {fault}, and so can put another file there, which chooses "
                "programs that run as you: move it to a directory of your own"
            )
        if not location.is_symlink():
            break
        _check_owner(path, location, location.lstat())
        location = location.parent / os.readlink(location)
    # Non-blocking: a pipe that nobody writes to would be waited for.
    with open(os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        # Asked of the open file, as its name may be another one's by now.
        info = os.fstat(file.fileno())
        _check_owner(path, location, info)
        if _can_others_write(location, info):
            raise Permanent(
                f"{path} is not used: others can write it (mode {_mode(info)}), and so choose "
                f"programs that run as you: run: chmod go-w {shlex.quote(str(location))}"
            )
        os.set_blocking(file.fileno(), True)
        return file.read()


def check_directory(where: Path) -> None:
    """Raises Permanent for a directory in which, or in place of which, another user could put
    commands that run as this one. What is not there yet, this user may make.

    Nobody can rename what belongs to others in a sticky directory such as /tmp.
    """
    try:
        steps, itself = list(_steps(where)), where.resolve()
        info = where.stat() if where.exists() else None
    except OSError as error:
        raise Permanent(f"cannot use {where}: {error.strerror}: {REMEDY}") from error
    for location, step in steps:
        if location != itself and (fault := _fault(location, step)):
            raise Permanent(
                f"{where} is not used: {fault}, and so can put another directory there, whose "
                f"commands would run as you: {REMEDY}"
            )
    if info is None:
        return
    if info.st_uid != os.geteuid():
        raise Permanent(
            f"{where} is not used: it {_belongs(info)}, and commands in it would run as you, "
            f"{_user(os.geteuid())}: {REMEDY}"
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Permanent(
            f"{where} is not used: others can write to it (mode {_mode(info)}), and so give "
            "commands that run as you: see that all in it is yours, then run: chmod go-w "
            f"{shlex.quote(str(where))}"
        )


def check_entries(where: Path) -> None:
    """Raises Permanent if somebody else has put a file into a directory, or into one of those in
    it, while that could be written, or still can write one of those."""
    folders = _folders(where)
    for folder in folders:
        check_directory(Path(folder))
    for folder in (str(where), *folders):
        with os.scandir(folder) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                if info.st_uid not in (os.geteuid(), ROOT):
                    raise Permanent(
                        f"{where} is not used: {entry.path} {_belongs(info)}, and commands in it "
                        f"would run as you, {_user(os.geteuid())}: remove it, or {REMEDY}"
                    )


def make_private(directory: Path) -> None:
    """Makes a directory and those above it that are missing, open to this user alone whatever the
    umask. Raises OSError."""
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        if not directory.is_dir():
            raise
    except FileNotFoundError:
        make_private(directory.parent)
        with contextlib.suppress(FileExistsError):  # another process was first
            os.mkdir(directory, 0o700)  # /proc refuses in these words for ever


def private(path: str | os.PathLike[str], flags: int) -> int:
    """The `opener` of a file that only this user may read and write, whatever the umask."""
    return os.open(path, flags, 0o600)


def make_private_file(path: Path) -> None:
    """Makes an empty file for this user alone, whatever the umask, unless there is one.

    That one is not opened: closing it would drop this process's POSIX locks of it, SQLite's too.
    Raises OSError.
    """
    with contextlib.suppress(FileExistsError):
        os.close(private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every directory and link on the way to a path, as far as it exists."""
    here, links = Path("/"), 0
    left = list(reversed(path.absolute().parts[1:]))
    yield here, here.lstat()
    while left:
        part = left.pop()
        if part == "..":
            here = here.parent
            continue
        location = here / part
        try:
            info = location.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        yield location, info
        if not stat.S_ISLNK(info.st_mode):
            here = location
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = Path(os.readlink(location))
        here = Path("/") if target.is_absolute() else here
        left.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))


def _folders(where: Path) -> list[str]:
    with os.scandir(where) as entries:
        return [entry.path for entry in entries if entry.is_dir()]


def _fault(location: Path, info: os.stat_result) -> str:
    """Who else can rename what is in a directory, or change a link; empty if nobody can."""
    if info.st_uid not in (os.geteuid(), ROOT) and not _is_unmapped(info.st_uid):
        return f"{location} {_belongs(info)}, who can write it"
    is_link, is_sticky = stat.S_ISLNK(info.st_mode), info.st_mode & stat.S_ISVTX
    if not is_link and not is_sticky and _can_others_write(location, info):
        return f"others can write {location} (mode {_mode(info)})"
    return ""


def _check_owner(path: Path, location: Path, info: os.stat_result) -> None:
    if info.st_uid not in (os.geteuid(), ROOT):
        what = "it" if location == path.absolute() else f"the link or file {location}"
        raise Permanent(
            f"{path} is not used: {what} {_belongs(info)}, and could choose programs that run as "
            f"you, {_user(os.geteuid())}: work in another directory, or name a file of your own "
            "with --config or ATOLL_CONFIG"
        )


def _can_others_write(location: Path, info: os.stat_result) -> bool:
    if info.st_mode & stat.S_IWOTH:
        return True
    return bool(info.st_mode & stat.S_IWGRP) and not _is_alone(location, info)


def _is_alone(location: Path, info: os.stat_result) -> bool:
    """Whether the group of a file has nobody in it but its owner or root.

    Many distributions give each user a group of the same name, and let it write all that the user
    makes.
    """
    import grp
    import pwd

    try:
        if ACL in os.listxattr(location):  # the mode of the group is then that of all it lists
            return False
    except OSError:
        pass  # a file system without them
    if info.st_gid == ROOT:
        return True
    try:
        group, user = grp.getgrgid(info.st_gid), pwd.getpwuid(info.st_uid).pw_name
    except KeyError:
        return False
    return group.gr_name == user and not set(group.gr_mem) - {user}


def _is_unmapped(uid: int) -> bool:
    """Whether that is how a user namespace shows owners that it does not know, such as root."""
    try:
        users = Path("/proc/self/uid_map").read_text().split()
        return users != EVERY_USER and uid == int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return False


def _belongs(info: os.stat_result) -> str:
    return f"belongs to {_user(info.st_uid)}"


def _user(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _mode(info: os.stat_result) -> str:
    return f"{stat.S_IMODE(info.st_mode):o}"
