"""Clocks that are set, machines that sleep, processes and machines that start anew."""

from __future__ import annotations

import pytest

from atoll.core.clock import Clock, ClockMark, Now


class Machine:
    """Its wall clock can be set, and both clocks move when it runs."""

    def __init__(self) -> None:
        self.wall, self.monotonic, self.boot = 1_000_000.0, 500.0, "first"

    def runs(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def sleeps(self, seconds: float) -> None:
        self.wall += seconds

    def boots(self, after_s: float, up_s: float) -> None:
        self.wall += after_s + up_s
        self.monotonic, self.boot = up_s, "second"

    def clock(self, mark: ClockMark | None = None) -> Clock:
        return Clock(lambda: self.wall, lambda: self.monotonic, boot=self.boot, mark=mark)


def test_an_undisturbed_clock_is_the_wall_clock() -> None:
    machine = Machine()
    clock = machine.clock()
    for _ in range(3):
        machine.runs(7200)
        assert clock() == Now.at(machine.wall)


@pytest.mark.parametrize("step", [-3600.0, 7200.0])
def test_a_clock_that_is_set_moves_the_dates_and_not_what_is_measured(step: float) -> None:
    machine = Machine()
    clock = machine.clock()
    before = clock()
    machine.wall += step
    machine.runs(10)
    assert clock().wall == before.wall + step + 10
    assert clock().monotonic == pytest.approx(before.monotonic + 10)


def test_sleep_is_not_counted() -> None:
    machine = Machine()
    clock = machine.clock()
    before = clock().monotonic
    machine.sleeps(8 * 3600)
    assert clock().monotonic == pytest.approx(before)


def test_a_drifting_clock_is_followed() -> None:
    machine = Machine()
    clock = machine.clock()
    for _ in range(100):
        machine.runs(60)
        machine.wall += 0.01
        assert clock().monotonic == machine.wall


def test_a_later_process_goes_on_where_the_first_one_was() -> None:
    """Also if the clock was set, and the machine slept, while none ran."""
    machine = Machine()
    clock = machine.clock()
    machine.wall += 7200
    before = clock()
    assert clock.mark.skew == 7200
    machine.runs(60)
    machine.wall -= 3600
    machine.sleeps(100)
    machine.runs(60)
    later = machine.clock(clock.mark)
    assert later().monotonic == pytest.approx(before.monotonic + 120)


def test_the_time_that_a_machine_was_off_is_not_counted() -> None:
    machine = Machine()
    clock = machine.clock()
    before = clock().monotonic
    machine.boots(after_s=1e6, up_s=30)
    assert machine.clock(clock.mark)().monotonic == pytest.approx(before + 30)


def test_readings_that_were_interrupted_are_repeated() -> None:
    """A process that is starved between two readings does not take that for a step."""
    machine = Machine()
    starved = [0.0, 5.0, 0.0]

    def wall() -> float:
        now = machine.wall
        machine.runs(starved.pop(0) if starved else 0.0)
        return now

    clock = Clock(wall, lambda: machine.monotonic)
    assert clock() == Now.at(machine.wall)
