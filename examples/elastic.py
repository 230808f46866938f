"""Work that any number of ranks share: ranks may die, leave and join, and every item is done once.

python examples/elastic.py

Ranks claim numbered items in a directory, as replicas would in an object store. One rank is
killed half-way and restarted, and two more join; the others keep working.
"""

import os
import tempfile
import time
from pathlib import Path

import atoll

ITEMS = 60


def work(place: Path) -> None:
    """What each rank runs: first its own unfinished item, then any that nobody has claimed."""
    rank = os.environ["RANK"]
    for item in range(ITEMS):
        claim, done = place / f"{item}.claim", place / f"{item}.done"
        try:
            with claim.open("x") as file:
                file.write(rank)
        except FileExistsError:
            if done.exists() or claim.read_text() != rank:
                continue
        time.sleep(0.1)
        done.write_text(rank)
        print(f"item {item}", flush=True)
        if rank == "1" and not (place / "fallen").exists():
            (place / "fallen").touch()
            os.kill(os.getpid(), 9)


with tempfile.TemporaryDirectory() as directory, atoll.Client() as client:
    place = Path(directory)
    with client.deploy_distributed(
        "elastic",
        source=lambda: work(place),
        world_size=atoll.WorldSize(min=1, target=2, max=4),
        max_restarts=1,
    ) as training:
        training.wait_until_target_world(timeout=60)
        training.scale(4)
        training.wait_until_complete(timeout=120)
        for event in reversed(training.events()):
            print(f"{event.reason:<20}{event.message}")
        shares = [done.read_text() for done in place.glob("*.done")]
        for rank in sorted(set(shares)):
            print(f"rank {rank} did {shares.count(rank)} of {len(shares)} items")
        assert len(shares) == ITEMS
