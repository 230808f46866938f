"""Waits against any timeline of states, any drops and any trouble, with a clock of our own."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.core.errors import BelowMinimumWorld, Temporary, UDTerminalState
from atoll.core.model import encode
from atoll.core.phase import TERMINAL, Phase
from atoll.core.ports import Change
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Status, Training, WorldStatus
from atoll.sdk import flows
from atoll.sdk.effects import Effect, Flow, NextChange, Pause, Reply
from atoll.sdk.flows import TrainingRef

WHO = TrainingRef("t", "u")
FOREVER = 1e9


class Point(NamedTuple):
    """From `at` on the training looks like this."""

    at: float
    training: Training


@st.composite
def timelines(draw: st.DrawFn) -> list[Point]:
    """States as a controller may write them: a spec that changes, a status that lags behind."""
    points: list[Point] = []
    at, generation, target, observed = 0.0, 1, 3, 0
    phase, ready = Phase.NONE, 0
    for version in range(1, draw(st.integers(1, 8)) + 1):
        if points:
            at += draw(st.floats(0.01, 20))
            if draw(st.booleans()):
                target, generation = draw(st.integers(2, 6)), generation + 1
            else:
                observed = generation
                phase = draw(st.sampled_from([p for p in Phase if p is not Phase.NONE]))
                ready = target if phase is Phase.SUCCEEDED else draw(st.integers(0, target))
        spec = TrainingSpec(
            name="t", world_size=WorldSize(min=2, target=target, max=6), command=["x"]
        )
        status = Status(
            phase=phase,
            observed_generation=observed,
            world=WorldStatus(ready=ready, target=target, min=2, max=6),
        )
        points.append(
            Point(
                at,
                Training(
                    namespace="n",
                    uid="u",
                    spec=spec,
                    status=status,
                    generation=generation,
                    resource_version=version,
                ),
            )
        )
        if phase in TERMINAL:
            break
    return points


class World:
    """A server that follows a timeline and has trouble when told to."""

    def __init__(self, points: list[Point], trouble: list[str]) -> None:
        self.points = points
        self.trouble = trouble
        self.now = 0.0
        self.reads: list[float] = []
        self.seen: Training | None = None  # as it was last told to the client

    def clock(self) -> float:
        return self.now

    def at(self, when: float) -> Training:
        return self.points[bisect_right([p.at for p in self.points], when) - 1].training

    def perform(self, effect: Effect) -> Any:
        if isinstance(effect, Pause):
            self.now += effect.seconds
            return None
        trouble = self.trouble.pop(0) if self.trouble else "none"
        if isinstance(effect, NextChange):
            ahead = [p for p in self.points if p.training.resource_version > effect.after]
            until = self.now + effect.timeout
            if trouble != "none":
                self.now += min(0.001, effect.timeout)
                return None
            if not ahead or ahead[0].at > until:
                self.now = until
                return None
            self.now = max(self.now, ahead[0].at)
            change = self.seen = ahead[0].training
            return Change(version=change.resource_version, training=change)
        if trouble == "lost":
            raise Temporary("lost")
        if trouble == "5xx":
            return Reply(503, b"")
        self.reads.append(self.now)
        self.seen = self.at(self.now)
        return Reply(200, encode(self.seen))

    def play(self, flow: Flow[Any]) -> Any:
        try:
            effect = next(flow)
            while True:
                try:
                    answer = self.perform(effect)
                except Exception as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(answer)
        except StopIteration as done:
            return done.value


def is_met(kind: str, training: Training) -> bool:
    status = training.status
    if status.phase is Phase.SUCCEEDED:
        return True
    if kind == "min":
        return status.world.ready >= 2
    fresh = status.observed_generation >= training.generation
    return kind == "target" and fresh and status.world.ready >= training.spec.world_size.target


FLOWS = {
    "min": flows.wait_until_min_world,
    "target": flows.wait_until_target_world,
    "result": flows.wait_until_end,
}


@pytest.mark.parametrize("kind", FLOWS)
@settings(max_examples=200, deadline=None)
@given(
    points=timelines(),
    trouble=st.lists(st.sampled_from(["none", "lost", "5xx"]), max_size=12),
    timeout=st.one_of(st.just(0.0), st.floats(0.1, 100)),
)
def test_a_wait_answers_with_the_truth(
    kind: str, points: list[Point], trouble: list[str], timeout: float
) -> None:
    world = World(points, list(trouble))
    end = timeout
    seen_until_end = [p.training for p in points if p.at <= end]
    last = seen_until_end[-1]
    try:
        answer = world.play(FLOWS[kind](WHO, timeout, clock=world.clock))
    except BelowMinimumWorld as error:
        known = world.seen or points[0].training
        target = known.spec.world_size.target
        assert error.timeout == timeout
        assert error.required_min == (target if kind == "target" else 2)
        if known.status.phase not in (Phase.FAILED, Phase.CANCELLED):
            # Late, and rightly so: at the deadline it was still not as waited for.
            assert world.now >= end
            if world.reads and world.reads[-1] >= end:
                assert not is_met(kind, last)
                assert last.status.phase not in TERMINAL
    except Temporary:
        assert not world.reads  # never read once
    else:
        assert any(is_met(kind, t) and t.world == answer for t in seen_until_end)
    assert world.now <= end + 1e-6


@settings(max_examples=200, deadline=None)
@given(points=timelines(), timeout=st.floats(0.1, 100))
def test_without_trouble_a_wait_ends_at_the_very_change(
    points: list[Point], timeout: float
) -> None:
    """Pushed: no polling interval anywhere."""
    world = World(points, [])
    over = [p for p in points if p.training.status.phase in TERMINAL and p.at <= timeout]
    try:
        world.play(flows.wait_until_end(WHO, timeout, clock=world.clock))
    except BelowMinimumWorld:
        assert (world.seen is not None and world.seen.status.phase in TERMINAL) == bool(over)
    assert world.now == pytest.approx(over[0].at if over else timeout)


@settings(max_examples=100, deadline=None)
@given(points=timelines(), timeout=st.floats(0, 100))
def test_complete_differs_from_the_end_only_for_what_was_over_at_the_call(
    points: list[Point], timeout: float
) -> None:
    def outcome(flow: Any) -> tuple[str, Any]:
        world = World(points, [])
        try:
            return "ok", world.play(flow(WHO, timeout, clock=world.clock))
        except UDTerminalState as error:
            return "over", error.phase
        except BelowMinimumWorld as error:
            return "bad", str(error)

    if points[0].training.status.phase in TERMINAL:
        assert outcome(flows.wait_until_complete)[0] == "over"
    else:
        assert outcome(flows.wait_until_complete) == outcome(flows.wait_until_end)


def test_the_world_of_these_tests_can_fail() -> None:
    """A check of the checker: a state that was never there is not accepted as an answer."""
    done = Point(0.0, _succeeded(4))
    assert World([done], []).play(flows.wait_until_end(WHO, 1)) != _succeeded(3).world


def _succeeded(target: int) -> Training:
    spec = TrainingSpec(name="t", world_size=WorldSize(min=2, target=target, max=6), command=["x"])
    base = Training(namespace="n", uid="u", spec=spec)
    return replace(base, status=Status(phase=Phase.SUCCEEDED, world=WorldStatus(ready=target)))
