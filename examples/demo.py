"""A training that loses a rank, gets it back, and grows while it runs: about a minute.

    make demo                    # or: python examples/demo.py [RANKS SCALED]

A small GPT on the bytes of Python's standard library, trained by DiLoCo through a directory that
stands for an object store. Everything runs on this machine, in a control plane of its own.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import atoll

# Ranks, ranks after the scale-up, rounds to do with all of them.
START, GROWN, AFTER = *map(int, sys.argv[1:3] or (4, 6)), 3
ROUND = re.compile(r"round (\d+) members ([\d ]+) loss ([\d.]+)")
FINAL = re.compile(r"validation loss ([\d.]+) after round (\d+), (\d+) bytes up")


def train(last_round: Path) -> None:
    """What each rank runs, up to the round that the file names once it exists."""
    import torch
    from diloco_gpt import GPT, Text, validate

    from atoll.diloco import DiLoCo

    def is_over(done: int) -> bool:
        return last_round.exists() and done > int(last_round.read_text())

    torch.set_num_threads(1)
    torch.manual_seed(0)
    text, model = Text(context=64), GPT()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []

    def print_round(report) -> None:
        members = " ".join(map(str, report.members))
        mean = sum(losses) / len(losses)
        losses.clear()
        print(f"round {report.round} members {members} loss {mean:.3f}", flush=True)

    with DiLoCo(model, inner, sync_every=20, outer_momentum=0.5, on_round=print_round) as diloco:
        dice = torch.Generator().manual_seed(10_000 * diloco.config.rank + diloco.round)
        while not is_over(diloco.round):
            loss = model.loss(text.batch(text.train, 8, dice))
            loss.backward()
            losses.append(loss.item())
            inner.step()  # every 20th step ends a round
            inner.zero_grad()
    sent = diloco.metrics()["bytes_up"]
    loss = validate(model, text)
    print(f"validation loss {loss:.4f} after round {diloco.round - 1}, {sent:.0f} bytes up")


class Story:
    """Prints what happens, and collects the lines of the ranks that the demo waits for."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.members_of: dict[int, list[int]] = {}
        self.finals: dict[int, re.Match[str]] = {}
        self.changed = threading.Condition()

    def tell(self, text: str) -> None:
        since = time.monotonic() - self.began
        print(f"{int(since) // 60:02}:{since % 60:04.1f}  {text}", flush=True)

    def follow(self, training: atoll.DistributedTraining) -> None:
        for line in training.stream_logs():
            with self.changed:
                self.hear(line.rank, line.text)
                self.changed.notify_all()

    def hear(self, rank: int, text: str) -> None:
        if done := ROUND.fullmatch(text):
            number, members = int(done[1]), [int(member) for member in done[2].split()]
            if number not in self.members_of:
                self.members_of[number] = members
                members = " ".join(str(r) if r in members else "-" for r in range(GROWN))
                self.tell(f"round {number:<3} ranks {members}   loss {done[3]} (of rank {rank})")
        elif final := FINAL.fullmatch(text):
            self.finals[rank] = final
        elif "Error" in text or "Traceback" in text:
            self.tell(f"rank {rank}: {text}")

    def wait_for(self, is_true, what: str, timeout: float = 300) -> None:
        with self.changed:
            if not self.changed.wait_for(is_true, timeout):
                raise SystemExit(f"demo: {what} did not happen within {timeout:g} s")


def pid_of(training: atoll.DistributedTraining, rank: int) -> int:
    wanted = {f"ATOLL_UID={training.uid}".encode(), f"RANK={rank}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                return int(process.name)
        except OSError:  # gone, or somebody else's
            continue
    raise SystemExit(f"demo: no process of rank {rank} found")


def main() -> None:
    story, config = Story(), Path(tempfile.mkdtemp(prefix="atoll-demo-"))
    with atoll.Client.local() as client:
        training = client.deploy_distributed(
            "demo",
            source=lambda: train(config / "last-round"),
            world_size=atoll.WorldSize(min=1, target=START, max=GROWN),
            rendezvous_uri=f"file://{config}/store",
            max_restarts=2,
            stop_grace_s=2,
        )
        story.tell(f"asked for {START} ranks, at least 1, at most {GROWN}")
        follower = threading.Thread(target=story.follow, args=[training], daemon=True)
        follower.start()
        world = training.wait_until_target_world(timeout=120)
        story.tell(f"{world.ready} of {world.target} ranks run; they load torch, then train")

        story.wait_for(lambda: 1 in story.members_of, "the second round")
        lose_a_rank(story, training, 1)
        grow(story, training)

        last = max(story.members_of) + AFTER
        (config / "draft").write_text(str(last))
        (config / "draft").rename(config / "last-round")
        story.tell(f"all {GROWN} ranks train; round {last} is to be the last")
        training.wait_until_complete(timeout=300)
        story.wait_for(lambda: len(story.finals) == GROWN, "the last line of every rank", 30)
        follower.join(30)  # the stream ends with the training
        summary(story, training)
    shutil.rmtree(config)


def lose_a_rank(story: Story, training: atoll.DistributedTraining, rank: int) -> None:
    pid, before = pid_of(training, rank), time.time()
    story.tell(f"kill -9 {pid}: rank {rank} is gone, as if its machine had died")
    os.kill(pid, signal.SIGKILL)
    while not (lost := [e for e in training.events(since=before) if e.reason == "RankRestarting"]):
        time.sleep(0.01)
    late_ms = (lost[0].at - before) * 1000
    story.tell(f"atoll, {late_ms:.0f} ms later: {lost[0].message}; it is started again")
    at = max(story.members_of)
    story.wait_for(
        lambda: any(n > at + 1 and rank in members for n, members in story.members_of.items()),
        f"rank {rank}'s return",
    )
    missed = [number for number, members in story.members_of.items() if rank not in members]
    story.tell(f"rank {rank} is back, from the store alone; rounds without it: {missed or 'none'}")


def grow(story: Story, training: atoll.DistributedTraining) -> None:
    training.scale(GROWN)
    world = training.wait_until_target_world(timeout=120)
    story.tell(f"scaled to {world.target} while it runs: {world.ready} ranks, nobody was stopped")
    story.wait_for(
        lambda: any(len(members) == GROWN for members in story.members_of.values()),
        "a round of all",
    )


def summary(story: Story, training: atoll.DistributedTraining) -> None:
    losses = {final[1] for final in story.finals.values()}
    rounds, stats = max(story.members_of) + 1, training.stats()
    sent = sum(int(final[3]) for final in story.finals.values())
    print(f"\n{training.name}: {training.phase}, {rounds} rounds of 20 steps")
    print("  rank  exit  restarts  took part in")
    for ended in training.rank_exits:
        took_part = sum(ended.rank in members for members in story.members_of.values())
        print(
            f"  {ended.rank:<6}{ended.exit_code!s:<6}{ended.restart_count:<10}"
            f"{took_part} of {rounds} rounds"
        )
    same = "the same on every rank" if len(losses) == 1 else "not the same everywhere"
    print(f"  validation loss {', '.join(sorted(losses))}: {same}")
    print(f"  {stats.rank_seconds:.0f} rank-seconds, {sent / 1e6:.1f} MB sent to the store")
    if len(losses) != 1 or training.phase != "succeeded":
        sys.exit(1)


if __name__ == "__main__":
    main()
