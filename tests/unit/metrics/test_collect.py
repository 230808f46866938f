"""Folders of reports are read as they grow, line by line, and cleared behind."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from atoll.agent.metrics import MetricWriter, batch_of
from atoll.controller.informer import Informer
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Status, Training
from atoll.metrics.collect import Collector, FolderReader
from atoll.metrics.series import COUNT
from atoll.metrics.store import MetricStore
from atoll.rounds.follow import RoundFollower, StoreAccess
from atoll.store.sqlite import MemoryStore


def line(n: int, source: str = "a") -> bytes:
    return batch_of(MetricWriter(0, 1, 0, source), n, {"loss": [[1.0, n, 0.5]]}, 0)


SPEC = TrainingSpec(name="t", command=["true"], world_size=WorldSize(min=1, target=1, max=1))


def training(phase: Phase) -> Training:
    return Training(namespace="n", uid="u", spec=SPEC, status=Status(phase=phase))


def total(metric_store: MetricStore) -> int:
    return int(sum(sum(one.series.columns[COUNT]) for one in metric_store.series("u")))


def test_half_a_line_waits_for_the_rest(tmp_path: Path) -> None:
    metric_store, folder = MetricStore(tmp_path / "db"), tmp_path / "metrics"
    folder.mkdir()
    file = folder / "0.1.0.a.000000"
    whole = line(1) + line(2)
    file.write_bytes(whole[:-5])
    reader = FolderReader("u", folder)
    reader.read(metric_store)
    assert total(metric_store) == 1
    file.write_bytes(whole)
    reader.read(metric_store)
    assert total(metric_store) == 2


def test_files_that_were_read_and_have_a_successor_are_removed(tmp_path: Path) -> None:
    metric_store, folder = MetricStore(tmp_path / "db"), tmp_path / "metrics"
    folder.mkdir()
    for number in range(3):
        (folder / f"0.1.0.a.{number:06d}").write_bytes(line(number + 1))
    (folder / "0.2.0.b.000000").write_bytes(line(1, "b"))
    FolderReader("u", folder).read(metric_store)
    assert sorted(path.name for path in folder.iterdir()) == ["0.1.0.a.000002", "0.2.0.b.000000"]
    assert total(metric_store) == 4


def test_another_reader_counts_nothing_twice(tmp_path: Path) -> None:
    metric_store, folder = MetricStore(tmp_path / "db"), tmp_path / "metrics"
    folder.mkdir()
    (folder / "0.1.0.a.000000").write_bytes(line(1) + line(2))
    FolderReader("u", folder).read(metric_store)
    FolderReader("u", folder).read(MetricStore(tmp_path / "db"))
    assert total(MetricStore(tmp_path / "db")) == 2


def test_a_line_that_is_no_report_hides_no_other(tmp_path: Path) -> None:
    metric_store, folder = MetricStore(tmp_path / "db"), tmp_path / "metrics"
    folder.mkdir()
    (folder / "0.1.0.a.000000").write_bytes(line(1) + b"no report\n" + line(2))
    FolderReader("u", folder).read(metric_store)
    assert total(metric_store) == 2


def test_a_folder_that_is_not_there_yet_is_no_trouble(tmp_path: Path) -> None:
    assert FolderReader("u", tmp_path / "none").read(MetricStore(tmp_path / "db")) is False


def test_whoever_asks_has_what_was_written_by_then(tmp_path: Path) -> None:
    """Ranks have ended, and nobody has looked since."""
    metric_store, folder = MetricStore(tmp_path / "db"), tmp_path / "metrics"
    folder.mkdir()
    (folder / "0.1.0.a.000000").write_bytes(line(1))
    Collector(metric_store, lambda _: folder.as_uri())
    assert metric_store.catch_up is not None
    asyncio.run(metric_store.catch_up(training(Phase.READY)))
    assert total(metric_store) == 1
    (folder / "0.1.0.a.000000").write_bytes(line(1) + line(2))
    asyncio.run(metric_store.catch_up(training(Phase.SUCCEEDED)))
    assert total(metric_store) == 2
    assert not folder.exists(), "it was read to its end"
    asyncio.run(metric_store.catch_up(training(Phase.SUCCEEDED)))
    assert total(metric_store) == 2


def test_what_is_kept_of_a_removed_training_goes_once_the_file_can_be_written(
    tmp_path: Path,
) -> None:
    """Somebody has the file locked while a training is removed: the others are read on."""

    async def main() -> None:
        metric_store, store = MetricStore(tmp_path / "db"), MemoryStore()
        folder = tmp_path / "metrics"
        folder.mkdir()
        stays, goes = [
            await store.create(replace(one, uid=uid, spec=replace(SPEC, name=uid)))
            for one, uid in zip([training(Phase.READY)] * 2, "uv", strict=True)
        ]
        metric_store.take("v", [line(1)])
        collector = Collector(
            metric_store, lambda one: folder.as_uri() if one.uid == stays.uid else ""
        )
        other = sqlite3.connect(tmp_path / "db", isolation_level=None)
        informer = Informer(store)
        running = asyncio.gather(informer.run(), collector.run(informer))
        try:
            (folder / "0.1.0.a.000000").write_bytes(line(1))
            await until(lambda: total(metric_store) == 1)
            other.execute("begin immediate")
            await store.remove(goes)
            await until(lambda: "locked" in metric_store.trouble)
            other.execute("rollback")
            (folder / "0.1.0.b.000000").write_bytes(line(1, "b"))
            await until(lambda: total(metric_store) == 2 and metric_store.uids() == {"u"})
            assert not running.done()
        finally:
            running.cancel()
            other.close()

    asyncio.run(main())


def test_rounds_are_followed_on_though_the_end_of_a_training_could_not_be_noted(
    tmp_path: Path,
) -> None:
    metric_store = MetricStore(tmp_path / "db")
    follower = RoundFollower(
        metric_store.rounds, lambda one: StoreAccess("local", "", is_exclusive=False)
    )
    over = training(Phase.SUCCEEDED)
    follower.note(over)
    (followed,) = follower._followed.values()
    other = sqlite3.connect(tmp_path / "db", isolation_level=None)
    other.execute("begin immediate")
    follower.observe(followed)  # does not raise
    assert not metric_store.rounds.is_finished("u")
    other.close()
    follower.observe(followed)
    assert metric_store.rounds.is_finished("u")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
