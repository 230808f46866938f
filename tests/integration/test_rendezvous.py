"""Rendezvous under the real controller, store and local executor: ports, etcd, torchrun."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.in_process import plane

from atoll.backends.local.etcd_server import start_etcd, stop_etcd
from atoll.backends.local.processes import is_running
from atoll.backends.local.rendezvous import read_rendezvous
from atoll.core.mesh import degraded_path, ready_path
from atoll.core.spec import RendezvousSpec, WorldSize
from atoll.mesh.etcd import EtcdKeys

SHOW = (
    "import json, os, sys, time\n"
    "print(json.dumps(dict(os.environ)), flush=True)\n"
    "while not os.path.exists(os.path.join(sys.argv[1], 'go')): time.sleep(0.02)\n"
)


def showing(tmp_path: Path, name: str, backend: str, n: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "command": [sys.executable, "-c", SHOW, str(tmp_path)],
        "world_size": WorldSize(min=n, target=n, max=n),
        "rendezvous": RendezvousSpec(backend=backend),  # type: ignore[arg-type]
        "stop_grace_s": 0.2,
        **more,
    }


def test_each_training_has_a_port_of_its_own_and_c10d_has_no_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "stale.example")
    monkeypatch.setenv("ATOLL_MESH_ENDPOINT", "stale.example:1")

    async def scene() -> None:
        async with plane(tmp_path) as here:
            made = [
                await here.create(**showing(tmp_path, f"t{at}", backend, 2))
                for at, backend in enumerate(["c10d", "static", "c10d", "static"])
            ]
            ports = []
            for training in made:
                first, second = await here.environments(training, 2)
                for name in ("MASTER_ADDR", "MASTER_PORT", "BASILICA_RDZV_ENDPOINT"):
                    assert first[name] == second[name]
                assert first["MASTER_ADDR"] == "127.0.0.1"
                endpoint = f"127.0.0.1:{first['MASTER_PORT']}"
                assert first["BASILICA_RDZV_ENDPOINT"] == endpoint
                assert first["ATOLL_MESH_ENDPOINT"] == ""
                assert first["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
                now = await here.until(training, lambda t: bool(t.status.rendezvous_endpoint))
                assert now.status.rendezvous_endpoint == endpoint
                ports.append(first["MASTER_PORT"])
            assert len(set(ports)) == 4
            (tmp_path / "go").touch()
            for training in made:
                await here.until(training, lambda t: t.status.phase == "succeeded")

    asyncio.run(scene())


def test_a_rank_that_is_restarted_or_added_meets_the_others_at_the_same_port(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with plane(tmp_path) as here:
            spec = showing(tmp_path, "t", "c10d", max_restarts=1)
            spec["world_size"] = WorldSize(min=1, target=1, max=2)
            training = await here.create(**spec)
            (first,) = await here.environments(training, 1)
            await here.scale(training, 2)
            assert len({e["MASTER_PORT"] for e in await here.environments(training, 2)}) == 1
            gang = here.executor._supervisor(training)
            os.kill(gang.facts.current(0).pid, signal.SIGKILL)
            again = await here.environments(training, 3)
            assert {e["MASTER_PORT"] for e in again} == {first["MASTER_PORT"]}
            (tmp_path / "go").touch()
            await here.until(training, lambda t: t.status.phase == "succeeded")

    asyncio.run(scene())


def test_what_the_user_sets_of_the_rendezvous_stays(tmp_path: Path) -> None:
    async def scene() -> None:
        async with plane(tmp_path) as here:
            chosen = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"}
            training = await here.create(**showing(tmp_path, "t", "static", env=chosen))
            (found,) = await here.environments(training, 1)
            assert chosen.items() <= found.items()

    asyncio.run(scene())


@pytest.mark.parametrize(("backend", "mesh"), [("etcd-v2", False), ("c10d", True)])
def test_a_private_etcd_lives_as_long_as_its_training(
    tmp_path: Path, backend: str, mesh: bool
) -> None:
    gate = (
        "import atoll, sys; atoll.mesh_wait(30); print(atoll.mesh_status())\n"
        "import os, time\n"
        "while not os.path.exists(os.path.join(sys.argv[1], 'go')): time.sleep(0.02)\n"
    )

    async def scene() -> None:
        async with plane(tmp_path) as here:
            spec = showing(tmp_path, "t", backend, 2, mesh=mesh)
            spec["command"] = [sys.executable, "-c", gate, str(tmp_path)]
            training = await here.create(**spec)
            await here.until(training, lambda t: t.status.phase == "ready")
            lines = await here.lines(training, 6)
            assert lines.count("ready") == 2
            assert sum("mesh-wait: OK" in line for line in lines) == 2
            found = read_rendezvous(here.root / training.uid)
            host = here.executor._host
            async with EtcdKeys(found["etcd"]) as keys:
                assert await keys.get(ready_path(host).removeprefix("/v2/keys/")) == "1"
                assert await keys.get(degraded_path(host).removeprefix("/v2/keys/")) is None
            now = await here.until(training, lambda t: bool(t.status.conditions))
            conditions = {c.type: c.status for c in now.status.conditions}
            assert conditions["MeshCapable"] == "True"
            assert conditions["DegradedMesh"] == "False"
            pid, start_ticks = etcd_of(found["ports"][1])
            (tmp_path / "go").touch()
            await here.until(training, lambda t: t.status.is_released)
            assert not is_running(pid, start_ticks)
            assert not (here.root / training.uid / "etcd").exists()
            await here.delete(training)

    asyncio.run(scene())


def etcd_of(port: int) -> tuple[int, int]:
    """The pid, and when it was born, of the etcd that listens there."""
    from atoll.backends.local.processes import all_pids, start_ticks

    wanted = f":{port}".encode()
    for pid in all_pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(w.startswith(b"--listen-client-urls") and w.endswith(wanted) for w in words):
                return pid, start_ticks(pid)
    raise AssertionError(f"no etcd on port {port}")


def test_an_etcd_that_is_killed_comes_back_with_its_keys(tmp_path: Path) -> None:
    async def scene() -> None:
        async with plane(tmp_path) as here:
            training = await here.create(**showing(tmp_path, "t", "etcd-v2"))
            (env,) = await here.environments(training, 1)
            endpoint = env["BASILICA_RDZV_ENDPOINT"]
            assert env["ATOLL_MESH_ENDPOINT"] == endpoint
            async with EtcdKeys(endpoint) as keys:
                await keys.put("torch/state", "kept")
                pid, start_ticks = etcd_of(int(endpoint.rpartition(":")[2]))
                os.kill(pid, signal.SIGKILL)
                deadline = time.monotonic() + 60
                value = None
                while value != "kept":
                    assert time.monotonic() < deadline
                    with contextlib.suppress(Exception):
                        value = await keys.get("torch/state")
                    await asyncio.sleep(0.05)
            assert etcd_of(int(endpoint.rpartition(":")[2]))[0] != pid

    asyncio.run(scene())


def test_no_etcd_to_be_found_fails_the_training_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_ETCD", "/no/such/etcd")

    async def scene() -> None:
        async with plane(tmp_path) as here:
            training = await here.create(**showing(tmp_path, "t", "etcd-v2"))
            now = await here.until(training, lambda t: t.status.phase == "failed")
            assert "/no/such/etcd" in now.status.message

    asyncio.run(scene())


def test_a_configured_etcd_is_used_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_etcd(tmp_path / "theirs")
    monkeypatch.setenv("ATOLL_ETCD_ENDPOINT", server.endpoint)

    async def scene() -> None:
        async with plane(tmp_path) as here, EtcdKeys(server.endpoint) as keys:
            await keys.put("theirs", "1")
            training = await here.create(**showing(tmp_path, "t", "etcd-v2"))
            (env,) = await here.environments(training, 1)
            assert env["BASILICA_RDZV_ENDPOINT"] == server.endpoint
            assert env["ATOLL_MESH_ENDPOINT"] == server.endpoint
            gate = ready_path(here.executor._host).removeprefix("/v2/keys/")
            assert await keys.get(gate) == "1"
            (tmp_path / "go").touch()
            await here.until(training, lambda t: t.status.is_released)
            assert (await keys.list(""))[0] == {"theirs": "1"}

    try:
        asyncio.run(scene())
    finally:
        stop_etcd(server)


# Workers say what torchrun tells them, and go on until their world has the size that is wanted;
# examples/21_torchrun_elastic.py has them meet by gloo, too.
TRAIN = """
import os, sys, time
world, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
print(f"world {world} rank {rank} at {os.environ['MASTER_ADDR']}", flush=True)
while world != int(sys.argv[1]):
    time.sleep(0.05)
