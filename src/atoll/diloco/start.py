"""How a run begins: with whom, and with how many at least.

Ranks that were started together may be minutes apart when they come to their first round. What the
launcher knows of them travels in two variables, so that no part of them begins without the rest.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from atoll.core.checks import QUORUM_VARIABLE, TOGETHER_VARIABLE, check_int
from atoll.core.errors import ValidationError

MINIMUM_VARIABLE = "ATOLL_WORLD_MIN"

_LAUNCH = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Start(NamedTuple):
    """`together`: so many ranks are waited for in the first round, until its timeout; None: it goes
    by the grace, like any other. `first_quorum`: so many must be in it. `launch` tells the marks of
    ranks that have ended apart from those of another launch. `tells_ends`: ranks that are done
    leave marks, too, not only those that failed or were told to go.
    """

    launch: str
    together: int | None = None
    tells_ends: bool = True
    first_quorum: int = 1


class _Launch(NamedTuple):
    together: int
    quorum: int  # of the first round


def find_min_replicas(min_replicas: int | None, world_size: int) -> int:
    """How many a round needs: as asked, by the launch, by $ATOLL_WORLD_MIN, or half of the world.

    Raises ValidationError naming the argument or the variable that does not fit.
    """
    if min_replicas is not None:
        check_int("min_replicas", min_replicas, 1, world_size)
        return min_replicas
    launch = _read_launch(world_size)
    if launch is not None:
        # Whoever they are, one of them was in the first round.
        return launch.together - launch.quorum + 1
    known = _read(MINIMUM_VARIABLE)
    return min(world_size, (world_size + 1) // 2 if known is None else known)


def read_start(world_size: int, min_replicas: int | None, grace_s: float | None) -> Start:
    """`min_replicas` and `grace_s` are the caller's, and win over what the launch says."""
    together = _read(TOGETHER_VARIABLE)
    uid = os.environ.get("ATOLL_UID", "")
    name = uid if _LAUNCH.fullmatch(uid) else "launch"
    if together is None or min_replicas is not None:
        return Start(name, tells_ends=together is not None)
    launch = _read_launch(world_size)
    return Start(
        name,
        min(together, world_size) if grace_s is None else None,
        first_quorum=1 if launch is None else launch.quorum,
    )


def _read_launch(world_size: int) -> _Launch | None:
    """What a launch tells its replicas; None for all other ranks, which have a minimum told."""
    together, quorum = _read(TOGETHER_VARIABLE), _read(QUORUM_VARIABLE)
    if together is None or quorum is None:
        return None
    together = min(together, world_size)
    return _Launch(together, min(quorum, together))


def _read(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValidationError(name, text, "expected a whole number, at least 1")
    return int(text)
