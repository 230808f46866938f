"""A run of one DiLoCo replica, with whichever atoll is on the path.

python diloco_run.py URI ROUNDS PROCESSES prints the round it began at and a digest of the result.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist

from atoll.diloco import DiLoCo


def main(uri: str, rounds: int, process: int, processes: int) -> None:
    if processes > 1:
        meet = f"{uri}.meet"
        dist.init_process_group("gloo", init_method=meet, rank=process, world_size=processes)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 162), torch.nn.Tanh(), torch.nn.Linear(162, 35))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    more = {"rank": 0, "world_size": 1, "codec": "int4", "checkpoint_every": 100, "grace_s": 1.0}
    more["outer_momentum"] = 0.9  # the default of the release before
    with DiLoCo(model, inner, sync_every=1, uri=uri, **more) as diloco:
        began = diloco.round
        while diloco.round < rounds:
            dice = torch.Generator().manual_seed(diloco.round)
            model(torch.randn(4, 6, generator=dice)).square().mean().backward()
            inner.step()
            inner.zero_grad()
        rows = [row.tobytes() for row in diloco.global_parameters().values()]
    if process == 0:
        sys.stdout.write(f"{began} {hashlib.sha256(b''.join(rows)).hexdigest()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    many = int(sys.argv[3])
    own, children = 0, []
    for number in range(1, many):
        child = os.fork()
        if child == 0:
            own = number
            break
        children.append(child)
    main(sys.argv[1], int(sys.argv[2]), own, many)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
