"""What a rank waits for is told anew by every look."""

from __future__ import annotations

from atoll.core.ranks import merge_ranks, waiting_message
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Observation, RankStatus, Status

WORLD = WorldSize(min=1, target=1, max=1)
SPEC = TrainingSpec(name="tiny", command=["true"], world_size=WORLD)


def test_a_rank_that_nobody_has_seen_shows_what_the_executor_says_now() -> None:
    rank = RankStatus(rank=0)
    for said, shown in [("", "starting"), ("quota: 1", "quota: 1"), ("quota: 2", "quota: 2")]:
        observation = Observation(message=said)
        rank = waiting_message(
            merge_ranks([rank], observation, SPEC, 0.0)[0], Status(), observation, WORLD
        )
        assert rank.message == shown
