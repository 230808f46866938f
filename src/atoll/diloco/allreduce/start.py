"""How a run begins: with whom, and with how many at least.

Ranks that were started together may be minutes apart when they come to their first round. What the
launcher knows of them travels in two variables, so that no part of them begins without the rest.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from atoll.core.checks import QUORUM_VARIABLE, TOGETHER_VARIABLE
from atoll.core.errors import ValidationError

_LAUNCH = re.compile(r"[A-Za-z0-9_-]{1,100}")


@dataclass
class Start:
    """What is known of the start; the runs of all fragments of a model share one.

    `together`: so many ranks are waited for in the first round, until its timeout; None: it goes
    by the grace, like any other. `quorum`: so many must be in it. `launch` tells the marks of ranks
    that have left apart from those of another launch; None: nobody leaves marks. `tells_ends`:
    ranks that are done, or have failed, leave them too, not only those that were told to go.
    """

    quorum: int
    together: int | None = None
    launch: str | None = None
    tells_ends: bool = True
    is_begun: bool = False  # a round is decided: nobody waits for a first one any more

    def begin(self, count: int | None = None) -> None:
        """A round was decided, by `count` ranks if that is known."""
        if not self.is_begun and self.together is not None:
            self.together = count
        self.is_begun = True


class _Launch(NamedTuple):
    together: int
    quorum: int


def read_launch(world_size: int) -> _Launch | None:
    """What a launch tells its replicas; None for all other ranks, which have a minimum told."""
    together, quorum = _read(TOGETHER_VARIABLE), _read(QUORUM_VARIABLE)
    if together is None or quorum is None:
        return None
    together = min(together, world_size)
    return _Launch(together, min(quorum, together))


def least_of(launch: _Launch) -> int:
    """How many a later round needs: whoever they are, one of them was in the first round."""
    return launch.together - launch.quorum + 1


def read_start(
    world_size: int, least: int, min_replicas: int | None, grace_s: float | None
) -> Start:
    """`least` is what every round needs; `min_replicas` and `grace_s` are the caller's, and win."""
    together = _read(TOGETHER_VARIABLE)
    uid = os.environ.get("ATOLL_UID", "")
    name = uid if _LAUNCH.fullmatch(uid) else "launch"
    if together is None or min_replicas is not None:
        return Start(least, launch=name, tells_ends=together is not None)
    launch = read_launch(world_size)
    return Start(
        quorum=least if launch is None else launch.quorum,
        together=min(together, world_size) if grace_s is None else None,
        launch=name,
    )


def _read(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValidationError(name, text, "expected a whole number, at least 1")
    return int(text)
