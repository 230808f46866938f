"""The machine by hand: what it says of a store or an object that it cannot use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from atoll.diloco.data.ranges import Ranges
from atoll.diloco.round import objects
from atoll.diloco.round.effects import (
    Create,
    Delete,
    Get,
    List,
    LoadCheckpoint,
    Offer,
    RoundConfig,
    SaveCheckpoint,
    Sleep,
    StoreIgnoresConditions,
    Stuck,
    Upload,
)
from atoll.diloco.round.objects import Checkpoint, Manifest, Outcome
from atoll.diloco.round.pace import Pace
from atoll.diloco.round.protocol import RoundMachine

NONCE = "a" * 16


class Memory:
    """Notes the calls."""

    fresh: Ranges = ()

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, manifest: Manifest) -> None:
        self.calls.append("begin")

    def settle(self, manifest: Manifest, outcomes: Mapping[str, Outcome]) -> None:
        self.calls.append("settle")

    def drop(self) -> None:
        self.calls.append("drop")

    def end(self, manifest: Manifest) -> None:
        self.calls.append("end")


def machine(**changes: Any) -> RoundMachine:
    config = RoundConfig(
        **{
            "rank": 0,
            "world": 2,
            "nonce": NONCE,
            "layout": "1" * 32,
            "shards": 2,
            "cells": (4,),
            "timeout_s": 30.0,
            **changes,
        }
    )
    return RoundMachine(config, Memory(), Pace(config.timeout_s))


class Folder:
    """A store that answers effects at once; a clock that only sleeps move."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.now = 0.0
        self.has_conditions = True

    def answer(self, effect: Any) -> Any:
        match effect:
            case Create(key, body):
                is_new = key not in self.objects or not self.has_conditions
                self.objects.setdefault(key, body)
                return is_new
            case Delete(keys):
                for key in keys:
                    self.objects.pop(key, None)
            case Get(key):
                return self.objects.get(key)
            case List(prefix, after):
                return [
                    (k, 0.0) for k in sorted(self.objects) if k.startswith(prefix) and k > after
                ]
            case Sleep(seconds):
                self.now += seconds
                return self.now
            case SaveCheckpoint(key, meta):
                return self.objects.setdefault(key, meta) is meta
            case LoadCheckpoint(key):
                return self.objects.get(key)
            case Upload(_, _, header):
                return header
        return None

    def run(self, steps: Any) -> Any:
        answer = None
        while True:
            try:
                answer = self.answer(steps.send(answer))
            except StopIteration as stop:
                return stop.value


def test_a_store_that_ignores_conditions_is_refused_by_name() -> None:
    folder = Folder()
    folder.has_conditions = False
    with pytest.raises(StoreIgnoresConditions, match="If-None-Match"):
        folder.run(machine().open())


def test_the_first_replica_creates_the_first_checkpoint_and_loads_it() -> None:
    folder, one = Folder(), machine()
    result = folder.run(one.open())
    assert (result.rounds, result.chain) == (0, objects.ZERO)
    assert isinstance(folder.objects[objects.checkpoint_key(0, objects.ZERO)], Checkpoint)
    assert not [key for key in folder.objects if key.startswith("probe/")]


def test_checkpoints_that_cannot_be_loaded_are_an_error_after_the_timeout() -> None:
    folder = Folder()
    folder.objects[objects.checkpoint_key(4, "b" * 32)] = None  # as a load of a damaged one
    with pytest.raises(Stuck, match="none of 1 checkpoints is complete"):
        folder.run(machine().open())
    assert 30 < folder.now < 60


def test_rounds_without_any_checkpoint_are_an_error_at_once() -> None:
    folder = Folder()
    folder.objects[objects.manifest_key(7)] = b""
    with pytest.raises(Stuck, match="restore it"):
        folder.run(machine().open())
    assert folder.now < 1


def test_a_damaged_manifest_is_an_error_that_names_it() -> None:
    folder, one = Folder(), machine()
    folder.run(one.open())
    folder.objects[objects.manifest_key(0)] = b"\0"
    with pytest.raises(Stuck, match=r"manifest/00000000 has committed round 0.*Restore it"):
        folder.run(one.run(Offer(1.0, 1)))


def test_one_that_leaves_hands_in_puts_its_mark_and_goes() -> None:
    folder, one = Folder(), machine()
    folder.run(one.open())
    one.is_leaving = True
    steps = one.run(Offer(1.0, 1, want=8))
    upload = next(steps)
    assert isinstance(upload, Upload)
    assert (upload.header.is_leaving, upload.header.want) == (True, 0)
    manifest = objects.manifest_key(0)
    assert steps.send(upload.header).key == manifest
    assert steps.send(None).key == objects.ended_key("launch", 0, "left")
    assert steps.send(None).key == manifest, "it may have been decided meanwhile"
    with pytest.raises(StopIteration) as stop:
        steps.send(None)
    assert stop.value.value.fate == "left"


def test_what_is_not_finite_is_dropped_and_has_no_weight() -> None:
    folder, one = Folder(), machine()
    folder.run(one.open())
    upload = next(one.run(Offer(3.0, 1, is_finite=False)))
    assert isinstance(upload, Upload)
    assert upload.header.weight == 0
    assert one.memory.calls[-1] == "drop"  # type: ignore[attr-defined]


def test_an_offer_without_weight_claims_nothing() -> None:
    folder, one = Folder(), machine()
    folder.run(one.open())
    upload = next(one.run(Offer(0.0, 0, claim=((0, 4),))))
    assert isinstance(upload, Upload)
    assert upload.header.claim == ()
