"""Command and environment of a rank, rendered in one place for every backend. Pure.

A backend describes where its ranks run (`RankLayout`) and applies the result (`RankLaunch`): it
fills in the values of each rank. Slow imports are avoided: the supervisor of local ranks loads
this file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from atoll.core.spec import TrainingSpec
    from atoll.core.status import Training

ETCD_BACKEND = "etcd-v2"
NO_BACKEND = "none"  # ranks do not meet

# Set to the rank's own number.
RANK_VARIABLES = ("RANK", "REPLICA_RANK", "ATOLL_RANK", "BASILICA_RANK")
# Set by a launch of replicas: the name of one more variable with the rank's own number.
RANK_ENV = "ATOLL_RANK_ENV"
# How many ranks were started together.
TOGETHER = "ATOLL_STARTED_TOGETHER"
# Set by a launch of replicas: how many of them a first round needs.
QUORUM = "ATOLL_QUORUM"
# Set to the number of ranks that are wanted when the rank starts.
SIZE_VARIABLES = ("WORLD_SIZE", "ATOLL_WORLD_TARGET", "BASILICA_WORLD_TARGET")
# Set by `meeting_environment` once the meeting point is known.
MEETING_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "BASILICA_RDZV_ENDPOINT",
    "PET_RDZV_ENDPOINT",
    "ATOLL_MESH_ENDPOINT",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)
# With the store shared, as torch has it by default, addresses of the round before stay in it. A
# node that joins later waits for that of the new round, under c10d and etcd-v2 alike, and after
# 60 s the whole job fails. Workers that a torchrun starts again look for those that are gone.
UNSHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# What torchrun goes by where its command line says nothing.
TORCHRUN_VARIABLES = (
    "PET_NNODES",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID",
    "PET_RDZV_CONF",
    "PET_NODE_RANK",
)
# Which process of the world a rank is. With these alone, it meets nobody.
LAYOUT_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# What torch.distributed, and frameworks on it, take for a world of processes.
WORLD_VARIABLES = (*LAYOUT_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
# As torchrun has it: several processes on a host would otherwise use all of its cores each.
SHARED_HOST_DEFAULTS = {"OMP_NUM_THREADS": "1"}
# Ranks may start minutes apart. A last call is for ranks that nobody asked for yet: those between
# target and max.
TORCHRUN_CONF = "timeout=1500,join_timeout=1500,last_call_timeout=5"


class Meeting(NamedTuple):
    """Where ranks find each other. `etcd` and `mesh` are endpoints; empty if there is none."""

    master: str
    port: int
    etcd: str = ""
    mesh: str = ""  # of the etcd with the mesh gate's keys


class CodeLayout(NamedTuple):
    """Where a rank finds the code that travels with its training."""

    unpack: str  # the file agent/unpack.py
    archive: str  # a file, or a folder with its parts
    root: str  # the folder to unpack it to


class RankLayout(NamedTuple):
    """Where the ranks of a backend run."""

    python: str
    shell: str
    source: str  # folder with the shipped code
    packages: str | None  # folder for pip packages that ranks share; None: the Python's own
    has_atoll: bool  # always there to be imported; without it, only functions need it
    rendezvous_uri: str  # for trainings that name none
    meeting: Meeting | None  # None: known later, by whoever starts the ranks
    is_one_host: bool = False  # all ranks of the training run on it
    # Devices that all ranks of the one host see; None: each rank has its own, if any.
    shared_devices: int | None = None
    code: CodeLayout | None = None  # None: ranks run where the code is
    metrics_uri: str = ""  # where `atoll.report` hands on what ranks tell; empty: nowhere
    report_token: str = ""  # needed there, where that is the control plane
    runs_uri: str = ""  # for trainings that name a run and no store: it outlives them


class RankLaunch(NamedTuple):
    """What to start. A rank's environment is `env` and a value for each of the listed names.

    What `later` names is taken from `meeting_environment` when it is known, and never inherited.
    `defaults` count only where neither the training nor the parent process has set them. Where
    `local_ranks` is above 1, LOCAL_RANK is the rank modulo it.
    """

    command: list[str]
    env: dict[str, str]
    rank_variables: tuple[str, ...]
    size_variables: tuple[str, ...]
    node_variables: tuple[str, ...]
    later: tuple[str, ...]
    defaults: dict[str, str]
    local_ranks: int


def render_launch(training: Training, layout: RankLayout) -> RankLaunch:
    """The launch of a rank. Variables of the user win, except for names that atoll reserves."""
    spec, world = training.spec, training.spec.world_size
    backend = spec.rendezvous.backend
    own = {**spec.nccl_env, **spec.env}
    unset = unset_variables(spec, own)
    meeting = None
    if layout.meeting is not None:
        meeting = meeting_environment(backend, layout.meeting)
    env = {
        **{name: value for name, value in (meeting or {}).items() if name not in own},
        **{n: v for n, v in _torchrun(spec, training.uid).items() if n not in own},
        **own,
        "ATOLL_NAME": spec.name,
        "ATOLL_NAMESPACE": training.namespace,
        "ATOLL_UID": training.uid,
        "ATOLL_WORLD_MIN": str(world.min),
        "ATOLL_WORLD_MAX": str(world.max),
        "ATOLL_RENDEZVOUS_URI": store_uri_of(spec, layout),
        "BASILICA_RDZV_ID": _rendezvous_id(spec, training.uid),
        "BASILICA_WORLD_MIN": str(world.min),
        "BASILICA_WORLD_MAX": str(world.max),
        "BASILICA_GPUS_PER_POD": str(max(spec.resources.gpu_count, 1)),
    }
    if spec.run_id is not None:
        env["ATOLL_RUN_ID"] = spec.run_id
    if layout.metrics_uri:
        env["ATOLL_REPORTS"] = layout.metrics_uri
    if layout.report_token:
        env["ATOLL_REPORTS_TOKEN"] = layout.report_token
    # Replicas of a launch have it from there. With fewer than all, only a backend that starts its
    # ranks itself knows how many it let go.
    if TOGETHER not in own and world.min == world.target:
        env[TOGETHER] = str(world.target)
    local_ranks = local_world_size(world.target, layout)
    env["LOCAL_WORLD_SIZE"] = str(local_ranks)
    env["LOCAL_RANK"] = "0"
    by_rank = [*RANK_VARIABLES]
    if RANK_ENV in own and own[RANK_ENV] not in by_rank:
        by_rank.append(own[RANK_ENV])
    by_size = [*SIZE_VARIABLES]
    if backend == "static":  # torchrun's own rendezvous needs to know who is who
        by_rank += ["PET_NODE_RANK"] if "PET_NODE_RANK" not in own else []
        by_size += ["PET_NNODES"] if "PET_NNODES" not in own else []
    rank_variables = tuple(name for name in by_rank if name not in unset)
    size_variables = tuple(name for name in by_size if name not in unset)
    filled_in = {*rank_variables, *size_variables, "NODE_NAME"}
    later = () if meeting is not None else tuple(n for n in MEETING_VARIABLES if n not in own)
    return RankLaunch(
        command=render_command(spec, layout),
        env={n: v for n, v in env.items() if n not in filled_in and n not in unset},
        rank_variables=rank_variables,
        size_variables=size_variables,
        node_variables=("NODE_NAME",),
        later=tuple(dict.fromkeys([*later, *unset])),
        defaults=SHARED_HOST_DEFAULTS if layout.is_one_host and world.target > 1 else {},
        local_ranks=1 if "LOCAL_RANK" in unset else local_ranks,
    )


def local_world_size(ranks: int, layout: RankLayout) -> int:
    """The number of LOCAL_RANKs on a host: `torch.cuda.set_device(LOCAL_RANK)` works for each.

    A rank with a host or devices of its own has LOCAL_RANK 0. Ranks that share devices are counted
    through, and begin again at 0 where there are more ranks than devices.
    """
    if not layout.is_one_host or layout.shared_devices is None:
        return 1
    return min(ranks, layout.shared_devices) or ranks


def store_uri_of(spec: TrainingSpec, layout: RankLayout) -> str:
    """The object store that ranks share."""
    own = layout.rendezvous_uri if spec.run_id is None else layout.runs_uri
    return spec.rendezvous.uri or own


def unset_variables(spec: TrainingSpec, own: dict[str, str]) -> tuple[str, ...]:
    """What a rank must not find, unless its user sets it: the variables of a world it is not in."""
    names: tuple[str, ...] = ()
    if spec.rendezvous.backend == NO_BACKEND:
        names = (*WORLD_VARIABLES, *TORCHRUN_VARIABLES)
        if QUORUM in own:  # replicas of a launch know which one of how many they are
            names = tuple(name for name in names if name not in LAYOUT_VARIABLES)
    elif is_one_host(spec):
        names = TORCHRUN_VARIABLES
    return tuple(name for name in names if name not in own)


_TORCHRUN = re.compile(
    r"(?<![\w.=-])(?:torchrun|torch\.distributed\.(?:run|launch))(?P<flags>(?:\s+[^\n;&|]*)?)"
)
_ONE_HOST = re.compile(r"(?<!\S)--(?:standalone|nnodes[=\s]\s*[\"']?1(?::1)?[\"']?)(?!\S)")
_SCRIPT = re.compile(r"\S+\.py(?!\S)|(?<!\S)-m\s|(?<!\S)--module\s")


def is_one_host(spec: TrainingSpec) -> bool:
    """Whether every torchrun that the training starts is for one host, by its own flags.

    With the variables of a larger world, torchrun would wait for the other hosts all the same.
    """
    if spec.env.get("PET_NNODES") in ("1", "1:1") or "PET_STANDALONE" in spec.env:
        return True
    text = " ".join([*(spec.command or ()), *spec.args])
    if spec.source is not None and spec.source.kind == "shell":
        text = spec.source.content.decode(errors="replace")
    # Whatever comes after the script's name is for the script.
    flags = [_SCRIPT.split(match["flags"])[0] for match in _TORCHRUN.finditer(text)]
    return bool(flags) and all(_ONE_HOST.search(each) for each in flags)


def _rendezvous_id(spec: TrainingSpec, uid: str) -> str:
    return f"{spec.name}-{uid[:8]}"


def _torchrun(spec: TrainingSpec, uid: str) -> dict[str, str]:
    """Torchrun's own variables: a bare `torchrun train.py` in every rank is one world."""
    return {
        "PET_NNODES": f"{spec.world_size.min}:{spec.world_size.max}",
        "PET_RDZV_BACKEND": spec.rendezvous.backend,
        "PET_RDZV_ID": _rendezvous_id(spec, uid),
        "PET_RDZV_CONF": TORCHRUN_CONF,
    }


