"""How long a rank has been silent, as its reader counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.agent.records import CLAIM, DESIRED, HEARTBEAT, desired_record, name_of
from atoll.agent.wrapper import Folder, write
from atoll.backends.reader import LOOK_S, RecordReader


class SlowFolder(Folder):
    """A store whose answers take `takes_s`, of a clock that nothing else moves."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.now = self.takes_s = 0.0
        self.is_away = False

    def entries(self) -> dict[str, int]:
        self.now += self.takes_s
        if self.is_away:
            raise OSError("it does not answer")
        return super().entries()


@pytest.fixture
def store(tmp_path: Path) -> SlowFolder:
    store = SlowFolder(tmp_path)
    store.put(DESIRED, write(desired_record(1, 1, {}, None, {}, 0.0)))
    store.create(name_of(0, 0, CLAIM), b"{}")
    store.heartbeat(name_of(0, 0, HEARTBEAT))
    return store


def reader_of(store: SlowFolder) -> RecordReader:
    reader = RecordReader(store, lambda: store.now)
    reader.refresh()
    return reader


def test_silence_counts_between_two_looks(store: SlowFolder) -> None:
    reader = reader_of(store)
    store.now += 60.0
    store.takes_s = LOOK_S
    reader.refresh()
    assert reader.heartbeat_age_s(0, 0) == 60.0 + LOOK_S


def test_silence_while_the_store_did_not_answer_is_no_rank_s(store: SlowFolder) -> None:
    reader = reader_of(store)
    store.now += 5.0
    store.takes_s, store.is_away = 10.0, True
    for _ in range(4):
        with pytest.raises(OSError, match="does not answer"):
            reader.refresh()
        store.now += 2.0
    store.is_away = False
    reader.refresh()
    assert reader.heartbeat_age_s(0, 0) == 5.0 + LOOK_S
    store.now, store.takes_s = store.now + 7.0, 0.0
    reader.refresh()
    assert reader.ages({}).unchanged_s == {(0, 0): 5.0 + LOOK_S + 7.0}
