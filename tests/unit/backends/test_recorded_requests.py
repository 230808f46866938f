"""Stacks and signals through the records of ranks, with wrappers that are real processes."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.core.errors import Conflict, Temporary
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Exit, Observation, RankStatus, Status, Training
from atoll.server.stacks import fold
from tests.support.recorded import ProcessBackend

HUNG = """
import os, signal, time
rank = int(os.environ["RANK"])
def hang():
    open(f"up{rank}.{os.environ['ATOLL_ATTEMPT']}", "w")
    while True: time.sleep(1000)  # HANG
"""
LINE = HUNG.split("\n").index("    while True: time.sleep(1000)  # HANG") + 1


class Gang:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "records").mkdir()
        self.backend = ProcessBackend(folder / "records")
        self.training: Training

    async def start(self, code: str, ranks: int = 1, **more: Any) -> None:
        script = self.folder / "train.py"
        script.write_text(HUNG + code)
        spec = TrainingSpec(
            name="t",
            world_size=WorldSize(min=1, target=ranks, max=ranks),
            command=[sys.executable, str(script)],
            working_dir=str(self.folder),
            start_grace_s=0.0,
            **more,
        )
        self.training = Training(namespace="n", uid="u1", spec=spec, created_at=time.time())
        await self.backend.apply(self.training, DesiredState(version=1, size=ranks))

    async def look(self) -> Observation:
        observation = await self.backend.observe(self.training)
        ranks = [
            RankStatus(rank=r.rank, attempt=r.attempt, phase="Running")
            for r in observation.ranks
            if r.state == "running"
        ]
        self.training = replace(self.training, status=Status(ranks=ranks))
        for followup in observation.followups:
            await self.backend.perform(self.training, followup)
        return observation

    async def until(self, holds: Callable[[Observation], Any]) -> Any:
        deadline = time.monotonic() + 60
        while not (answer := holds(observation := await self.look())):
            assert time.monotonic() < deadline, observation
            await asyncio.sleep(0.05)
        return answer

    async def until_up(self, ranks: int = 1, attempt: int = 0) -> list[RankStatus]:
        files = [self.folder / f"up{rank}.{attempt}" for rank in range(ranks)]
        await self.until(lambda o: len(running(o)) == ranks and all(f.exists() for f in files))
        return list(self.training.status.ranks)

    async def ended(self) -> Exit:
        return await self.until(lambda o: o.ranks[0].exit)  # type: ignore[no-any-return]

    async def stored(self) -> list[dict[str, Any]]:
        return await self.backend.stored_stacks(self.training)


def running(observation: Observation) -> list[int]:
    return [rank.rank for rank in observation.ranks if rank.state == "running"]


def played(body: Callable[[Gang], Awaitable[None]]) -> Callable[[Path], None]:
    """A test of a gang of its own."""

    async def play(folder: Path) -> None:
        gang = Gang(folder)
        try:
            await body(gang)
        finally:
            await gang.backend.close()

    def test(tmp_path: Path) -> None:
        asyncio.run(play(tmp_path))

    return test


@played
async def test_stacks_are_taken_when_somebody_asks(gang: Gang) -> None:
    await gang.start("hang()", ranks=2)
    ranks = await gang.until_up(2)
    for _ in range(2):
        (group,) = fold(await gang.backend.take_stacks(gang.training, ranks))
        assert (group.ranks, group.count) == ("0-1", 2)
        assert f"train.py:{LINE} in hang" in group.where
    (one,) = await gang.backend.take_stacks(gang.training, ranks[1:])
    assert one["rank"] == 1
    assert await gang.stored() == [], "nothing was taken by itself"


@played
async def test_a_wrapper_that_does_not_answer_is_named(gang: Gang) -> None:
    await gang.start("hang()")
    (rank,) = await gang.until_up()
    gang.backend.processes[0, 0].send_signal(signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atoll.backends.recorded.ANSWER_S", 0.1)
        (one,) = await gang.backend.take_stacks(gang.training, [rank])
        assert one["reason"].startswith("its wrapper did not answer within ")
        with pytest.raises(Temporary, match="rank 0 of 't': its wrapper did not answer"):
            await gang.backend.kill(gang.training, rank, 10)
    gang.backend.processes[0, 0].send_signal(signal.SIGCONT)


@played
async def test_a_signal_reaches_one_attempt_of_a_rank(gang: Gang) -> None:
    await gang.start("hang()", max_restarts=3)
    (rank,) = await gang.until_up()
    await gang.backend.kill(gang.training, rank, 10)
    end = await gang.until(lambda o: o.ranks[0].previous_exit or o.ranks[0].exit)
    assert (end.signal, end.stack) == ("SIGUSR1", [])
    await gang.backend.apply(gang.training, DesiredState(version=1, size=1))
    (rank,) = await gang.until_up(attempt=1)
    assert await gang.backend.take_stacks(gang.training, [rank])
    assert (await gang.look()).ranks[0].attempt == 1, "the signal was not for its next attempt"


@played
async def test_a_rank_that_outlives_its_grace_has_its_stack_in_its_exit(gang: Gang) -> None:
    await gang.start("signal.signal(15, signal.SIG_IGN); hang()", stop_grace_s=0.2)
    await gang.until_up()
    await gang.backend.apply(gang.training, DesiredState(version=2, size=0))
    end = await gang.ended()
    assert end.signal == "SIGKILL"
    assert f"train.py:{LINE} in hang" in end.stack[0]
    (kept,) = await gang.stored()
    assert kept["cause"] == "it did not end within its grace period"


@played
async def test_a_rank_that_its_backend_ends_has_its_stack_before_that(gang: Gang) -> None:
    gang.backend.eviction_s = 4.5
    await gang.start("signal.signal(15, signal.SIG_IGN); hang()")
    await gang.until_up()
    gang.backend.processes[0, 0].terminate()  # as a backend does, which kills soon after
    end = await gang.ended()
    assert end.signal == "SIGKILL"
    assert f"train.py:{LINE} in hang" in end.stack[0]


@played
async def test_a_rank_that_is_killed_at_once_says_why_there_is_no_stack(gang: Gang) -> None:
    await gang.start("signal.signal(15, signal.SIG_IGN); hang()", stop_grace_s=0.0)
    await gang.until_up()
    await gang.backend.apply(gang.training, DesiredState(version=2, size=0))
    assert (await gang.ended()).stack == ["no stacks: it had no grace period"]


@played
async def test_a_rank_stopped_by_a_signal_shows_where_it_was(gang: Gang) -> None:
    await gang.start("import threading; os.kill(os.getpid(), 19); hang()")
    end = await gang.ended()
    assert end.reason == "Frozen"
    assert "train.py" in end.stack[0]


@played
async def test_a_rank_that_loses_its_wrapper_says_why_there_is_no_stack(gang: Gang) -> None:
    await gang.start("hang()")
    await gang.until_up()
    gang.backend.processes[0, 0].kill()
    end = await gang.ended()
    assert end.reason == "SupervisorLost"
    assert end.stack == ["no stacks: its wrapper, which takes them, left no record"]


@played
async def test_a_rank_that_stalls_keeps_its_stack_and_goes_on(gang: Gang) -> None:
    await gang.start("hang()", stall_s=1.0)
    await gang.until_up()
    while not (kept := await gang.stored()):
        assert running(await gang.look()) == [0]
        await asyncio.sleep(0.05)
    assert kept[0]["cause"].startswith("it did not move for ")
    assert kept[0]["processes"][0]["threads"][0]["frames"][0]["line"] == LINE


@played
async def test_a_round_that_times_out_keeps_the_stacks_of_all_ranks(gang: Gang) -> None:
    late = """
