"""How the processes of one replica deal out the data that it holds."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest

from atoll.diloco.data.lease import DataLease
from atoll.diloco.data.ledger import Hold, begin, make_terms
from atoll.diloco.data.sampler import DataSampler


class PeriodEnds(Exception):
    pass


class Host:
    steps = 0

    def receive(self) -> None:
        """No round is on its way."""

    def end_period(self) -> None:
        raise PeriodEnds


class OneOf:
    """One process of a replica of several that tell each other nothing between rounds."""

    def __init__(self, process: int, processes: int) -> None:
        self.process, self.processes = process, processes

    def gather(self, message: Any) -> list[Any]:
        raise AssertionError("a round came first")


def until_the_round(process: int, processes: int, end: int | None = None) -> list[list[int]]:
    """The batches that a process trains on before it asks for a round; `end`: of a stream."""
    length = 100 if end is None else None
    lease = DataLease(begin(make_terms(length, period=1, world=2, fragments=1)), 0)
    stream = None if end is None else lambda position: iter(range(position, end))
    data = DataSampler(Host(), lease, OneOf(process, processes), batch=8, stream=stream)
    batches = []
    with suppress(PeriodEnds):
        for step, batch in enumerate(data, 1):
            batches.append(list(batch) if end is not None else batch.positions)
            data.after_step(step)
    return batches


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_run_out_of_data_at_the_same_step_and_share_none_of_it(processes: int) -> None:
    # A lease that ends within a period: what another process trained on must not look free.
    dealt = [until_the_round(process, processes) for process in range(processes)]
    assert len({len(batches) for batches in dealt}) == 1
    assert sorted(at for batches in dealt for batch in batches for at in batch) == list(range(25))


def test_all_processes_train_on_the_last_position_so_that_none_is_idle() -> None:
    dealt = [until_the_round(process, 3) for process in range(3)]
    assert [len(batches) for batches in dealt] == [2, 2, 2]
    assert [batches[1] for batches in dealt] == [[24]] * 3


@pytest.mark.parametrize("end", range(1, 25))
def test_a_stream_ends_for_all_processes_at_the_same_step(end: int) -> None:
    dealt = [until_the_round(process, 3, end) for process in range(3)]
    assert len({len(batches) for batches in dealt}) == 1
    positions = [at for batches in dealt for batch in batches for at in batch]
    assert set(positions) == set(range(end))
    assert len(positions) <= end + 2  # one for each process that had nothing in the last step


def test_a_loader_that_cannot_wait_for_a_round_holds_the_data_of_a_late_one_too() -> None:
    lease = DataLease(begin(make_terms(100, period=5, world=2, fragments=1)), 0)
    data = DataSampler(Host(), lease, OneOf(0, 1), batch=8)
    assert data.want(5) == 5 * 8
    data.fetch_ahead(1)
    assert data.want(5) == (2 * 5 + 1) * 8


def test_all_processes_of_a_replica_go_past_a_fetched_batch_that_others_have_a_part_of() -> None:
    """One that trained alone would wait in a collective for those that did not."""
    ledger = begin(make_terms(100, period=1, world=2, fragments=1))
    lost = msgspec.structs.replace(ledger, holds={0: Hold(((4, 25),), 1, True)})
    for process in range(2):
        lease = DataLease(ledger, 0)
        data = DataSampler(Host(), lease, OneOf(process, 2), batch=4)
        data.begin_loader()
        for _ in range(2):
            data.hand_to_loader()  # 0 to 7, of which each process has a half, and 8 to 15
        lease.ledger = lost
        assert [data.hand_to_loop() for _ in range(2)] == [False, True], f"process {process}"
