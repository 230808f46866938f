"""What an observation of a gang costs on Slurm and the services, at 1, 100 and 1,000 ranks.

    python bench/look.py [--beside TREE] [--ranks N…] [--backends NAME…]

Slurm has its real daemons; the services are the stand-ins of the tests, and S3 is moto, each in a
process of its own, so that the processor time is the client's. Records are as wrappers write them.
In a running gang every fifth observation asks the backend, and the others its records alone:
so it is here. With `--beside`, another checkout is measured by turns on the same services.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # in place of this folder, which has a `queue` of its own
RESULTS = Path(__file__).with_name("results") / "look.json"
SIZES, ROUNDS, LOOKS, EVERY = (1, 100, 1000), 3, 10, 5
ROLE = "arn:aws:iam::123456789012:role/trainer"
# Nothing is late while it is measured.
OPTIONS: dict[str, dict[str, Any]] = {
    "slurm": {"heartbeat_timeout_s": 3600.0},
    "modal": {"secrets": ["store"], "poll_s": 60.0},
    "sagemaker": {"role": ROLE, "image": "i", "poll_s": 60.0},
    "hfjobs": {"image": "i", "poll_s": 60.0},
}


def uid_of(kind: str, ranks: int) -> str:
    return f"{kind}{ranks}".ljust(32, "0")


def fill_slurm(cluster: Any, uid: str, ranks: int) -> None:
    """One entry for each rank, as Slurm has of running ones: tasks that were changed one by one."""
    from atoll.backends.slurm.render import job_name

    words = ["--hold", "--output=/dev/null", f"--array=0-{ranks - 1}", "--wrap", "true"]
    name = f"--job-name={job_name(uid, 0, 0)}"
    array = cluster.run("sbatch", "--parsable", name, *words).stdout.strip()
    changes = "".join(f"update jobid={array}_{rank} comment=x\n" for rank in range(ranks))
    subprocess.run(["scontrol"], input=changes, text=True, env=cluster.env(), check=True,
                   capture_output=True)  # fmt: skip


def serve() -> None:
    """The stand-ins and S3, with entries that nobody runs. Prints what clients need."""
    from tests.allreduce.s3server import S3Server
    from tests.support import hfjobs_stand_in, sagemaker_stand_in
    from tests.support.modal_stand_in import ModalStandIn

    class Unrun(sagemaker_stand_in.StandInJob):
        def _run(self) -> None:
            self.created -= 3600.0  # nothing has changed for an hour
            self.moves = [("Training", self.created)]

        def _live(self) -> None:
            self._run()

    class UnrunOfHub(hfjobs_stand_in.StandInJob):
        stage = "RUNNING"

        def _live(self) -> None:
            self.created -= 3600.0

    sagemaker_stand_in.StandInJob = Unrun  # type: ignore[misc]
    hfjobs_stand_in.StandInJob = UnrunOfHub  # type: ignore[misc]
    s3, modal = S3Server(), ModalStandIn()
    s3.make_bucket("runs")
    modal.secrets["store"] = s3.environment
    aws = sagemaker_stand_in.SageMakerStandIn(s3.url, s3.environment)
    hub = hfjobs_stand_in.HFJobsStandIn()
    known = {**modal.environment, **s3.environment, **aws.environment, **hub.environment}
    print(json.dumps(known), flush=True)
    for line in sys.stdin:  # an app of Modal, once a client has made it
        app, uid, ranks = line.split()
        for rank in range(int(ranks)):
            modal.add_entry(modal.apps[app], f"{uid}-r{rank}-a0", uid, rank)
        print("ok", flush=True)
    os._exit(0)


def env_of(server: subprocess.Popen[str]) -> dict[str, str]:
    assert server.stdout is not None
    return dict(json.loads(server.stdout.readline()))


async def measure(kind: str, ranks: int, state: str, *, is_first: bool) -> dict[str, Any]:
    """Runs in a process of its own, with the tree to measure as its atoll."""
    from concurrent.futures import ThreadPoolExecutor

    from atoll.agent.records import DESIRED, GATE, LAUNCH, desired_record, name_of
    from atoll.agent.wrapper import write
    from atoll.core.executors import PlaneContext, load
    from atoll.core.spec import RendezvousSpec, TrainingSpec, WorldSize
    from atoll.core.status import Training

    assert sys.modules["atoll"].__file__.startswith(os.environ["PYTHONPATH"])  # type: ignore[union-attr]
    backend: Any = load(kind).configured(kind, OPTIONS[kind], PlaneContext(Path(state), "p"))
    world = WorldSize(min=1, target=ranks, max=ranks)
    uri = None if kind == "slurm" else "s3://runs/b"
    spec = TrainingSpec(
        name="t", command=["true"], world_size=world, rendezvous=RendezvousSpec(uri=uri)
    )
    training = Training(
        namespace="n", uid=uid_of(kind, ranks), spec=spec, created_at=time.time() - 600
    )
    records = backend.record_store_of(training)
    if is_first:
        await backend.prepare(training)
        records.put(DESIRED, write(desired_record(1, ranks, {}, None, {}, time.time())))
        records.put(LAUNCH, write(backend.launch(training)))
        records.put(GATE, write({"at": time.time(), "together": ranks}))
        now = write({"host": "h", "at": time.time(), "pid": 1})
        names = [name_of(r, 0, k) for r in range(ranks) for k in ("claim", "start", "heartbeat")]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: records.put(name, now), names))
        if kind in ("sagemaker", "hfjobs"):
            await backend.start_jobs(training, 0, range(ranks))
        if kind == "modal":
            await backend.sandboxes.open()
        return {}
    observation = await backend.observe(training)  # reads the records, which never change
    assert sum(rank.state == "running" for rank in observation.ranks) == ranks, observation
    wall_s, cpu_s = [], []
    for number in range(LOOKS):
        if kind == "slurm":
            await asyncio.sleep(0.5)  # as often as it is observed
        elif number % EVERY == 0 and hasattr(backend, "_listings"):
            backend._listings.clear()
        began, used = time.perf_counter(), cpu()
        await backend.observe(training)
        wall_s.append(time.perf_counter() - began)
        cpu_s.append(cpu() - used)
    await backend.close()
    mean = {"wall_ms": sum(wall_s) / LOOKS * 1000, "cpu_ms": sum(cpu_s) / LOOKS * 1000}
    return mean | {"asking_ms": max(cpu_s) * 1000, "not_asking_ms": min(cpu_s) * 1000}


def cpu() -> float:
    """Of this process and of the commands that it ran."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def run(tree: Path, kind: str, ranks: int, state: str, env: dict[str, str], mode: str) -> Any:
    command = [sys.executable, __file__, mode, kind, str(ranks), state]
    env = {**os.environ, **env, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def compare(kind: str, ranks: int, trees: dict[str, Path], env: dict[str, str], state: str,
            server: subprocess.Popen[str] | None) -> dict[str, Any]:  # fmt: skip
    run(ROOT, kind, ranks, state, env, "fill")
    if kind == "modal" and server is not None:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"atoll {uid_of(kind, ranks)} {ranks}\n")
        server.stdin.flush()
        server.stdout.readline()
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(ROUNDS):
        for name, tree in trees.items():
            rows[name].append(run(tree, kind, ranks, state, env, "look"))
    medians = {
        name: {key: round(sorted(row[key] for row in each)[ROUNDS // 2], 1) for key in each[0]}
        for name, each in rows.items()
    }
    line = {"backend": kind, "ranks": ranks, **medians["this"]}
    if "beside" in medians:
        line["beside"] = medians["beside"]
        line["times_less"] = round(medians["beside"]["cpu_ms"] / medians["this"]["cpu_ms"], 2)
    print(json.dumps(line), flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--ranks", type=int, nargs="*", default=SIZES)
    parser.add_argument("--backends", nargs="*", default=list(OPTIONS))
    options = parser.parse_args()
    from tests.support.slurm_cluster import slurm_cluster, why_not

    trees = {"this": ROOT} | ({"beside": options.beside} if options.beside else {})
    rows = []
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryDirectory(prefix="atoll-look-") as folder:
        server = subprocess.Popen([sys.executable, __file__, "serve"], **pipes)
        env = env_of(server)
        for kind in (kind for kind in options.backends if kind != "slurm"):
            for ranks in options.ranks:
                rows.append(compare(kind, ranks, trees, env, folder, server))
        server.kill()
        server.wait()
        has_slurm = "slurm" in options.backends and not why_not()
        for ranks in options.ranks if has_slurm else ():  # each in a queue of its own
            with slurm_cluster(Path(folder) / f"cluster-{ranks}") as cluster:
                fill_slurm(cluster, uid_of("slurm", ranks), ranks)
                state = f"{folder}/{ranks}"
                rows.append(compare("slurm", ranks, trees, cluster.env(), state, None))
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    by_key = {(row["backend"], row["ranks"]): row for row in [*known, *rows]}
    results = [by_key[key] for key in sorted(by_key)]
    RESULTS.write_text(json.dumps({"rows": results, "load": os.getloadavg()}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    elif sys.argv[1:2] in (["fill"], ["look"]):
        mode, name, size, where = sys.argv[1:]
        print(json.dumps(asyncio.run(measure(name, int(size), where, is_first=mode == "fill"))))
    else:
        main()
