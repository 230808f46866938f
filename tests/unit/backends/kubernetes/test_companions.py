"""What runs beside the ranks: as it is asked of the cluster, and read from its pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest

from atoll.backends.kubernetes.companions import (
    Companions,
    FollowMesh,
    address,
    describe_etcd,
    members,
    read_bench,
    ready_etcd,
    render_bench,
    render_companion_service,
    render_etcd,
)
from atoll.backends.kubernetes.followups import PatchJob
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.names import BLOCKED_BY, PART
from atoll.backends.kubernetes.pod import Pod, PodManifest
from atoll.backends.kubernetes.read import read_gate
from atoll.backends.kubernetes.render import gang_name, render_job, render_service
from atoll.core.model import encode
from atoll.core.spec import BenchSpec, RendezvousSpec
from atoll.core.status import BenchResult, BenchStatus, DesiredState, Observation, Status
from atoll.mesh.watch import FABRIC_DIR
from tests.unit.backends.kubernetes.kube import (
    MADE,
    NO_ROOM,
    NOW,
    Json,
    Options,
    Resources,
    ended,
    job,
    observation,
    observe_gang,
    only,
    pod,
    running,
    stamp,
    training,
)
from tests.unit.backends.kubernetes.test_read_gate import waiting
from tests.unit.backends.kubernetes.test_render import GOLDEN, VERSIONS, environment

AGENT = Options(agent_image="atoll:1")
ETCD_V2 = RendezvousSpec(backend="etcd-v2")
BENCHED = training(
    bench=BenchSpec(mode="on-start"),
    resources=Resources(gpu_count=8, gpu_models=["H100"]),
    topology_spread="pack",
)


def rendered() -> list[Json]:
    given = training(mesh=True, rendezvous=ETCD_V2)
    options = Options(agent_image="atoll:1", image_pull_secrets=["registry"])
    strict = training(bench=BenchSpec(mode="on-start", placement="strict"))
    return [
        render_job(given, DesiredState(version=1, size=3), options),
        render_etcd(given, options, None),
        render_companion_service(given, options, None, "etcd"),
        render_bench(BENCHED, AGENT, None, "token"),
        render_bench(strict, Options(agent_image="atoll:1", is_host_network=True), None, "token"),
        render_companion_service(BENCHED, AGENT, None, "bench"),
    ]


def test_requests_are_the_golden_ones(request: pytest.FixtureRequest) -> None:
    path = Path(GOLDEN / "companions.json")
    if request.config.getoption("--update-golden", default=False):
        path.write_text(json.dumps(rendered(), indent=1) + "\n")
    assert path.exists(), f"{path} is missing: run pytest --update-golden, and read it"
    assert json.loads(path.read_text()) == rendered()


@pytest.mark.parametrize("version", VERSIONS)
def test_requests_fit_the_published_schemas(version: str) -> None:
    for manifest in rendered():
        kubernetes_validate.validate(manifest, version, strict=True)


def env_of(options: Options, **spec: Any) -> Json:
    return environment(render_job(training(**spec), DesiredState(version=1, size=3), options))


def test_with_c10d_ranks_meet_at_rank_zero_and_only_the_gate_is_in_etcd() -> None:
    env, name = env_of(AGENT, mesh=True), gang_name(training())
    assert env["BASILICA_RDZV_ENDPOINT"] == f"{name}-0.{name}:29500"
    assert env["MASTER_ADDR"] == f"{name}-0.{name}"
    assert env["ATOLL_MESH_ENDPOINT"] == f"{name}-etcd:2379"


def test_with_etcd_ranks_meet_there_and_wait_at_a_gate_only_if_somebody_opens_it() -> None:
    name = gang_name(training())
    env = env_of(AGENT, rendezvous=ETCD_V2)
    assert env["BASILICA_RDZV_ENDPOINT"] == env["ATOLL_MESH_ENDPOINT"] == f"{name}-etcd:2379"
    env = env_of(Options(), rendezvous=ETCD_V2)
    assert env["BASILICA_RDZV_ENDPOINT"] == f"{name}-etcd:2379"
    assert env["ATOLL_MESH_ENDPOINT"] == ""


def test_what_the_user_has_set_stays() -> None:
    env = env_of(Options(), env={"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"})
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "1")


def test_an_etcd_that_trainings_share_is_used_as_it_is() -> None:
    options = Options(agent_image="atoll:1", etcd_endpoint="etcd.infra:2379")
    made = render_job(training(mesh=True), DesiredState(version=1, size=3), options)
    assert environment(made)["ATOLL_MESH_ENDPOINT"] == "etcd.infra:2379"
    assert not Job(made).is_blocked
    (agent,) = made["spec"]["template"]["spec"]["initContainers"]
    assert "--etcd=etcd.infra:2379" in agent["command"]
    assert f"--folder={FABRIC_DIR}/{training().uid}" in agent["command"]


def test_a_job_is_held_until_its_etcd_answers() -> None:
    made = render_job(training(rendezvous=ETCD_V2), DesiredState(version=1, size=3), Options())
    assert made["spec"]["suspend"] is True
    assert Job(made).is_blocked
    patch = Job(made).unblock()
    assert patch["spec"]["suspend"] is False


def test_a_job_in_a_queue_is_held_at_its_start_gate() -> None:
    """When it runs is the queue's business, and its pods do not start ranks before that."""
    options = Options(kueue_queue="research", is_start_gated=True)
    made = render_job(training(rendezvous=ETCD_V2), DesiredState(version=1, size=1), options)
    assert Job(made).is_blocked
    assert "spec" not in Job(made).unblock()
    made["status"] = {"startTime": stamp(MADE)}
    ranks = [Pod(waiting(rank)) for rank in range(3)]
    given, desired = training(rendezvous=ETCD_V2), DesiredState(version=1, size=3)
    assert not read_gate(given, Job(made), desired, ranks, NOW).is_due
    del made["metadata"]["annotations"][BLOCKED_BY]
    assert read_gate(given, Job(made), desired, ranks, NOW).is_due


