"""The one client of object stores: put, create-only put, ranged get, list, delete."""

from atoll.objectstore.client import ObjectInfo, ObjectStore, RangeReader, Traffic

__all__ = ["ObjectInfo", "RangeReader", "ObjectStore", "Traffic"]
