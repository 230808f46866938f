"""What a rank waits for is told anew by every look."""

from __future__ import annotations

from atoll.core.ranks import waiting_message
from atoll.core.spec import WorldSize
from atoll.core.status import RankStatus, Seen, Status

WORLD = WorldSize(min=1, target=1, max=1)


def test_a_rank_that_nobody_has_seen_shows_what_the_executor_says_now() -> None:
    rank = RankStatus(rank=0)
    for said, shown in [("", "starting"), ("quota: 1", "quota: 1"), ("quota: 2", "quota: 2")]:
        rank = waiting_message(rank, Status(), Seen(message=said), WORLD)
        assert rank.message == shown