def test_the_agent_comes_before_the_start_gate_and_leaves_the_rank_its_class_of_service() -> None:
    options = Options(agent_image="atoll:1", is_start_gated=True)
    needs = Resources(cpu="1", memory="1Gi")
    made = render_job(
        training(mesh=True, resources=needs), DesiredState(version=1, size=3), options
    )
    before = made["spec"]["template"]["spec"]["initContainers"]
    assert [c["name"] for c in before] == ["atoll-fabric", "start-gate"]
    assert before[0]["restartPolicy"] == "Always"
    assert before[0]["resources"]["requests"] == before[0]["resources"]["limits"]


def companion(part: str, index: int = -1, state: Json | None = None, **more: Any) -> Json:
    made = pod(index, state, **more)
    made["metadata"]["labels"] = {PART: part}
    made["metadata"]["name"] = f"{part}-{index}"
    if index < 0:
        del made["metadata"]["annotations"]
    for status in made["status"].get("containerStatuses", ()):
        status["name"] = part
    return made


def etcd(is_ready: bool, ip: str = "10.0.0.9", **more: Any) -> Json:
    made = companion("etcd", conditions={"Ready": {"status": str(is_ready)}}, **more)
    made["status"]["podIP"] = ip
    return made


def test_pods_beside_the_ranks_are_no_ranks() -> None:
    extra = [companion("bench", 0, running()), companion("bench", 1, ended(1)), etcd(True)]
    ranks = [pod(rank, running()) for rank in range(3)]
    found = observation(*ranks, *extra)
    assert [(r.rank, r.state) for r in found.observation.ranks] == [
        (r, "running") for r in range(3)
    ]
    assert Job(job()).is_current(map(Pod, [*ranks, *extra]))
    selector = render_service(training(), Options(), None)["spec"]["selector"]
    assert selector[PART] == "rank"


def test_an_etcd_answers_once_its_pod_is_ready() -> None:
    assert ready_etcd([Pod(etcd(False))]) is None
    assert ready_etcd([Pod(etcd(True, deleted_at=NOW))]) is None
    found = ready_etcd([Pod(etcd(False)), Pod(etcd(True))])
    assert found is not None
    assert address(found) == "10.0.0.9:2379"
    assert address(Pod(etcd(True, ip="fd00::9"))) == "[fd00::9]:2379"
    assert describe_etcd([Pod(companion("etcd", conditions=NO_ROOM, node=None))]).startswith(
        "waits for its etcd: no capacity: 0/2 nodes"
    )


def newest(*pods: Json) -> list[Pod]:
    return [Pod(p) for p in pods]


def placed(manifest: Json, at: float) -> Json:
    """As a watch brings it: only fields that are read are decoded."""
    manifest["status"]["startTime"] = stamp(at)
    read: Json = msgspec.json.decode(msgspec.json.encode(manifest), type=PodManifest)
    return read


def test_agents_are_those_of_the_ranks_that_have_a_node() -> None:
    desired = DesiredState(version=1, size=3)
    pods = [
        placed(pod(0, running(), node="a"), NOW - 60),
        placed(pod(1, running(), node="b"), NOW),
        pod(2, node=None, conditions=NO_ROOM),
    ]
    found = members(newest(*pods), desired)
    assert found is not None
    assert found.agents == {"rank-0@a", "rank-1@b"}
    assert found.placed_at == NOW
    taken = members(newest(pods[0], pod(1, node="b"), pods[2]), desired)
    assert taken is not None
    assert taken.placed_at > NOW, "its kubelet has yet to take it"
    over = members(newest(pods[0], pod(1, ended(0), node="b"), pods[2]), desired)
    assert over is not None
    assert over.agents == {"rank-0@a"}


