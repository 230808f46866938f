"""The file of the series: whatever happens to it, series are kept."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.agent.metrics import MetricWriter, batch_of
from atoll.core.errors import Temporary
from atoll.metrics.series import COUNT
from atoll.metrics.store import MetricStore


def line(n: int) -> bytes:
    return batch_of(MetricWriter(0, 1, 0, "a"), n, {"loss": [[1.0, n, 0.5]]}, 0)


def total(metric_store: MetricStore, uid: str = "u") -> int:
    return int(sum(sum(one.series.columns[COUNT]) for one in metric_store.series(uid)))


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(20_000))


def no_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * 100)


def torn(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def other_tables(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("create table series (uid text)")


def aside(path: Path) -> list[Path]:
    return sorted(path.parent.glob("series.db.damaged-*"))


@pytest.mark.parametrize(
    "damage",
    [garbage, no_header, torn, overwritten, a_folder, other_tables],
    ids=lambda d: d.__name__,
)
def test_a_damaged_file_is_put_aside_and_an_empty_one_is_used(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "series.db"
    metric_store = MetricStore(path)
    for uid in range(200):
        metric_store.take(str(uid), [line(1)])
    metric_store.close()
    damage(path)
    again = MetricStore(path)
    for _ in range(3):  # what is only found when it is read is put aside then
        try:
            again.uids()
            again.take("u", [line(1)])
            break
        except Temporary:
            assert aside(path)
    assert total(again) == 1
    (note,) = again.notes
    assert str(aside(path)[0]) in note
    assert str(aside(path)[0]) in caplog.text
    again.close()
    assert total(MetricStore(path)) == 1


def test_what_is_in_memory_survives_damage_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "series.db"
    metric_store = MetricStore(path)
    metric_store.take("u", [line(n) for n in range(1, 6)])
    with sqlite3.connect(path) as other:
        other.execute("pragma wal_checkpoint(truncate)")
    garbage(path)
    fill = (metric_store.take(f"other-{uid}", [line(1)]) for uid in range(1000))
    with pytest.raises(Temporary, match="metrics"):  # once it reads what SQLite has not in memory
        sum(fill)
    assert aside(path)
    metric_store.take("u", [line(6)])
    assert total(metric_store) == 6
    assert metric_store.trouble == ""
    metric_store.close()
    assert total(MetricStore(path)) == 6


@pytest.mark.parametrize("what", ["deleted", "replaced", "log deleted"])
def test_a_file_that_goes_while_it_is_used_is_written_again(tmp_path: Path, what: str) -> None:
    path = tmp_path / "series.db"
    metric_store = MetricStore(path)
    metric_store.take("u", [line(1), line(2)])
    metric_store.check()
    if what == "replaced":
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
    else:
        Path(f"{path}-wal" if what == "log deleted" else path).unlink()
    metric_store.check()
    metric_store.take("u", [line(3)])
    metric_store.close()
    assert total(MetricStore(path)) == 3
    assert "was deleted or replaced" in metric_store.notes[0]


def test_a_file_that_somebody_has_locked_is_not_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "series.db"
    metric_store = MetricStore(path)
    metric_store.take("u", [line(1)])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(Temporary, match="locked"):
        metric_store.take("u", [line(2)])
    assert "locked" in metric_store.trouble
    assert MetricStore(path).uids() == {"u"}  # it starts meanwhile
    other.close()
    metric_store.check()
    assert metric_store.trouble == ""
    metric_store.take("u", [line(2)])
    assert (total(metric_store), aside(path)) == (2, [])
