"""Records in an object store, for backends whose hosts share no folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.agent.records import RecordStore
from atoll.core.errors import NotFound, Permanent, ValidationError

if TYPE_CHECKING:
    from atoll.objectstore.client import ObjectStore

# Whoever reads or writes records tries again by itself, and meanwhile must show that it lives.
PATIENCE_S = 10.0


class Bucket(RecordStore):
    """The objects under a URI.

    Raises Temporary where another try may work, and Permanent where none will.
    """

    poll_s = 2.0  # a listing each, and a stop is noticed by so much later
    heartbeat_s = 10.0  # a put each, which costs money: 360 an hour and rank

    def __init__(self, store: ObjectStore) -> None:
        self.uri = store.uri
        self._store = store

    @classmethod
    def open(cls, uri: str) -> Bucket:
        try:
            from atoll.objectstore.client import ObjectStore
        except ModuleNotFoundError as error:
            raise Permanent(
                f"records in {uri} need the package {error.name!r}: "
                "pip install '.[store]' in a clone of atoll"
            ) from error
        return cls(ObjectStore.open(uri, patience_s=PATIENCE_S))

    def create(self, name: str, data: bytes) -> bool:
        # Taken by this very request, if its answer was lost and it was sent again.
        return self._store.create(name, data) or self.get(name) == data

    def put(self, name: str, data: bytes) -> None:
        self._store.put(name, data)

    def get(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Raises ValidationError for an object of more than `max_bytes`."""
        try:
            with self._store.reader(name) as reader:
                size = reader.remaining()
                if max_bytes is not None and size > max_bytes:
                    raise ValidationError(name, f"{size} bytes", f"expected {max_bytes} at most")
                data = memoryview(bytearray(size))
                return bytes(data[: reader.fill(data)])
        except NotFound:
            return None

    def heartbeat(self, name: str) -> None:
        self.put(name, b"")

    def entries(self) -> dict[str, int]:
        return {
            info.key: int(info.modified.timestamp() * 1e6) * 1000 for info in self._store.list("")
        }

    def delete(self, names: list[str]) -> None:
        self._store.delete(names)
