"""The shared executor over wrappers that are real processes, with a backend that can lie."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.agent.process import record_line
from atoll.agent.records import CLAIM, DESIRED, EXIT, desired_record, name_of
from atoll.agent.wrapper import write
from atoll.backends import recorded
from atoll.backends.local import processes
from atoll.backends.records import JobState, OpenStartGate
from atoll.code.archive import pack
from atoll.core.errors import Permanent, Temporary
from atoll.core.phase import Phase
from atoll.core.spec import Code, TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Observation, RankStatus, Status, Training
from tests.support.recorded import ProcessBackend

SCRIPT = """echo $RANK $ATOLL_ATTEMPT >> {folder}/ran
while :; do
    for file in {folder}/all {folder}/$RANK.$ATOLL_ATTEMPT; do
        [ -e $file ] && exit $(cat $file)
    done
    sleep 0.02
done"""


class Stage:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "records").mkdir()
        self.backend = ProcessBackend(folder / "records")
        self.training = self.of(3)

    def of(self, ranks: int, **more: Any) -> Training:
        spec = TrainingSpec(
            name="t",
            world_size=WorldSize(min=1, target=ranks, max=9),
            command=["sh", "-c", SCRIPT.format(folder=self.folder)],
            start_grace_s=0.0,
            stop_grace_s=2.0,
            **more,
        )
        return Training(namespace="default", uid="u1", spec=spec, created_at=time.time())

    async def observe_gang(self) -> Observation:
        observation = await self.backend.observe(self.training)
        for followup in observation.followups:
            await self.backend.perform(self.training, followup)
        return observation

    async def until(
        self, holds: Callable[[Observation], bool], desired: DesiredState | None = None
    ) -> Observation:
        deadline = time.monotonic() + 30
        while True:
            observation = await self.observe_gang()
            if holds(observation):
                return observation
            if desired is not None:
                await self.backend.apply(self.training, desired)
            assert time.monotonic() < deadline, observation
            await asyncio.sleep(0.05)

    async def running(self, ranks: int, desired: DesiredState | None = None) -> Observation:
        return await self.until(lambda s: states(s).count("running") == ranks, desired)

    async def recorded(self, ranks: int) -> None:
        """So many ends are written by their wrappers."""
        record_store, deadline = self.backend.record_store_of(self.training), time.monotonic() + 30
        while sum(name.endswith(".exit") for name in record_store.entries()) < ranks:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    def tell(self, file: str, code: int) -> None:
        (self.folder / f"{file}.new").write_text(str(code))
        (self.folder / f"{file}.new").rename(self.folder / file)

    def ran(self) -> list[str]:
        path = self.folder / "ran"
        return sorted(path.read_text().splitlines()) if path.exists() else []

    def rank_pids(self) -> list[int]:
        mark = str(self.folder / "ran").encode()
        pids = [pid for pid in processes.all_pids() if mark in _words(pid)]
        shells = [pid for pid in pids if _words(pid).startswith(b"sh")]
        # Without the children of theirs that are about to become another command.
        return [pid for pid in shells if processes.parent(pid) not in shells]


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def states(observation: Observation) -> list[str]:
    return [rank.state for rank in observation.ranks]


Body = Callable[[Stage], Awaitable[None]]


@pytest.fixture
def staged(tmp_path: Path) -> Callable[[Body], None]:
    async def play(body: Body) -> None:
        stage = Stage(tmp_path)
        try:
            await body(stage)
        finally:
            await stage.backend.close()

    return lambda body: asyncio.run(play(body))


async def _nothing() -> AsyncIterator[None]:
    yield


def test_a_gang_starts_grows_shrinks_and_ends(staged: Callable[[Body], None]) -> None:
    async def body(stage: Stage) -> None:
        nothing = Observation(has_gate=True, again_in_s=stage.backend.timing.observe_s)
        assert await stage.observe_gang() == nothing
        await stage.backend.apply(stage.training, DesiredState(version=1, size=3))
        observation = await stage.running(3)
        assert observation.gate_opened_at is not None
        assert observation.desired == DesiredState(version=1, size=3)
        stage.training = stage.of(4)
        await stage.backend.apply(stage.training, DesiredState(version=2, size=4))
        await stage.running(4)
        stage.training = stage.of(2)
        await stage.backend.apply(stage.training, DesiredState(version=3, size=2))
        await stage.backend.apply(stage.training, DesiredState(version=2, size=4))  # an older one
        observation = await stage.until(lambda s: states(s).count("exited") == 2)
        assert observation.desired == DesiredState(version=3, size=2)
        gone = [rank.exit for rank in observation.ranks if rank.rank >= 2 and rank.exit]
        assert [(e.code, e.reason, e.is_stopped) for e in gone] == [(143, "Stopped", True)] * 2
        stage.tell("all", 0)
        observation = await stage.until(lambda s: states(s) == ["exited"] * 4)
        assert [r.exit.code for r in observation.ranks if r.exit and r.rank < 2] == [0, 0]
        assert stage.ran() == ["0 0", "1 0", "2 0", "3 0"]
        await stage.backend.release(stage.training)
        stage.training = replace(stage.training, status=Status(phase=Phase.SUCCEEDED))
        assert await stage.observe_gang() == Observation(has_gate=True)
        assert stage.rank_pids() == []

    staged(body)


def test_one_question_to_the_backend_is_one_look(staged: Callable[[Body], None]) -> None:
    async def body(stage: Stage) -> None:
        await stage.backend.apply(stage.training, DesiredState(version=1, size=3))
        await stage.running(3)
        stage.backend._listings.clear()
        before = stage.backend.questions
        await stage.observe_gang()
        assert stage.backend.questions == before + 1

    staged(body)


def test_a_backend_is_asked_rarely_while_the_records_tell_all(
    staged: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "RELIST_OBSERVATIONS", 1_000_000)

    async def body(stage: Stage) -> None:
        patient = stage.backend.timing._replace(heartbeat_timeout_s=60.0)
        stage.backend.timing, hasty = patient, stage.backend.timing
        await stage.backend.apply(stage.training, DesiredState(version=1, size=3))
        await stage.running(3)
        await stage.observe_gang()
        before = stage.backend.questions
        for _ in range(5):
            assert states(await stage.observe_gang()) == ["running"] * 3
        assert stage.backend.questions == before
        stage.tell("1.0", 3)  # the backend may have more to say of an end
        await stage.until(lambda s: s.ranks[1].state == "exited")
        await stage.until(lambda s: stage.backend.processes[1, 0].poll() is not None)
        await stage.observe_gang()
        assert stage.backend.questions > before
        before, stage.backend.timing = stage.backend.questions, hasty
        os.kill(stage.backend.processes[0, 0].pid, signal.SIGSTOP)  # it shows no life
        await stage.until(lambda s: stage.backend.questions > before)

    staged(body)


def test_a_failed_rank_is_restarted_within_its_budget(staged: Callable[[Body], None]) -> None:
    async def body(stage: Stage) -> None:
        stage.training, desired = stage.of(2, max_restarts=1), DesiredState(version=1, size=2)
        await stage.backend.apply(stage.training, desired)
        await stage.running(2)
        stage.tell("1.0", 7)
        observation = await stage.until(lambda s: s.ranks[1].attempt == 1, desired)
        assert observation.ranks[1].previous_exit is not None
        assert (observation.ranks[1].restarts, observation.ranks[1].previous_exit.code) == (1, 7)
        stage.tell("1.1", 8)
        observation = await stage.until(lambda s: s.ranks[1].state == "exited", desired)
        assert observation.ranks[1].exit is not None
        assert observation.ranks[1].exit.code == 8
        await stage.backend.apply(stage.training, desired)
        assert (1, 2) not in stage.backend.started

    staged(body)


def test_a_rank_scaled_away_and_wanted_again_has_its_whole_budget(
    staged: Callable[[Body], None],
) -> None:
    async def body(stage: Stage) -> None:
        stage.training = stage.of(2, max_restarts=1)
        await stage.backend.apply(stage.training, DesiredState(version=1, size=2))
        await stage.running(2)
        await stage.backend.apply(stage.training, DesiredState(version=2, size=1))
        await stage.backend.apply(
            stage.training, DesiredState(version=3, size=2)
        )  # it still leaves
        observation = await stage.until(lambda s: s.ranks[1].state == "exited")
        assert observation.ranks[1].exit is not None
        assert observation.ranks[1].exit.is_stopped
        desired = DesiredState(version=4, size=2, discarded_attempts={1: 0})
        await stage.backend.apply(stage.training, desired)
        observation = await stage.running(2, desired)
        assert (observation.ranks[1].attempt, observation.ranks[1].restarts) == (1, 0)

    staged(body)


def test_a_job_that_the_backend_forgot_is_asked_for_again_and_runs_once(
    staged: Callable[[Body], None],
) -> None:
    async def body(stage: Stage) -> None:
        started: list[Any] = []

        async def lost(training: Training, attempt: int, ranks: Any) -> None:
            started.append((attempt, list(ranks)))  # accepted, and forgotten

        truly = stage.backend.start_jobs
        stage.backend.start_jobs = lost  # type: ignore[method-assign]
        desired = DesiredState(version=1, size=3)
        await stage.backend.apply(stage.training, desired)
        stage.backend.start_jobs = truly  # type: ignore[method-assign]
        await stage.running(3, desired)
        assert started == [(0, [0, 1, 2])]
        assert stage.ran() == ["0 0", "1 0", "2 0"]

    staged(body)


def test_a_job_that_the_backend_gave_up_is_asked_for_again(
    staged: Callable[[Body], None],
) -> None:
    async def body(stage: Stage) -> None:
        truly, given_up = stage.backend.start_jobs, JobState("ended", "Deleted", is_withdrawn=True)

        async def refuse(training: Training, attempt: int, ranks: Any) -> None:
            stage.backend.words = {(rank, attempt): given_up for rank in ranks}

        stage.backend.start_jobs = refuse  # type: ignore[method-assign]
        desired = DesiredState(version=1, size=2)
        await stage.backend.apply(stage.training, desired)

        async def take(training: Training, attempt: int, ranks: Any) -> None:
            stage.backend.words = {}
            await truly(training, attempt, ranks)

        stage.backend.start_jobs = take  # type: ignore[method-assign]
        stage.training = stage.of(2)
        await stage.running(2, desired)
        assert stage.ran() == ["0 0", "1 0"]

    staged(body)


def test_an_attempt_that_the_backend_starts_twice_runs_once(
    staged: Callable[[Body], None],
) -> None:
    async def body(stage: Stage) -> None:
        await stage.backend.apply(stage.training, DesiredState(version=1, size=3))
        await stage.running(3)
        again = [stage.backend.start(stage.training, rank, 0) for rank in range(3)]
        assert [process.wait(60) for process in again] == [75] * 3
        assert states(await stage.observe_gang()) == ["running"] * 3
        assert stage.ran() == ["0 0", "1 0", "2 0"]

    staged(body)


def test_another_executor_sees_the_same(staged: Callable[[Body], None]) -> None:
    async def body(stage: Stage) -> None:
        await stage.backend.apply(stage.training, DesiredState(version=1, size=3))
        before = await stage.running(3)
        other = ProcessBackend(stage.folder / "records")
        other.processes = stage.backend.processes
        after = await other.observe(stage.training)
        assert after.ranks == before.ranks
        stage.tell("1.0", 3)
        observation = await stage.until(lambda s: s.ranks[1].state == "exited")
        assert observation.ranks[1].exit is not None
        assert observation.ranks[1].exit.code == 3

    staged(body)


def test_exits_are_told_while_the_backend_does_not_answer(staged: Callable[[Body], None]) -> None:
    async def body(stage: Stage) -> None:
        await stage.backend.apply(stage.training, DesiredState(version=1, size=3))
        await stage.running(3)
        stage.backend.is_silent = True
        stage.backend._listings.clear()
        with pytest.raises(Temporary):
            await stage.observe_gang()
        stage.tell("1.0", 3)
        deadline = time.monotonic() + 60
        observation = Observation()
        while not observation.ranks and time.monotonic() < deadline:
            try:
                observation = await stage.observe_gang()
            except Temporary:
                await asyncio.sleep(0.05)
        assert states(observation) == ["running", "exited", "running"]
        assert observation.message == "it does not answer"

    staged(body)


def test_a_launch_that_cannot_be_stopped_for_now_runs_on(staged: Callable[[Body], None]) -> None:
    """Its wrappers would carry out what its script was told to be refused."""

    async def body(stage: Stage) -> None:
        stage.backend.is_shared = True
        desired = DesiredState(version=1, size=3)
        await stage.backend.apply(stage.training, desired)
        await stage.running(3)
        stage.backend.is_silent = True
        with pytest.raises(Temporary, match="it does not answer"):
            await stage.backend.apply(stage.training, DesiredState(version=2, size=0))
        stage.backend.is_silent = False
        assert (await stage.observe_gang()).desired == desired

    staged(body)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_wrapper_that_is_killed_or_frozen_is_told_of(
    staged: Callable[[Body], None], number: int
) -> None:
    async def body(stage: Stage) -> None:
        await stage.backend.apply(stage.training, DesiredState(version=1, size=3))
        await stage.running(3)
        os.kill(stage.backend.processes[1, 0].pid, number)
        observation = await stage.until(lambda s: s.ranks[1].state == "exited")
        ended = observation.ranks[1].exit
        assert ended is not None
        assert (ended.code, ended.reason, ended.is_from_backend) == (None, "SupervisorLost", True)
        assert states(observation) == ["running", "exited", "running"]
        assert len(stage.rank_pids()) == 2

    staged(body)


def test_a_silent_wrapper_is_not_ended_before_its_end_is_written(
    staged: Callable[[Body], None],
) -> None:
    """Else its backend says that somebody deleted it."""

    async def body(stage: Stage) -> None:
        desired = DesiredState(version=1, size=3)
        await stage.backend.apply(stage.training, desired)
        await stage.running(3, desired)
        reader = stage.backend._readers[stage.training.uid]
        os.kill(stage.backend.processes[1, 0].pid, signal.SIGSTOP)
        while reader.heartbeat_age_s(1, 0) < stage.backend.timing.heartbeat_timeout_s:
            await stage.backend.apply(stage.training, desired)
            await asyncio.sleep(0.05)
        await stage.backend.apply(stage.training, desired)
        assert stage.backend.stopped == []
        observation = await stage.until(lambda s: s.ranks[1].state == "exited")
        assert observation.ranks[1].exit is not None
        assert observation.ranks[1].exit.reason == "SupervisorLost"
        assert (1, 0) in stage.backend.stopped

    staged(body)


def test_an_end_that_nobody_saw_is_dated_by_the_last_sign_of_life(
    staged: Callable[[Body], None],
) -> None:
    """Not by who looks first, an hour later: that hour is charged to nobody."""

    async def body(stage: Stage) -> None:
        await stage.backend.apply(stage.training, DesiredState(version=1, size=3))
        await stage.running(3)
        record_store = stage.backend.record_store_of(stage.training)
        deadline = time.monotonic() + 30
        while sum(name.endswith(".heartbeat") for name in record_store.entries()) < 3:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        for process in stage.backend.processes.values():
            process.kill()
        later = ProcessBackend(stage.backend.root, clock=lambda: time.time() + 3600)
        later.processes = stage.backend.processes
        stage.backend = later
        observation = await stage.until(lambda s: states(s) == ["exited"] * 3)
        for rank in observation.ranks:
            assert rank.exit is not None
            assert rank.started_at is not None
            assert 0 <= rank.exit.at - rank.started_at < 60

    staged(body)


@pytest.mark.parametrize(
    ("words", "reason"), [("Preempted", "Preempted"), ("OOMKilled", "OOMKilled"), ("", "Signal")]
)
def test_the_backend_names_what_it_did(
    staged: Callable[[Body], None], words: str, reason: str
) -> None:
    async def body(stage: Stage) -> None:
        await stage.backend.apply(stage.training, DesiredState(version=1, size=3))
        await stage.running(3)
        stage.backend.words = {(rank, 0): JobState("running") for rank in range(3)}
        for pid in stage.rank_pids():
            os.kill(pid, signal.SIGKILL)
        await stage.recorded(3)  # in time: a record that comes late is another matter
        stage.backend.words = {(r, 0): JobState("ended", words, "Slurm: X") for r in range(3)}
        observation = await stage.until(lambda s: states(s) == ["exited"] * 3)
        assert [r.exit.reason for r in observation.ranks if r.exit] == [reason] * 3
        assert [r.exit.code for r in observation.ranks if r.exit] == [137] * 3
        assert [r.exit.message for r in observation.ranks if r.exit] == ["Slurm: X"] * 3

    staged(body)


def test_records_that_are_gone_are_never_run_again(staged: Callable[[Body], None]) -> None:
    async def body(stage: Stage) -> None:
        ran = Status(ranks=[RankStatus(rank=0, attempt=0, started_at=1.0)])
        training = replace(stage.training, status=ran)
        await stage.backend.apply(training, DesiredState(version=2, size=0))
        with pytest.raises(Permanent, match="the records of t are gone"):
            await stage.backend.apply(training, DesiredState(version=2, size=3))
        assert stage.backend.started == []

    staged(body)


def project(folder: Path) -> Code:
    (folder / "project/src").mkdir(parents=True)
    (folder / "project/src/model.py").write_text("NAME = 'a model'")
    (folder / "project/train.py").write_text(
        "import os, model\nprint(os.environ['RANK'], model.NAME, file=open('../../out', 'a'))\n"
        "raise SystemExit(0 if os.environ['ATOLL_ATTEMPT'] == '1' else 3)\n"
    )
    code = pack(folder / "project", [str(folder / "project/src")])
    assert code is not None
    return code


def test_code_travels_to_every_attempt_and_goes_with_the_training(
    staged: Callable[[Body], None],
) -> None:
    async def body(stage: Stage) -> None:
        code, command = project(stage.folder), [sys.executable, "train.py"]
        spec = replace(stage.of(2, max_restarts=1, code=code).spec, command=command)
        stage.training = replace(stage.training, spec=spec)
        records = stage.folder / "records/u1"
        desired = DesiredState(version=1, size=2)
        await stage.backend.apply(stage.training, desired)
        await stage.until(
            lambda s: [(r.attempt, r.exit and r.exit.code) for r in s.ranks] == [(1, 0)] * 2,
            desired,
        )
        lines = (stage.folder / "records/out").read_text().splitlines()
        assert sorted(lines) == [f"{rank} a model" for rank in (0, 0, 1, 1)]
        assert f"tree-{code.digest[:12]}" in os.listdir(records)
        await stage.backend.apply(stage.training, DesiredState(version=2, size=0))
        await stage.backend.release(stage.training)
        assert os.listdir(records) == []

    staged(body)


def test_code_that_somebody_changed_is_not_run(staged: Callable[[Body], None]) -> None:
    async def body(stage: Stage) -> None:
        stage.training = stage.of(1, code=project(stage.folder))
        stage.backend.start_jobs = nothing  # type: ignore[method-assign]
        await stage.backend.apply(stage.training, DesiredState(version=1, size=1))
        (stage.folder / "records/u1/code").write_bytes(b"other code")
        stage.backend.start(stage.training, 0, 0)
        observation = await stage.until(lambda s: states(s) == ["exited"])
        assert observation.ranks[0].exit is not None
        assert (observation.ranks[0].exit.code, stage.ran()) == (126, [])
        assert "not the code that was deployed" in observation.ranks[0].exit.message

    async def nothing(*_: Any) -> None:
        pass

    staged(body)


def lose_records(stage: Stage) -> None:
    for name in stage.backend.record_store_of(stage.training).entries():
        path = stage.backend.root / stage.training.uid / name
        if path.is_dir():  # that of metrics, once a rank has been there for a while
            shutil.rmtree(path)
        else:
            path.unlink()


def test_ranks_whose_records_are_lost_are_stopped_by_what_the_backend_lists(
    staged: Callable[[Body], None],
) -> None:
    async def body(stage: Stage) -> None:
        desired = DesiredState(version=1, size=3)
        await stage.backend.apply(stage.training, desired)
        await stage.running(3)
        lose_records(stage)
        ran = [RankStatus(rank=rank, attempt=0, started_at=1.0) for rank in range(3)]
        lost = Status(phase=Phase.FAILED, ranks=ran, desired=desired)
        stage.training = replace(stage.training, status=lost)
        assert (await stage.backend.observe(stage.training)).is_supervised
        with pytest.raises(Temporary, match="about to end"):
            await stage.backend.release(stage.training)
        for process in stage.backend.processes.values():
            process.wait()
        await stage.backend.release(stage.training)
        assert not (await stage.backend.observe(stage.training)).is_supervised
        desired = stage.backend.questions
        released = replace(stage.training, status=replace(lost, is_released=True))
        await stage.backend.purge(released)
        assert stage.backend.questions == desired  # nothing can be left of it

    staged(body)


def test_the_start_gate_does_not_count_an_attempt_that_has_ended(
    staged: Callable[[Body], None],
) -> None:
    """Killed at the gate: while its backend is asked why, it is shown as one that waits."""

    async def body(stage: Stage) -> None:
        world = WorldSize(min=2, target=2, max=2)
        spec = replace(stage.training.spec, world_size=world, start_grace_s=600.0)
        training = replace(stage.training, spec=spec)
        record_store = stage.backend.record_store_of(training)
        document = desired_record(1, 2, {}, None, {}, 1.0)
        await stage.backend._put(training, DESIRED, document)
        killed = {"atollExit": 1, "code": 137, "signal": "SIGKILL", "reason": "Signal", "at": 2.0,
                  "ran": False, "stopped": False, "host": "h"}  # fmt: skip
        for rank in range(2):
            record_store.create(
                name_of(rank, 0, CLAIM), write({"token": "t", "host": "h", "at": 1.0})
            )
            stage.backend.words[rank, 0] = JobState("running")
        record_store.create(name_of(1, 0, EXIT), record_line(killed, 4096))
        observation = await stage.backend.observe(training)
        assert states(observation) == ["waiting", "waiting"]
        assert not [
            followup for followup in observation.followups if isinstance(followup, OpenStartGate)
        ]

    staged(body)