@pytest.mark.parametrize(
    "pods",
    [
        [],
        [pod(0, running())],  # the second has no pod yet
        [pod(0, running()), pod(1, node=None)],  # its place is not decided
        [pod(0, ended(0)), pod(1, ended(0))],
    ],
)
def test_while_places_are_being_decided_there_is_no_mesh_to_check(pods: list[Json]) -> None:
    assert members(newest(*pods), DesiredState(version=1, size=2)) is None


def test_a_sidecar_that_is_not_ready_is_not_a_silent_node() -> None:
    unready = {"Ready": {"status": "False", "reason": "ContainersNotReady"}}
    assert only(observation(pod(0, running(), conditions=unready))).message == ""
    silent = {"Ready": {"status": "False"}}
    assert "does not answer" in only(observation(pod(0, running(), conditions=silent))).message


def test_a_sidecar_whose_image_is_missing_is_what_its_rank_waits_for() -> None:
    later = {"waiting": {"reason": "PodInitializing"}}
    made = pod(0, later, phase="Pending")
    made["spec"]["initContainers"] = [{"name": "atoll-fabric", "image": "atoll:9"}]
    pull = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    made["status"]["initContainerStatuses"] = [
        {"name": "atoll-fabric", "state": pull},
        {"name": "start-gate", "state": later},
    ]
    assert only(observation(made)).message == "the image atoll:9 cannot be pulled: not found"


def observe(*pods: Json, ranks: tuple[str, ...] = ("a", "b"), **more: Any) -> Any:
    given = {"created_at": NOW - 1, "are_ranks_placed": True} | more
    mine = [Pod(pod(i, running(), node=node)) for i, node in enumerate(ranks)]
    subject = given.pop("subject", BENCHED)
    return read_bench(subject, map(Pod, pods), mine, AGENT, NOW, **given)


def told(result: BenchResult) -> Json:
    return ended(0, "Completed", encode(result).decode())


RESULT = BenchResult(measured_at=NOW, probe_node_a="b", probe_node_b="peer", busbw_gbps_p50=9.0)


def test_the_link_is_measured_once_ranks_have_their_nodes() -> None:
    assert observe(created_at=None, are_ranks_placed=False).state == "waiting"
    assert observe(created_at=None).state == "idle"
    assert observe().state == "waiting"
    assert observe(created_at=NOW - 301).state == "failed"
    floor = training(bench=BenchSpec(mode="on-start", require_gbps=1.0))
    assert observe(subject=floor, created_at=None, are_ranks_placed=False).state == "idle"


def test_the_bench_runs_when_both_of_its_pods_do() -> None:
    one = companion("bench", 0, running(), node="a")
    assert observe(one).state == "waiting"
    lost = companion("bench", 1, node=None, conditions=NO_ROOM)
    found = observe(one, lost)
    assert found.state == "waiting"
    assert found.message.startswith("no capacity: 0/2 nodes are available")
    found = observe(one, companion("bench", 1, running(), node="b"))
    assert (found.state, found.message) == ("running", "measuring a with b")


@pytest.mark.parametrize(
    ("nodes", "is_own"), [(("a", "b"), True), (("a", "c"), False), (("a", "a"), True)]
)
def test_the_result_names_the_nodes_it_was_measured_on(
    nodes: tuple[str, str], is_own: bool
) -> None:
    a = companion("bench", 0, ended(0, "Completed"), phase="Succeeded", node=nodes[0])
    b = companion("bench", 1, told(RESULT), phase="Succeeded", node=nodes[1])
    found = observe(a, b).result
    assert (found.probe_node_a, found.probe_node_b) == nodes
    assert found.is_worker_pair is is_own
    assert found.busbw_gbps_p50 == 9.0


def test_before_there_are_ranks_no_node_is_theirs() -> None:
    a = companion("bench", 0, ended(0, "Completed"), phase="Succeeded", node="a")
    b = companion("bench", 1, told(RESULT), phase="Succeeded", node="b")
    assert observe(a, b, ranks=()).result.is_worker_pair is False


def test_a_bench_that_fails_says_why() -> None:
    a = companion("bench", 0, running(), node="a")
    b = companion("bench", 1, ended(1, "Error", "netbench: no route"), phase="Failed", node="b")
    found = observe(a, b)
    assert found.state == "failed"
    assert found.message == "the pod on b ended with Error: netbench: no route"
    rubbish = companion("bench", 1, ended(0, "Completed", "<html>"), phase="Succeeded", node="b")
    assert observe(a, rubbish).state == "failed"
    never = companion("bench", 1, {"waiting": {"reason": "InvalidImageName"}}, phase="Pending")
    assert observe(a, never).state == "failed"


