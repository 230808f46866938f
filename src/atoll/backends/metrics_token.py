"""The token with which ranks report by HTTP: it is good for one training, and for nothing else.

It is signed, not stored: whoever has the control plane's key can check it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from atoll.files.writing import write_file

FILE = "report-key"  # in the state directory of a control plane
PREFIX = "atollr"

_TOKEN = re.compile(r"atollr_([a-z0-9-]{1,63})_([A-Za-z0-9-]{1,64})_([0-9a-f]{64})")


class Reporting(NamedTuple):
    """Whom a token speaks for."""

    namespace: str
    uid: str


def key_at(state_dir: Path) -> bytes:
    """The key of a control plane, made on first use."""
    path = state_dir / FILE
    if not path.exists():
        with contextlib.suppress(FileExistsError):  # whoever is first
            write_file(path, secrets.token_bytes(32), is_new=True)
    return path.read_bytes()


def token_for(key: bytes, namespace: str, uid: str) -> str:
    return f"{PREFIX}_{namespace}_{uid}_{_signature(key, namespace, uid)}"


def read_token(key: bytes, token: str) -> Reporting | None:
    """None for a token that this key did not sign."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        return None
    if not hmac.compare_digest(match[3], _signature(key, match[1], match[2])):
        return None
    return Reporting(match[1], match[2])


def _signature(key: bytes, namespace: str, uid: str) -> str:
    return hmac.new(key, f"report {namespace} {uid}".encode(), hashlib.sha256).hexdigest()
