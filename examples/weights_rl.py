"""Policy gradients over a bucket: one trainer, two rollout workers, and kills.

    python examples/weights_rl.py [URI]

The trainer publishes its policy after every step; rollout workers follow it, act with it and
upload episodes. The example kills one worker and the trainer, whose successor continues from the
channel. The reward rises from 0.1 to above 0.8 within two minutes on a laptop.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from atoll.weights import Follower, Publisher

STATES, ACTIONS, STEPS, BATCH = 16, 10, 150, 256


def make_policy() -> torch.nn.Module:
    torch.manual_seed(0)
    hidden = torch.nn.Linear(STATES, 64)
    return torch.nn.Sequential(hidden, torch.nn.Tanh(), torch.nn.Linear(64, ACTIONS))


def rollout(uri: str, episodes: Path) -> None:
    """Act with the newest policy: the right action follows from the state, and pays 1."""
    policy, follower = make_policy(), Follower(uri, name=f"rollout-{os.getpid()}")
    rng = np.random.default_rng(os.getpid())
    while True:
        version = follower.next(timeout=0 if follower.version else 60)
        if version is not None:
            follower.copy_into(policy)
        if follower.version is None or len(list(episodes.glob("*.npz"))) > 8:
            time.sleep(0.02)
            continue
        states = torch.from_numpy(rng.integers(0, STATES, BATCH))
        with torch.no_grad():
            logits = policy(torch.nn.functional.one_hot(states, STATES).float())
        actions = torch.distributions.Categorical(logits=logits).sample()
        rewards = (actions == (3 * states + 1) % ACTIONS).float()
        draft = episodes / f".{os.getpid()}.npz"
        np.savez(draft, states=states, actions=actions, rewards=rewards)
        draft.rename(episodes / f"{time.time_ns()}.{follower.version.number}.npz")


def train(uri: str, episodes: Path) -> None:
    """Learn from episodes as they come, and publish every step."""
    policy, step = make_policy(), 0
    with Follower(uri, name="resume") as follower:
        if version := follower.next():
            follower.copy_into(policy)
            step = version.step or 0
            print(f"trainer: resumes at step {step}", flush=True)
    publisher = Publisher(uri, full_every=20)  # fences the trainer before, if it lives
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    publisher.publish(policy.named_parameters(), step=step)
    while step < STEPS:
        batches = sorted(episodes.glob("[0-9]*.npz"))
        if not batches:
            time.sleep(0.01)
            continue
        with np.load(batches[0]) as batch:
            states, actions, rewards = (
                torch.from_numpy(batch[name]) for name in ("states", "actions", "rewards")
            )
        batches[0].unlink()
        step += 1
        inputs = torch.nn.functional.one_hot(states, STATES).float()
        chosen = torch.distributions.Categorical(logits=policy(inputs)).log_prob(actions)
        loss = -(chosen * (rewards - rewards.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        version = publisher.publish(policy.named_parameters(), step=step)
        lag = version.number - int(batches[0].name.split(".")[1])
        print(f"step {step}: reward {rewards.mean():.2f}, {lag} versions old", flush=True)
    publisher.close()


def main(uri: str | None = None) -> None:
    root = Path(tempfile.mkdtemp(prefix="weights-rl-"))
    episodes = root / "episodes"
    episodes.mkdir()
    uri = uri or f"file://{root}/policy"

    def start(role: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE if role == "train" else None
        command = [sys.executable, __file__, role, uri, str(episodes)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=pipe, text=True, env=env)

    workers = [start("rollout"), start("rollout")]
    try:
        trainer = start("train")
        step, is_resumed = 0, False
        while step < STEPS:
            assert trainer.stdout is not None
            line = trainer.stdout.readline()
            if not line:
                raise SystemExit(f"the trainer ended with {trainer.wait()}")
            print(line, end="", flush=True)
            if line.startswith("step "):
                step = int(line.split()[1].rstrip(":"))
            if step == 40 and len(workers) == 2:
                print("killing a rollout worker, starting another", flush=True)
                workers[0].kill()
                workers.append(start("rollout"))
            if step >= 80 and not is_resumed:
                print("killing the trainer, starting another", flush=True)
                trainer.kill()
                trainer.wait()
                trainer.stdout.close()
                trainer = start("train")
                is_resumed = True
        trainer.wait()
        trainer.stdout.close()
    finally:
        for process in workers:
            process.kill()
            process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] in (["rollout"], ["train"]):
        {"rollout": rollout, "train": train}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
    else:
        main(*sys.argv[1:2])
