"""One real Slurm for the tests of a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.backends.slurm import executor as slurm
from atoll.backends.slurm.executor import SlurmBackend
from atoll.backends.slurm.options import SlurmOptions
from atoll.controller.loop import Controller
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training
from atoll.store.sqlite import MemoryStore
from tests.support.slurm_cluster import SlurmCluster, slurm_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as made:
        yield made


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine sbatch takes longer to refuse something than a user is made to wait."""
    monkeypatch.setattr(slurm, "TRY_S", 60.0)


class Lab:
    """A store, a controller and the Slurm executor in this process."""

    def __init__(self, cluster: SlurmCluster, folder: Path, **options: Any) -> None:
        self.cluster = cluster
        self.folder = folder
        given = {"conf": str(cluster.conf), "heartbeat_timeout_s": 10.0, **options}
        self.executor = SlurmBackend(SlurmOptions(**given), folder / "trainings")
        self.store = MemoryStore()
        self.uids = 0

    def spec(self, script: str, ranks: int = 3, **more: Any) -> TrainingSpec:
        world = WorldSize(min=more.pop("min", ranks), target=ranks, max=9)
        words = ["sh", "-c", script.replace("{folder}", str(self.folder))]
        options = {"stop_grace_s": 5.0, "executor": "slurm", **more}
        return TrainingSpec(name=f"t{self.uids}", world_size=world, command=words, **options)

    async def create(self, spec: TrainingSpec) -> Training:
        self.uids += 1
        uid = f"{time.time_ns():x}"
        training = Training(namespace="default", uid=uid, spec=spec, created_at=time.time())
        return await self.store.create(training)

    async def get(self, training: Training) -> Training:
        return await self.store.get(training.key)

    async def ask(self, training: Training, target: int | None = None, **more: Any) -> None:
        now = await self.get(training)
        spec = replace(now.spec, **more)
        if target is not None:
            spec = replace(spec, world_size=replace(spec.world_size, target=target))
        await self.store.update_spec(replace(now, spec=spec))

    async def until(
        self, training: Training, holds: Callable[[Training], Any], within_s: float = 60
    ) -> Training:
        deadline = time.monotonic() + within_s
        while not holds(now := await self.get(training)):
            assert time.monotonic() < deadline, now.status
            await asyncio.sleep(0.05)
        return now

    async def until_running(self, training: Training, ranks: int) -> Training:
        return await self.until(
            training, lambda t: sum(r.is_alive for r in t.status.ranks) == ranks
        )

    async def until_over(self, training: Training, within_s: float = 60) -> Training:
        return await self.until(training, lambda t: t.status.phase.is_terminal, within_s)

    def record(self, training: Training, name: str) -> Path:
        return self.executor.folder_of(training) / "records" / name

    def ran(self) -> list[str]:
        path = self.folder / "ran"
        return sorted(path.read_text().split("\n")[:-1]) if path.exists() else []

    async def play(self, body: Callable[[Lab], Any], **settings: Any) -> None:
        """Runs the test beside the controller; whatever it left is ended."""
        controller = asyncio.create_task(
            Controller(self.store, {"slurm": self.executor}, **settings).run()
        )
        try:
            await body(self)
        finally:
            controller.cancel()
            await asyncio.gather(controller, return_exceptions=True)
            self.cluster.run("scancel", "--user=root")
            self.cluster.resume_nodes()


@pytest.fixture
def lab(cluster: SlurmCluster, tmp_path: Path) -> Callable[..., None]:
    def run(body: Callable[[Lab], Any], **options: Any) -> None:
        asyncio.run(Lab(cluster, tmp_path, **options).play(body))

    return run