def test_pods_of_a_bench_that_are_leaving_are_not_looked_at() -> None:
    gone = companion("bench", 0, running(), deleted_at=NOW)
    assert observe(gone, created_at=None).state == "idle"


def test_two_nodes_are_preferred_to_one_however_many_ranks_are_on_it() -> None:
    rules = render_bench(BENCHED, AGENT, None, "t")["spec"]["template"]["spec"]["affinity"]
    (own_keys_only,) = rules["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (near,) = rules["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert own_keys_only["weight"] >= 100 * near["weight"]


def test_bench_pods_go_where_ranks_may_and_take_no_gpu() -> None:
    made = render_bench(BENCHED, AGENT, None, "t")["spec"]["template"]["spec"]
    ranks = render_job(BENCHED, DesiredState(version=1, size=2), AGENT)["spec"]["template"]["spec"]
    assert made["affinity"]["nodeAffinity"] == ranks["affinity"]["nodeAffinity"]
    assert made["tolerations"] == ranks["tolerations"]
    assert "limits" not in made["containers"][0]["resources"]


def test_names_of_everything_beside_fit_a_dns_label() -> None:
    for name in ("a" * 63, "7" * 63):
        made = render_bench(training(name=name, bench=BENCHED.spec.bench), AGENT, None, "t")
        assert len(made["metadata"]["name"] + "-0") <= 63


def asked_beside(*pods: Json, options: Options = AGENT, **more: Any) -> Observation:
    """One look beside the ranks; any request would fail."""
    gang = more.pop("gang", job())
    subject = training(**more)
    cluster: Any = object()
    parts = Companions(cluster, options, lambda key: None, is_owner=True)
    ranks = [p for p in pods if p["metadata"].get("labels", {}).get(PART, "rank") == "rank"]
    others = [Pod(p) for p in pods if p not in ranks]
    found = observe_gang(subject, gang, ranks, options, NOW)
    return parts.observe(subject, Job(gang), found.newest, others, found.observation, NOW)


def kinds(found: Observation) -> list[str]:
    return [type(followup).__name__ for followup in found.followups]


HELD_JOB = job(annotations={BLOCKED_BY: "etcd"}, suspend=True)


def test_an_etcd_that_is_not_there_is_asked_for() -> None:
    found = asked_beside(rendezvous=ETCD_V2, gang=HELD_JOB)
    assert kinds(found) == ["StartEtcd"]
    assert (found.message, found.again_in_s) == ("waits for its etcd", 5.0)
    assert kinds(asked_beside(etcd(False), rendezvous=ETCD_V2, gang=HELD_JOB)) == []


@pytest.mark.parametrize("ending", [{"cancel": True}, {"status": Status(failing="RankFailed")}])
def test_no_etcd_is_started_for_ranks_that_are_being_stopped(ending: Json) -> None:
    assert kinds(asked_beside(rendezvous=ETCD_V2, gang=HELD_JOB, **ending)) == []


def test_a_job_is_let_go_once_its_etcd_answers() -> None:
    found = asked_beside(etcd(True), rendezvous=ETCD_V2, gang=HELD_JOB)
    (begun,) = found.followups
    assert isinstance(begun, PatchJob)
    assert begun.patch == Job(HELD_JOB).unblock()


def test_a_mesh_is_followed_by_a_chore_and_looked_at_next() -> None:
    ranks = [pod(rank, running(), node=f"node-{rank}") for rank in range(3)]
    found = asked_beside(etcd(True), *ranks, mesh=True)
    (follow,) = found.followups
    assert isinstance(follow, FollowMesh)
    assert (follow.endpoint, found.again_in_s) == ("10.0.0.9:2379", 0.0)
    assert follow.members is not None
    assert len(follow.members.agents) == 3
    assert found.mesh is not None
    assert found.mesh.message == "its ranks are being placed"
    assert kinds(asked_beside(*ranks, mesh=True)) == ["StartEtcd"]  # nowhere to follow it


def test_a_bench_is_cleared_away_in_the_pass_that_stores_its_end() -> None:
    on_start = BENCHED.spec.bench
    one = companion("bench", 0, running(), node="a")
    two = companion("bench", 1, running(), node="b")
    found = asked_beside(one, two, bench=on_start)
    assert (kinds(found), found.again_in_s) == ([], 5.0)
    over = companion("bench", 1, told(RESULT), phase="Succeeded", node="b")
    found = asked_beside(one, over, bench=on_start)
    assert kinds(found) == ["ClearBench"]
    assert found.bench is not None
    assert found.bench.result is not None
    for phase in ("Succeeded", "Failed", "TimedOut", "Skipped"):
        done = Status(bench=BenchStatus(phase=phase))
        assert kinds(asked_beside(one, two, bench=on_start, status=done)) == ["ClearBench"]
        assert kinds(asked_beside(bench=on_start, status=done)) == []
