"""Ranks as sandboxes of the stand-in, under the real controller, with a real S3 API."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import modal
import pytest
from msgspec.structs import replace

from atoll.backends.modal.executor import ModalBackend
from atoll.backends.modal.options import ModalOptions
from atoll.code.archive import pack
from atoll.controller.loop import Controller
from atoll.core.config import parse
from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.executors import PlaneContext, load
from atoll.core.spec import Code, RendezvousSpec, Resources, Source, TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Training
from atoll.store.sqlite import MemoryStore
from tests.allreduce.s3server import S3Server
from tests.support.modal_stand_in import ModalStandIn

POLL_S = 0.2


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    server.make_bucket("runs")
    yield server
    server.stop()


@pytest.fixture
def uri(s3: S3Server, stand_in: ModalStandIn, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    stand_in.secrets["store"] = s3.environment
    return f"s3://runs/{uuid.uuid4().hex}"


def make_backend(**options: Any) -> ModalBackend:
    given = {"secrets": ["store"], "python": "python", "poll_s": POLL_S, "image": "python:3.11"}
    return ModalBackend(ModalOptions(**given | options))


class World:
    def __init__(self, backend: ModalBackend, uri: str) -> None:
        self.backend = backend
        self.store = MemoryStore()
        self.uri = uri

    async def create(self, script: str, ranks: int = 1, **fields: Any) -> Training:
        given: dict[str, Any] = {
            "name": "t",
            "command": ["sh", "-c", script],
            "world_size": WorldSize(min=ranks, target=ranks, max=max(ranks, 8)),
            "rendezvous": RendezvousSpec(uri=self.uri),
            "executor": "modal",
            "stop_grace_s": 5.0,
        }
        if "source" in fields:
            del given["command"]
        spec = TrainingSpec(**given | fields)
        training = Training(namespace="n", uid=uuid.uuid4().hex, spec=spec, created_at=time.time())
        return await self.store.create(training)

    async def until(
        self, training: Training, holds: Callable[[Training], object], within_s: float = 60
    ) -> Training:
        deadline = time.monotonic() + within_s
        while True:
            now = await self.store.get(training.key)
            if holds(now):
                return now
            assert time.monotonic() < deadline, now.status
            await asyncio.sleep(0.02)

    async def until_running(self, training: Training, ranks: int) -> Training:
        return await self.until(
            training, lambda t: sum(r.is_alive for r in t.status.ranks) == ranks
        )

    async def until_over(self, training: Training) -> Training:
        return await self.until(training, lambda t: t.status.phase.is_terminal)

    async def change(self, training: Training, **spec: Any) -> None:
        now = await self.store.get(training.key)
        await self.store.update_spec(replace(now, spec=replace(now.spec, **spec)))


@contextlib.asynccontextmanager
async def world(uri: str, **options: Any) -> AsyncIterator[World]:
    made = World(make_backend(**options), uri)
    running = asyncio.create_task(Controller(made.store, {"modal": made.backend}).run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.backend.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def test_logs_are_followed_and_stay_readable(uri: str) -> None:
    async def work() -> None:
        async with world(uri) as there:
            script = "for i in 1 2 3; do echo $REPLICA_RANK line $i; done; echo last >&2; exit 3"
            training = await there.create(script, 2)
            over = await there.until_over(training)
            assert over.status.root_cause is not None
            assert over.status.root_cause.exit_code == 3
            lines = [line async for line in there.backend.logs(over, ranks=[1])]
            texts = [line.text for line in lines]
            assert texts[:3] == ["1 line 1", "1 line 2", "1 line 3"]
            assert "last" in texts
            tail = [line.text async for line in there.backend.logs(over, ranks=[1], tail=1)]
            assert tail == texts[-1:]
            is_asked = iter([False, False, True])
            again = there.backend.logs(over, ranks=[1], follow=lambda: next(is_asked))
            assert [line.text async for line in again] == texts
            record_store = lines[1].at  # type: ignore[attr-defined]
            rest = there.backend.logs_after(over, {1: record_store}, ranks=[1])
            assert [line.text async for line in rest] == texts[2:]

    run(work)


def test_a_look_is_one_question_however_many_ranks(uri: str, stand_in: ModalStandIn) -> None:
    async def work() -> None:
        async with world(uri) as there:
            training = await there.create("sleep 600", 4)
            now = await there.until_running(training, 4)
            stand_in.calls.clear()
            there.backend.sandboxes.questions.clear()
            there.backend._listings.clear()  # it asks, whatever the records say
            observation = await there.backend.observe(now)
            looks = there.backend.sandboxes.questions["running"]
            assert len(observation.ranks) == 4
            assert set(there.backend.sandboxes.questions) == {"running"}
            assert stand_in.calls["SandboxListV2"] == looks
            await there.change(now, cancel=True)
            await there.until_over(training)

    run(work)


def test_a_planned_hand_over_is_no_failure(
    uri: str, stand_in: ModalStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sandbox lives for a day. The rank goes on in another, whatever its code, though no restart
    is allowed."""
    monkeypatch.setattr("atoll.backends.modal.executor.planned_lifetime_s", lambda *_: 3.0)
    script = (
        f"echo $ATOLL_ATTEMPT >> {tmp_path}/ran; trap 'exit 0' TERM; "
        f"while [ ! -e {tmp_path}/done ]; do sleep 0.05; done"
    )

    async def work() -> None:
        async with world(uri) as there:
            training = await there.create(script, 1, max_restarts=0)
            ran = tmp_path / "ran"
            await there.until(training, lambda _: ran.exists() and "1" in ran.read_text())
            (tmp_path / "done").touch()
            over = await there.until_over(training)
            assert over.status.phase == "succeeded"
            (end,) = over.status.rank_exits
            assert (end.exit_code, end.restart_count) == (0, 0)

    run(work)


