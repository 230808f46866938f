"""Why is it stuck: twelve planted hangs, and what atoll takes by itself before it kills a rank.

Rank 1 hangs at the line that ends in `# HANG`; rank 0 is elsewhere.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.face.conftest import until

import atoll
from atoll.agent.stacks import find_py_spy, take
from atoll.core.errors import ValidationError

HEAD = """
import ctypes, os, sys, threading, time
rank = int(os.environ["ATOLL_RANK"])
def up():
    print("up", flush=True)
def fine():
    up()
    while True:
        time.sleep(1000)
"""
TAIL = """
def main():
    if rank == 1:
        hang()
    fine()
main()
"""
# Each has the function `hang`, which prints `up` just before it hangs.
HANGS = {
    "a lock": """
def hang():
    lock = threading.Lock()
    lock.acquire(); up()
    lock.acquire()  # HANG
""",
    "a sleep in C": """
def hang():
    up()
    while True: ctypes.CDLL(None).sleep(1000)  # HANG
""",
    "a blocked read": """
def hang():
    reader, writer = os.pipe(); up()
    os.read(reader, 1)  # HANG
""",
    "an endless loop": """
def hang():
    up()
    while True: pass  # HANG
""",
    "the GIL is held": """
def hang():
    up()
    while True: ctypes.PyDLL(None).sleep(1000)  # HANG
""",
    "a store that never answers": """
def hang():
    import urllib.request
    up()
    urllib.request.urlopen(os.environ["SILENT"])  # HANG
""",
    "a child of a fork": """
def hang():
    child = os.fork()
    if child == 0:
        up()
        while True: time.sleep(1000)  # HANG
    os.waitpid(child, 0)
""",
    "an import": """
def hang():
    open("slow_module.py", "w").write("import time, __main__\\n__main__.up()\\ntime.sleep(1000)\\n")
    sys.path.insert(0, os.getcwd())
    import slow_module  # HANG
""",
}
HEAVY = {
    "a data loader": """
def hang():
    import torch
    class Slow(torch.utils.data.Dataset):
        def __len__(self): return 8
        def __getitem__(self, index):
            up()
            while True: time.sleep(1000)  # HANG
    next(iter(torch.utils.data.DataLoader(Slow(), num_workers=1)))
""",
    "a collective": """
def hang():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    up()
    while True: time.sleep(1000)  # HANG
def fine():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    up()
    dist.all_reduce(torch.ones(1))  # COLLECTIVE
""",
}


def script_of(body: str, where: Path) -> tuple[Path, int]:
    """The script, and the number of its line that hangs."""
    path = where / "train.py"
    own_fine = "def fine" in body
    path.write_text((HEAD if not own_fine else HEAD.replace("def fine", "def _")) + body + TAIL)
    lines = path.read_text().split("\n")
    return path, next(n for n, line in enumerate(lines, 1) if line.endswith("# HANG"))


def start(client: atoll.Client, script: Path, **more: Any) -> Any:
    made = client.deploy_distributed(
        name="hung",
        command=[sys.executable, str(script)],
        world_size=2,
        working_dir=str(script.parent),
        **more,
    )
    made.wait_until_target_world(60)
    until(lambda: len({line.rank for line in made.logs() if line.text == "up"}) == 2)
    return made


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


def check_named(made: Any, script: Path, line: int) -> None:
    """The folded stacks name rank 1, or its child, with that line, and rank 0 without it."""
    place = f"{script.name}:{line} in "
    found = made.stacks()
    (named,) = [group for group in found.folded if any(place in each for each in group.stack)]
    assert named.ranks == "1", found.folded
    assert place in named.where or "slow_module.py:3 in <module>" in named.where
    others = [group for group in found.folded if group.ranks == "0"]
    assert others
    assert place not in others[0].where


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_named_by_rank_and_line(
    client: atoll.Client, tmp_path: Path, silent: str, name: str
) -> None:
    script, line = script_of(HANGS[name], tmp_path)
    made = start(client, script, env={"SILENT": silent})
    check_named(made, script, line)
    check_named(made, script, line)  # taking them has changed nothing
    assert {rank.phase for rank in made.ranks} == {"Running"}


@pytest.mark.soak
@pytest.mark.parametrize("name", HEAVY)
def test_a_hang_in_torch_is_named_by_rank_and_line(
    client: atoll.Client, tmp_path: Path, name: str
) -> None:
    script, line = script_of(HEAVY[name], tmp_path)
    backend = "c10d" if name == "a collective" else "none"
    made = start(client, script, rendezvous_backend=backend)
    check_named(made, script, line)
    if name == "a collective":
        (other,) = [group for group in made.stacks().folded if group.ranks == "0"]
        assert "all_reduce" in other.where


def test_a_rank_stopped_by_a_signal_has_its_line_in_the_root_cause(
    client: atoll.Client, tmp_path: Path
) -> None:
    body = """
def hang():
    up()
    os.kill(os.getpid(), 19)  # HANG
    while True: time.sleep(1000)
