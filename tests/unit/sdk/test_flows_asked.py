"""Operations at the edge of what may be asked, with scripted answers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.core.errors import NotFound, Temporary
from atoll.core.status import RankStatus
from atoll.sdk import flows
from atoll.sdk.effects import Reply
from tests.unit.sdk.test_flows import WHO, Script, training


@pytest.mark.parametrize("target", [2, 8])
def test_the_bounds_themselves_may_be_asked_for(target: int) -> None:
    script = Script([training("ready", 4), training("ready", 4, target=target, generation=2)])
    assert script.play(flows.scale(training("ready", 4), target)).world.target == target
    assert script.requests()[-1] == "POST /v1/trainings/t/scale"


def test_a_rerun_is_never_one_of_another_training_of_the_same_name() -> None:
    script = Script([training(uid="uid-2")])
    with pytest.raises(NotFound):
        script.play(flows.rerun(training("failed"), {}, "key"))
    assert script.requests() == ["GET /v1/trainings/t"]


def test_a_delete_that_takes_longer_than_it_may_says_what_is_still_there() -> None:
    alive = training("ready", 2)
    ranks = [RankStatus(rank=rank, phase="Running", attempt=0, started_at=1.0) for rank in (0, 1)]
    alive = replace(alive, status=replace(alive.status, ranks=ranks))
    script = Script([alive, Reply(202, b"{}"), alive])
    with pytest.raises(Temporary, match=r"'t' is not removed after 1 s") as caught:
        script.play(flows.delete(WHO, 1, clock=script.clock))
    assert "still being stopped" in str(caught.value)


def test_a_delete_that_waits_for_nothing_has_only_asked() -> None:
    script = Script([training("ready", 4), Reply(202, b"{}")])
    script.play(flows.delete(WHO, 0, clock=script.clock))
    assert script.requests() == ["GET /v1/trainings/t", "DELETE /v1/trainings/t"]
