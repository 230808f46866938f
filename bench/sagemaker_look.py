"""What a look at a gang costs on SageMaker: questions and seconds, at 1, 100 and 1,000 ranks.

python bench/sagemaker_look.py

The service is the stand-in of the tests, which lists jobs that are not run; the records are in
moto's S3. Seconds are those of this machine; the number of questions is the same everywhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.allreduce.s3server import S3Server  # noqa: E402
from tests.support import sagemaker_stand_in  # noqa: E402

from atoll.agent.wrapper import RankAttempt  # noqa: E402
from atoll.backends.sagemaker.executor import SageMakerBackend  # noqa: E402
from atoll.backends.sagemaker.options import SageMakerOptions  # noqa: E402
from atoll.core.spec import RendezvousSpec, TrainingSpec, WorldSize  # noqa: E402
from atoll.core.status import DesiredState, Training  # noqa: E402

LOOKS = 3
RESULTS = ROOT / "bench/results/sagemaker_look.json"


async def measure(ranks: int, uri: str) -> dict[str, object]:
    options = SageMakerOptions(role=sagemaker_stand_in.ROLE, image="i", starts=32)
    backend = SageMakerBackend(options)
    spec = TrainingSpec(
        name="t",
        command=["x"],
        world_size=WorldSize(min=1, target=ranks, max=ranks),
        rendezvous=RendezvousSpec(uri=uri),
    )
    training = Training(namespace="n", uid=f"{ranks:032}", spec=spec, created_at=time.time())
    began = time.perf_counter()
    await backend.apply(training, DesiredState(version=1, size=ranks))
    started_s = time.perf_counter() - began
    place = backend.place_of(training)
    for rank in range(ranks):
        RankAttempt(place, rank, 0, "host").claim()
    await backend.observe(training)  # reads the claims, once
    backend.jobs.asked.clear()
    began = time.perf_counter()
    for _ in range(LOOKS):
        await backend.observe(training)
    look_ms = (time.perf_counter() - began) / LOOKS * 1000
    asked = {name: count / LOOKS for name, count in backend.jobs.asked.items()}
    print(f"{ranks:5} ranks: a look {look_ms:7.1f} ms, {asked}; started in {started_s:.1f} s")
    return {
        "ranks": ranks,
        "look_ms": round(look_ms, 1),
        "requests_a_look": asked,
        "all_started_s": round(started_s, 2),
    }


class Unrun(sagemaker_stand_in.StandInJob):
    """A job that is only listed."""

    def _run(self) -> None:
        self._move("Training")

    def _live(self) -> None:
        self._run()


def main() -> None:
    sagemaker_stand_in.StandInJob = Unrun  # type: ignore[misc]
    aws = S3Server()
    aws.make_bucket("runs")
    service = sagemaker_stand_in.SageMakerStandIn(aws.url, aws.environment)
    os.environ.update({**aws.environment, **service.environment})
    rows = [asyncio.run(measure(ranks, f"s3://runs/{ranks}")) for ranks in (1, 100, 1000)]
    kept = {"rows": rows, "looks": LOOKS, "loadAverage": os.getloadavg()}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
