"""Deltas of weights: bits a changed value, GB/s a core, memory, and how long a publish blocks.

Bits are of a small policy that is really trained (policy gradient, AdamW, fp32 with bf16 published)
and of made-up weights. Beside them are, on the same weights, those of ModelExpress's own codec, run
by a Python that has it, and those of verl's format, computed. Without `--peer`, the figures of
ModelExpress stay those of the last run with it. Rates are of one core by processor time, and of two
threads by wall time, the best of many runs. How long a publish of 1, 4 and 14 GB blocks is computed
from the rates, not measured.

python bench/weights.py --peer PYTHON
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, which has a `queue` of its own

import numpy as np
import torch

from atoll.weights import Follower, Publisher, codec
from atoll.weights.state import Tensors, TensorsSource, TensorValue, Threads

RESULTS = Path(__file__).resolve().parent / "results" / "weights.json"
PEER = Path(__file__).resolve().parent / "peers" / "weights.py"
MADE_UP_BYTES = 128 << 20
SHARES = (0.005, 0.01, 0.03)
RUNS = 5
WALL_RUNS = 20  # few of them have both cores on a busy machine


Weights = dict[str, TensorValue]


def to_values(tensors: dict[str, torch.Tensor]) -> Weights:
    return {
        name: TensorValue(
            "BF16",
            tuple(each.shape),
            each.detach().bfloat16().reshape(-1).view(torch.uint8).numpy().copy(),
        )
        for name, each in tensors.items()
    }


def bits_of(old: Weights, new: Weights) -> dict[str, float]:
    run = Threads(1).run
    delta = TensorsSource(new.items(), {}, run).delta(Tensors(dict(old), {}, run))
    size = sum(len(bytes(part)) for part in delta)
    total = sum(each.values.size for each in new.values())
    share = delta.changed / total
    bound = bound_of(old, new, share)
    return {
        "changed_percent": round(100 * share, 2),
        "bits": round(8 * size / delta.changed, 2),
        "times_bound": round(8 * size / delta.changed / bound, 2),
        "verl_bits": round(8 * indexed_bytes(old, new) / delta.changed, 2),
    }


def indexed_bytes(old: Weights, new: Weights) -> int:
    """As verl 0.9.1 sends changed values: 32-bit indices in each tensor, then the values."""
    size = 0
    for name, each in new.items():
        indices = np.flatnonzero(each.values != old[name].values)
        size += indices.astype(np.int32).nbytes + each.values[indices].nbytes
    return size


def of_peer(python: str, old: Weights, new: Weights) -> dict[str, Any]:
    """What ModelExpress makes of the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        for file, tensors in (("old", old), ("new", new)):
            np.savez(Path(folder, file), **{name: each.data for name, each in tensors.items()})
        printed = subprocess.run(
            [python, PEER, folder], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    row: dict[str, Any] = json.loads(printed)
    changed = sum(int((each.values != old[name].values).sum()) for name, each in new.items())
    return {"bits": round(8 * row.pop("bytes") / changed, 2)} | row


def bound_of(old: Weights, new: Weights, share: float) -> float:
    """Bits a changed value if each value changed by chance, and steps had one distribution."""
    steps = []
    for name, each in new.items():
        before, after = old[name].values, each.values
        changed = before != after
        steps.append(codec._order(after[changed]) - codec._order(before[changed]))
    chances = np.unique(np.concatenate(steps), return_counts=True)[1] / sum(map(len, steps))
    places = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    return float(places / share - (chances * np.log2(chances)).sum())


def trained() -> dict[str, tuple[Weights, Weights]]:
    """A policy of 6.5 M parameters under REINFORCE at a learning rate of 1e-6."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = torch.nn.Sequential(
        torch.nn.Embedding(2000, 512),
        *[
            torch.nn.Sequential(
                torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
            )
            for _ in range(2)
        ],
        torch.nn.Linear(512, 2000),
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0)
    versions = []
    for _ in range(13):
        states = torch.randint(0, 2000, (64,))
        choice = torch.distributions.Categorical(logits=policy(states))
        actions = choice.sample()
        rewards = (actions % 7 == states % 7).float()
        loss = -(choice.log_prob(actions) * (rewards - rewards.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        versions.append(to_values(dict(policy.named_parameters())))
    return {
        "1 step": (versions[-2], versions[-1]),
        "4 steps": (versions[-5], versions[-1]),
    }


def made_up(share: float) -> tuple[Weights, Weights]:
    rng, dice = np.random.default_rng(1), np.random.default_rng(2)
    old, new = {}, {}
    for number in range(8):
        count = MADE_UP_BYTES // 16
        values = (rng.standard_normal(count, np.float32) * 0.02).view(np.uint32) >> 16
        before = values.astype(np.uint16)
        after = before.copy()
        chosen = dice.random(count, np.float32) < share
        after[chosen] += dice.choice(np.array([1, 65535], np.uint16), int(chosen.sum()))
        for tensors, each in ((old, before), (new, after)):
            tensors[f"t{number}"] = TensorValue("BF16", (count,), each.view(np.uint8))
    return old, new


def rates(share: float, threads: int) -> dict[str, float]:
    """GB/s of what is served: by processor time with one thread, by wall time with more."""
    clock, runs = (time.process_time, RUNS) if threads == 1 else (time.perf_counter, WALL_RUNS)
    old, new = made_up(share)
    pool = Threads(threads)
    base = Tensors(old, {}, pool.run)
    encode_s, decode_s, apply_s = [], [], []
    for _ in range(runs):
        began = clock()
        delta = TensorsSource(new.items(), {}, pool.run).delta(base)
        parts = list(delta)
        assert delta.state
        encode_s.append(clock() - began)
        began = clock()
        for part in parts:
            hashlib.sha256(part).digest()
        change = base.prepare(parts, ())
        assert change.state == delta.state
        decode_s.append(clock() - began)
    for _ in range(runs):  # the same values again: as much work
        began = clock()
        base.apply(change)
        apply_s.append(clock() - began)
    pool.close()
    size = MADE_UP_BYTES / 1e9
    return {
        "encode_gb_s": round(size / min(encode_s), 2),
        "apply_gb_s": round(size / (min(decode_s) + min(apply_s)), 2),
        "bits": round(8 * sum(len(bytes(part)) for part in parts) / delta.changed, 2),
    }


def memory_of(work: Callable[[], None]) -> float:
    """By how much memory grows at its peak while a child process works, in served bytes."""
    read, write = os.pipe()
    if os.fork() == 0:
        ctypes.CDLL(None).malloc_trim(0)  # what is free, but not given back, would be used again
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        began = _status("VmRSS")
        work()
        os.write(write, json.dumps((_status("VmHWM") - began) / MADE_UP_BYTES).encode())
        os._exit(0)
    os.wait()
    grown: float = json.loads(os.read(read, 100))
    return round(grown, 2)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def memory() -> dict[str, float]:
    versions = [
        {name: each.values for name, each in made_up(share)[1].items()} for share in (0, 0.01, 0.03)
    ]
    with tempfile.TemporaryDirectory() as folder:

        def publish() -> None:
            with Publisher(folder, full_every=3) as publisher:
                for tensors in versions:
                    publisher.publish(tensors)

        def follow() -> None:
            with Follower(folder) as follower:
                assert follower.next()

        return {"publisher": memory_of(publish), "follower": memory_of(follow)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has modelexpress")
    peer = parser.parse_args().peer
    load = os.getloadavg()[0]
    policies = trained()
    result: dict[str, Any] = {"trained": {name: bits_of(*each) for name, each in policies.items()}}
    if peer:
        inputs = {f"trained, {name}": each for name, each in policies.items()}
        inputs |= {str(share): made_up(share) for share in SHARES}
        result["modelexpress"] = {name: of_peer(peer, *each) for name, each in inputs.items()}
        del inputs
    else:
        result["modelexpress"] = json.loads(RESULTS.read_text())["modelexpress"]
    for kind in ("trained", "modelexpress"):
        for name, row in result[kind].items():
            print(f"{kind}, {name}: {row}")
    result["one_core"] = {str(share): rates(share, 1) for share in SHARES}
    result["two_threads"] = {str(share): rates(share, 2) for share in SHARES}
    for kind in ("one_core", "two_threads"):
        for share, row in result[kind].items():
            print(f"{kind}, {float(share):.1%} changed: {row}")
    result["memory"] = memory()
    print(f"peak memory, in bytes served: {result['memory']}")
    row = result["one_core"]["0.01"]
    size_share = 0.01 * row["bits"] / 16
    result["publish_blocks_s"] = {
        # Encoding, decoding onto the base, and the upload of the delta at 100 MB/s.
        f"{size} GB": round(
            size / row["encode_gb_s"] + size / row["apply_gb_s"] + size * size_share / 0.1, 1
        )
        for size in (1, 4, 14)
    }
    print(f"publish blocks, computed at 1 % changed and 100 MB/s: {result['publish_blocks_s']}")
    machine = {
        "cores": os.cpu_count(),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],  # before and after
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    RESULTS.write_text(json.dumps({"machine": machine} | result, indent=2) + "\n")


if __name__ == "__main__":
    main()
