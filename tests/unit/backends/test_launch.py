"""What a rank runs and finds is the same on every backend, but for what is listed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.backends.kubernetes.render import rank_layout as cluster_place
from atoll.backends.kubernetes.render import render_job
from atoll.backends.launch import (
    MEETING_VARIABLES,
    TOGETHER,
    TORCHRUN_VARIABLES,
    WORLD_VARIABLES,
    Meeting,
    RankLaunch,
    RankLayout,
    is_one_host,
    meeting_environment,
    render_launch,
)
from atoll.backends.local.executor import rank_layout as local_place
from atoll.backends.local.executor import render_desired
from atoll.core.spec import RendezvousSpec, Source, WorldSize
from atoll.core.status import DesiredState
from tests.unit.backends.kubernetes.kube import Options, training

DIRECTORY = Path("/state/uid")
# What a backend knows and another does not.
OF_LOCAL = {"ATOLL_REPORTS", TOGETHER}
# Locally the supervisor sets these for each attempt, with what it alone knows.
OF_THE_CLUSTER = {"ATOLL_ATTEMPT", "ATOLL_RESULT"}
DIFFERENT = {
    *MEETING_VARIABLES,
    *("ATOLL_RENDEZVOUS_URI", "ATOLL_RESULT", "NODE_NAME", "LOCAL_WORLD_SIZE"),
}


def local_launch(**spec: Any) -> RankLaunch:
    return render_launch(training(**spec), local_place(DIRECTORY))


def cluster_launch(options: Options | None = None, **spec: Any) -> RankLaunch:
    one = training(**spec)
    return render_launch(one, cluster_place(one, options or Options()))


def gang(base: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return render_desired(
        training(**spec),
        DesiredState(version=1, size=3),
        directory=DIRECTORY,
        host="here",
        rendezvous={},
        base=base or {},
    )


@pytest.mark.parametrize("backend", ["c10d", "static", "etcd-v2"])
def test_local_and_cluster_ranks_find_the_same_variables(backend: Any) -> None:
    spec = {
        "rendezvous": RendezvousSpec(backend=backend),
        "env": {"A": "1"},
        "nccl_env": {"NCCL_DEBUG": "INFO", "A": "2"},
    }
    document = gang(**spec)
    local = dict(document["env"]) | dict.fromkeys(document["rank_variables"], "0")
    local |= meeting_environment(backend, Meeting("127.0.0.1", 4000, "127.0.0.1:2379"))
    job = render_job(training(**spec), DesiredState(version=1, size=3), Options())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    cluster = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert set(local) - OF_LOCAL == set(cluster) - OF_THE_CLUSTER
    values = {name: value for name, value in cluster.items() if value is not None}
    assert values.items() - local.items() <= {(name, values.get(name)) for name in DIFFERENT}
    assert local["A"] == values["A"] == "1"


def test_ranks_are_told_how_many_were_started_together() -> None:
    one = training()
    desired = DesiredState(version=2, size=2)
    rest: dict[str, Any] = {"directory": DIRECTORY, "host": "here", "rendezvous": {}, "base": {}}
    assert render_desired(one, desired, **rest)["env"][TOGETHER] == "2"
    later = render_desired(one, desired, **rest, started_together="3")
    assert later["env"][TOGETHER] == "3", "a rank that joins later finds the same"
    assert TOGETHER not in cluster_launch().env, "its gate may open with fewer"
    all_or_none = WorldSize(min=3, target=3, max=3)
    assert cluster_launch(world_size=all_or_none).env[TOGETHER] == "3"
    of_launch = {TOGETHER: "7", "ATOLL_QUORUM": "4"}
    assert of_launch.items() <= gang(env=of_launch)["env"].items()
    assert of_launch.items() <= cluster_launch(env=of_launch).env.items()


def test_the_rank_is_under_the_name_that_a_launch_chose_too() -> None:
    chosen = {"ATOLL_RANK_ENV": "MY_RANK"}
    for launch in (local_launch(env=chosen), cluster_launch(env=chosen)):
        assert launch.rank_variables[-1] == "MY_RANK"
    usual = local_launch(env={"ATOLL_RANK_ENV": "RANK"}).rank_variables
    assert usual == local_launch().rank_variables


def test_what_the_user_has_set_stays_on_every_backend() -> None:
    own = {"MASTER_ADDR": "10.0.0.1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    for launch in (local_launch(env=own), cluster_launch(env=own)):
        assert own.items() <= launch.env.items()
        assert not own.keys() & set(launch.later)


def test_where_ranks_meet_is_never_inherited_from_the_control_plane() -> None:
    inherited = dict.fromkeys(MEETING_VARIABLES, "of the control plane") | {"PATH": "/bin"}
    document = gang(inherited, env={"MASTER_PORT": "7"})
    assert document["env"]["PATH"] == "/bin"
    assert {name for name in MEETING_VARIABLES if name in document["env"]} == {"MASTER_PORT"}
    assert document["env"]["MASTER_PORT"] == "7"


def test_what_is_known_later_is_everything_that_says_where_ranks_meet() -> None:
    assert set(local_launch().later) == set(MEETING_VARIABLES)
    assert set(meeting_environment("c10d", Meeting("m", 1))) == set(MEETING_VARIABLES)
    assert cluster_launch().later == ()


def test_the_endpoint_is_the_etcd_where_ranks_meet_there() -> None:
    meeting = Meeting("m", 1, etcd="e:2379")
    assert meeting_environment("etcd-v2", meeting)["BASILICA_RDZV_ENDPOINT"] == "e:2379"
    assert meeting_environment("c10d", meeting)["BASILICA_RDZV_ENDPOINT"] == "m:1"


TORCHRUN = set(TORCHRUN_VARIABLES) - {"PET_NODE_RANK"}


def test_a_bare_torchrun_finds_one_elastic_world_in_its_own_variables() -> None:
    launch = cluster_launch(
        command=["torchrun", "--nproc-per-node", "2", "train.py", "--standalone"],
        world_size=WorldSize(min=2, target=3, max=4),
        env={"PET_RDZV_CONF": "timeout=7"},
    )
    assert launch.env["PET_NNODES"] == "2:4"
    assert launch.env["PET_RDZV_BACKEND"] == "c10d"
    assert launch.env["PET_RDZV_ENDPOINT"] == launch.env["BASILICA_RDZV_ENDPOINT"]
    assert launch.env["PET_RDZV_ID"] == launch.env["BASILICA_RDZV_ID"]
    assert launch.env["PET_RDZV_CONF"] == "timeout=7", "the user's own wins"


def test_the_static_rendezvous_of_torchrun_knows_who_is_who() -> None:
    launch = local_launch(rendezvous=RendezvousSpec(backend="static"))
    assert "PET_NODE_RANK" in launch.rank_variables
    assert "PET_NNODES" in launch.size_variables
    assert "PET_NNODES" not in launch.env


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        (["torchrun", "--standalone", "train.py"], True),
        (["torchrun", "--nnodes=1", "--nproc-per-node=2", "train.py"], True),
        (["torchrun", "--nnodes", "1:1", "-m", "package.train"], True),
        (["/opt/bin/torchrun", "--nproc-per-node", "gpu", "--standalone", "train.py"], True),
        (["python", "-m", "torch.distributed.run", "--standalone", "train.py"], True),
        (["sh", "-c", "cd /x && exec torchrun --standalone train.py"], True),
        (["sh", "-c", 'torchrun --nnodes="1" train.py; echo done'], True),
        (["torchrun", "train.py", "--nnodes=1"], False),
        (["torchrun", "-m", "train", "--standalone"], False),
        (["torchrun", "--nnodes=1:4", "train.py"], False),
        (["torchrun", "--nnodes=16", "train.py"], False),
        (["python", "train.py", "--standalone"], False),
        (["sh", "-c", "torchrun --standalone a.py; torchrun b.py"], False),
    ],
)
def test_a_torchrun_for_one_host_keeps_meaning_one_host(command: list[str], is_one: bool) -> None:
    assert is_one_host(training(command=command).spec) is is_one
    for launch in (cluster_launch(command=command), local_launch(command=command)):
        assert ("PET_NNODES" in launch.env) is not is_one
    document = gang(dict.fromkeys(TORCHRUN, "inherited"), command=command)
    assert bool(TORCHRUN & document["env"].keys()) is not is_one


def test_a_shell_script_is_read_for_its_torchrun_and_a_variable_counts_too() -> None:
    text = b"set -e\npip install x\ntorchrun --standalone train.py\n"
    source = Source(kind="shell", content=text, filename="run.sh")
    assert is_one_host(training(command=None, source=source).spec)
    assert is_one_host(training(env={"PET_NNODES": "1"}).spec)


def test_without_a_rendezvous_a_rank_is_in_no_world_but_knows_its_number() -> None:
    away = {*WORLD_VARIABLES, *TORCHRUN_VARIABLES}
    none = RendezvousSpec(backend="none")
    document = gang(dict.fromkeys(away, "inherited"), rendezvous=none)
    local = document["env"].keys() | set(document["rank_variables"])
    local |= meeting_environment("none", Meeting("m", 1)).keys()
    launch = cluster_launch(rendezvous=none)
    names = (launch.env, launch.rank_variables, launch.size_variables)
    for seen in (local, set().union(*names)):
        assert not away & seen
        assert {"REPLICA_RANK", "ATOLL_RANK", "ATOLL_WORLD_MAX", "ATOLL_WORLD_TARGET"} <= seen
    own = cluster_launch(rendezvous=none, env={"MASTER_ADDR": "here"})
    assert own.env["MASTER_ADDR"] == "here"


def test_a_torchrun_starts_its_workers_again_with_every_rendezvous() -> None:
    # With the store shared they look for those that are gone: "Gloo connectFullMesh failed".
    for backend in ("none", "c10d", "static", "etcd-v2"):
        meeting = meeting_environment(backend, Meeting("m", 1))
        assert meeting["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1", backend


PLACE = RankLayout(
    python="py",
    shell="ash",
    source="/s",
    packages=None,
    has_atoll=False,
    rendezvous_uri="",
    meeting=None,
)
WITH_ATOLL = PLACE._replace(has_atoll=True, packages="/p")
ENTRY = ("py", "-m", "atoll.agent.entrypoint")
COMMANDS: dict[str, tuple[str, RankLayout, list[str]]] = {
    "script": ("script", PLACE, ["py", "/s/code", "a"]),
    "script with atoll": (
        *("script", WITH_ATOLL),
        [*ENTRY, "--from", "/home/me", "script", "/s/code", "a"],
    ),
    "function": ("function", PLACE, [*ENTRY, "function", "/s/code", "a"]),
    "function with atoll": (
        *("function", WITH_ATOLL),
        [*ENTRY, "--from", "/home/me", "function", "/s/code", "a"],
    ),
    "shell": ("shell", WITH_ATOLL, ["ash", "/s/code", "a"]),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_code_that_was_shipped_is_run_by_its_kind(what: str) -> None:
    kind, record_store, command = COMMANDS[what]
    source = Source(kind=kind, content=b"x", filename="code", directory="/home/me")
    spec = {"command": None, "source": source, "args": ["a"]}
    assert render_launch(training(**spec), record_store).command == command


def test_packages_are_installed_before_the_command_runs() -> None:
    one = training(command=["run"], pip_packages=["einops>=0.8"])
    assert render_launch(one, PLACE).command == [
        *("sh", "-c", "py -m pip install --quiet 'einops>=0.8' && exec \"$@\"", "sh", "run"),
    ]
    assert render_launch(one, WITH_ATOLL).command == [
        *("py", "-m", "atoll.agent.install", "/p", "einops>=0.8", "--", "run"),
    ]


def test_a_run_with_an_id_is_where_the_next_training_with_it_finds_it() -> None:
    env = local_launch(run_id="exp-7").env
    assert env["ATOLL_RUN_ID"] == "exp-7"
    assert env["ATOLL_RENDEZVOUS_URI"] == "file:///runs"  # DIRECTORY is two folders down
    own = local_launch(run_id="exp-7", rendezvous=RendezvousSpec(uri="s3://b/x")).env
    assert own["ATOLL_RENDEZVOUS_URI"] == "s3://b/x"
    assert "ATOLL_RUN_ID" not in local_launch().env
