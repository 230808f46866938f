"""A function on four ranks, scaled to six while it runs. Needs nothing but atoll.

python examples/quickstart.py
"""

import atoll


def train() -> dict[str, float]:
    import os
    import time

    for step in range(20):
        print(f"rank {os.environ['RANK']}: step {step}", flush=True)
        time.sleep(0.1)
    return {"loss": 0.25}


size = atoll.WorldSize(min=2, target=4, max=6)
with atoll.Client().deploy_distributed("hello", source=train, world_size=size) as training:
    training.wait_until_min_world(timeout=60)
    training.scale(6)
    print(training.wait_until_target_world(timeout=60))
    print(training.result(timeout=60))
    print(*training.logs(rank=5, tail=1))
