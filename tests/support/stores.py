"""A store whose requests fail as a test says, and threads that end together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from atoll.objectstore import ObjectInfo, ObjectStore, RangeReader

# Gets the request, its key, and whether it has been made: it may raise, wait or note it.
Fault = Callable[[str, str, bool], None]


class FaultyStore(ObjectStore):
    """`fault` is called before and after every request."""

    fault: Fault | None = None

    def _around(self, what: str, key: str, request: Callable[[], Any]) -> Any:
        if self.fault is not None:
            self.fault(what, key, False)
        answer = request()
        if self.fault is not None:
            self.fault(what, key, True)
        return answer

    def put(self, key: str, data: Any, **how: Any) -> None:
        make = super().put
        self._around("put", key, lambda: make(key, data, **how))

    def create(self, key: str, data: Any, **how: Any) -> bool:
        make = super().create
        return bool(self._around("create", key, lambda: make(key, data, **how)))

    def get(self, key: str, *span: Any, **how: Any) -> memoryview:
        make = super().get
        found: memoryview = self._around("get", key, lambda: make(key, *span, **how))
        return found

    def reader(self, key: str, start: int = 0, end: int | None = None) -> RangeReader:
        make = super().reader
        found: RangeReader = self._around("get", key, lambda: make(key, start, end))
        return found

    def list(self, prefix: str, after: str | None = None) -> list[ObjectInfo]:
        make = super().list
        found: list[ObjectInfo] = self._around("list", prefix, lambda: make(prefix, after))
        return found

    def delete(self, keys: Iterable[str]) -> None:
        keys, make = list(keys), super().delete
        self._around("delete", " ".join(keys), lambda: make(keys))


def run_threads(*jobs: Callable[[], Any], timeout_s: float = 100.0) -> None:
    """Run all at once; raises the first error."""
    errors: list[BaseException] = []

    def run(job: Callable[[], Any]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a replica hangs"
