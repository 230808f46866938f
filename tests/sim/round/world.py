"""Virtual time, a store with faults, and actors that make one request a step.

An actor is a generator that yields requests (tuples) and is sent answers. A request is issued,
happens some time later and is answered later still; kills and freezes come in between.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from atoll.diloco.round.effects import StoreError

Request = tuple[Any, ...]
Actor = Generator[Request, Any, Any]
WRITES = ("put", "create", "delete")


class GroupFailed(Exception):
    """A collective of a replica's processes failed: for good, as gloo closes the group."""


@dataclass(frozen=True)
class Faults:
    """Chances of each fault, for one request."""

    fail_before: float = 0.0
    fail_after: float = 0.0
    land_late: float = 0.0  # a write fails, and happens up to 400 s later
    freeze: float = 0.0
    freeze_write: float = 0.0  # just before a write
    skewed_list: float = 0.0


QUIET = Faults()


class Stored:
    """An object with the store's time of its last write."""

    __slots__ = ("body", "damage", "time")

    def __init__(self, body: Any, time: float) -> None:
        self.body, self.time = body, time
        self.damage = 0  # so many of the next reads find it damaged; -1: all


@dataclass
class Task:
    """A process: its generator and what happens to it."""

    name: str
    actor: Actor
    latency: float = 0.02
    faults: Faults = field(default=QUIET)
    is_dead: bool = False
    frozen_until: float = 0.0
    cut_until: float = 0.0  # it does not reach the store
    clock: float = 0.0  # its monotonic time at 0
    is_leaving: bool = False
    told_at: float = 0.0
    waits: int = 0  # changes whenever it is resumed, so that an old wake-up is not taken
    wakes_early: bool = False
    gate: Callable[[str, Request], None] | None = None
    on_end: Callable[[BaseException | None, Any], None] | None = None
    parent: Task | None = None  # the process of this thread: it is killed, frozen and cut as one

    @property
    def process(self) -> Task:
        return self.parent or self


@dataclass
class Group:
    """The processes of a replica and their collectives, in order."""

    size: int
    tasks: list[Task] = field(default_factory=list)
    slots: dict[tuple[str, int], dict[int, Any]] = field(default_factory=dict)
    seq: dict[tuple[str, int], int] = field(default_factory=dict)
    waiting: dict[tuple[str, int], list[Task]] = field(default_factory=dict)
    is_closed: bool = False


