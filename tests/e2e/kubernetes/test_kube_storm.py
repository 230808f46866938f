"""A storm over ranks, pods, operator and kubelets of a real cluster; a checker reads pods,
Jobs and /proc. `ATOLL_STORM` is the number of blows, 200 unless set; `ATOLL_STORM_SEED` the seed.

The checker follows every pod and every status by watches of its own. It wants: each rank that ended
is on record with its own exit code, no two pods of a rank ran at once, `ready` is the number of
ranks that run, and nothing is left of a training that was deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.backends.kubernetes.pod import Pod, when
from atoll.core.errors import AtollError
from atoll.core.status import Exit
from atoll.operator.resource import to_training
from tests.e2e.kubernetes.conftest import Operator, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.test_kube_operator import left, sh

Json = dict[str, Any]
log = logging.getLogger(__name__)
BLOWS = int(os.environ.get("ATOLL_STORM", "200"))
SEED = int(os.environ.get("ATOLL_STORM_SEED", "1"))
EACH = 8  # blows to one training: the Job controller waits longer after each failure of a rank
MARK = "98765"
SCRIPT = f'trap "exit 7" TERM; sleep {MARK} & wait'

pytestmark = [pytest.mark.usefixtures("pods"), pytest.mark.soak]


class Checker:
    """What the cluster itself shows of a namespace, from its first object to its last."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self.pods: dict[str, Json] = {}  # the last state of each, by uid
        self.stored: dict[tuple[str, int, int], set[int | None]] = defaultdict(set)
        self.flaws: list[str] = []
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(kind, note), daemon=True)
            for kind, note in (("pods", self._note_pod), ("trainings", self._note_training))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()

    def _watch(self, kind: str, note: Callable[[Json], None]) -> None:
        asyncio.run(self._follow(kind, note))

    async def _follow(self, kind: str, note: Callable[[Json], None]) -> None:
        cluster = self._space.site.connect()
        version = ""
        while not self._is_over.is_set():
            with contextlib.suppress(AtollError):
                if not version:
                    version = (await cluster.list(kind, self._space.name)).version
                async for event in cluster.watch(kind, self._space.name, after=version):
                    version = event.object["metadata"]["resourceVersion"]
                    if event.type != "BOOKMARK":
                        note(event.object)
                    if self._is_over.is_set():
                        break
        await cluster.close()

    def _note_pod(self, manifest: Json) -> None:
        if Pod(manifest).rank >= 0:
            self.pods[manifest["metadata"]["uid"]] = manifest

    def _note_training(self, raw: Json) -> None:
        training = to_training(raw)
        status = training.status
        for rank in (*status.ranks, *status.removed_ranks):
            if rank.exit is not None:
                self._store(training.name, rank.rank, rank.attempt, rank.exit)
        if status.world.ready > max(status.world.target, training.spec.world_size.target):
            self.flaws.append(f"{training.name}: ready {status.world.ready} of too few")

    def _store(self, name: str, rank: int, attempt: int, exit: Exit) -> None:
        self.stored[name, rank, attempt].add(exit.code)

    def of(self, name: str) -> list[Pod]:
        label = "atoll.dev/training"
        pods = [Pod(m) for m in list(self.pods.values()) if m["metadata"]["labels"][label] == name]
        return sorted(pods, key=lambda p: (p.rank, p.created_at))

    def verdict(self, name: str) -> list[str]:
        """What is wrong with a training that is over."""
        wrong = []
        last: dict[int, Pod] = {}
        for pod in self.of(name):
            ended = pod.state.get("terminated")
            if ended is None:
                if pod.has_run:
                    wrong.append(f"{pod.name} never ended")
                continue
            codes = self.stored.get((name, pod.rank, pod.attempt), set())
            if codes != {ended["exitCode"]}:
                wrong.append(
                    f"{pod.name} (attempt {pod.attempt}): {ended['exitCode']}, not {codes}"
                )
            before = last.get(pod.rank)
            if before is not None and (pod.started_at or 0.0) < _ended_at(before):
                wrong.append(f"{pod.name} started before {before.name} had ended")
            last[pod.rank] = pod
        return wrong


