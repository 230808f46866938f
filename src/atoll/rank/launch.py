"""Command and environment of a rank, rendered in one place for every backend. Pure.

A backend describes where its ranks run (`RankPlace`) and applies the result (`RankLaunch`): it
fills in the values of each rank. Slow imports are avoided: the supervisor of local ranks loads
this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from atoll.core.spec import TrainingSpec
    from atoll.core.status import Training

ETCD_BACKEND = "etcd-v2"

# Set to the rank's own number.
RANK_VARIABLES = ("RANK", "REPLICA_RANK", "ATOLL_RANK", "BASILICA_RANK")
# Set by a launch of replicas: the name of one more variable with the rank's own number.
RANK_ENV = "ATOLL_RANK_ENV"
# How many ranks were started together.
TOGETHER = "ATOLL_STARTED_TOGETHER"
# Set to the number of ranks that are wanted when the rank starts.
SIZE_VARIABLES = ("WORLD_SIZE", "ATOLL_WORLD_TARGET", "BASILICA_WORLD_TARGET")
# Set by `meeting_environment` once the meeting point is known.
MEETING_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "BASILICA_RDZV_ENDPOINT",
    "ATOLL_MESH_ENDPOINT",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)


class Meeting(NamedTuple):
    """Where ranks find each other. `etcd` and `mesh` are endpoints; empty if there is none."""

    master: str
    port: int
    etcd: str = ""
    mesh: str = ""  # of the etcd with the mesh gate's keys


class RankPlace(NamedTuple):
    """Where the ranks of a backend run."""

    python: str
    shell: str
    source: str  # folder with the shipped code
    packages: str | None  # folder for pip packages that ranks share; None: the Python's own
    has_atoll: bool  # always there to be imported; without it, only functions need it
    rendezvous_uri: str  # for trainings that name none
    meeting: Meeting | None  # None: known later, by whoever starts the ranks
    is_one_host: bool = False  # a rank's number is then its number on its host, too


class RankLaunch(NamedTuple):
    """What to start. A rank's environment is `env` and a value for each of the listed names.

    What `later` names is taken from `meeting_environment` when it is known, and never inherited.
    """

    command: list[str]
    env: dict[str, str]
    rank_variables: tuple[str, ...]
    size_variables: tuple[str, ...]
    node_variables: tuple[str, ...]
    later: tuple[str, ...]


def render_launch(training: Training, place: RankPlace) -> RankLaunch:
    """The launch of a rank. Variables of the user win, except for names that atoll reserves."""
    spec, world = training.spec, training.spec.world_size
    own = {**spec.nccl_env, **spec.env}
    # A backend "none", where ranks do not meet, leaves out what torch.distributed goes by: these
    # variables, RANK and LOCAL_RANK of `rank_variables`, WORLD_SIZE of `size_variables`.
    meeting = None
    if place.meeting is not None:
        meeting = meeting_environment(spec.rendezvous.backend, place.meeting)
    env = {
        **{name: value for name, value in (meeting or {}).items() if name not in own},
        **own,
        "ATOLL_NAME": spec.name,
        "ATOLL_NAMESPACE": training.namespace,
        "ATOLL_UID": training.uid,
        "ATOLL_WORLD_MIN": str(world.min),
        "ATOLL_WORLD_MAX": str(world.max),
        "ATOLL_RENDEZVOUS_URI": spec.rendezvous.uri or place.rendezvous_uri,
        "BASILICA_RDZV_ID": f"{spec.name}-{training.uid[:8]}",
        "BASILICA_WORLD_MIN": str(world.min),
        "BASILICA_WORLD_MAX": str(world.max),
        "BASILICA_GPUS_PER_POD": str(max(spec.resources.gpu_count, 1)),
    }
    # Replicas of a launch have it from there. With fewer than all, only a backend that starts its
    # ranks itself knows how many it let go.
    if TOGETHER not in own and world.min == world.target:
        env[TOGETHER] = str(world.target)
    by_rank = (*RANK_VARIABLES, *(("LOCAL_RANK",) if place.is_one_host else ()))
    if RANK_ENV in own and own[RANK_ENV] not in by_rank:
        by_rank = (*by_rank, own[RANK_ENV])
    filled_in = {*by_rank, *SIZE_VARIABLES, "NODE_NAME"}
    return RankLaunch(
        command=render_command(spec, place),
        env={name: value for name, value in env.items() if name not in filled_in},
        rank_variables=by_rank,
        size_variables=SIZE_VARIABLES,
        node_variables=("NODE_NAME",),
        later=() if meeting is not None else tuple(n for n in MEETING_VARIABLES if n not in own),
    )


def render_command(spec: TrainingSpec, place: RankPlace) -> list[str]:
    if spec.source is None:
        command = [*(spec.command or ()), *spec.args]
    else:
        command = [*_entry(spec, place), f"{place.source}/{spec.source.filename}", *spec.args]
    if not spec.pip_packages:
        return command
    if place.packages is not None and place.has_atoll:
        prepare = [place.python, "-m", "atoll.rank.prepare", place.packages]
        return [*prepare, *spec.pip_packages, "--", *command]
    import shlex  # imported here: the supervisor does not need it

    install = shlex.join([place.python, "-m", "pip", "install", "--quiet", *spec.pip_packages])
    return ["sh", "-c", f'{install} && exec "$@"', "sh", *command]


def _entry(spec: TrainingSpec, place: RankPlace) -> list[str]:
    """The command that runs the shipped code."""
    assert spec.source is not None
    if spec.source.kind == "shell":
        return [place.shell]
    if spec.source.kind == "script" and not place.has_atoll:
        return [place.python]
    entry = [place.python, "-m", "atoll.rank.entrypoint"]
    if place.has_atoll and spec.source.directory is not None:
        entry += ["--from", spec.source.directory]
    return [*entry, spec.source.kind]


def needs_etcd(backend: str, *, has_mesh: bool) -> bool:
    """Whether the training needs an etcd: for its rendezvous, or for the keys of the mesh gate."""
    return backend == ETCD_BACKEND or has_mesh


def meeting_environment(backend: str, meeting: Meeting) -> dict[str, str]:
    is_etcd = backend == ETCD_BACKEND
    return {
        "MASTER_ADDR": meeting.master,
        "MASTER_PORT": str(meeting.port),
        "BASILICA_RDZV_ENDPOINT": meeting.etcd if is_etcd else f"{meeting.master}:{meeting.port}",
        "ATOLL_MESH_ENDPOINT": meeting.mesh,
        # With the store shared, as torch has it by default, node 0 publishes the store's address
        # in the first round only. A node that joins later waits for it in the new round, under
        # c10d and etcd-v2 alike, and after 60 s the whole job fails.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
