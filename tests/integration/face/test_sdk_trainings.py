"""The handle against a whole control plane with real ranks."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll import BelowMinimumWorld, NotFound, UDTerminalState, WorldSize, WorldSizeOutOfBounds
from atoll.core.errors import Conflict, ValidationError
from atoll.sdk import effects
from atoll.sdk.endpoint import Address
from atoll.sdk.wire import AsyncPerformer

from .conftest import Plane

TEN = 60  # seconds that a loaded machine may take for what takes milliseconds


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def hold(path: Path) -> list[str]:
    """A rank that runs until the file is there."""
    return shell(f"while [ ! -e {path} ]; do sleep 0.05; done")


def test_the_contracts_example(client: atoll.Client, tmp_path: Path) -> None:
    t = client.deploy_distributed(
        name="tiny-gpt",
        command=hold(tmp_path / "go"),
        world_size=WorldSize(min=2, target=4, max=8),
    )
    assert t.name == "tiny-gpt"
    assert t.wait_until_min_world(timeout=TEN).ready >= 2
    assert t.scale(target=6).target == 6
    world = t.wait_until_target_world(timeout=TEN)
    assert (world.ready, world.target, world.below_minimum) == (6, 6, False)
    assert [rank.phase for rank in t.ranks] == ["Running"] * 6
    assert (t.phase, t.is_terminal, t.rank_exits, t.root_cause) == ("ready", False, [], None)
    (tmp_path / "go").touch()
    assert t.wait_until_complete(timeout=TEN).ready == 6
    assert (t.phase, t.is_terminal) == ("succeeded", True)
    assert [(e.rank, e.exit_code) for e in t.rank_exits] == [(rank, 0) for rank in range(6)]


def alive(marks: Path) -> set[str]:
    """The ranks whose processes exist, told by files that they leave and remove."""
    return {path.name for path in marks.iterdir()}


def test_ranks_that_are_being_stopped_are_neither_ready_nor_gone(
    client: atoll.Client, plane: Plane, tmp_path: Path
) -> None:
    """The wait for fewer ranks returns once the others are gone; for more, once they are new."""
    marks, release = tmp_path / "marks", tmp_path / "release"
    marks.mkdir()
    script = f"""touch {marks}/$RANK.$ATOLL_ATTEMPT
        leave() {{
            until [ -e {release}.$RANK.$ATOLL_ATTEMPT ]; do sleep 0.05; done
            rm {marks}/$RANK.$ATOLL_ATTEMPT; exit 0
        }}
        trap leave TERM
        while :; do sleep 0.05; done"""
    size = WorldSize(min=1, target=3, max=3)
    t = client.deploy_distributed("slow", command=shell(script), world_size=size)
    t.wait_until_target_world(TEN)
    while alive(marks) != {"0.0", "1.0", "2.0"}:
        time.sleep(0.02)
    t.scale(1)
    while "stopping" not in t.ranks[-1].message:
        t.refresh()
    with pytest.raises(BelowMinimumWorld, match="above the target and still alive: 1-2"):
        t.wait_until_target_world(0)
    with plane.client() as other, pytest.raises(BelowMinimumWorld):
        asyncio.run(other.get("slow").wait_until_target_world_async(0))
    Path(f"{release}.2.0").touch()
    waited = threading.Thread(target=t.wait_until_target_world, args=(TEN,))
    waited.start()
    while "2.0" in alive(marks):
        time.sleep(0.02)
    assert waited.is_alive()
    Path(f"{release}.1.0").touch()
    waited.join(TEN)
    assert alive(marks) == {"0.0"}
    t.scale(3)
    t.wait_until_target_world(TEN)
    while alive(marks) != {"0.0", "1.1", "2.1"}:
        time.sleep(0.02)
    t.scale(1)
    while "stopping" not in t.ranks[-1].message:
        t.refresh()
    t.scale(3)
    while "restarts" not in t.ranks[-1].message:
        t.refresh()
    assert t.world.ready == 1
    for rank in (1, 2):
        Path(f"{release}.{rank}.1").touch()
    assert t.wait_until_target_world(TEN).ready == 3
    while not {"1.2", "2.2"} <= alive(marks):
        time.sleep(0.02)
    assert alive(marks) == {"0.0", "1.2", "2.2"}
    for rank, attempt in ((0, 0), (1, 2), (2, 2)):
        Path(f"{release}.{rank}.{attempt}").touch()
    t.delete()


def test_scaling_down_is_waited_for_from_another_handle(
    client: atoll.Client, plane: Plane, tmp_path: Path
) -> None:
    size = WorldSize(min=1, target=4, max=4)
    t = client.deploy_distributed("down", command=hold(tmp_path / "go"), world_size=size)
    t.wait_until_target_world(TEN)
    with plane.client() as other:
        t.scale(2)
        seen = other.get("down")
        world = seen.wait_until_target_world(TEN)
        assert (world.ready, world.target) == (2, 2)
        assert _settles(t.uid, [0, 1])


def test_a_failure_names_the_rank_its_code_and_its_last_lines(client: atoll.Client) -> None:
    t = client.deploy_distributed(
        "bad",
        command=shell('[ $RANK = 1 ] && echo "out of luck" && exit 7; sleep 60'),
        world_size=2,
    )
    with pytest.raises(BelowMinimumWorld) as caught:
        t.wait_until_complete(TEN)
    assert "rank 1: exit_code=7" in str(caught.value)
    assert "out of luck" in str(caught.value)
    assert [e.rank for e in caught.value.rank_exits if not e.collateral] == [1]
    cause = t.root_cause
    assert cause is not None
    assert (cause.rank, cause.exit_code, cause.log_tail) == (1, 7, ["out of luck"])
    for _ in range(2):  # the same answer as often as it is asked
        with pytest.raises(BelowMinimumWorld):
            t.result()
    with pytest.raises(UDTerminalState) as over:
        t.wait_until_complete(TEN)
    assert over.value.phase == "failed"
    with pytest.raises(UDTerminalState):
        t.scale(2)
    for wait in (t.wait_until_min_world, t.wait_until_target_world):
        with pytest.raises(BelowMinimumWorld):
            wait(TEN)


def test_bounds_and_deadlines(client: atoll.Client, tmp_path: Path) -> None:
    size = WorldSize(min=1, target=1, max=2)
    t = client.deploy_distributed("b", command=hold(tmp_path / "go"), world_size=size, wait="min")
    for target in (0, 3, -1):
        with pytest.raises(WorldSizeOutOfBounds):
            t.scale(target)
    for timeout in (0, 0.2):
        with pytest.raises(BelowMinimumWorld) as caught:
            t.wait_until_complete(timeout)
        assert (caught.value.ready, caught.value.timeout) == (1, timeout)
    assert t.wait_until_min_world(0).ready == 1


def test_cancel_keeps_the_record_and_delete_removes_it(client: atoll.Client) -> None:
    t = client.deploy_distributed("c", command=["sleep", "600"], world_size=2, wait="target")
    t.cancel()
    t.cancel()
    with pytest.raises(BelowMinimumWorld, match="cancelled"):
        t.result(TEN)
    assert t.phase == "cancelled"
    assert {e.signal for e in t.rank_exits} == {"SIGTERM"}
    t.delete()
    t.delete()
    with pytest.raises(NotFound):
        client.get("c")
    assert t.phase == "cancelled"  # the handle still knows


def test_a_name_is_free_again_once_delete_has_returned(client: atoll.Client) -> None:
    for _ in range(3):
        t = client.deploy_distributed("again", command=["sleep", "600"], world_size=1, wait="min")
        with pytest.raises(Conflict):
            client.deploy_distributed("again", command=["true"])
        t.delete()


def test_a_block_deletes_on_leaving_and_never_masks_the_error(client: atoll.Client) -> None:
    def fail() -> None:
        with client.deploy_distributed("w", command=["sleep", "600"], wait="min") as t:
            assert t.phase == "ready"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert client.list() == []


def test_a_block_whose_control_plane_does_not_answer_does_not_mask_the_error(
    plane: Plane, client: atoll.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        with client.deploy_distributed("w", command=["sleep", "600"], wait="min"):
            monkeypatch.setattr(client.endpoint, "_address", Address("http://127.0.0.1:1"))
            monkeypatch.setattr(effects, "PATIENCE_S", 0.5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert "cannot reach" in caught.value.__notes__[0]
    monkeypatch.undo()


def test_a_private_control_plane_that_is_killed_comes_back_and_leaves_nothing() -> None:
    with atoll.Client.local() as private:
        t = private.deploy_distributed("p", command=["sleep", "600"], wait="min")
        private.endpoint._server.process.kill()  # type: ignore[attr-defined]
        assert t.wait_until_min_world(TEN).ready == 1
        assert _settles(t.uid, [0])
        private.endpoint._server.process.kill()  # type: ignore[attr-defined]
    assert _ranks_of(t.uid) == []


def test_logs_have_the_true_rank_and_stay_readable(client: atoll.Client) -> None:
    script = "for i in 1 2 3; do echo rank $RANK line $i; done"
    t = client.deploy_distributed("logs", command=shell(script), world_size=3)
    followed = [(line.rank, line.text) for line in t.stream_logs()]
    expected = sorted((r, f"rank {r} line {i}") for r in range(3) for i in (1, 2, 3))
    assert sorted(followed) == expected
    assert t.is_terminal
    assert sorted((line.rank, line.text) for line in t.logs()) == expected
    assert [line.text for line in t.logs(rank=2, tail=1)] == ["rank 2 line 3"]
    assert {line.rank for line in t.stream_logs(ranks=[0, 2])} == {0, 2}
    assert len(list(t.logs(follow=True))) == 9
    with pytest.raises(ValidationError, match="logs has ranks 0 to 2"):
        t.logs(rank=7)


def test_a_log_line_is_what_the_rank_ended_with_a_newline(client: atoll.Client) -> None:
    """Characters that other line readers stop at: a progress bar's, a paragraph's, a form's."""
    odd = r"10%%\r20%% a\342\200\250b\302\205c\013d\014e\036f"
    script = f"printf '{odd}\\n'; exit 3"
    t = client.deploy_distributed("odd", command=shell(script))
    text = "10%\r20% a\u2028b\x85c\x0bd\x0ce\x1ef"
    assert [line.text for line in t.stream_logs()] == [text]
    assert [line.text for line in asyncio.run(_followed(t))] == [text]
    assert t.root_cause is not None
    assert t.root_cause.log_tail == [text.partition("\r")[2]]  # as a terminal shows it


