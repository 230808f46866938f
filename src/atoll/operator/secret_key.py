"""The key with which all operators of a cluster sign and check the tokens of ranks."""

from __future__ import annotations

import base64
import secrets
from typing import Any

from atoll.core.errors import Conflict, NotFound
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.names import REPORT_KEY

KEY = "key"


async def report_key(cluster: Cluster, home: str) -> bytes:
    """The key, made on first use. Raises Denied without the rights, and BackendError."""
    while True:
        try:
            secret = await cluster.get("secrets", home, REPORT_KEY)
            return base64.b64decode(secret["data"][KEY])
        except NotFound:
            pass
        made: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": REPORT_KEY},
            "data": {KEY: base64.b64encode(secrets.token_bytes(32)).decode()},
        }
        try:
            await cluster.create("secrets", home, made)
        except Conflict:  # another operator was faster
            continue
