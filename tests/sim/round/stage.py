"""Directed schedules: what happens at which request is written down, and nothing else happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.sim.round.oracle import Oracle
from tests.sim.round.replica import Process, Replica, Run, Setup
from tests.sim.round.world import Request, Task, World

Action = Callable[[Task], None]


class Stage:
    """A world of replicas with a script.

    `on(rank, verb, prefix, action)`: when this rank is about to make that request for the nth time,
    do this first. `process` narrows it to one process of the replica.
    """

    def __init__(self, **settings: Any) -> None:
        self.setup = Setup(**{"training": 1.0, **settings})
        self.world = World(1)
        self.world.random = random.Random(1)
        self.oracle = Oracle(self.setup)
        self.world.watch += [self._tick, self.oracle.see]
        self.run_ = Run(self.world, self.setup, self.oracle)
        self._script: list[tuple[int, int | None, str, str, list[int], Action, str]] = []
        self.said: list[str] = []

    def _tick(self, *_: Any) -> None:
        self.oracle.now = self.world.now

    def start(self, rank: int, processes: int = 1) -> Replica:
        return self.run_.start(rank, processes, gate=self._gate)

    def start_all(self, processes: int = 1) -> list[Replica]:
        return [self.start(rank, processes) for rank in range(self.setup.world)]

    def on(
        self,
        rank: int,
        verb: str,
        prefix: str,
        action: Action,
        *,
        times: int = 1,
        process: int | None = None,
        when: str = "issue",
    ) -> None:
        """`times`: how often it happens. `when` is "issue", or "done" for after the request."""
        self._script.append((rank, process, verb, prefix, [times], action, when))

    def _gate(self, process: Process) -> Callable[[str, Request], None]:
        def gate(when: str, request: Request) -> None:
            key = request[1] if isinstance(request[1], str) else ""
            for rank, at, verb, prefix, left, action, moment in self._script:
                if (
                    moment == when
                    and left[0]
                    and rank == process.rank
                    and at in (None, process.at)
                    and verb == request[0]
                    and key.startswith(prefix)
                ):
                    left[0] -= 1
                    action(process.task)

        return gate

    # -- Actions

    def freeze(self, seconds: float) -> Action:
        return lambda task: self.world.freeze(task, seconds)

    def kill(self, task: Task) -> None:
        self.world.kill(task)

    def cut(self, seconds: float) -> Action:
        """Requests of the process fail for so long."""

        def act(task: Task) -> None:
            task.cut_until = self.world.now + seconds

        return act

    # -- Going on

    @property
    def rounds(self) -> int:
        return max(self.oracle.canonical)

    def run_to(self, rounds: int, within: float = 1000.0) -> None:
        """Until so many rounds are committed."""
        self.run_until(lambda: self.rounds >= rounds, within, f"{rounds} rounds")

    def run_until(
        self, is_over: Callable[[], bool], within: float = 1000.0, what: str = "this"
    ) -> None:
        self.world.run(self.world.now + within, is_over)
        if not is_over():
            self.oracle.fail("O9", f"not {what} within {within} s, but {self.rounds} rounds")

    def run_for(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.world.objects if key.startswith(prefix))

    def damage(self, key: str, reads: int = -1) -> None:
        self.world.objects[key].damage = reads

    def alive(self) -> list[Replica]:
        return [replica for replica in self.run_.replicas if replica.is_alive]

    def members(self, round: int) -> list[int]:
        """Of the committed round of that number, counted from 0."""
        manifest = self.oracle.commits[self.oracle.canonical[round + 1]][0]
        return [member.rank for member in manifest.members]
