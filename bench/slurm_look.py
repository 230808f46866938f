"""What one look at a gang under Slurm costs, at 1, 100 and 1,000 ranks, with the real daemons.

Slurm has one entry for each rank, as it has of running ones: the tasks of an array that is held,
each of which was changed by itself. Their records are as wrappers write them. Beside each look, in
the same run, a bare `squeue --json`, and what asking for each rank by itself would cost.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.slurm_cluster import SlurmCluster, slurm_cluster, why_not  # noqa: E402

from atoll.agent.records import DESIRED, GATE, LAUNCH, desired_record  # noqa: E402
from atoll.agent.wrapper import RankAttempt, write  # noqa: E402
from atoll.backends.slurm.executor import SHARED_S, SlurmBackend  # noqa: E402
from atoll.backends.slurm.options import SlurmOptions  # noqa: E402
from atoll.backends.slurm.render import job_name  # noqa: E402
from atoll.core.spec import TrainingSpec, WorldSize  # noqa: E402
from atoll.core.status import Training  # noqa: E402

SIZES = (1, 100, 1000)
LOOKS = 7
RESULTS = Path(__file__).with_name("results") / "slurm_look.json"


def fill_queue(cluster: SlurmCluster, training: Training, ranks: int) -> None:
    name = job_name(training.uid, 0, 0)
    words = (
        "--hold",
        "--output=/dev/null",
        f"--array=0-{ranks - 1}",
        f"--job-name={name}",
        "--wrap",
        "true",
    )
    array = cluster.run("sbatch", "--parsable", *words).stdout.strip()
    changes = "".join(f"update jobid={array}_{rank} comment=x\n" for rank in range(ranks))
    subprocess.run(["scontrol"], input=changes, text=True, env=cluster.env(), check=True,
                   capture_output=True)  # fmt: skip
    entries = [job for job in cluster.jobs() if job["name"] == name]
    assert [job["job_state"] for job in entries] == ["PENDING"] * ranks


async def fill_records(backend: SlurmBackend, training: Training, ranks: int) -> None:
    await backend.prepare(training)
    place = backend.place_of(training)
    place.put(DESIRED, write(desired_record(1, ranks, {}, None, {}, time.time())))
    place.put(LAUNCH, write(backend.launch(training)))
    place.put(GATE, write({"at": time.time(), "together": ranks}))
    for rank in range(ranks):
        attempt = RankAttempt(place, rank, 0, "n0")
        attempt.claim()
        attempt.started(1)
        attempt.heartbeat()


async def look(backend: SlurmBackend, training: Training, ranks: int) -> list[float]:
    observation = await backend.observe(
        training
    )  # the first one reads the records, which never change
    assert sum(rank.state == "running" for rank in observation.ranks) == ranks, observation
    took, before = [], backend.questions
    for _ in range(LOOKS):
        await asyncio.sleep(1.2 * SHARED_S)  # an answer is shared by looks that come together
        began = time.perf_counter()
        await backend.observe(training)
        took.append(time.perf_counter() - began)
    assert backend.questions - before == LOOKS, "one question a look"
    return took


def ask(cluster: SlurmCluster, *words: str) -> tuple[float, int]:
    """Seconds and bytes of a question to slurmctld."""
    took, size = [], 0
    for _ in range(LOOKS):
        began = time.perf_counter()
        done = subprocess.run(words, env=cluster.env(), capture_output=True, check=True)
        took.append(time.perf_counter() - began)
        size = len(done.stdout)
    return statistics.median(took), size


def measure(cluster: SlurmCluster, folder: Path, ranks: int) -> dict[str, float]:
    backend = SlurmBackend(folder / "trainings", SlurmOptions(conf=str(cluster.conf)))
    world = WorldSize(min=1, target=ranks, max=ranks)
    spec = TrainingSpec(name="t", world_size=world, command=["true"])
    training = Training(namespace="default", uid=f"bench{ranks}", spec=spec)
    fill_queue(cluster, training, ranks)
    asyncio.run(fill_records(backend, training, ranks))
    look_s = statistics.median(asyncio.run(look(backend, training, ranks)))
    question_s, size = ask(cluster, "squeue", "--json", "--states=all")
    one_s, _ = ask(cluster, "squeue", "-h", "-j", "1", "-o", "%T")
    return {
        "ranks": ranks,
        "questions_a_look": 1,
        "answer_kB": round(size / 1000, 1),
        "question_ms": round(question_s * 1000, 1),
        "look_ms": round(look_s * 1000, 1),
        "look_over_question": round(look_s / question_s, 2),
        "one_by_one_ms": round(one_s * ranks * 1000, 1),
    }


def main() -> None:
    if why := why_not():
        print(f"no Slurm: {why}")
        return
    rows = []
    for ranks in SIZES:  # each in a queue of its own: Slurm is always asked for all of it
        with tempfile.TemporaryDirectory(prefix="atoll-slurm-") as folder:
            with slurm_cluster(Path(folder) / "cluster") as cluster:
                rows.append(measure(cluster, Path(folder), ranks))
        print(json.dumps(rows[-1]))
    kept = {"rows": rows, "looks": LOOKS, "loadAverage": os.getloadavg()}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
