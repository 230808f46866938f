"""Which replica this is, of how many, where they meet, and with how many a run begins.

Arguments win over the environment. Ranks that were started together may be minutes apart when they
come to their first round: what the launcher knows of them travels in two variables, so that no part
of them begins without the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atoll.core.checks import QUORUM_VARIABLE, TOGETHER_VARIABLE, check_int, check_run_id
from atoll.core.errors import ValidationError
from atoll.diloco.round.objects import MAX_RANK
from atoll.objectstore import ObjectStore

# The first variable that is set counts.
RANK = ("ATOLL_RANK", "REPLICA_RANK", "RANK")
# The largest size comes first: tensors are cut into that many shares, which must not change while
# the world grows and shrinks.
WORLD = ("ATOLL_WORLD_MAX", "ATOLL_WORLD_TARGET", "WORLD_SIZE")
URI = "ATOLL_RENDEZVOUS_URI"
MINIMUM_VARIABLE = "ATOLL_WORLD_MIN"
_LAUNCH = re.compile(r"[A-Za-z0-9_-]{1,100}")


class ReplicaConfig(NamedTuple):
    rank: int
    world_size: int
    min_replicas: int
    uri: str | ObjectStore | None  # None: alone, nothing is stored


def find_replica_config(
    uri: str | ObjectStore | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    min_replicas: int | None = None,
    *,
    is_one_of_many: bool = False,
) -> ReplicaConfig:
    """An argument wins over the environment; with neither, a world of one without a store.

    `is_one_of_many`: a replica has several processes, so RANK and WORLD_SIZE are of a process.

    Raises ValidationError naming the argument or the variable that does not fit.
    """
    if uri in (None, ""):
        uri = os.environ.get(URI) or None
    rank = find_rank(rank, is_one_of_many=is_one_of_many)
    if world_size is None:
        world_size = _read(*WORLD[: -1 if is_one_of_many else None]) or 1
    check_int("world_size", world_size, 1, MAX_RANK)
    if rank >= world_size:
        raise ValidationError("rank", rank, f"expected less than world_size, {world_size}")
    minimum = find_min_replicas(min_replicas, world_size)
    if uri is None and world_size > 1:
        raise ValidationError(
            "uri", None, f"{world_size} replicas need a store to meet in: pass uri= or set {URI}"
        )
    return ReplicaConfig(rank, world_size, minimum, uri)


def find_rank(rank: int | None, *, is_one_of_many: bool) -> int:
    """The rank of this replica, as `find_replica_config` finds it."""
    if rank is None:
        rank = _read(*RANK[: -1 if is_one_of_many else None], least=0) or 0
    check_int("rank", rank, 0, MAX_RANK)
    return rank


def read_run_id(run_id: str | None) -> str:
    """The name of the run: its folder in the store."""
    if run_id in (None, ""):
        run_id = os.environ.get("ATOLL_RUN_ID") or os.environ.get("ATOLL_UID") or "run"
    check_run_id("run_id", run_id)
    return run_id


def refuse_unlike(processes: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValidationError if processes have other settings, by name, than process 0.

    They are not of one replica, or would wait for each other in different rounds.
    """
    ranks = sorted({settings["rank"] for settings in processes})
    if len(ranks) > 1:
        raise ValidationError(
            "process_group",
            f"of replicas {', '.join(map(str, ranks))}",
            "expected the processes of one replica, but torch.distributed spans several: start "
            "them with --rendezvous none (rendezvous_backend='none'), or pass process_group= with "
            "the processes of this replica",
        )
    for process, settings in enumerate(processes):
        for name, value in settings.items():
            if value != processes[0][name]:
                raise ValidationError(
                    name,
                    f"{value} in process {process} of the replica",
                    f"expected {processes[0][name]!r}, as in process 0",
                )


class Start(NamedTuple):
    """`together`: so many ranks are waited for in the first round, until its timeout; None: it goes
    by the grace, like any other. `first_quorum`: so many must be in it. `launch` tells the marks of
    ranks that have ended apart from those of another launch.
    """

    launch: str
    together: int | None = None
    first_quorum: int = 1


def find_min_replicas(min_replicas: int | None, world_size: int) -> int:
    """How many a round needs: as asked, by the launch, by $ATOLL_WORLD_MIN, or half of the world.

    Raises ValidationError naming the argument or the variable that does not fit.
    """
    if min_replicas is not None:
        check_int("min_replicas", min_replicas, 1, world_size)
        return min_replicas
    together, quorum = _read_launch(world_size)
    if together and quorum:
        # Whoever they are, one of them was in the first round.
        return together - quorum + 1
    return min(world_size, _read(MINIMUM_VARIABLE) or (world_size + 1) // 2)


def read_start(world_size: int, min_replicas: int | None, grace_s: float | None) -> Start:
    """`min_replicas` and `grace_s` are the caller's, and win over what the launch says."""
    together, quorum = _read_launch(world_size)
    uid = os.environ.get("ATOLL_UID", "")
    name = uid if _LAUNCH.fullmatch(uid) else "launch"
    if together is None or min_replicas is not None:
        return Start(name)
    is_learned = grace_s is None
    return Start(name, together if is_learned else None, first_quorum=quorum or 1)


def _read_launch(world_size: int) -> tuple[int | None, int | None]:
    """How many were started together, and of a launch the quorum of its first round."""
    together, quorum = _read(TOGETHER_VARIABLE), _read(QUORUM_VARIABLE)
    if together is not None:
        together = min(together, world_size)
    return together, None if together is None or quorum is None else min(quorum, together)


def _read(*names: str, least: int = 1) -> int | None:
    """The number in the first variable that is set."""
    for name in names:
        text = os.environ.get(name, "").strip()
        if text:
            if not text.isdecimal() or int(text) < least:
                raise ValidationError(name, text, f"expected a whole number, at least {least}")
            return int(text)
    return None
