"""torchrun, scaled from two nodes to three while it runs.

python examples/21_torchrun_elastic.py

Each rank is a torchrun agent of one process. They meet where atoll says (BASILICA_RDZV_ENDPOINT),
for as many nodes as the world may have. When a third one joins, torchrun starts its workers again,
as three, and the script continues from its checkpoint.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import atoll

STEPS = 10


def train(place: Path) -> None:
    """What each worker runs: it sums up the ranks in every step, and remembers the step."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    saved = place / "step"
    step = torch.tensor(int(saved.read_text()) if saved.exists() else 0)
    dist.broadcast(step, src=0)  # all continue from the step of rank 0
    print(f"world {world}: rank {rank} continues from step {step}", flush=True)
    # The last steps need three workers: until the third has joined, two wait.
    while step < STEPS or world < 3:
        total = torch.tensor(rank)
        dist.all_reduce(total)
        assert total == world * (world - 1) // 2
        step += 1
        if rank == 0:
            saved.write_text(str(int(step)))
        time.sleep(0.1)
    dist.barrier()
    print(f"world {world}: rank {rank} is done", flush=True)
    dist.destroy_process_group()


def main(place: Path) -> None:
    torchrun = (
        f'exec "{sys.executable}" -m torch.distributed.run --rdzv-backend=c10d '
        '--rdzv-endpoint="$BASILICA_RDZV_ENDPOINT" --rdzv-id="$BASILICA_RDZV_ID" '
        "--rdzv-conf=last_call_timeout=1 --nproc-per-node=1 --max-restarts=3 "
        '--nnodes="$BASILICA_WORLD_MIN:$BASILICA_WORLD_MAX" --monitor-interval=0.2 '
        f'"{Path(__file__).resolve()}" "{place}"'
    )
    with (
        atoll.Client() as client,
        client.deploy_distributed(
            "torchrun-elastic",
            command=["sh", "-c", torchrun],
            world_size=atoll.WorldSize(min=2, target=2, max=3),
            env={"OMP_NUM_THREADS": "1"},
        ) as training,
    ):
        training.wait_until_target_world(timeout=60)
        while not (place / "step").exists():  # both have met, and train
            assert not training.is_terminal, training.root_cause
            time.sleep(0.1)
        print("two train; scaling to three", flush=True)
        training.scale(3)
        print(training.wait_until_complete(timeout=300))
        for line in training.logs():
            if line.text.startswith("world"):
                print(line.text)


if "TORCHELASTIC_RUN_ID" in os.environ:
    train(Path(sys.argv[1]))
else:
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
