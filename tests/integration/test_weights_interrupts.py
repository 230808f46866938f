"""Ctrl-C at any line of a publisher or a follower that goes on afterwards, as in a notebook."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.integration.weights_process import weights

from atoll.weights import Follower, Publisher, api
from atoll.weights.state import Threads

PUBLISHES = 120
MAX_LINES = 700  # of the package that a publish or a look runs, mostly


class InterruptAfter:
    """Raises KeyboardInterrupt at the line of `atoll/weights` that is this many lines ahead.

    `function`: only lines of functions of this name count.
    """

    def __init__(self, lines: int, function: str | None) -> None:
        self._left = lines
        self._function = function

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        is_counted = self._function in (None, code.co_name)
        return self._count if is_counted and "/atoll/weights/" in code.co_filename else None

    def _count(self, frame: FrameType, event: str, arg: object) -> Any:
        self._left -= event == "line"
        if self._left == 0:
            self._left = -1
            raise KeyboardInterrupt
        return self._count


def is_interrupted(work: Callable[[], object], lines: int, function: str | None = None) -> bool:
    before = sys.gettrace()
    sys.settrace(InterruptAfter(lines, function))
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def assert_is(follower: Follower) -> None:
    version = follower.version
    assert version is not None
    assert version.step is not None
    for name, values in weights(version.step).items():
        assert (follower._copy().tensors[name].values == values).all()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_interrupt_at_any_line_makes_no_wrong_version_and_nobody_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(api, "_threads", lambda: Threads(1))  # all work is on the traced thread
    chance, interrupts = random.Random(seed), 0
    publisher, follower = Publisher(tmp_path, full_every=4, keep=2), Follower(tmp_path)
    for step in range(PUBLISHES):
        lines = chance.randrange(1, MAX_LINES)
        interrupts += is_interrupted(partial(publisher.publish, weights(step), step=step), lines)
        interrupts += is_interrupted(follower.next, chance.randrange(1, MAX_LINES))
        if follower.version is not None:
            assert_is(follower)
        if step % 20 == 19:
            newest = publisher.publish(weights(step), step=step)
            with Follower(tmp_path) as joiner:
                assert joiner.next() == newest
                assert_is(joiner)
            follower.next()
            assert follower.version == newest
            assert_is(follower)
    assert interrupts > PUBLISHES / 4


@pytest.mark.parametrize("line", range(1, 14))
def test_an_interrupt_at_any_line_that_settles_a_version_leaves_the_publisher_its_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: int
) -> None:
    monkeypatch.setattr(api, "_threads", lambda: Threads(1))
    with Publisher(tmp_path) as publisher, Follower(tmp_path) as follower:
        publisher.publish(weights(0), step=0)
        is_interrupted(partial(publisher.publish, weights(1), step=1), line, "settle")
        for step in (2, 3):
            assert publisher.publish(weights(step), step=step) == follower.next()
            assert_is(follower)
