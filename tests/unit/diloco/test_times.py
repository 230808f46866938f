"""A period's time is divided into reading data, computing and waiting for rounds."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.diloco.times import PeriodClock, PeriodTimes


class Now:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def test_reading_computing_and_blocking_are_told_apart() -> None:
    now = Now()
    clock = PeriodClock(now)

    def batches() -> Iterator[int]:
        for number in range(3):
            now.at += 2.0
            yield number

    for _ in clock.read(clock.read(batches())):  # as in until(data): it counts once
        now.at += 1.0
    now.at += 5.0
    assert clock.block_since(now.at - 5.0) == 5.0
    assert clock.take() == PeriodTimes(9.0, 6.0)
    now.at += 1.0
    assert clock.take() == PeriodTimes(1.0, 0.0)


def test_data_is_unknown_if_nobody_reads_through_the_clock() -> None:
    now = Now()
    clock = PeriodClock(now)
    now.at = 4.0
    assert clock.take() == PeriodTimes(4.0, None)


def test_a_round_that_reading_leads_to_is_no_reading() -> None:
    now = Now()
    clock = PeriodClock(now)
    ended: list[PeriodTimes] = []

    def batches() -> Iterator[int]:
        now.at += 1.0
        yield 0
        now.at += 2.0
        ended.append(clock.take())  # nothing is free: a round comes first
        now.at += 7.0
        clock.block_since(now.at - 7.0)
        now.at += 3.0
        yield 1

    list(clock.read(batches()))
    assert ended == [PeriodTimes(3.0, 1.0)]
    assert clock.take() == PeriodTimes(3.0, 3.0)
