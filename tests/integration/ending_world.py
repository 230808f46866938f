"""Replicas of two gloo processes that end in each way, as whole Pythons, at the worst moment.

    python ending_world.py FOLDER END ...

FOLDER/codes.json has for each END the exit codes of the processes.

For the last collective the threads of the gloo groups get the processor only when nobody else wants
it. So most of them have yet to let go of it when the program has ended, and get to it when Python
is being taken down.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimiser loads it: once, before the processes are forked
import torch.distributed as dist

from atoll.diloco import DiLoCo


class LastObject:
    """A global of the program: it goes when Python is already ending."""

    def __del__(self) -> None:
        time.sleep(1.0)  # the threads run


def meet_last(diloco: DiLoCo) -> None:
    """A collective, with the threads of the groups left what others leave of one processor."""
    processors = sorted(os.sched_getaffinity(0))
    own = processors[dist.get_rank() % len(processors)]
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {own})
        if Path(f"/proc/self/task/{thread}/comm").read_text().strip() == "pt_gloo_runloop":
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    diloco.global_parameters()


def train(process: int, folder: Path, steps: int, **options: Any) -> DiLoCo:
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=process, world_size=2)
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = DiLoCo(model, inner, sync_every=2, **options)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        inner.step()
        inner.zero_grad()
    return diloco


def close(diloco: DiLoCo) -> None:
    diloco.close()
    meet_last(diloco)


def leave_open(diloco: DiLoCo) -> None:
    meet_last(diloco)


def fail(diloco: DiLoCo) -> None:
    with diloco:
        meet_last(diloco)
        raise ValueError("of the program")


def leave(diloco: DiLoCo) -> None:
    with diloco:
        meet_last(diloco)
        sys.exit(0)


def destroy(diloco: DiLoCo) -> None:
    close(diloco)
    dist.destroy_process_group()


def leave_a_round(diloco: DiLoCo) -> None:
    """A round is on its way, and waits for a replica that does not come."""
    with diloco:
        sys.exit(0)


def leave_alone(diloco: DiLoCo) -> None:
    """One process exits; the other one goes to its next round, and must not wait for it."""
    with diloco:
        if dist.get_rank() == 0:
            sys.exit(0)
        diloco.sync()


ENDS = {
    each.__name__: each
    for each in (close, leave_open, fail, leave, destroy, leave_a_round, leave_alone)
}


def run(name: str, process: int, folder: Path) -> None:
    global last, kept
    last = LastObject()
    torch.manual_seed(0)
    if name == "leave_alone":
        store = {"uri": f"file://{folder}/store", "rank": 0, "world_size": 1}
        kept = train(process, folder, 4, **store)
    elif name == "leave_a_round":
        pair = {"uri": f"file://{folder}/store", "rank": 0, "world_size": 2, "min_replicas": 2}
        kept = train(process, folder, 1, overlap_steps=1, **pair)
    else:
        kept = train(process, folder, 4)
    ENDS[name](kept)


def main() -> None:
    torch.set_num_threads(1)
    codes = {}
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        children = []
        for process in range(2):
            child = os.fork()
            if child == 0:
                return run(name, process, folder)  # and on to the end of Python
            children.append(child)
        codes[name] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (Path(sys.argv[1]) / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