def _ended_at(pod: Pod) -> float:
    return when(pod.state["terminated"]["finishedAt"]) or 0.0


def ranks_of_the_machine() -> list[int]:
    """Processes of ranks, wherever they are."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if any(MARK.encode() in word for word in words) and b"sleep" not in words[0]:
                pids.append(int(path.parent.name))
    return pids


class Storm:
    """Blows at random. Each is one method."""

    def __init__(self, space: Space, operator: Operator, dice: random.Random) -> None:
        self.space = space
        self.operator = operator
        self.dice = dice

    def blow(self, name: str) -> str:
        kind = self.dice.choice(
            ["kill_rank", "delete_pod", "scale", "kill_operator", "pause_kubelet"]
        )
        getattr(self, kind)(name)
        return kind

    def kill_rank(self, name: str) -> None:
        if pids := ranks_of_the_machine():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.dice.choice(pids), signal.SIGKILL)

    def delete_pod(self, name: str) -> None:
        if pods := [p["metadata"]["name"] for p in self.space.pods()]:
            chosen = self.dice.choice(pods)
            self.space.kubectl("delete", "pod", chosen, "--wait=false", is_checked=False)

    def scale(self, name: str) -> None:
        size = self.dice.randint(1, 5)
        self.space.kubectl("scale", "training", name, f"--replicas={size}", is_checked=False)

    def kill_operator(self, name: str) -> None:
        self.operator.kill()
        time.sleep(self.dice.random() * 2)
        self.operator.start()

    def pause_kubelet(self, name: str) -> None:
        node = self.dice.choice(self.space.site.nodes)
        node.pause_kubelet(0.5 + self.dice.random() * 2)


def running(space: Space, target: int) -> int:
    """Ranks that run and are not being stopped, by their pods."""
    pods = [Pod(manifest) for manifest in space.pods()]
    return sum(
        p.rank < target and "running" in p.state and not p.is_leaving and not p.is_over
        for p in pods
    )


def is_ready_true(space: Space, name: str) -> bool:
    before = running(space, space.get(name)["spec"]["worldSize"]["target"])
    training = to_training(space.get(name))
    target = training.spec.world_size.target
    done = sum(r.phase == "Succeeded" and r.rank < target for r in training.status.ranks)
    after = running(space, target)
    return before == after and training.status.world.ready == after + done


@pytest.mark.timeout(60 + BLOWS * 30)
def test_nothing_is_lost_started_twice_left_or_miscounted(space: Space, operator: Operator) -> None:
    dice = random.Random(SEED)
    checker, storm = Checker(space), Storm(space, operator, dice)
    checker.start()
    blows, wrong = 0, []
    while blows < BLOWS:
        name = f"storm-{blows}"
        world = {"min": 1, "target": 3, "max": 5}
        space.submit(name, command=sh(SCRIPT), worldSize=world, maxRestarts=50)
        space.until_ready(name, 3, timeout=120)
        kinds = []
        for _ in range(min(EACH, BLOWS - blows)):
            kinds.append(storm.blow(name))
            blows += 1
            time.sleep(dice.random() * 1.5)
        wait_for("ready is true", lambda name=name: is_ready_true(space, name), 90)
        space.kubectl("patch", "training", name, "--type=merge", "-p", '{"spec":{"cancel":true}}')
        space.until(name, "over", lambda s: s.get("isReleased"), 120)
        wait_for("no rank runs", lambda: not ranks_of_the_machine(), 60)
        wrong += [f"{name} {kinds}: {text}" for text in checker.verdict(name)]
        space.kubectl("delete", "training", name, "--timeout=60s")
        wait_for("nothing is left", lambda: not left(space), 60)
        log.warning("%d blows, %d pods, %d wrong", blows, len(checker.pods), len(wrong))
    checker.stop()
    assert wrong + checker.flaws == []
    assert len(checker.pods) > BLOWS / 8
