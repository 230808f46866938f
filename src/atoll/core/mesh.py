"""The mesh gate: its key names and states, shared by the ranks and the control plane.

The keys, in the v2 API of etcd, are those that existing images poll. Slow imports are avoided:
every rank that waits at the gate loads this file.
"""

from __future__ import annotations

from enum import StrEnum

GATE_DIR = "basilica"
READY_DIR = f"{GATE_DIR}/mesh-ready"
DEGRADED_DIR = f"{GATE_DIR}/mesh-degraded"
DEFAULT_ETCD_PORT = 2379  # as etcd has it

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.~")


class MeshState(StrEnum):
    """Whether every host of a training can reach every other."""

    PENDING = "Pending"
    READY = "Ready"
    DEGRADED = "Degraded"


def key_path(key: str) -> str:
    """The HTTP path of a v2 key; each part is escaped, so a host name stays one part."""
    return "/v2/keys/" + "/".join(map(escaped, key.split("/")))


def ready_path(host: str) -> str:
    return f"/v2/keys/{READY_DIR}/{escaped(host)}"


def degraded_path(host: str) -> str:
    return f"/v2/keys/{DEGRADED_DIR}/{escaped(host)}"


def escaped(text: str) -> str:
    """Percent-encoded, '/' included; not urllib.parse, whose import costs a rank milliseconds."""
    data = text.encode("utf-8", "surrogateescape")
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in data)


def split_endpoint(endpoint: str) -> tuple[str, int] | None:
    """Host and port of `host`, `host:port`, `[v6]:port` or a bare v6 address; else None.

    An `http://` in front and a path of `/` behind are tolerated: people paste URLs.
    """
    text = endpoint.strip().removeprefix("http://").removesuffix("/")
    if text.startswith("["):
        host, bracket, remaining = text[1:].partition("]")
        if not bracket or (remaining and not remaining.startswith(":")):
            return None
        port = remaining[1:]
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host or any(char in host for char in "/@[]?# \t\r\n"):
        return None
    if not port:
        return host, DEFAULT_ETCD_PORT
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        return None
    return host, int(port)
