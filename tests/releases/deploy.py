"""Trainings in every phase, made with whichever atoll is on the path: `deploy.py STEPS WHEEL`.

Ranks that run wait for a file in STEPS: `end` lets all of them end, `fail.NAME.RANK.ATTEMPT` makes
one of them fail. WHEEL is a package for `pip_packages`. Prints the uid of each training by name.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import atoll
from atoll import ObjectStoreAllReduce

RANK = """echo "rank $RANK attempt $ATOLL_ATTEMPT pid $$"
until [ -e {0}/end ] || [ -e {0}/fail.$ATOLL_NAME.$RANK.$ATOLL_ATTEMPT ]; do sleep 0.05; done
[ -e {0}/end ] && echo bye || exit 3"""


def train(steps: str) -> None:
    import os
    import time

    me = "fail.{ATOLL_NAME}.{RANK}.{ATOLL_ATTEMPT}".format(**os.environ)
    print("rank", os.environ["RANK"], "attempt", os.environ["ATOLL_ATTEMPT"], "pid", os.getpid())
    sys.stdout.flush()
    while not os.path.exists(f"{steps}/end"):
        if os.path.exists(f"{steps}/{me}"):
            raise ValueError("loss is nan")
        time.sleep(0.05)
    # Loaded now: the files of another release may be there by then.
    assert callable(atoll.mesh_wait)
    assert ObjectStoreAllReduce.__name__ == "ObjectStoreAllReduce"
    print("bye")


def main(steps: str, wheel: str) -> None:
    client = atoll.Client()
    rank = ["sh", "-c", RANK.format(steps)]
    script = Path(steps, "train.py")
    script.write_text(
        "import sys, atoll, tidal\nfrom atoll import ObjectStoreAllReduce\n"
        f"{inspect.getsource(train)}\ntrain(sys.argv[1])\nprint(tidal.HIGH)\n"
    )
    elastic = atoll.WorldSize(min=1, target=2, max=4)
    all_of_them = {
        "done": {"command": ["sh", "-c", "echo out; echo $RANK >&2"], "ttl_seconds": 3600},
        "broken": {"command": ["sh", "-c", "[ $RANK = 0 ] || exit 7; exec sleep 600"]},
        "stopped": {"command": ["sleep", "600"]},
        "shell": {"command": rank, "world_size": elastic, "max_restarts": 2},
        "brief": {"command": rank, "ttl_seconds": 0},
        "orphan": {"command": rank, "max_restarts": 2},
        "cancelled": {"command": rank},
        "deleted": {"command": rank},
        "function": {"source": train, "args": [steps], "max_restarts": 2, "world_size": elastic},
        "packages": {"source": script, "args": [steps], "max_restarts": 2, "pip_packages": [wheel]},
        "waiting": {"command": ["true"], "world_size": 64},
    }
    trainings = {
        name: client.deploy_distributed(name, **{"world_size": 2, "max_restarts": 0, **options})
        for name, options in all_of_them.items()
    }
    trainings["stopped"].cancel()
    for name in ("done", "broken", "stopped"):
        try:
            trainings[name].result(timeout=60)
        except atoll.BelowMinimumWorld:
            assert name != "done", name
    for name in ("shell", "brief", "orphan", "cancelled", "deleted", "function", "packages"):
        trainings[name].wait_until_target_world(timeout=60)
    print(json.dumps({name: training.uid for name, training in trainings.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
