"""What one look at a gang on this machine costs, at 1, 100 and 1,000 ranks that sleep.

Nobody is asked: the supervisor of a gang keeps a journal, and a look reads what it has added.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from pathlib import Path

from atoll.backends.local.executor import LocalBackend
from atoll.core.spec import RendezvousSpec, TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Training

SIZES = (1, 100, 1000)
LOOKS = 20
RESULTS = Path(__file__).with_name("results") / "local_look.json"


async def measure(root: Path, ranks: int) -> dict[str, float]:
    backend = LocalBackend(root, slots=ranks)
    world = WorldSize(min=ranks, target=ranks, max=ranks)
    spec = TrainingSpec(
        name="t", command=["sleep", "600"], world_size=world,
        rendezvous=RendezvousSpec(backend="none"), executor="local",
    )  # fmt: skip
    training = Training(namespace="n", uid=uuid.uuid4().hex, spec=spec, created_at=time.time())
    began = time.perf_counter()
    desired = DesiredState(version=1, size=ranks)
    await backend.apply(training, desired)
    try:
        await until(backend, training, ranks)
        started_s = time.perf_counter() - began
        took = []
        for _ in range(LOOKS):
            began = time.perf_counter()
            await backend.observe(training)
            took.append(time.perf_counter() - began)
    finally:
        await backend.apply(training, DesiredState(version=2, size=0))
        await until(backend, training, 0)
        await backend.release(training)
    look_ms = round(statistics.median(took) * 1000, 2)
    return {"ranks": ranks, "look_ms": look_ms, "all_started_s": round(started_s, 2)}


async def until(backend: LocalBackend, training: Training, running: int) -> None:
    for _ in range(2400):
        observation = await backend.observe(training)
        if sum(rank.state == "running" for rank in observation.ranks) == running:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"not {running} ranks")


def main() -> None:
    rows = []
    for ranks in SIZES:
        with tempfile.TemporaryDirectory(prefix="atoll-look-") as folder:
            rows.append(asyncio.run(measure(Path(folder), ranks)))
        print(json.dumps(rows[-1]))
    kept = {"rows": rows, "looks": LOOKS, "loadAverage": os.getloadavg()}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