class World:
    """Runs the actors in the order of their events."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.objects: dict[str, Stored] = {}
        self.tasks: list[Task] = []
        self.counts: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        self.watch: list[Callable[[str, str, Any], None]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    # -- Time

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (max(time, self.now), self._number, action))

    def run(self, until: float, is_over: Callable[[], bool] | None = None) -> None:
        while self._events and self._events[0][0] <= until:
            if is_over is not None and is_over():
                return
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = max(self.now, until) if not is_over else self.now

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    # -- Tasks

    def start(self, task: Task) -> Task:
        self.tasks.append(task)
        self.at(self.now, lambda: self._resume(task, None))
        return task

    def kill(self, task: Task) -> None:
        if task.is_dead:
            return
        task.is_dead = True
        task.waits += 1
        self._end(task, None, None, is_killed=True)

    def _end(
        self, task: Task, error: BaseException | None, value: Any, *, is_killed: bool = False
    ) -> None:
        task.is_dead = True
        if is_killed:
            # The generator is dropped as it stands: nothing of it runs any more.
            task.actor = iter(())  # type: ignore[assignment]
        if task.on_end is not None:
            task.on_end(error, value)

    def _resume(self, task: Task, answer: Any, error: BaseException | None = None) -> None:
        if task.is_dead or task.process.is_dead:
            return
        if task.process.frozen_until > self.now:
            self.at(task.process.frozen_until, lambda: self._resume(task, answer, error))
            return
        task.waits += 1
        try:
            request = task.actor.throw(error) if error else task.actor.send(answer)
        except StopIteration as stop:
            self._end(task, None, stop.value)
            return
        except GroupFailed as failed:
            self._end(task, failed, None)
            return
        self._issue(task, request)

    def wake(self, task: Task) -> None:
        """End a sleep early."""
        if task.wakes_early and not task.is_dead:
            task.wakes_early = False
            task.waits += 1
            self.at(self.now, lambda: self._resume(task, self.clock(task)))

    def clock(self, task: Task) -> float:
        return self.now + task.clock

    # -- Requests

    def _issue(self, task: Task, request: Request) -> None:
        kind = request[0]
        if kind == "sleep":
            waits = task.waits
            task.wakes_early = True
            if task.is_leaving and request[1] > 0:
                self.at(self.now + 1e-6, lambda: self._wake_at(task, waits))
            else:
                self.at(self.now + request[1], lambda: self._wake_at(task, waits))
            return
        if kind == "gather":
            self._gather(task, *request[1:])
            return
        process = task.process
        if process.gate is not None:
            process.gate("issue", request)
            if process.is_dead:
                return
        faults, rng = process.faults, self.random
        delay = process.latency * (0.5 + rng.random())
        if faults is not QUIET:
            if kind in WRITES and rng.random() < faults.freeze_write:
                self.freeze(process, rng.uniform(1, 400))
            elif rng.random() < faults.freeze:
                self.freeze(process, rng.uniform(1, 400))
        first = self._list(*request[1:]) if kind == "list" and faults.skewed_list else None
        happens = max(self.now, process.frozen_until) + delay
        self.at(happens, lambda: self._happen(task, request, first, delay))

    def _wake_at(self, task: Task, waits: int) -> None:
        if task.waits == waits and not task.is_dead:
            task.wakes_early = False
            self._resume(task, self.clock(task))

    def freeze(self, task: Task, seconds: float) -> None:
        task.frozen_until = max(task.frozen_until, self.now + seconds)
        self.count("freezes")

    def _happen(self, task: Task, request: Request, first: Any, delay: float) -> None:
        process = task.process
        if process.is_dead:
            return
        if process.frozen_until > self.now:
            self.at(process.frozen_until + 1e-6, lambda: self._happen(task, request, first, delay))
            return
        faults, rng, kind = process.faults, self.random, request[0]
        self.requests[task.name] = self.requests.get(task.name, 0) + 1
        error: BaseException | None = None
        answer: Any = None
        if process.cut_until > self.now:
            error = StoreError(f"no way to the store: {request[:2]}")
        elif faults is not QUIET and rng.random() < faults.fail_before:
            error = StoreError(f"failed before: {request[:2]}")
        elif faults is not QUIET and kind in WRITES and rng.random() < faults.land_late:
            error = StoreError(f"failed, lands later: {request[:2]}")
            self.at(self.now + rng.uniform(0, 400), lambda: self._perform(task, request))
        else:
            answer = self._perform(task, request)
            if kind == "list" and first is not None and rng.random() < faults.skewed_list:
                answer = self._skew(dict(first), dict(answer))
            if faults is not QUIET and rng.random() < faults.fail_after:
                error = StoreError(f"failed after: {request[:2]}")
        if error is not None:
            self.count("failed requests")
        if process.gate is not None:
            process.gate("done", request)
        self.at(self.now + delay, lambda: self._resume(task, answer, error))

    def _skew(self, one: dict[str, float], two: dict[str, float]) -> list[tuple[str, float]]:
        """A LIST that saw each object at another moment."""
        keys = sorted({*one, *two})
        return [
            (key, two.get(key, one.get(key, 0.0)))
            for key in keys
            if (key in one and key in two) or self.random.random() < 0.5
        ]

    def _perform(self, task: Task, request: Request) -> Any:
        kind = request[0]
        if kind == "get":
            return self.read(request[1])
        if kind == "gets":  # at once, each one a request
            self.requests[task.name] += len(request[1]) - 1
            return {key: self.read(key) for key in request[1]}
        if kind == "list":
            return self._list(*request[1:])
        if kind == "delete":
            for key in request[1]:
                if self.objects.pop(key, None) is not None:
                    self._tell("deleted", key, task)
            return None
        if kind == "head":
            return request[1] in self.objects
        key, body = request[1:]
        is_taken = key in self.objects
        if kind == "create" and is_taken:
            return False
        if kind == "put" and is_taken:
            self._tell("replaced", key, body)
        self.objects[key] = Stored(body, self.now)
        self._tell("created" if kind == "create" else "put", key, body)
        return True

    def read(self, key: str) -> Any:
        """The object, None, or `damaged` in place of its body."""
        stored = self.objects.get(key)
        if stored is None:
            return None
        if stored.damage:
            stored.damage -= stored.damage > 0
            return DAMAGED
        return stored.body

    def _list(self, prefix: str, after: str) -> list[tuple[str, float]]:
        return sorted(
            (key, stored.time)
            for key, stored in self.objects.items()
            if key.startswith(prefix) and key > after
        )

    def _tell(self, what: str, key: str, body: Any) -> None:
        for watcher in self.watch:
            watcher(what, key, body)

    # -- Collectives

    def _gather(self, task: Task, group: Group, kind: str, process: int, payload: Any) -> None:
        """All processes give a payload and get those of all; `kind` tells two groups apart."""
        if group.is_closed or any(each.is_dead for each in group.tasks):
            group.is_closed = True
            self._fail(task)
            return
        mine = kind, process
        group.seq[mine] = group.seq.get(mine, 0) + 1
        place = kind, group.seq[mine]
        slot = group.slots.setdefault(place, {})
        slot[process] = payload
        if len(slot) < group.size:
            group.waiting.setdefault(place, []).append(task)
            return
        del group.slots[place]
        everybody = [slot[each] for each in range(group.size)]
        for each in (*group.waiting.pop(place, ()), task):
            self.at(self.now + 0.002, lambda each=each: self._resume(each, everybody))

    def close(self, group: Group) -> None:
        """A process of the group has ended: whoever waits for it fails."""
        if group.is_closed:
            return
        group.is_closed = True
        for tasks in group.waiting.values():
            for task in tasks:
                self._fail(task)
        group.waiting.clear()

    def _fail(self, task: Task) -> None:
        self.count("failed collectives")
        self.at(self.now + 0.3, lambda: self._resume(task, None, GroupFailed("peer is gone")))


class _Damaged:
    def __repr__(self) -> str:
        return "DAMAGED"


DAMAGED = _Damaged()
