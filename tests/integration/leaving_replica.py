"""A replica for tests of leaving: it trains until the run has done ROUNDS, slowly, and says so.

    python leaving_replica.py ROUNDS STEP_S HOW

HOW is `plain`, or `polite`: a program that ends by itself once it is told to go.
Step 13 is followed by the others when the file $GATE is there, or the replica is told to go.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from atoll.diloco import DiLoCo


def say(*messages: object) -> None:
    sys.stdout.write(" ".join(map(str, messages)) + "\n")
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)
    rounds, pause_s, how = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    rank, gate = int(os.environ["ATOLL_RANK"]), os.environ.get("GATE")
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    dice = torch.Generator().manual_seed(rank)
    with DiLoCo(model, inner, sync_every=10, timeout=60, codec=os.environ["CODEC"]) as diloco:
        diloco.global_parameters()
        while diloco.round < rounds:
            x = torch.randn(4, 40, generator=dice)
            model(x).pow(2).mean().backward()
            inner.step()
            inner.zero_grad()
            say("step", diloco.steps)
            while gate is not None and diloco.steps == 13 and not diloco.leaving:
                if os.path.exists(gate):
                    break
                time.sleep(0.02)
            if diloco.reports and diloco.steps % 10 == 0:
                say("round", diloco.round, *diloco.reports[-1].members)
            if diloco.leaving and how == "polite":
                say("bye")
                return
            time.sleep(pause_s)
    say("done", diloco.round)


if __name__ == "__main__":
    main()