def render_command(spec: TrainingSpec, layout: RankLayout) -> list[str]:
    if spec.source is None:
        command = [*(spec.command or ()), *spec.args]
    else:
        command = [*_entry(spec, layout), f"{layout.source}/{spec.source.filename}", *spec.args]
    return [*_unpacking(spec, layout), *_preparing(spec, layout, command)]


def _unpacking(spec: TrainingSpec, layout: RankLayout) -> list[str]:
    """What comes before the command to unpack the code of the training, if it has some.

    By agent/unpack.py, or by `tar` in images without a fit Python.
    """
    if spec.code is None or layout.code is None:
        return []
    from shlex import join, quote

    # What is called `python` may be of the second version, and may be missing.
    python = quote("python3" if layout.python == "python" else layout.python)
    unpack, archive, root = map(quote, layout.code)
    folders = [word for folder in spec.code.path for word in ("--path", folder)]
    script = (
        f"if command -v {python} >/dev/null && {python} -S -I {unpack} --check >/dev/null 2>&1; "
        f"then exec {python} -S -I {unpack} {join(['--digest', spec.code.digest, *folders])} "
        f'{archive} {root} -- "$@"; fi; '
        f"if command -v tar >/dev/null && mkdir -p {root} && "
        f"if [ -d {archive} ]; then cat {archive}/*; else cat {archive}; fi | "
        f'tar -xzf - -C {root}; then cd {root} && exec "$@"; fi; '
        'echo "atoll: the code could not be unpacked: that needs python3, or tar" >&2; exit 126'
    )
    return ["sh", "-c", script, "sh"]


