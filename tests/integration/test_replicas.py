"""Executors as a library, with real processes and no server."""

from __future__ import annotations

import base64
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll import LocalProcessExecutor, ReplicaHandle
from atoll.backends.local import processes
from atoll.backends.local.executor import LocalBackend
from atoll.core.errors import NotFound, Permanent, ValidationError
from atoll.core.ports import Executor
from atoll.core.status import DesiredState, Training

KEYS = {
    "rank", "status", "exit_code", "error", "result", "job_name",
    "signal", "reason", "host", "started_at", "ended_at",
}  # fmt: skip
SOURCE = str(Path(atoll.__file__).parents[1])


@pytest.fixture
def executor() -> Iterator[LocalProcessExecutor]:
    with LocalProcessExecutor() as made:
        yield made


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def marked(mark: str) -> list[int]:
    """Living processes that carry `mark` in their environment."""
    return [
        pid
        for pid in processes.all_pids()
        if processes.environment_of(pid).get(b"TEST_MARK") == mark.encode()
        and processes.is_running(pid, processes.start_ticks(pid))
    ]


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_a_count_below_one_is_refused_before_anything_happens(count: int) -> None:
    executor = LocalProcessExecutor()
    with pytest.raises(ValueError, match="n_replicas"):
        executor.launch_replicas(count, "no-such-script.py", {})
    assert "_root" not in vars(executor)


