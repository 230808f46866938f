"""The cost of one look at a gang on Modal, by its size: questions, requests and time.

The service is the stand-in of the tests and the store a real S3 API, both in this process: times
are theirs for the most part. Sandboxes are entries without processes. The first look is that of a
controller which knows none of them, and asks for the tags of each.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.allreduce.s3server import S3Server
from tests.support.modal_stand_in import ModalStandIn

from atoll.agent.records import DESIRED, LAUNCH, desired_record, name_of
from atoll.agent.wrapper import write
from atoll.backends.modal.executor import ModalBackend
from atoll.backends.modal.options import ModalOptions
from atoll.backends.modal.render import sandbox_name
from atoll.core.spec import RendezvousSpec, TrainingSpec, WorldSize
from atoll.core.status import Training

SIZES = (1, 100, 1000)
LOOKS = 5


async def measure(size: int, modal: ModalStandIn) -> dict[str, object]:
    world = WorldSize(min=size, target=size, max=size)
    spec = TrainingSpec(
        name="t", command=["true"], world_size=world, rendezvous=RendezvousSpec(uri="s3://runs/b")
    )
    training = Training(namespace="n", uid=uuid.uuid4().hex, spec=spec)
    backend = ModalBackend(ModalOptions(secrets=["store"]))
    place = backend.place_of(training)
    place.put(DESIRED, write(desired_record(1, size, {}, None, {}, time.time())))
    place.put(LAUNCH, write(backend.launch(training)))
    place.put("gate", write({"at": time.time(), "together": size}))
    now = write({"host": "h", "at": time.time()})
    names = [(r, k) for r in range(size) for k in ("claim", "start", "heartbeat")]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: place.put(name_of(n[0], 0, n[1]), now), names))
    app = await backend.sandboxes.open()
    for rank in range(size):
        modal.add_entry(app.app_id, sandbox_name(training.uid, rank, 0), training.uid, rank)
    first = time.perf_counter()
    observation = await backend.observe(training)
    first_s = time.perf_counter() - first
    assert sum(rank.state == "running" for rank in observation.ranks) == size
    backend.sandboxes.questions.clear()
    modal.calls.clear()
    looks = [await timed(backend.observe(training)) for _ in range(LOOKS)]
    listings = [await timed(asyncio.to_thread(place.entries)) for _ in range(LOOKS)]
    questions = [await timed(backend.list_jobs(training)) for _ in range(LOOKS)]
    await backend.close()
    return {
        "ranks": size,
        "adoption_ms": round(first_s * 1000, 1),
        "look_ms": median_ms(looks),
        "of_it_the_store_ms": median_ms(listings),
        "of_it_modal_ms": median_ms(questions),
        "questions_a_look": sum(backend.sandboxes.questions.values()) / LOOKS / 2,
        "requests_to_modal_a_look": sum(modal.calls.values()) / LOOKS / 2,
    }


async def timed(work: Awaitable[object]) -> float:
    at = time.perf_counter()
    await work
    return time.perf_counter() - at


def median_ms(times: list[float]) -> float:
    return round(statistics.median(times) * 1000, 1)


def main() -> None:
    modal, s3 = ModalStandIn(), S3Server()
    try:
        s3.make_bucket("runs")
        modal.secrets["store"] = s3.environment
        os.environ.update({**modal.environment, **s3.environment})
        rows = [asyncio.run(measure(size, modal)) for size in SIZES]
    finally:
        modal.close()
        s3.stop()
    for row in rows:
        print(json.dumps(row))
    out = Path(__file__).with_name("results") / "modal_look.json"
    out.write_text(json.dumps({"rows": rows, "looks": LOOKS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
