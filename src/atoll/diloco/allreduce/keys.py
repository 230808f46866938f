"""The keys of a run's objects in the store.

manifest/ROUND.ATTEMPT            who is in the round: created once
past/ROUND                      the manifests of the BLOCK rounds from that one on, folded
up/ROUND/RANK.NONCE.WEIGHT.LAYOUT   what one rank brings to the round; .PROCESSES if several do,
                                .nNOTE where it has a word for all the others, .C… with how far
                                it trained and on which data (see note.py)
up/ROUND/part/NAME/PROCESS      what a further process of the rank carries of the upload NAME
up/left/LAUNCH/RANK.HOW         the mark of a rank that has left: done, failed, or told to go
sum/ROUND.ATTEMPT/SHARD         the mean of one shard, or the note that the attempt was given up
sum/ROUND.ATTEMPT/SHARD.PROCESS the same of the cells that a further process of the owner carries
checkpoint/ROUNDS               the state after that many rounds
start                           the state before the first, where the replicas need the same one
state/ROUNDS/NONCE.PROCESS      the values that a checkpoint or the start points to
inner/RANK/…                    what is a rank's own (see diloco/own_state.py)
live/LAUNCH/RANK                the mark of a rank that is at the run (see diloco/claim.py)
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import NamedTuple

UPLOAD = re.compile(
    r"(\d{5})\.([0-9a-f]{16})\.([^/.]+)\.([0-9a-f]{16})(?:\.(\d{1,5}))?(?:\.n([a-z0-9-]{1,60}))?"
    r"(?:\.(C[0-9a-z._+D-]+))?"
)
ATTEMPT = re.compile(r"(\d{8})\.(\d{4})")


BLOCK = 1000  # rounds whose manifests are folded into one object; part of the format

LEFT = re.compile(r"left/([^/]+)/(\d{5})\.(done|failed|left)")

COMPLETE = (
    "left"  # the note of a rank that does not wait for the round: its own shard is in it, too
)


class UploadName(NamedTuple):
    key: str
    round: int
    rank: int
    nonce: str
    weight: float
    layout: str
    size: int = 0
    processes: int = 1
    note: str = ""
    header: str = ""


class Keys:
    """Makes the keys of one run."""

    def __init__(self, run: str) -> None:
        self.run = run

    def manifest(self, number: int, attempt: int) -> str:
        return f"{self.run}/manifest/{number:08d}.{attempt:04d}"

    def manifests(self) -> str:
        return f"{self.run}/manifest"

    def past(self, number: int) -> str:
        """Of the block that the round is in."""
        return f"{self.pasts()}/{block_of(number):08d}"

    def pasts(self) -> str:
        return f"{self.run}/past"

    def uploads(self, number: int | None = None) -> str:
        return f"{self.run}/up" if number is None else f"{self.run}/up/{number:08d}"

    def upload(
        self,
        number: int,
        rank: int,
        nonce: str,
        weight: float,
        layout: str,
        processes: int = 1,
        note: str = "",
        header: str = "",
    ) -> str:
        # The exact weight is in the name, so that one LIST holds all that a manifest is decided on.
        weight_hex = weight.hex().replace(".", "_")
        many = f".{processes}" if processes > 1 else ""
        message = (f".n{note}" if note else "") + (f".{header}" if header else "")
        return f"{self.uploads(number)}/{rank:05d}.{nonce}.{weight_hex}.{layout}{many}{message}"

    def left(self, launch: str, rank: int, how: str) -> str:
        # Among the uploads, and after them, so that one LIST holds the marks as well.
        return f"{self.uploads()}/left/{launch}/{rank:05d}.{how}"

    def sums(self, number: int | None = None, attempt: int = 0) -> str:
        return f"{self.run}/sum" if number is None else f"{self.run}/sum/{number:08d}.{attempt:04d}"

    def shard(self, number: int, attempt: int, shard: int, process: int = 0) -> str:
        part = f".{process}" if process else ""
        return f"{self.sums(number, attempt)}/{shard:05d}{part}"

    def start(self) -> str:
        return f"{self.run}/start"

    def checkpoints(self) -> str:
        return f"{self.run}/checkpoint"

    def checkpoint(self, rounds: int) -> str:
        return f"{self.run}/checkpoint/{rounds:08d}"

    def states(self) -> str:
        return f"{self.run}/state"

    def state(self, rounds: int, nonce: str, process: int) -> str:
        return f"{self.run}/state/{rounds:08d}/{nonce}.{process}"


def block_of(number: int) -> int:
    """The first round of the block that the round is in."""
    return number // BLOCK * BLOCK


def part_of(upload: str, process: int) -> str:
    """The key of what one process of a replica carries of its upload; process 0 has the upload."""
    folder, _, name = upload.rpartition("/")
    return f"{folder}/part/{name}/{process}" if process else upload


@lru_cache(maxsize=1024)  # members are asked for the parts of their names again and again
def parse_upload(key: str, size: int = 0) -> UploadName | None:
    """The parts of an upload's key; None for a key that no rank would make."""
    folder, _, name = key.rpartition("/")
    match = UPLOAD.fullmatch(name)
    number = folder.rpartition("/")[2]
    if match is None or not number.isdigit():
        return None
    try:
        weight = float.fromhex(match[3].replace("_", "."))
    except ValueError:
        return None
    if not (math.isfinite(weight) and weight > 0):
        return None
    processes = int(match[5] or 1)
    if not processes:
        return None
    return UploadName(
        key,
        int(number),
        int(match[1]),
        match[2],
        weight,
        match[4],
        size,
        processes,
        match[6] or "",
        match[7] or "",
    )


def parse_left(key: str, launch: str) -> tuple[int, str] | None:
    """Rank and how it left, from the mark of a rank of `launch`; None for any other key."""
    match = LEFT.search(key)
    if match is None or match.end() != len(key) or match[1] != launch:
        return None
    return int(match[2]), match[3]


def parse_attempt(key: str) -> tuple[int, int] | None:
    """Round and attempt of a manifest or shard key."""
    for part in reversed(key.split("/")):
        match = ATTEMPT.fullmatch(part)
        if match:
            return int(match[1]), int(match[2])
    return None


def parse_round(key: str) -> int | None:
    """The round of a manifest, upload, shard or checkpoint key."""
    for part in reversed(key.split("/")[1:]):
        head = part.partition(".")[0]
        if len(head) == 8 and head.isdigit():
            return int(head)
    return None
