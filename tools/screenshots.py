"""The pictures of the dashboard in `docs/images`: `python -m tools.screenshots` makes them anew.

They show real trainings of a real control plane: a sweep, a DiLoCo run that loses a replica, a
world that grows and then fails, and rollouts that follow the weights of a trainer.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.browser import Visitor, open_browser
from tests.e2e.conftest import Shell, until

IMAGES = Path(__file__).parents[1] / "docs" / "images"
QUALITY = 72
MAX_BYTES = 600_000
SWEEP = [(lr, width) for lr in (0.003, 0.01, 0.03) for width in (16, 64)]
COMPARE = "&".join(f"t=mlp-lr{lr}-w{width}" for lr, width in SWEEP)
# Name, address, what to wait for, height.
SHOTS = (
    ("list-light", "/", "table.list a.name", 700),
    ("training-light", "/t/mlp-elastic", ".chart canvas", 1560),
    ("compare-light", f"/compare?{COMPARE}&smooth=0.6", "table.compare", 860),
    ("rounds-light", "/t/diloco-3", "#rounds canvas, #rounds svg", 900),
    ("weights-light", "/t/rollouts", "#weights table", 520),
)

TRAIN = """
import argparse, os, time
import torch
import atoll

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--fail-at", type=int, default=10**9)
options = parser.parse_args()
rank = int(os.environ.get("RANK", 0))
torch.set_num_threads(1)
torch.manual_seed(rank)
layers = (torch.nn.Linear(8, options.width), torch.nn.Tanh(), torch.nn.Linear(options.width, 1))
model = torch.nn.Sequential(*layers)
inner = torch.optim.AdamW(model.parameters(), lr=options.lr)
for step in range(options.steps):
    x = torch.randn(64, 8)
    loss = torch.nn.functional.mse_loss(model(x), (2 * x).sin().sum(1, keepdim=True))
    loss.backward()
    inner.step()
    inner.zero_grad()
    atoll.report(step=step, loss=loss.item(), tokens=512)
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
    if rank == 3 and step == options.fail_at:
        open("lost", "w").close()
        raise MemoryError("cannot allocate 1.07 GiB for shard 0412")
    if rank < 3 and os.path.exists("lost"):  # its peers lose the connection to it
        time.sleep(3 + rank)  # rank 3 has exited by then, also on a busy machine
        raise RuntimeError("Connection closed by peer")
    time.sleep(0.02)
"""
REPLICA = """
import os, signal, time
import torch
import atoll
from atoll.diloco import DiLoCo

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
with DiLoCo(model, inner, sync_every=10) as diloco:
    dice = torch.Generator().manual_seed(diloco.config.rank)
    for _ in diloco.until(rounds=40):
        x = torch.randn(32, 8, generator=dice)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        inner.step()
        inner.zero_grad()
        atoll.report(step=diloco.step, loss=loss.item())
        time.sleep(0.2)  # so that the replica joins again while the others train
        if diloco.config.rank == 1 and diloco.round == 15 and os.environ["ATOLL_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
"""
TRAINER = """
import time
import numpy as np
import atoll
from atoll.weights import Publisher

publisher = Publisher("policy")
dice = np.random.default_rng(0)
weights = dice.normal(size=1_000_000).astype(np.float32)
for step in range(0, 240, 20):
    weights[dice.integers(weights.size, size=10_000)] *= 1.01
    publisher.publish({"w": weights}, step=step)
    atoll.report(step=step, reward=1 - 0.99**step)
    time.sleep(2)
time.sleep(600)
"""
# Rank 2 stays at its second version, in a rollout that does not end.
ROLLOUTS = """
import os, time
from atoll.weights import Follower

rank = int(os.environ["ATOLL_RANK"])
follower = Follower("policy", name=f"engine-{rank}")
loaded = 0
while rank < 2 or loaded < 2:
    loaded += follower.next(timeout=1) is not None
    time.sleep(1)
time.sleep(600)
"""


def train(atoll: Shell) -> None:
    scripts = {"train": TRAIN, "replica": REPLICA, "trainer": TRAINER, "rollouts": ROLLOUTS}
    for name, text in scripts.items():
        (atoll.cwd / f"{name}.py").write_text(text)
    python = ("--", sys.executable)
    for lr, width in SWEEP:
        name = f"mlp-lr{lr}-w{width}"
        flags = ("--lr", str(lr), "--width", str(width))
        atoll("run", "-d", "--name", name, "-n", "2", *python, "train.py", *flags)
        until(lambda name=name: atoll("wait", name, "--timeout", "50").returncode == 0)
    world = ("-n", "3", "--min", "3", "--max", "4")
    grown = ("--fail-at", "150", "--steps", "100000")
    atoll("run", "-d", "--name", "mlp-elastic", *world, *python, "train.py", *grown)
    replicas = ("-n", "3", "--min", "2", "--max-restarts", "1", "--rendezvous", "none")
    atoll("run", "-d", "--name", "diloco-3", *replicas, *python, "replica.py")
    until(lambda: max(atoll.json("metrics", "mlp-elastic", "loss")["step"], default=0) > 150)
    atoll("scale", "mlp-elastic", "4")
    until(lambda: atoll.json("status", "mlp-elastic")["phase"] == "failed")
    until(lambda: atoll("wait", "diloco-3", "--timeout", "50").returncode == 0)
    (atoll.cwd / "lost").unlink()
    steps = ("train.py", "--steps", "100000")
    needs = ("--cpu", "0.5", "--memory", "1Gi")
    atoll("run", "-d", "--name", "mlp-long", "-n", "2", *needs, *python, *steps)
    until(lambda: len(atoll.json("metrics", "mlp-long", "loss")["step"]) > 300)
    atoll("run", "-d", "--name", "trainer", "--replicas", "1", *python, "trainer.py")
    atoll("run", "-d", "--name", "rollouts", "--replicas", "3", *python, "rollouts.py")
    until(lambda: [row["step"] for row in newest_versions(atoll)] == [220])
    until(lambda: sorted(row["behind"] > 0 for row in followers(atoll)) == [False, False, True])


def newest_versions(atoll: Shell) -> list[dict[str, Any]]:
    return [channel["versions"][0] for channel in atoll.json("weights", "rollouts")]


def followers(atoll: Shell) -> list[dict[str, Any]]:
    channels = atoll.json("weights", "rollouts")
    return [row for channel in channels for row in channel["followers"]]


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="atoll-shots-") as folder, open_browser() as browser:
        (Path(folder) / "work").mkdir()
        atoll = Shell(Path(folder) / "state", Path(folder) / "work")
        try:
            train(atoll)
            for name, path, wanted, height in SHOTS:
                visitor = Visitor(browser, atoll)
                visitor.page.set_viewport_size({"width": 1440, "height": height})
                visitor.sign_in()
                page = visitor.open(path, wanted)
                section = page.locator(f"#{name.partition('-')[0]}")  # of a training, if there
                if section.count():
                    section.scroll_into_view_if_needed()
                page.wait_for_timeout(1500)
                shot = visitor.context.new_cdp_session(page).send(
                    "Page.captureScreenshot", {"format": "webp", "quality": QUALITY}
                )
                (IMAGES / f"{name}.webp").write_bytes(base64.b64decode(shot["data"]))
                visitor.close()
        finally:
            atoll.stop()
    total = sum(image.stat().st_size for image in IMAGES.glob("*.webp"))
    assert total < MAX_BYTES, f"{total} bytes"


if __name__ == "__main__":
    main()
