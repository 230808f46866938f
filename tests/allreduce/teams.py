"""Replicas of many processes as threads: a team whose words go through memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.packing import Vector


class ThreadTeam:
    """One process of a replica. When one of them is dead, the others fail, as over sockets."""

    def __init__(self, process: int, messages: list[Any], barrier: threading.Barrier) -> None:
        self.process, self.processes = process, len(messages)
        self._words, self._barrier = messages, barrier

    def share(self, message: Any) -> list[Any]:
        self._words[self.process] = message
        self._barrier.wait(60)
        messages = list(self._words)
        self._barrier.wait(60)
        return messages

    def die(self) -> None:
        self._barrier.abort()


def thread_team(processes: int) -> list[ThreadTeam]:
    barrier = threading.Barrier(processes)
    messages: list[Any] = [None] * processes
    return [ThreadTeam(process, messages, barrier) for process in range(processes)]


def take(replica: ObjectStoreAllReduce, layout: Layout, vector: Vector) -> Vector:
    """What the process carries of the vector."""
    intervals = replica.share_of(layout).intervals
    parts = [vector[start:stop] for start, stop in intervals]
    return np.concatenate([np.empty(0, np.float32), *parts])


def give(replica: ObjectStoreAllReduce, layout: Layout, row: Vector, vector: Vector) -> None:
    """Write what the process carries into the vector."""
    at = 0
    for start, stop in replica.share_of(layout).intervals:
        vector[start:stop] = row[at : at + stop - start]
        at += stop - start