"""
    script, line = script_of(body, tmp_path)
    made = start(client, script)
    with pytest.raises(atoll.BelowMinimumWorld) as failed:
        made.result(60)
    cause = made.root_cause
    assert (cause.rank, cause.termination_reason) == (1, "Frozen")
    assert f"train.py:{line} in hang" in cause.stack[0]
    assert f"train.py:{line} in hang" in str(failed.value)


def test_a_round_that_times_out_shows_where_the_missing_rank_is(
    client: atoll.Client, tmp_path: Path
) -> None:
    body = f"""
def hang():
    up()
    while True: time.sleep(1000)  # HANG
def fine():
    import numpy as np
    from atoll import ObjectStoreAllReduce
    up()
    reduce = ObjectStoreAllReduce("file://{tmp_path}/store", 0, 2, timeout_s=2.0)
    try:
        reduce.allreduce([np.ones(4, np.float32)])
    except atoll.BelowMinimumWorld:
        print("late", flush=True)
    while True: time.sleep(1000)
"""
    script, line = script_of("import atoll\n" + body, tmp_path)
    made = start(client, script, rendezvous_backend="none")
    until(lambda: "late" in [log.text for log in made.logs()])
    kept = {one.rank: one for one in made.stacks(stored=True).items}
    assert kept[1].cause == "an outer round timed out"
    assert kept[1].processes[0].threads[0].frames[0].line == line
    places = [frame.file for frame in kept[0].processes[0].threads[0].frames]
    assert str(script) in places
    assert {rank.phase for rank in made.refresh().status.ranks} == {"Running"}
    assert made.stacks(1).folded[0].ranks == "1", "it was not killed for it"


def test_a_rank_that_does_not_end_in_its_grace_has_its_stack_in_its_exit(
    client: atoll.Client, tmp_path: Path
) -> None:
    body = """
import signal
signal.signal(15, signal.SIG_IGN)
def hang():
    up()
    while True: time.sleep(1000)  # HANG
"""
    script, line = script_of(body, tmp_path)
    made = start(client, script, stop_grace_s=0.2)
    made.cancel()
    until(lambda: made.is_terminal)
    for ended in made.rank_exits:
        assert (ended.signal, bool(ended.stack)) == ("SIGKILL", True)
    assert f"train.py:{line} in hang" in made.rank_exits[1].stack[0]
    kept = made.stacks()
    assert [one.cause for one in kept.items] == ["it did not end within its grace period"] * 2
    assert any(group.ranks == "1" and f":{line} " in group.where for group in kept.folded)


def test_a_rank_that_is_no_python_has_the_reason_why_there_is_none(
    client: atoll.Client, tmp_path: Path
) -> None:
    code = "trap '' TERM; echo up; while :; do sleep 0.05; done"
    made = client.deploy_distributed(
        name="shell", command=["sh", "-c", code], world_size=1, stop_grace_s=0.2
    )
    until(lambda: bool(made.logs()))
    assert "py-spy" in made.stacks().folded[0].where
    assert made.ranks[0].phase == "Running"
    made.cancel()
    until(lambda: made.is_terminal)
    assert made.rank_exits[0].stack[0].startswith("no stack: it is no Python")


def test_a_stalled_rank_is_shown_with_where_it_is(client: atoll.Client, tmp_path: Path) -> None:
    script, line = script_of(HANGS["a lock"], tmp_path)
    made = start(client, script, stall_s=2.0)
    until(lambda: any(f":{line} in hang" in rank.message for rank in made.ranks))
    kept = {one.rank: one for one in made.stacks(stored=True).items}
    assert kept[1].cause.startswith("it made no progress for ")


def test_a_rank_that_ends_by_itself_has_no_stack(client: atoll.Client) -> None:
    made = client.deploy_distributed(name="well", command=["true"], world_size=1)
    made.wait_until_complete(60)
    assert made.rank_exits[0].stack == []
    assert made.stacks().items == []


def test_a_training_without_ranks_says_so(client: atoll.Client) -> None:
    made = client.deploy_distributed(name="one", command=["sleep", "1000"], world_size=1)
    made.wait_until_target_world(60)
    with pytest.raises(ValidationError, match="expected at most 0"):
        made.stacks(1)


def test_a_programs_own_sitecustomize_and_path_stay(client: atoll.Client, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("OWN = 'mine'\n")
    code = "import sys, sitecustomize; print(sitecustomize.OWN, sys.path[1])"
    made = client.deploy_distributed(
        name="own", command=[sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}
    )
    made.wait_until_complete(60)
    assert made.logs()[0].text == f"mine {tmp_path}"


@pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")
def test_py_spy_reads_a_process_without_the_hook(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import time\nprint('up', flush=True)\ndef f():\n    time.sleep(1000)\nf()\n")
    import subprocess

    with subprocess.Popen([sys.executable, "-S", str(script)], stdout=-1, env={}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (dump,) = take(process.pid, find_py_spy())
        process.kill()
    assert dump["threads"][0]["frames"][0]["line"] == 4
    assert os.path.basename(dump["threads"][0]["frames"][0]["file"]) == "plain.py"