def test_a_sandbox_that_modal_started_twice_runs_once(
    uri: str, stand_in: ModalStandIn, tmp_path: Path
) -> None:
    async def work() -> None:
        async with world(uri) as there:
            wait = f"while [ ! -e {tmp_path}/done ]; do sleep 0.05; done"
            training = await there.create(f"echo $ATOLL_ATTEMPT >> {tmp_path}/ran; {wait}")
            await there.until_running(training, 1)
            (box,) = stand_in.running()
            await asyncio.to_thread(stand_in.run_again, box)
            await there.until(training, lambda _: "has run, or runs" in box.log.read_text())
            (tmp_path / "done").touch()
            over = await there.until_over(training)
            assert over.status.phase == "succeeded"
            assert (tmp_path / "ran").read_text() == "0\n"

    run(work)


def test_terminated_by_somebody_else_is_not_out_of_memory(uri: str, stand_in: ModalStandIn) -> None:
    async def work() -> None:
        async with world(uri) as there:
            training = await there.create("sleep 600")
            await there.until_running(training, 1)
            (box,) = stand_in.running()
            await asyncio.to_thread(stand_in.terminate, box)
            over = await there.until_over(training)
            (end,) = over.status.rank_exits
            assert end.exit_code is None
            assert end.termination_reason == "Deleted"
            assert "Modal says terminated" in end.message

    run(work)


def test_a_start_that_waits_for_room_holds_up_nothing(uri: str, stand_in: ModalStandIn) -> None:
    """With a GPU, the client waits in `create` until there is room."""
    stand_in.held.set()

    async def work() -> None:
        async with world(uri) as there:
            needs = Resources(gpu_count=1, gpu_models=["H100"])
            training = await there.create("sleep 600", 2, resources=needs)
            waiting = await there.until(
                training, lambda t: len([r for r in t.status.ranks if "Modal" in r.message]) == 2
            )
            assert waiting.status.phase == "pending"
            assert len(stand_in.sandboxes) == 2
            await there.change(waiting, cancel=True)
            over = await there.until_over(training)
            assert over.status.phase == "cancelled"
            released = await there.until(over, lambda t: t.status.is_released)
            assert stand_in.running() == []
            assert released.status.rank_exits == []

    run(work)


