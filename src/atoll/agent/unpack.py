"""Unpacks the code that travels with a training, and becomes the command, in its root.

`python3 -S -I unpack.py --digest SHA256 [--path FOLDER]… ARCHIVE ROOT -- COMMAND…`

ARCHIVE is a file, or a folder with the parts of one. One file for Python 3.7 and its standard
library, so that it can travel to images without atoll. Ranks that share ROOT unpack it once. What
is not the archive that was deployed, or would write outside of ROOT, is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import sys
import tarfile
import zlib

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than all the rest
if TYPE_CHECKING:
    from typing import NoReturn

USAGE = "usage: unpack.py --digest SHA256 [--path FOLDER]... ARCHIVE ROOT -- COMMAND...\n"
# As the client refuses them before they are sent: these are for an archive that is not its own.
MAX_UNPACKED = 256 * 2**20
MAX_PACKED = 64 * 2**20
FAILED, NOT_FOUND = 126, 127  # as in shells


class Refused(OSError):
    """What is not, or must not be, unpacked."""


def read_archive(location: str, digest: str) -> bytes:
    """Its bytes. Raises Refused if they are others than those of `digest`."""
    parts = [location]
    if os.path.isdir(location):
        parts = sorted(
            os.path.join(location, name) for name in os.listdir(location) if name[0] != "."
        )
    data = b""
    for part in parts:
        with open(part, "rb") as file:
            data += file.read(MAX_PACKED + 1 - len(data))
    check_digest(data, digest, location)
    return data


def check_digest(data: bytes, digest: str, location: str) -> None:
    if len(data) > MAX_PACKED or hashlib.sha256(data).hexdigest() != digest:
        raise Refused(f"{location} is not the code that was deployed: its digest is another one")


def unpack_or_refuse(data: bytes, root: str) -> None:
    """Raises Refused also for what is no archive at all."""
    try:
        unpack(data, root)
    except (tarfile.TarError, zlib.error, EOFError, ValueError) as error:
        raise Refused(f"the archive cannot be read: {error}") from error
    except (FileExistsError, NotADirectoryError) as error:  # in a new folder: by the archive itself
        name = os.path.basename(str(error.filename2 or error.filename))
        raise Refused(f"{name} is a file and a folder in the archive") from error
    except RecursionError as error:
        raise Refused("the folders of the archive are nested too deep") from error


def unpack(data: bytes, root: str) -> None:
    """Everything or nothing: `root` is there only when it is whole."""
    draft = f"{root}.{os.uname().nodename}.{os.getpid()}.new"
    shutil.rmtree(draft, ignore_errors=True)
    os.makedirs(draft)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
            _extract(tar, draft)
        try:
            os.rename(draft, root)
        except OSError as error:  # another rank was first
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _extract(tar: tarfile.TarFile, root: str) -> None:
    names = set()
    left = MAX_UNPACKED
    for entry in tar:
        name = _checked(entry.name)
        if name in names:
            raise Refused(f"{name} is in the archive twice")
        names.add(name)
        location = os.path.join(root, name)
        folder = os.path.dirname(location)
        os.makedirs(folder, exist_ok=True)
        if os.path.realpath(folder) != os.path.normpath(folder):
            raise Refused(f"{name} would be written through a link")
        left -= entry.size
        if left < 0:
            raise Refused(f"{name}: there are more than {MAX_UNPACKED} bytes in the archive")
        if entry.issym():
            _checked(os.path.normpath(os.path.join(os.path.dirname(name), entry.linkname)), name)
            os.symlink(entry.linkname, location)
        elif entry.isreg():
            source = tar.extractfile(entry)
            assert source is not None
            mode = 0o755 if entry.mode & 0o100 else 0o644
            into = os.open(location, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(into, "wb") as file:
                shutil.copyfileobj(source, file)
        else:
            raise Refused(f"{name} is neither a file nor a link")


def _checked(path: str, name: str = "") -> str:
    parts = path.split("/")
    if path.startswith("/") or not path or ".." in parts or "\0" in path:
        raise Refused(f"{name or path} leads out of the directory")
    return path


def say(message: str, reason: str) -> None:
    """Says why the rank ends, also where the record of its end takes it from."""
    sys.stderr.write(f"atoll: {message}\n")
    with contextlib.suppress(OSError):  # run without `process.py`: nobody reads it
        from runpy import run_path

        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "process.py")
        run_path(path)["write_error_file"](message, reason=reason)


def become(command: list[str], root: str, path: list[str]) -> NoReturn:
    os.chdir(root)
    os.environ["PWD"] = root
    folders = [os.path.normpath(os.path.join(root, folder)) for folder in path]
    before = os.environ.get("PYTHONPATH")
    if folders:
        os.environ["PYTHONPATH"] = os.pathsep.join(folders + ([before] if before else []))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        say(f"{command[0]}: {error.strerror}", "CommandNotFound" if is_missing else "CannotRun")
        sys.exit(NOT_FOUND if is_missing else FAILED)


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:  # whether this Python can run this file
        return 0
    digest, path = "", []
    while len(arguments) > 1 and arguments[0] in ("--digest", "--path"):
        if arguments[0] == "--digest":
            digest = arguments[1]
        else:
            path.append(arguments[1])
        arguments = arguments[2:]
    if len(arguments) < 4 or arguments[2] != "--" or len(digest) != 64:
        sys.stderr.write(USAGE)
        return 2
    archive, root, command = arguments[0], os.path.abspath(arguments[1]), arguments[3:]
    try:
        if not os.path.isdir(root):
            unpack_or_refuse(read_archive(archive, digest), root)
        become(command, root, path)
    except OSError as error:
        say(f"the code could not be unpacked: {error}", "CannotRun")
        return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