def _preparing(spec: TrainingSpec, layout: RankLayout, command: list[str]) -> list[str]:
    if not spec.pip_packages:
        return command
    if layout.packages is not None and layout.has_atoll:
        prepare = [layout.python, "-m", "atoll.agent.install", layout.packages]
        return [*prepare, *spec.pip_packages, "--", *command]
    import shlex  # imported here: the supervisor does not need it

    install = shlex.join([layout.python, "-m", "pip", "install", "--quiet", *spec.pip_packages])
    return ["sh", "-c", f'{install} && exec "$@"', "sh", *command]


def _entry(spec: TrainingSpec, layout: RankLayout) -> list[str]:
    """The command that runs the shipped code."""
    assert spec.source is not None
    if spec.source.kind == "shell":
        return [layout.shell]
    if spec.source.kind == "script" and not layout.has_atoll:
        return [layout.python]
    entry = [layout.python, "-m", "atoll.agent.entrypoint"]
    if layout.has_atoll and spec.source.directory is not None:
        entry += ["--from", spec.source.directory]
    return [*entry, spec.source.kind]


def meeting_environment(backend: str, meeting: Meeting) -> dict[str, str]:
    if backend == NO_BACKEND:
        return {
            "BASILICA_RDZV_ENDPOINT": "",
            "ATOLL_MESH_ENDPOINT": meeting.mesh,
            **UNSHARED_STORE,
        }
    own = f"{meeting.master}:{meeting.port}"
    endpoint = meeting.etcd if backend == ETCD_BACKEND else own
    return {
        "MASTER_ADDR": meeting.master,
        "MASTER_PORT": str(meeting.port),
        "BASILICA_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_ENDPOINT": endpoint,
        "ATOLL_MESH_ENDPOINT": meeting.mesh,
        **UNSHARED_STORE,
    }