def test_another_process_finds_what_runs_and_how_it_ended(uri: str, stand_in: ModalStandIn) -> None:
    """Killed between a start and the note of its id, and away while memory ran out."""

    async def work() -> None:
        async with world(uri) as there:
            training = await there.create("sleep 600", 2)
            now = await there.until_running(training, 2)
        boxes = {box.rank: box for box in stand_in.running()}
        await asyncio.to_thread(stand_in.lose, boxes[1], "KERNEL_OOM_KILL")
        other = make_backend()
        stand_in.calls.clear()
        await other.observe(now)
        assert stand_in.calls["SandboxTagsGetV2"] == 1, "only what runs and is unknown is asked for"
        deadline = time.monotonic() + 60
        ends: list[Any] = []
        while not ends:
            assert time.monotonic() < deadline
            observation = await other.observe(now)
            for followup in observation.followups:
                await other.perform(now, followup)
            ends = [rank for rank in observation.ranks if rank.exit is not None]
            await asyncio.sleep(0.05)
        (end,) = ends
        assert (end.rank, end.exit.code, end.exit.reason) == (1, 137, "OOMKilled")
        with pytest.raises(Temporary):
            await other.purge(now)
        while True:
            with contextlib.suppress(Temporary):
                await other.purge(now)
                break
            await asyncio.sleep(0.1)
        assert stand_in.running() == []
        assert not (await other.observe(now)).ranks

    run(work)


def test_a_start_that_is_repeated_starts_nothing_twice(uri: str, stand_in: ModalStandIn) -> None:
    async def work() -> None:
        async with world(uri) as there:
            training = await there.create("sleep 600")
            now = await there.until_running(training, 1)
            await there.backend.start_jobs(now, 0, [0])
            assert len(stand_in.sandboxes) == 1
            await make_backend().start_jobs(now, 0, [0])
            assert len(stand_in.sandboxes) == 1

    run(work)