if rank == 0:
    from atoll.agent.stacks import request_all
    def late(): request_all()
    while not os.path.exists("up1.0"): time.sleep(0.02)
    late()
hang()
"""
    await gang.start(late, ranks=2)
    await gang.until_up(2)
    while len(kept := await gang.stored()) < 2:
        await gang.look()
        await asyncio.sleep(0.05)
    assert {one["cause"] for one in kept} == {"an outer round timed out"}
    assert "late" in [f["function"] for f in kept[0]["processes"][0]["threads"][0]["frames"]]
    assert kept[1]["processes"][0]["threads"][0]["frames"][0]["line"] == LINE
    assert running(await gang.look()) == [0, 1]


@played
async def test_ranks_without_the_hook_say_what_to_do(gang: Gang) -> None:
    await gang.start("hang()", env={"ATOLL_STACKS": "0"})
    ranks = await gang.until_up()
    (one,) = await gang.backend.take_stacks(gang.training, ranks)
    process = one["processes"][0]
    assert process["threads"] or "install py-spy" in process["reason"]


@played
async def test_a_rank_that_ended_before_it_was_asked_is_not_waited_for(gang: Gang) -> None:
    await gang.start("while not os.path.exists('go'): time.sleep(0.01)")
    (gang.folder / "go").touch()
    await gang.ended()
    rank = RankStatus(rank=0, attempt=0, phase="Running")  # as somebody saw it before
    with pytest.raises(Conflict, match="rank 0 of 't' does not run: it has ended"):
        await gang.backend.kill(gang.training, rank, 10)
    (one,) = await gang.backend.take_stacks(gang.training, [rank])
    assert one["reason"] == "it has ended"
