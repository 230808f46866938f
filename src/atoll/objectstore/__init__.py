"""The one client of object stores: put, create-only put, ranged get, list, delete.

It is loaded when it is used: `bucket.py` explains what to install where its package is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.objectstore.client import ObjectInfo, ObjectStore, RangeReader, Traffic

__all__ = ["ObjectInfo", "RangeReader", "ObjectStore", "Traffic"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from atoll.objectstore import client

    return getattr(client, name)
