"""One replica of a small training, as a process that tests may kill. Prints a line a round.

    python diloco_replica.py ROUNDS WAIT_AT FILE

Once loaded it says `loaded` and waits for the end of its input, so that all replicas can begin
together. At round WAIT_AT, or the first after it that it takes part in, it says so and waits until
the file is there, or until it is killed.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import torch

from atoll.diloco import DiLoCo, RoundReport


def digest(diloco: DiLoCo) -> str:
    rows = b"".join(row.tobytes() for row in diloco.global_parameters().values())
    return hashlib.sha256(rows).hexdigest()[:16]


def say(*messages: object) -> None:
    sys.stdout.write(" ".join(map(str, messages)) + "\n")
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1])
    wait_at, file = int(sys.argv[2]), Path(sys.argv[3])
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def report(round: RoundReport) -> None:
        nonlocal wait_at
        if 0 <= wait_at <= diloco.round:
            wait_at = -1
            say("waiting")
            while not file.exists():
                time.sleep(0.02)

    say("loaded")
    sys.stdin.read()
    with DiLoCo(net, inner, sync_every=4, codec="e3m0", grace_s=1.5, on_round=report) as diloco:
        say("start", diloco.round)
        while diloco.round < rounds:
            x = torch.randn(8, 6)
            torch.nn.functional.mse_loss(net(x), x[:, :2]).backward()
            inner.step()
            inner.zero_grad()
            if diloco.steps % 4 == 0:
                say("round", diloco.round, digest(diloco))


if __name__ == "__main__":
    main()