async def _followed(t: atoll.DistributedTraining) -> list[Any]:
    return [line async for line in t.stream_logs_async()]


def test_follow_gives_lines_as_they_come(client: atoll.Client, tmp_path: Path) -> None:
    script = f"echo first; {hold(tmp_path / 'go')[2]}; echo second"
    t = client.deploy_distributed("follow", command=shell(script))
    lines = t.logs(follow=True)
    assert next(lines).text == "first"
    assert not t.is_terminal
    (tmp_path / "go").touch()
    assert [line.text for line in lines] == ["second"]


def test_events_metrics_and_usage_are_real(client: atoll.Client, tmp_path: Path) -> None:
    size = WorldSize(min=1, target=1, max=2)
    t = client.deploy_distributed(
        "m",
        command=hold(tmp_path / "go"),
        world_size=size,
        gpu_count=2,
        env={"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        wait="min",
    )
    before = time.time()
    t.scale(2)
    t.wait_until_target_world(TEN)
    events = t.events()
    assert [e.at for e in events] == sorted((e.at for e in events), reverse=True)
    assert {"Accepted", "Ready", "Scaled"} <= {e.reason for e in events}
    assert {e.reason for e in t.events(since=before)} < {e.reason for e in events}
    first = t.stats()
    assert (first.ready, first.target, first.ranks_running, first.generation) == (2, 2, 2, 2)
    second = t.stats()
    assert second.rank_seconds > first.rank_seconds > 0
    assert second.gpu_seconds > second.rank_seconds
    (tmp_path / "go").touch()
    t.result(TEN)
    done = t.stats()
    assert t.stats().rank_seconds == done.rank_seconds
    assert t.stats().gpu_seconds == done.gpu_seconds


def test_a_training_that_ended_well_before_the_wait_counts_as_there(client: atoll.Client) -> None:
    t = client.deploy_distributed("quick", command=["true"], wait="target", timeout=TEN)
    t.result(TEN)
    assert t.wait_until_min_world(0).ready == 1
    assert t.wait_until_target_world(0).ready == 1


def test_get_and_list(client: atoll.Client) -> None:
    with pytest.raises(NotFound):
        client.get("nothing")
    for name in ("b", "a", "c"):
        client.deploy_distributed(name, command=["true"]).result(TEN)
    assert [t.name for t in client.list()] == ["a", "b", "c"]
    assert [t.name for t in client.list(prefix="b")] == ["b"]
    assert client.list(phase="failed") == []


OFFSET = 40


def helper(x: int) -> int:
    return x + OFFSET


def test_functions_run_with_helpers_closures_and_any_size(client: atoll.Client) -> None:
    data = os.urandom(500_000)  # an argument list takes 128 KiB

    def train(word: str) -> None:
        print(word, os.environ["RANK"], helper(2), len(data))  # noqa: T201

    t = client.deploy_distributed("fn", source=train, args=["hello"], world_size=2)
    t.result(TEN)
    lines = sorted(line.text for line in t.logs())
    assert lines == [f"hello {rank} 42 500000" for rank in range(2)]


def test_a_script_runs_where_it_was_and_fails_by_name(client: atoll.Client, tmp_path: Path) -> None:
    (tmp_path / "lib.py").write_text("def f(x):\n    raise ValueError(x)\n")
    script = tmp_path / "train.py"
    script.write_text("import lib, sys\nlib.f(sys.argv[1])\n")
    t = client.deploy_distributed("script", source=script, args=["lost"])
    with pytest.raises(BelowMinimumWorld, match="ValueError: lost"):
        t.result(TEN)
    assert t.root_cause is not None
    assert t.root_cause.message == "ValueError: lost"
    assert 'train.py", line 2' in "\n".join(t.root_cause.log_tail)


def test_ranks_start_in_the_callers_directory(
    client: atoll.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    t = client.deploy_distributed("pwd", command=["pwd"])
    t.result(TEN)
    assert [line.text for line in t.logs()] == [str(tmp_path)]


def test_async_twins_do_the_same(
    client: atoll.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followers: set[int] = set()  # calls that wait for the next change: each has read once
    real = AsyncPerformer.__call__

    async def perform(performer: AsyncPerformer, effect: effects.Effect) -> Any:
        if isinstance(effect, effects.NextChange):
            followers.add(id(performer))
            if len(followers) == 5:
                are_waiting.set()
        return await real(performer, effect)

    monkeypatch.setattr(AsyncPerformer, "__call__", perform)
    are_waiting = asyncio.Event()

    async def story() -> list[str]:
        size = WorldSize(min=1, target=2, max=3)
        t = await client.deploy_distributed_async(
            "async", command=hold(tmp_path / "go"), world_size=size, wait="min"
        )
        async with t:
            await t.wait_until_target_world_async(TEN)
            assert (await t.scale_async(3)).target == 3
            assert (await t.wait_until_target_world_async(TEN)).ready == 3
            with pytest.raises(BelowMinimumWorld):
                await t.wait_until_complete_async(0.1)
            followers.clear()
            are_waiting.clear()
            waiting = [asyncio.create_task(t.wait_until_complete_async(TEN)) for _ in range(5)]
            await are_waiting.wait()  # one that comes after the end would be refused
            (tmp_path / "go").touch()
            assert [world.ready for world in await asyncio.gather(*waiting)] == [3] * 5
            assert (await t.stats_async()).ranks_succeeded == 3
            assert await t.events_async(since=0)
            assert await t.logs_async() == []
            assert [line async for line in t.stream_logs_async()] == []
            assert (await t.refresh_async()).status.phase == "succeeded"
            same = await client.get_async("async")
            assert same.uid == t.uid
        return [found.name for found in await client.list_async()]

    assert asyncio.run(story()) == []


def test_many_waiters_in_threads_and_tasks_all_return(client: atoll.Client, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def work() -> int:
        while not go.exists():
            time.sleep(0.01)
        return 5

    t = client.deploy_distributed("many", source=work, wait="min")
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(client.get("many").result(TEN)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()

    async def wait() -> None:
        going = [asyncio.create_task(t.result_async(TEN)) for _ in range(32)]
        await asyncio.sleep(0)
        go.touch()
        answers.extend(await asyncio.gather(*going))

    asyncio.run(wait())
    for thread in threads:
        thread.join()
    assert answers == [5] * 40


def test_a_private_control_plane_takes_everything_with_it() -> None:
    with atoll.Client.local() as private:
        t = private.deploy_distributed("p", command=["sleep", "600"], world_size=2, wait="target")
        assert _settles(t.uid, [0, 1])
        where = private.endpoint._where  # type: ignore[attr-defined]
    assert not where.exists()
    assert _ranks_of(t.uid) == []


def test_a_private_control_plane_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import atoll, os, signal
        client = atoll.Client.local()
        t = client.deploy_distributed("p", command=["sleep", "600"], world_size=2, wait="target")
        print(t.uid, client.endpoint._where, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    import subprocess

    owner = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    uid, where = owner.stdout.split()
    deadline = time.monotonic() + TEN
    while (_ranks_of(uid) or Path(where).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _ranks_of(uid) == []
    assert not Path(where).exists()


def _settles(uid: str, ranks: list[int]) -> bool:
    """Whether just these ranks have processes, soon: one that was forked needs a moment."""
    deadline = time.monotonic() + TEN
    while _ranks_of(uid) != ranks and time.monotonic() < deadline:
        time.sleep(0.05)
    return _ranks_of(uid) == ranks


def _ranks_of(uid: str) -> list[int]:
    """The ranks of that training that have a process, by what their environment says."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"ATOLL_UID={uid}".encode() in words:
                found |= {int(word[5:]) for word in words if word.startswith(b"RANK=")}
    return sorted(found)
