"""Three replicas in threads train the same model with torchft's DiLoCo and with ours.

Run as a script, so that each version of torchft gets a process of its own: prints one JSON object
with the parameters' largest differences to torchft over a plain in-process mean.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from atoll.diloco import DiLoCo, ObjectStoreManager

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torchft's own imports
    from torchft.local_sgd import DiLoCo as TorchftDiLoCo

REPLICAS, ROUNDS = 3, 20


class InProcessManager:
    """The arithmetic of torchft's manager for threads of one process: a sum, divided."""

    _use_async_quorum = False

    def __init__(self, rank: int, meeting: threading.Barrier, table: dict[int, Any]) -> None:
        self.rank, self.meeting, self.table, self.step = rank, meeting, table, 0

    def register_state_dict_fn(self, *_: object) -> None: ...
    def start_quorum(self) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...

    def current_step(self) -> int:
        return self.step

    def should_commit(self) -> bool:
        self.step += 1
        return True

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        self.table[self.rank] = tensor.clone()
        self.meeting.wait()
        total = sum(self.table[rank] for rank in range(REPLICAS))
        self.meeting.wait()
        tensor.copy_(total / REPLICAS)
        work: Any = type("Done", (), {"wait": lambda self: True})()
        return work


def model() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 24, bias=False), torch.nn.Tanh(), torch.nn.Linear(24, 8, bias=False)
    )


def train(net: torch.nn.Module, inner: torch.optim.Optimizer, rank: int, steps: int) -> None:
    dice = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(12, 16, generator=dice)
        torch.nn.functional.mse_loss(net(x), x[:, :8].sin()).backward()
        inner.step()
        inner.zero_grad()


Loop = Callable[[int, torch.nn.Sequential, torch.optim.Optimizer, dict[str, Any]], Any]


def replicas(loop: Loop, how: dict[str, Any]) -> list[torch.Tensor]:
    """The parameters of rank 0 after all rounds; the replicas are checked to be alike."""
    out: dict[int, list[torch.Tensor]] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            net = nets[rank]
            inner = torch.optim.SGD(net.parameters(), lr=0.05)
            with loop(rank, net, inner, how):
                train(net, inner, rank, ROUNDS * how["sync_every"])
            out[rank] = [p.detach().clone() for p in net.parameters()]
        except BaseException as error:
            errors.append(error)

    nets = [model() for _ in range(REPLICAS)]
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if not how["mix"]:
        for rank in range(1, REPLICAS):
            assert all(map(torch.equal, out[0], out[rank])), f"rank {rank} differs from rank 0"
    return out[0]


def torchft_loop(manager: Any, net: Any, inner: Any, how: dict[str, Any], **more: Any) -> Any:
    parts = [net] if how["fragments"] == 1 else [net[0], net[2]]
    outer = [
        torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts
    ]
    return TorchftDiLoCo(
        manager,
        parts,
        inner,
        outer,
        sync_every=how["sync_every"],
        fragment_sync_delay=how["overlap"],
        fragment_update_alpha=how["mix"],
        **more,
    )


def reference() -> Loop:
    meeting, table = threading.Barrier(REPLICAS), {}
    return lambda rank, net, inner, how: torchft_loop(
        InProcessManager(rank, meeting, table), net, inner, how
    )


def torchft_over_store(uri: str, **more: Any) -> Loop:
    return lambda rank, net, inner, how: torchft_loop(
        ObjectStoreManager(uri=uri, rank=rank, world_size=REPLICAS, min_replicas=REPLICAS),
        net,
        inner,
        how,
        **more,
    )


def ours(uri: str) -> Loop:
    return lambda rank, net, inner, how: DiLoCo(
        net,
        inner,
        sync_every=how["sync_every"],
        fragments=how["fragments"],
        overlap_steps=how["overlap"],
        mix=how["mix"],
        outer_lr=0.7,
        outer_momentum=0.9,
        uri=uri,
        rank=rank,
        world_size=REPLICAS,
        min_replicas=REPLICAS,
    )


HOW = {
    "plain": {"sync_every": 4, "fragments": 1, "overlap": 0, "mix": 0.0},
    "streaming": {"sync_every": 6, "fragments": 2, "overlap": 2, "mix": 0.25},
}


def main() -> None:
    torch.set_num_threads(1)
    matches: dict[str, float] = {}
    for name, how in HOW.items():
        expected = replicas(reference(), how)
        for who, loop in {
            "torchft over the store": torchft_over_store(f"memory:///torchft-{name}"),
            "torchft in one bucket": torchft_over_store(
                f"memory:///bucket-{name}", use_bucketization=True
            ),
            "atoll": ours(f"memory:///atoll-{name}"),
        }.items():
            got = replicas(loop, how)
            matches[f"{name}, {who}"] = max(
                (a - b).abs().max().item() for a, b in zip(expected, got, strict=True)
            )
    json.dump(matches, sys.stdout)


if __name__ == "__main__":
    main()
