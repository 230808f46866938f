"""Folders of reports are read as they grow, line by line, and cleared behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import Gone
from atoll.core.phase import Phase
from atoll.core.ports import Change
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Status, Training
from atoll.rank.figures import Teller, batch_of
from atoll.rounds.follow import RoundFollower
from atoll.series.collect import Collector, FolderReader
from atoll.series.fold import COUNT
from atoll.series.keep import SeriesKeeper
from atoll.store.memory import MemoryStore


def line(n: int, life: str = "a") -> bytes:
    return batch_of(Teller(0, 1, 0, life), n, {"loss": [[1.0, n, 0.5]]}, 0)


def training(phase: Phase) -> Training:
    spec = TrainingSpec(name="t", command=["true"], world_size=WorldSize(min=1, target=1, max=1))
    return Training(namespace="n", uid="u", spec=spec, status=Status(phase=phase))


def total(keeper: SeriesKeeper) -> int:
    return int(sum(sum(one.series.columns[COUNT]) for one in keeper.series("u")))


def test_half_a_line_waits_for_the_rest(tmp_path: Path) -> None:
    keeper, folder = SeriesKeeper(tmp_path / "db"), tmp_path / "figures"
    folder.mkdir()
    file = folder / "0.1.0.a.000000"
    whole = line(1) + line(2)
    file.write_bytes(whole[:-5])
    reader = FolderReader("u", folder)
    reader.read(keeper)
    assert total(keeper) == 1
    file.write_bytes(whole)
    reader.read(keeper)
    assert total(keeper) == 2


def test_files_that_were_read_and_have_a_successor_are_removed(tmp_path: Path) -> None:
    keeper, folder = SeriesKeeper(tmp_path / "db"), tmp_path / "figures"
    folder.mkdir()
    for number in range(3):
        (folder / f"0.1.0.a.{number:06d}").write_bytes(line(number + 1))
    (folder / "0.2.0.b.000000").write_bytes(line(1, "b"))
    FolderReader("u", folder).read(keeper)
    assert sorted(path.name for path in folder.iterdir()) == ["0.1.0.a.000002", "0.2.0.b.000000"]
    assert total(keeper) == 4


def test_another_reader_counts_nothing_twice(tmp_path: Path) -> None:
    keeper, folder = SeriesKeeper(tmp_path / "db"), tmp_path / "figures"
    folder.mkdir()
    (folder / "0.1.0.a.000000").write_bytes(line(1) + line(2))
    FolderReader("u", folder).read(keeper)
    FolderReader("u", folder).read(SeriesKeeper(tmp_path / "db"))
    assert total(SeriesKeeper(tmp_path / "db")) == 2


def test_a_line_that_is_no_report_hides_no_other(tmp_path: Path) -> None:
    keeper, folder = SeriesKeeper(tmp_path / "db"), tmp_path / "figures"
    folder.mkdir()
    (folder / "0.1.0.a.000000").write_bytes(line(1) + b"no report\n" + line(2))
    FolderReader("u", folder).read(keeper)
    assert total(keeper) == 2


def test_a_folder_that_is_not_there_yet_is_no_trouble(tmp_path: Path) -> None:
    assert FolderReader("u", tmp_path / "none").read(SeriesKeeper(tmp_path / "db")) is False


class ForgetfulStore(MemoryStore):
    """Has dropped changes before they were read, once."""

    def __init__(self) -> None:
        super().__init__()
        self.watches = 0
        self.is_watched_again = asyncio.Event()

    async def watch(self, after: int, key: Any = None) -> AsyncIterator[Change]:
        self.watches += 1
        if self.watches == 1:
            raise Gone(after, after + 1)
        self.is_watched_again.set()
        async for change in super().watch(after, key):
            yield change


@pytest.mark.parametrize("what", ["series", "rounds"])
def test_whoever_misses_changes_begins_again_and_does_not_end(tmp_path: Path, what: str) -> None:
    async def scene() -> None:
        store, keeper = ForgetfulStore(), SeriesKeeper(tmp_path / "db")
        whose: Any = None  # there are no trainings
        follower = RoundFollower(keeper.rounds, whose)
        collector = Collector(keeper, lambda training: "")
        following = asyncio.create_task((collector if what == "series" else follower).run(store))
        again = asyncio.create_task(store.is_watched_again.wait())
        await asyncio.wait([following, again], return_when=asyncio.FIRST_COMPLETED)
        assert not following.done()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(scene())


def test_whoever_asks_has_what_was_written_by_then(tmp_path: Path) -> None:
    """Ranks have ended, and nobody has looked since."""
    keeper, folder = SeriesKeeper(tmp_path / "db"), tmp_path / "figures"
    folder.mkdir()
    (folder / "0.1.0.a.000000").write_bytes(line(1))
    Collector(keeper, lambda _: folder.as_uri())
    assert keeper.catch_up is not None
    asyncio.run(keeper.catch_up(training(Phase.READY)))
    assert total(keeper) == 1
    (folder / "0.1.0.a.000000").write_bytes(line(1) + line(2))
    asyncio.run(keeper.catch_up(training(Phase.SUCCEEDED)))
    assert total(keeper) == 2
    assert not folder.exists(), "it was read to its end"
    asyncio.run(keeper.catch_up(training(Phase.SUCCEEDED)))
    assert total(keeper) == 2
