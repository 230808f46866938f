"""What a look at the mesh does to conditions and events."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.clock import Now
from atoll.core.mesh import MeshState
from atoll.core.plan import plan
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import DesiredState, MeshStatus, Observation, ObservedRank, Status, Training


def observe(mesh: MeshStatus | None) -> Observation:
    ranks = [ObservedRank(rank=0, state="running", started_at=1.0)]
    return Observation(
        ranks=ranks, desired=DesiredState(version=1, size=1), is_supervised=True, mesh=mesh
    )


def conditions(status: Status) -> dict[str, tuple[str, str, str, float]]:
    return {
        c.type: (c.status, c.reason, c.message, c.last_transition_at)
        for c in status.conditions
        if "Mesh" in c.type
    }


def test_conditions_follow_the_mesh_and_keep_the_time_of_change() -> None:
    spec = TrainingSpec(name="t", world_size=WorldSize(min=1, target=1, max=1), command=["x"])
    training = Training(namespace="n", uid="u", spec=spec)
    made = plan(training, observe(None), Now.at(1.0))
    assert conditions(made.status) == {}
    cut = "cannot talk: a <-> b"
    steps = [
        (2.0, MeshStatus(state=MeshState.PENDING, message="no report from b"), ("False", "False")),
        (3.0, MeshStatus(state=MeshState.READY, hosts=2), ("True", "False")),
        (4.0, MeshStatus(state=MeshState.DEGRADED, message=cut), ("False", "True")),
        (5.0, None, ("False", "True")),  # a look without word of the mesh changes nothing
    ]
    for now, mesh, (capable, degraded) in steps:
        training = replace(training, status=made.status)
        made = plan(training, observe(mesh), Now.at(now))
        found = conditions(made.status)
        assert (found["MeshCapable"][0], found["DegradedMesh"][0]) == (capable, degraded)
        if now == 4.0:
            assert [(e.type, e.reason, e.message) for e in made.events] == [
                ("Warning", "MeshDegraded", cut)
            ]
    assert found["DegradedMesh"] == ("True", "MeshDegraded", cut, 4.0)
    assert made.status.phase == "ready"  # degraded is a condition, not a phase
