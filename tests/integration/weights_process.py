"""A trainer or a follower of a weight channel, to be killed: `weights_process.py KIND URI OUT`.

The values of a version follow from its step, so that anybody can check its bits. OUT gets a line
for each version that was published or verified.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from atoll.weights import Follower, Publisher, Superseded, Temporary


def weights(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """A thousand values in four tensors, of which a few are others than in the step before."""
    tensors = {}
    for number in range(4):
        values = np.arange(250, dtype=np.uint16) * (number + 1)
        values[step % 11 :: 50] += np.uint16(step % 60_000)
        tensors[f"t{number}"] = values
    return tensors


def train(uri: str, out: Any, limit: int) -> None:
    publisher = Publisher(uri, full_every=5, keep=2)
    step = int(time.time() * 1000) % 1_000_000_000
    for _ in range(limit):
        step += 1
        try:
            version = publisher.publish(weights(step), step=step)
        except Temporary:
            continue
        except Superseded:
            return
        print("published", version.number, version.step, file=out, flush=True)


def follow(uri: str, out: Any) -> None:
    follower = Follower(uri)
    while True:
        try:
            version = follower.next(timeout=1.0)
        except Temporary:
            continue
        if version is not None:
            assert version.step is not None
            for name, tensor in weights(version.step).items():
                found = follower._copy().tensors[name].values  # without waiting for torch's import
                is_same = bool((found == tensor).all())
                if not is_same:
                    print("wrong", version.number, version.step, name, file=out, flush=True)
            print("verified", version.number, version.step, file=out, flush=True)


if __name__ == "__main__":
    with open(sys.argv[3], "a") as lines:
        if sys.argv[1] == "train":
            train(sys.argv[2], lines, int(sys.argv[4]))
        else:
            follow(sys.argv[2], lines)