"""


@pytest.mark.timeout(300)  # three times importing torch
def test_torchrun_scales_from_two_nodes_to_three_while_running(tmp_path: Path) -> None:
    """Under etcd-v2; examples/21_torchrun_elastic.py does the same under c10d."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    flags = (
        "--rdzv-backend=etcd-v2 "
        '--rdzv-endpoint="$BASILICA_RDZV_ENDPOINT" --rdzv-id="$BASILICA_RDZV_ID" '
        "--rdzv-conf=last_call_timeout=1 "
        '--nnodes="$BASILICA_WORLD_MIN":"$BASILICA_WORLD_MAX"'
    )
    launch = (
        f'exec "{sys.executable}" -m torch.distributed.run {flags} --nproc-per-node=1 '
        f'--max-restarts=3 --monitor-interval=0.2 "{tmp_path}/train.py" 3'
    )

    async def scene() -> None:
        async with plane(tmp_path) as here:
            env = {"OMP_NUM_THREADS": "1", "PET_RDZV_CONF": "last_call_timeout=1"}
            spec = showing(tmp_path, "t", "etcd-v2", env=env)
            spec["command"] = ["/bin/sh", "-c", launch]
            spec["world_size"] = WorldSize(min=2, target=2, max=3)
            training = await here.create(**spec)
            deadline = time.monotonic() + 120
            while sum("world 2" in line for line in await here.logs(training)) < 2:
                assert time.monotonic() < deadline, await here.logs(training)
                await asyncio.sleep(0.1)
            await here.scale(training, 3)
            done = await here.until(training, lambda t: t.status.phase.is_terminal, 150)
            lines = await here.logs(training)
            assert done.status.phase == "succeeded", lines
            assert [e.exit_code for e in done.status.rank_exits] == [0, 0, 0]
            last = [line.split(" at ") for line in lines if "world 3" in line]
            (ranks, meetings) = zip(*last, strict=True)
            assert sorted(ranks) == [f"world 3 rank {rank}" for rank in range(3)]
            assert len(set(meetings)) == 1

    asyncio.run(scene())


@pytest.mark.timeout(300)
def test_torchrun_for_one_host_does_not_wait_for_the_other_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "show.py").write_text("import os\nprint('world', os.environ['WORLD_SIZE'])\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

    async def scene() -> None:
        async with plane(tmp_path) as here:
            spec = showing(tmp_path, "t", "c10d", 2, env={"OMP_NUM_THREADS": "1"})
            spec["command"] = [*command, "--nproc-per-node=1", str(tmp_path / "show.py")]
            training = await here.create(**spec)
            done = await here.until(training, lambda t: t.status.phase.is_terminal, 240)
            lines = await here.logs(training)
            assert done.status.phase == "succeeded", lines
            assert lines.count("world 1") == 2

    asyncio.run(scene())
