"""Records in an object store: the place for backends whose hosts see no folder together."""

from __future__ import annotations

import os
from typing import Any

from atoll.core.errors import Permanent, Temporary, ValidationError

BATCH = 1000


class Objects:
    """A place for records under the URI of an object store: `agent/record_store.py:RecordStore`.

    Raises Temporary where another try may work, and Permanent where none will.
    """

    poll_s = 2.0
    heartbeat_s = 10.0

    def __init__(self, store: Any, name: str) -> None:
        self.name = name
        self._store = store

    @classmethod
    def open(cls, uri: str) -> Objects:
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ModuleNotFoundError as error:
            raise Permanent(
                f"records in {uri} need the package {error.name!r}: pip install 'atoll[store]'"
            ) from error
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        config = {"region": region} | ({"endpoint": endpoint} if endpoint else {})
        options = {"allow_http": endpoint.startswith("http://"), "timeout": "30s"}
        is_s3 = uri.startswith("s3://")
        try:
            store = from_url(uri, client_options=options, **({"config": config} if is_s3 else {}))  # type: ignore[call-overload]
        except BaseError as error:
            raise ValidationError("uri", uri, str(error).splitlines()[0]) from error
        return cls(store, uri)

    def create(self, name: str, data: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            self._ask("put", name, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            # Or this very request, if its answer was lost and it was sent again.
            return self.get(name) == data
        return True

    def put(self, name: str, data: bytes) -> None:
        self._ask("put", name, data, use_multipart=False)

    def get(self, name: str, most: int | None = None) -> bytes | None:
        """Raises ValidationError for an object of more than `most` bytes."""
        try:
            answer = self._ask("get", name)
            size = answer.meta["size"]
            if most is not None and size > most:
                raise ValidationError(name, f"{size} bytes", f"expected {most} at most")
            return bytes(answer.bytes())
        except FileNotFoundError:
            return None

    def heartbeat(self, name: str) -> None:
        self.put(name, b"")

    def entries(self) -> dict[str, int]:
        pages = self._ask("list", None, chunk_size=BATCH)
        return {
            item["path"]: int(item["last_modified"].timestamp() * 1e6) * 1000
            for page in pages
            for item in page
        }

    def delete(self, names: list[str]) -> None:
        for first in range(0, len(names), BATCH):
            try:
                self._ask("delete", names[first : first + BATCH])
            except FileNotFoundError:
                for name in names[first : first + BATCH]:
                    try:
                        self._ask("delete", name)
                    except FileNotFoundError:
                        continue

    def _ask(self, verb: str, *args: Any, **options: Any) -> Any:
        import obstore
        from obstore import exceptions

        refused = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        retained = (
            *(exceptions.AlreadyExistsError, exceptions.PreconditionError),
            *(FileNotFoundError, exceptions.NotFoundError),
        )
        try:
            return getattr(obstore, verb)(self._store, *args, **options)
        except retained:
            raise
        except refused as error:
            raise Permanent(f"{self.name}: {str(error).splitlines()[0]}") from error
        except (exceptions.BaseError, OSError) as error:
            raise Temporary(f"{self.name}: {str(error).splitlines()[0]}") from error