def test_code_travels_through_the_store(uri: str, stand_in: ModalStandIn, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/helper.py").write_text("WORD = 'from the project'")
    (tmp_path / "project/train.py").write_text("import helper\nprint(helper.WORD)")
    code: Code | None = pack(tmp_path / "project")

    async def work() -> None:
        async with world(uri) as there:
            training = await there.create("python train.py", 2, code=code)
            over = await there.until_over(training)
            assert over.status.phase == "succeeded", over.status.message
            lines = [line.text async for line in there.backend.logs(over, ranks=[1])]
            assert lines == ["from the project"]
            source = Source(kind="script", content=b"print('shipped')", filename="s.py")
            training = await there.create("", name="u", source=source)
            over = await there.until_over(training)
            assert over.status.phase == "succeeded", over.status.message
            assert [line.text async for line in there.backend.logs(over)] == ["shipped"]

    run(work)


def test_what_a_rank_finds(uri: str) -> None:
    async def work() -> None:
        async with world(uri) as there:
            training = await there.create("env", 2, env={"MINE": "1"})
            over = await there.until_over(training)
            lines = [line.text async for line in there.backend.logs(over, ranks=[1])]
            env = dict(line.split("=", 1) for line in lines if "=" in line)
            assert env["RANK"] == env["REPLICA_RANK"] == "1"
            assert (env["WORLD_SIZE"], env["MINE"]) == ("2", "1")
            assert env["ATOLL_RENDEZVOUS_URI"] == uri
            assert env["NODE_NAME"].startswith("ta-")
            assert not {name for name in env if name.startswith(("PET_", "MASTER_", "MODAL_TOKEN"))}

    run(work)


def test_the_store_away_delays_the_stop_and_loses_nothing(
    uri: str, s3: S3Server, stand_in: ModalStandIn
) -> None:
    async def work() -> None:
        async with world(uri) as there:
            training = await there.create("sleep 0.5; exit 4")
            await there.until_running(training, 1)
            s3.has_left = True
            (box,) = stand_in.running()
            try:
                await asyncio.sleep(1.5)
                assert box.is_running, "its wrapper waits until it can tell"
            finally:
                s3.has_left = False
            over = await there.until_over(training)
            assert [e.exit_code for e in over.status.rank_exits] == [4]

    run(work)


def test_modal_away_delays_and_loses_nothing(uri: str, stand_in: ModalStandIn) -> None:
    async def work() -> None:
        async with world(uri) as there:
            training = await there.create("sleep 1; exit 4")
            await there.until_running(training, 1)
            await asyncio.to_thread(stand_in.down)
            over = await there.until_over(training)
            assert [e.exit_code for e in over.status.rank_exits] == [4]
            await asyncio.to_thread(stand_in.up)
            await there.until(over, lambda t: t.status.is_released)

    run(work)


def test_what_modal_will_never_do_ends_the_training(uri: str, stand_in: ModalStandIn) -> None:
    async def work() -> None:
        async with world(uri, secrets=["store", "nonesuch"]) as there:
            training = await there.create("true")
            over = await there.until_over(training)
            assert over.status.reason == "ExecutorRefused"
            assert "nonesuch" in over.status.message
            assert stand_in.sandboxes == {}

    run(work)


def test_an_image_without_atoll_is_told_of(uri: str, stand_in: ModalStandIn) -> None:
    async def work() -> None:
        async with world(uri, python="false") as there:
            training = await there.create("true")
            over = await there.until_over(training)
            assert "does its image have Python and atoll[store]" in over.status.message

    run(work)


def test_the_start_gate_holds_ranks_until_all_are_there(uri: str, stand_in: ModalStandIn) -> None:
    async def work() -> None:
        async with world(uri) as there:
            training = await there.create("sleep 600", 3)
            now = await there.until_running(training, 3)
            assert now.status.gate_opened_at is not None
            assert min(r.started_at or 0 for r in now.status.ranks) >= now.status.gate_opened_at
            assert len({r.node for r in now.status.ranks}) == 3

    run(work)


def test_by_its_name_in_the_configuration(stand_in: ModalStandIn, tmp_path: Path) -> None:
    text = '[executors.cloud]\nkind = "modal"\nstore = "s3://b/runs"\nregion = ["us-east"]\n'
    config = parse(text, "atoll.toml")
    made = config.executors["cloud"]
    backend = load(made.kind).configured("cloud", made.options, PlaneContext(tmp_path, "p"))
    assert backend.name == "cloud"
    asyncio.run(backend.probe())  # type: ignore[attr-defined]
    assert stand_in.calls["SandboxListV2"] == 1
    with pytest.raises(ValidationError, match="store"):
        load("modal").configured("c", {"store": "file:///x"}, PlaneContext(tmp_path, "p"))


def test_without_credentials_the_executor_says_what_to_set(
    stand_in: ModalStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MODAL_TOKEN_ID")
    monkeypatch.delenv("MODAL_TOKEN_SECRET")
    with pytest.raises(Permanent, match="modal token new.*MODAL_TOKEN_ID"):
        load("modal").configured("c", {}, PlaneContext(tmp_path, "p"))


def test_a_training_that_can_never_run_is_refused_before_anything_is_made(
    uri: str, stand_in: ModalStandIn
) -> None:
    backend = make_backend()
    spec = TrainingSpec(
        name="t", command=["true"], world_size=WorldSize(min=1, target=1, max=1), mesh=True
    )
    with pytest.raises(ValidationError):
        backend.check(spec)
    training = Training(namespace="n", uid="u", spec=spec)
    with pytest.raises(Permanent):
        asyncio.run(backend.apply(training, DesiredState(version=1, size=1)))
    assert stand_in.calls == {}
    assert modal.__name__ == "modal", "the package of that name here is not in its way"