def test_each_replica_has_its_rank_its_arguments_and_its_own_exit_code(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    text = """
import json, os, sys
print(json.dumps([os.environ["RANK"], sys.argv[1:], os.environ["ATOLL_ENTRYPOINT_ARGS"],
                  os.environ["ATOLL_RENDEZVOUS_URI"], os.environ["WORLD_SIZE"]]))
sys.exit(int(os.environ["REPLICA_RANK"]) * 7)
"""
    args = {"rendezvous_uri": f"file://{tmp_path}/meet", "lr": 0.1, "tags": ["a b"], "deep": True}
    handles = executor.launch_replicas(3, script(tmp_path, text), args)
    assert [handle.rank for handle in handles] == [0, 1, 2]
    reports = executor.collect(handles, timeout=60)
    assert [set(report) for report in reports] == [KEYS] * 3
    assert [report["rank"] for report in reports] == [0, 1, 2]
    assert [report["exit_code"] for report in reports] == [0, 7, 14]
    assert [report["status"] for report in reports] == ["succeeded", "failed", "failed"]
    assert [executor.poll(handle) for handle in handles] == ["succeeded", "failed", "failed"]
    for handle in handles:
        rank, argv, variable, uri, world = json.loads(executor.stream_logs(handle))
        assert (rank, world) == (str(handle.rank), "3")
        assert json.loads(variable) == args
        assert argv == ["--rendezvous_uri", args["rendezvous_uri"], "--lr", "0.1",
                        "--tags", '["a b"]', "--deep", "true"]  # fmt: skip
        assert uri == args["rendezvous_uri"]


def test_scalars_and_the_rank_are_variables_that_the_caller_named(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    names = ["RENDEZVOUS_URI", "LR", "MY_RANK", "REPLICA_RANK", "ENTRYPOINT", "RANK_ENV"]
    text = f"""
import json, os, sys
print(json.dumps([[os.environ.get(name) for name in {names}], sys.argv[1:]]))
"""
    entry, folder = script(tmp_path, text), str(tmp_path / "meet")
    args = {"rendezvous_uri": folder, "lr": 0.1, "rank_env": "MY_RANK"}
    handles = executor.launch_replicas(2, entry, args)
    executor.collect(handles, timeout=60)
    for handle in handles:
        values, argv = json.loads(executor.stream_logs(handle))
        rank = str(handle.rank)
        assert values == [folder, "0.1", rank, rank, entry, None]
        assert argv == ["--rendezvous_uri", folder, "--lr", "0.1"]


def test_a_function_has_its_place_and_its_store_without_being_given_them(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    def work(rank: int, world_size: int, lr: float) -> list[object]:
        names = ("LR", "ATOLL_ENTRYPOINT_ARGS", "ATOLL_RENDEZVOUS_URI")
        return [rank, world_size, lr, *(os.environ[name] for name in names)]

    args = {"lr": 0.1, "rank_env": "MY_RANK"}
    reports = executor.collect(executor.launch_replicas(2, work, args), timeout=60)
    for rank, report in enumerate(reports):
        *values, uri = report["result"]
        assert values == [rank, 2, 0.1, "0.1", '{"lr": 0.1}']
        assert uri.startswith("file://")


def test_one_that_fails_does_not_stop_the_others(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    text = f"""
import os, sys, time
from pathlib import Path
if os.environ["RANK"] == "1":
    raise RuntimeError("a bad batch")
while not Path({str(tmp_path)!r}, "go").exists():
    time.sleep(0.01)
"""
    handles = executor.launch_replicas(2, script(tmp_path, text))
    (bad,) = executor.collect(handles[1:], timeout=60)
    assert bad["exit_code"] == 1
    assert "RuntimeError: a bad batch" in bad["error"]
    assert executor.poll(handles[0]) == "running"
    (tmp_path / "go").touch()
    assert executor.collect(handles, timeout=60)[0]["status"] == "succeeded"


def test_a_signal_is_told_as_one(executor: LocalProcessExecutor, tmp_path: Path) -> None:
    text = "import os; os.kill(os.getpid(), 9)"
    (report,) = executor.collect(executor.launch_replicas(1, script(tmp_path, text)), timeout=60)
    assert (report["exit_code"], report["signal"]) == (137, "SIGKILL")
    assert report["error"]


def test_a_function_gets_keywords_and_gives_its_result(executor: LocalProcessExecutor) -> None:
    offset = 40

    def work(base: int, names: list[str], big: bytes) -> dict[str, object]:
        os.write(1, b"working\n")
        rank = int(os.environ["RANK"])
        return {"sum": base + rank + offset, "names": names, "big": big * 2}

    args = {"base": 2, "names": ["x"], "big": bytes(300_000)}
    handles = executor.launch_replicas(2, work, args)
    reports = executor.collect(handles, timeout=60)
    assert [report["error"] for report in reports] == [None, None]
    assert [report["result"]["sum"] for report in reports] == [42, 43]
    assert reports[1]["result"]["big"] == bytes(600_000)
    assert executor.stream_logs(handles[0]) == "working"
    assert executor.stream_logs(handles[0], n_lines=1) == "working"


def test_a_partial_and_a_function_of_the_standard_library(executor: LocalProcessExecutor) -> None:
    found = [
        executor.collect(executor.launch_replicas(1, entry, args))[0]
        for entry, args in (
            (functools.partial(divmod, 7, 2), {}),
            (functools.partial(functools.partial(_joined, "a"), b="b"), {"c": "c"}),
            (textwrap.shorten, {"text": "a  b", "width": 9}),
        )
    ]
    assert [each["result"] for each in found] == [(3, 1), "abc", "a b"], found


def _joined(*parts: str, **more: str) -> str:
    return "".join([*parts, *more.values()])


def test_a_result_takes_no_lines_from_the_log(executor: LocalProcessExecutor) -> None:
    def talk() -> bytes:
        for number in range(9):
            sys.stdout.write(f"{number}\n")
        return os.urandom(10_000)

    (handle,) = executor.launch_replicas(1, talk)
    executor.collect([handle])
    assert executor.stream_logs(handle, n_lines=5) == "4\n5\n6\n7\n8"
    assert executor.stream_logs(handle) == "\n".join("012345678")


@pytest.mark.parametrize("timeout", [float("nan"), "5"])
def test_a_wait_that_is_no_number_is_refused(
    executor: LocalProcessExecutor, timeout: float
) -> None:
    with pytest.raises(ValidationError, match="timeout"):
        executor.collect([], timeout=timeout)


def test_a_closed_executor_says_so() -> None:
    with LocalProcessExecutor() as executor:
        executor.collect(executor.launch_replicas(1, os.getpid))
    with pytest.raises(RuntimeError, match="closed"):
        executor.launch_replicas(1, os.getpid)


def test_a_function_that_raises_says_so(executor: LocalProcessExecutor) -> None:
    def work() -> None:
        raise KeyError("no such layer")

    (report,) = executor.collect(executor.launch_replicas(1, work), timeout=60)
    assert (report["status"], report["exit_code"]) == ("failed", 1)
    assert "KeyError: 'no such layer'" in report["error"]


def test_modules_and_functions_by_name(
    executor: LocalProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "job.py").write_text(
        "import sys\n"
        "def double(value): return value * 2\n"
        "if __name__ == '__main__': print(sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    by_name = executor.launch_replicas(1, "mypackage.job:double", {"value": 21})
    as_main = executor.launch_replicas(1, "mypackage.job", {"value": 21})
    assert executor.collect(by_name, timeout=60)[0]["result"] == 42
    assert executor.collect(as_main, timeout=60)[0]["exit_code"] == 0
    assert executor.stream_logs(as_main[0]) == "['--value', '21']"


def test_a_script_may_give_a_result(executor: LocalProcessExecutor, tmp_path: Path) -> None:
    text = (
        f"import sys; sys.path.append({SOURCE!r})\n"
        "from atoll import set_result\n"
        "from atoll.agent.result import set_result\n"
        "print('half a line', end='', flush=True)\n"
        "set_result({'loss': 0.5})\n"
    )
    handles = executor.launch_replicas(1, script(tmp_path, text))
    assert executor.collect(handles, timeout=60)[0]["result"] == {"loss": 0.5}
    assert executor.stream_logs(handles[0]) == "half a line"


class Evil:
    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (self.place,)


def test_what_a_rank_prints_never_runs_code_here(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    """Also where pickles are allowed: a script is not a function that was shipped."""
    evil = tmp_path / "ran"
    payload = base64.b64encode(pickle.dumps(Evil(str(evil)))).decode()
    text = (
        f"import os, sys; sys.path.append({SOURCE!r}); import base64\n"
        "from atoll.agent.result import Result, write_result\n"
        f"payload = base64.b64decode({payload!r})\n"
        "for kind in ('json', 'msgpack', 'pickle'):\n"
        "    write_result(os.environ['ATOLL_RESULT'], Result(kind, payload))\n"
    )
    executor._allow_pickle = True
    handles = executor.launch_replicas(1, script(tmp_path, text))
    (report,) = executor.collect(handles, timeout=60)
    assert (report["status"], report["result"]) == ("succeeded", None)
    assert "allow_pickle" in report["error"]
    assert not evil.exists()


def test_a_damaged_result_is_told(executor: LocalProcessExecutor, tmp_path: Path) -> None:
    text = "import os; open(os.environ['ATOLL_RESULT'], 'w').write('x y z')"
    (report,) = executor.collect(executor.launch_replicas(1, script(tmp_path, text)), timeout=60)
    assert (report["status"], report["exit_code"], report["result"]) == ("succeeded", 0, None)
    assert "the result is damaged" in report["error"]


def test_a_result_that_is_not_plain_data_is_told_or_pickled_on_request() -> None:
    with LocalProcessExecutor() as executor:
        (report,) = executor.collect(executor.launch_replicas(1, lambda: Path("x")), timeout=60)
    assert (report["status"], report["exit_code"], report["result"]) == ("succeeded", 0, None)
    assert "expected plain data" in report["error"]
    with LocalProcessExecutor(allow_pickle=True) as executor:
        (report,) = executor.collect(executor.launch_replicas(1, lambda: Path("x")), timeout=60)
    assert (report["result"], report["error"]) == (Path("x"), None)


@pytest.mark.parametrize(
    ("entrypoint", "args", "field"),
    [
        ("train.py", {"handle": object()}, "entrypoint_args.handle"),
        ("train.py", {"large": "x" * 200_000}, "entrypoint_args.large"),
        ("train.py", {"text": "a\0b"}, "entrypoint_args.text"),
        ("train.py", {"not a name": 1}, "entrypoint_args"),
        (lambda value: None, {"value": (n for n in ())}, "entrypoint_args.value"),
        (lambda value: None, {"vlaue": 1}, "entrypoint_args"),
        (lambda: None, {"value": 1}, "entrypoint_args"),
        ("missing.py", {}, "entrypoint"),
        (None, {}, "entrypoint"),
        (7, {}, "entrypoint"),
        (b"train.py", {}, "entrypoint"),
        ("\udcff.py", {}, "entrypoint"),
        ("train.py", {"rendezvous_uri": "ftp://x"}, "rendezvous_uri"),
        ("train.py", {"world_size": 3}, "entrypoint_args.world_size"),
        ("atoll.replica_entrypoint", {}, "entrypoint_args"),
        ("atoll.replica_entrypoint", {"trainer_module": "7"}, "entrypoint_args"),
        (lambda rank: None, {"rank": 3}, "entrypoint_args.rank"),
        ("train.py", {"rank_env": "A B"}, "entrypoint_args.rank_env"),
    ],
)
def test_what_cannot_reach_the_replica_is_refused_by_name(
    executor: LocalProcessExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: object,
    args: dict[str, object],
    field: str,
) -> None:
    script(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValidationError) as refused:
        executor.launch_replicas(1, entrypoint, args)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_a_second_launch_leaves_the_first_alone(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    first = executor.launch_replicas(2, lambda tag: tag, {"tag": "first"})
    second = executor.launch_replicas(2, lambda tag: tag, {"tag": "second"})
    mixed = [second[1], first[0], first[1], second[0]]
    reports = executor.collect(mixed, timeout=60)
    assert [r["result"] for r in reports] == ["second", "first", "first", "second"]
    assert [r["rank"] for r in reports] == [1, 0, 1, 0]


def test_the_deadline_is_the_gangs(executor: LocalProcessExecutor, tmp_path: Path) -> None:
    text = "import os, time; time.sleep(600 if os.environ['RANK'] == '1' else 0)"
    handles = executor.launch_replicas(2, script(tmp_path, text), timeout=1.5)
    reports = executor.collect(handles, timeout=60)
    assert [r["status"] for r in reports] == ["succeeded", "failed"]
    assert reports[1]["exit_code"] == 143
    assert "1.5 s" in reports[1]["error"]


def test_collecting_too_early_tells_how_it_is_and_can_be_repeated(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    text = f"""
import time
from pathlib import Path
while not Path({str(tmp_path)!r}, "go").exists():
    time.sleep(0.01)
"""
    handles = executor.launch_replicas(1, script(tmp_path, text))
    (early,) = executor.collect(handles, timeout=0)
    assert set(early) == KEYS
    assert early["status"] in ("pending", "running")
    assert early["exit_code"] is None
    assert early["error"]
    for never in (float("nan"), -1, "1"):
        with pytest.raises(ValidationError, match="timeout"):
            executor.collect(handles, timeout=never)  # type: ignore[arg-type]
    (tmp_path / "go").touch()
    assert executor.collect(handles, timeout=60)[0]["status"] == "succeeded"


def test_cancel_stops_the_gang_and_may_be_repeated(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    handles = executor.launch_replicas(2, script(tmp_path, "import time; time.sleep(600)"))
    assert executor.stream_logs(handles[0]) == "(nothing to read yet)"
    executor.cancel(handles[1])
    assert [executor.poll(handle) for handle in handles] == ["cancelled", "cancelled"]
    executor.cancel(handles[1])
    executor.cancel(handles[0])
    reports = executor.collect(handles, timeout=10)
    assert [report["status"] for report in reports] == ["cancelled", "cancelled"]
    assert {report["exit_code"] for report in reports} <= {143, None}


def test_cancelling_what_is_over_changes_nothing(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    handles = executor.launch_replicas(1, script(tmp_path, "raise SystemExit(3)"))
    executor.collect(handles, timeout=60)
    executor.cancel(handles[0])
    assert executor.poll(handles[0]) == "failed"
    assert executor.collect(handles)[0]["exit_code"] == 3


def test_a_cancel_that_the_backend_refuses_is_raised_and_nothing_is_called_cancelled(
    tmp_path: Path,
) -> None:
    class Refusing(LocalBackend):
        is_refusing = True

        async def apply(self, training: Training, desired: DesiredState) -> None:
            if self.is_refusing and desired.size == 0:
                raise Permanent("403 forbidden")
            await super().apply(training, desired)

    class Library(LocalProcessExecutor):
        def _make_backend(self) -> Executor:
            return Refusing(self._root / "gangs")

    with Library() as executor:
        handles = executor.launch_replicas(1, script(tmp_path, "import time; time.sleep(600)"))
        until(lambda: executor.poll(handles[0]) == "running")
        with pytest.raises(Permanent, match="403"):
            executor.cancel(handles[0])
        (report,) = executor.collect(handles, timeout=0)
        assert report["status"] == "running"
        executor._plane.executor.is_refusing = False  # type: ignore[attr-defined]
        executor.cancel(handles[0])
        assert executor.poll(handles[0]) == "cancelled"


def test_one_question_answers_for_the_whole_gang(tmp_path: Path) -> None:
    class Counting(LocalBackend):
        questions = 0

        async def observe(self, training: Training):  # type: ignore[no-untyped-def]
            self.questions += 1
            return await super().observe(training)

    class Library(LocalProcessExecutor):
        def _make_backend(self) -> Executor:
            return Counting(self._root / "gangs")

    with Library() as executor:
        handles = executor.launch_replicas(8, script(tmp_path, "import time; time.sleep(600)"))
        until(lambda: all(executor.poll(handle) == "running" for handle in handles))
        backend = executor._plane.executor
        assert isinstance(backend, Counting)
        before = backend.questions
        for _ in range(100):
            assert {executor.poll(handle) for handle in handles} == {"running"}
        assert backend.questions - before <= 2


def test_an_unknown_launch_is_cancelled_and_a_foreign_handle_is_refused(
    executor: LocalProcessExecutor,
) -> None:
    unknown = ReplicaHandle(2, "local", {"job_name": "replicas-nobody"})
    assert executor.poll(unknown) == "cancelled"
    assert executor.stream_logs(unknown) == "(nothing to read yet)"
    executor.cancel(unknown)
    (report,) = executor.collect([unknown], timeout=0)
    assert set(report) == KEYS
    assert (report["rank"], report["status"], report["exit_code"]) == (2, "cancelled", None)
    assert report["error"] == "the launch replicas-nobody no longer exists"
    assert report["job_name"] == "replicas-nobody"
    with pytest.raises(NotFound, match="local launch 'replicas-nobody' not found"):
        executor.attach("replicas-nobody")
    foreign = ReplicaHandle(0, "eks", {"job_name": "replicas-nobody"})
    for call in (executor.poll, executor.stream_logs, executor.cancel):
        with pytest.raises(ValidationError, match="belongs to another backend"):
            call(foreign)
        with pytest.raises(ValidationError, match=r"handle\.metadata\.job_name"):
            call(ReplicaHandle(0, "local", {}))
    with pytest.raises(ValidationError, match="belongs to another backend"):
        executor.collect([unknown, foreign])


LAUNCH = """
import os, sys, time
from atoll import LocalProcessExecutor
executor = LocalProcessExecutor()
handles = executor.launch_replicas(3, sys.argv[1])
while {executor.poll(handle) for handle in handles} != {"running"}:
    time.sleep(0.01)
print(executor._root, flush=True)
"""


def start_script(tmp_path: Path, mark: str, ending: str) -> tuple[subprocess.Popen[str], Path]:
    ranks = script(tmp_path, "import subprocess; subprocess.run(['sleep', '600'])")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH + ending, ranks],
        env={**os.environ, "PYTHONPATH": SOURCE, "TEST_MARK": mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    root = Path(launcher.stdout.readline().strip())
    assert root.is_dir()
    assert len(marked(mark)) >= 1 + 3
    return launcher, root


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_replicas_end_with_the_script_however_it_ends(tmp_path: Path, how: signal.Signals) -> None:
    launcher, root = start_script(tmp_path, str(tmp_path), "executor.collect(handles)")
    with launcher:
        launcher.send_signal(how)
        launcher.wait(60)
    until(lambda: not marked(str(tmp_path)))
    until(lambda: not root.exists())


def test_replicas_end_with_a_script_that_forgets_them(tmp_path: Path) -> None:
    launcher, root = start_script(tmp_path, str(tmp_path), "")
    with launcher:
        assert launcher.wait(60) == 0
    until(lambda: not marked(str(tmp_path)))
    until(lambda: not root.exists())


def test_the_next_script_clears_up_when_the_guard_was_killed_too(tmp_path: Path) -> None:
    launcher, root = start_script(tmp_path, str(tmp_path), "executor.collect(handles)")
    (reaper,) = [p for p in processes.children(launcher.pid) if " reap " in _command(p)]
    with launcher:
        os.kill(reaper, signal.SIGKILL)
        launcher.kill()
        launcher.wait(60)
    assert root.exists()
    assert marked(str(tmp_path))
    with LocalProcessExecutor() as executor:
        executor.collect(executor.launch_replicas(1, script(tmp_path, "")), timeout=60)
        assert not root.exists()
        assert not marked(str(tmp_path))


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


WORLD = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
total = dist.get_world_size()
os.write(1, f"world of {total} replica {os.environ['REPLICA_RANK']}\\n".encode())  # one write
dist.barrier()  # who leaves first breaks the connection of who is still joining
dist.destroy_process_group()
"""
# What torchrun says of the world, without loading torch to meet in it.
SHOWN = """
import os
total, replica = os.environ["WORLD_SIZE"], os.environ["REPLICA_RANK"]
os.write(1, f"world of {total} replica {replica}\\n".encode())
"""


@pytest.mark.timeout(300)  # four times importing torch, and again for each torchrun
@pytest.mark.parametrize(
    ("flags", "program"), [([], WORLD), (["--standalone"], SHOWN), (["--nnodes=1"], SHOWN)]
)
def test_a_torchrun_in_a_replica_is_a_world_of_its_own(
    executor: LocalProcessExecutor, tmp_path: Path, flags: list[str], program: str
) -> None:
    pytest.importorskip("torch")
    worker = tmp_path / "worker.py"
    worker.write_text(program)
    words = [sys.executable, "-m", "torch.distributed.run", *flags, "--nproc-per-node=2"]
    launcher = f"import os\nos.execv({words[0]!r}, {[*words, str(worker)]!r})\n"
    handles = executor.launch_replicas(2, script(tmp_path, launcher), timeout=240)
    reports = executor.collect(handles)
    for rank, handle in enumerate(handles):
        log = executor.stream_logs(handle)
        assert reports[rank]["status"] == "succeeded", log
        assert log.count(f"world of 2 replica {rank}") == 2, log


@pytest.mark.parametrize(
    "entrypoint",
    ["atoll.replica_entrypoint", "composer_replication.diloco.serverless.replica_entrypoint"],
)
def test_the_entrypoint_of_replicas_calls_the_trainer_that_the_arguments_name(
    executor: LocalProcessExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entrypoint: str,
) -> None:
    code = "def work(rank, world_size, rendezvous_uri, lr): return [rank, world_size, lr]\n"
    (tmp_path / "my_trainer.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    args = {"rendezvous_uri": f"file://{tmp_path}/run", "world_size": 2, "trainer_fn": "work"}
    for kwargs in ({"trainer_kwargs": {"lr": 0.1}}, {"trainer_kwargs_json": '{"lr": 0.1}'}):
        given = {**args, "trainer_module": "my_trainer", **kwargs}
        reports = executor.collect(executor.launch_replicas(2, entrypoint, given, timeout=60))
        assert [report["result"] for report in reports] == [[0, 2, 0.1], [1, 2, 0.1]], reports


def test_replicas_meet_only_if_that_is_asked_for(tmp_path: Path) -> None:
    text = "import json, os, atoll.agent.result as r\nr.set_result(dict(os.environ))\n"
    for backend in ("none", "c10d"):
        with LocalProcessExecutor(rendezvous_backend=backend) as executor:
            (_, second) = executor.collect(
                executor.launch_replicas(2, script(tmp_path, text), timeout=60)
            )
        env = second["result"]
        assert env["REPLICA_RANK"] == env["RANK"] == "1"
        assert env["WORLD_SIZE"] == "2"
        met = {name for name in env if name.startswith(("PET_", "MASTER_"))}
        assert bool(met) is (backend == "c10d"), met
    with pytest.raises(ValidationError, match="rendezvous_backend: 'pigeon' is not valid"):
        LocalProcessExecutor(rendezvous_backend="pigeon")  # type: ignore[arg-type]
