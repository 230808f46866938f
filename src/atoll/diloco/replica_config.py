"""Which replica this is, of how many, and where they meet: from arguments or the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from atoll.core.checks import check_int
from atoll.core.errors import ValidationError
from atoll.diloco.start import find_min_replicas
from atoll.objectstore import ObjectStore

_MANY = 10**6

# The first variable that is set counts.
RANK = ("ATOLL_RANK", "REPLICA_RANK", "RANK")
# The largest size comes first: tensors are cut into that many shares, which must not change while
# the world grows and shrinks.
WORLD = ("ATOLL_WORLD_MAX", "ATOLL_WORLD_TARGET", "WORLD_SIZE")
URI = "ATOLL_RENDEZVOUS_URI"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class ReplicaConfig(NamedTuple):
    rank: int
    world_size: int
    min_replicas: int
    uri: str | ObjectStore | None  # None: alone, nothing is stored

    def open_store(self) -> ObjectStore | None:
        is_open = self.uri is None or isinstance(self.uri, ObjectStore)
        return self.uri if is_open else ObjectStore.open(self.uri)  # type: ignore[return-value,arg-type]


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
    uri = uri or os.environ.get(URI) or None
    last = -1 if is_one_of_many else None
    rank = find_rank(rank, is_one_of_many=is_one_of_many)
    world_size = _number("world_size", world_size, WORLD[:last], 1, 1)
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
    return _number("rank", rank, RANK[: -1 if is_one_of_many else None], 0, 0)


def read_run_id(run_id: str | None) -> str:
    """The name of the run: its folder in the store."""
    name = run_id or os.environ.get("ATOLL_RUN_ID") or os.environ.get("ATOLL_UID") or "run"
    if not isinstance(name, str) or not RUN_ID.fullmatch(name):
        raise ValidationError("run_id", name, "expected letters, digits, '.', '_' and '-'")
    return name


def _number(field: str, value: int | None, names: tuple[str, ...], low: int, default: int) -> int:
    if value is None:
        name = next((name for name in names if os.environ.get(name)), None)
        if name is None:
            return default
        field, text = name, os.environ[name]
        if not text.strip().isdigit():
            raise ValidationError(field, text, "expected a whole number")
        value = int(text)
    check_int(field, value, low, _MANY)
    return value


def refuse_spanning(places: Sequence[ReplicaConfig]) -> None:
    """Raises ValidationError if the processes are not of one replica."""
    ranks = sorted({config.rank for config in places})
    if len(ranks) > 1:
        raise ValidationError(
            "process_group",
            f"of replicas {', '.join(map(str, ranks))}",
            "expected the processes of one replica, but torch.distributed spans several: start "
            "them with --rendezvous none (rendezvous_backend='none'), or pass process_group= with "
            "the processes of this replica",
        )
    for process, config in enumerate(places):
        if config != places[0]:
            raise ValidationError(
                "process_group",
                f"process {process} with {config}",
                f"expected the arguments of process 0, {places[0]}",
            )
