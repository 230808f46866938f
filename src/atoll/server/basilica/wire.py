"""The wire of the basilica-sdk client: its requests as specs, trainings as deployments. Pure.

Requests with unknown fields are refused, so that nothing is silently dropped. The client decodes
strictly: a required field may be neither missing nor null, and an optional field may be missing but
not null.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.core.checks import TEXT, check_as, check_name, is_text
from atoll.core.describe import describe_phase
from atoll.core.errors import ValidationError
from atoll.core.model import SpecModel
from atoll.core.phase import ConditionType, Phase
from atoll.core.spec import (
    BenchSpec,
    IntegerSeconds,
    ProviderFilter,
    RendezvousSpec,
    Resources,
    Source,
    TrainingSpec,
    WorldSize,
)
from atoll.core.status import BenchStatus, Event, RankStatus, Status, Training, WorldStatus

# The shell command that a basilica client ships, as the script a rank runs. Pure.
#
# The client writes one line for `/bin/sh -c`, meant for the pods of its own platform. Here ranks
# may share a machine, start together, and have no etcd; what would break then is rewritten.

AUTO = (
    'exec torchrun --rdzv-backend={backend} --rdzv-endpoint="$BASILICA_RDZV_ENDPOINT" '
    '--rdzv-id="$BASILICA_RDZV_ID" --nnodes="$BASILICA_WORLD_MIN":"$BASILICA_WORLD_MAX" '
    '--nproc-per-node="$BASILICA_GPUS_PER_POD" "$@"'
)
ALONE = 'exec torchrun --standalone --nproc-per-node="$BASILICA_GPUS_PER_POD" "$@"'
SHIPPED = "/tmp/__basilica_source.py"
# Ranks of one machine would write the same file, and run each other's code.
OWN_FILE = (
    "ATOLL_SHIPPED=$(mktemp -d ./shipped.XXXXXX 2>/dev/null || mktemp -d) || exit 1\n"
    "ATOLL_SHIPPED=$ATOLL_SHIPPED/source.py"
)
# The client adds this after the script's name, where torchrun takes it for an argument of the
# script. Its last call would also make every start wait a quarter of an hour for ranks between
# target and max, which nobody has asked for.
INJECTED = " --rdzv-conf=timeout=1500,last_call_timeout=900"
CONF = "--rdzv-conf=timeout=1500,join_timeout=1500,last_call_timeout=5"

# Commands may be megabytes long: every pattern here reads them once.
_TORCHRUN = re.compile(r"(?<![\w.=-])torchrun(?=\s+[^\s;&|<>)#])")
_HAS_CONF = re.compile(r"--rdzv[-_]conf[= ]")
_ETCD = re.compile(r"(--rdzv[-_]backend[= ])etcd(-v2)?(?=\s|$)")
_ELASTIC_NODES = '--nnodes="$BASILICA_WORLD_MIN":"$BASILICA_WORLD_MAX"'
_FIXED_NODES = '--nnodes="$BASILICA_WORLD_TARGET" --node-rank="$BASILICA_RANK"'
# Options of the rendezvous, which ranks without one do not have.
_RENDEZVOUS_FLAGS = re.compile(
    r"""--rdzv[-_](?:backend[= ]\S+|endpoint[= ]"?\$\{?BASILICA_RDZV_ENDPOINT\}?"?"""
    r"""|id[= ]"?\$\{?BASILICA_RDZV_ID\}?"?|conf[= ]\S+) ?"""
)
_POSITIONAL = re.compile(r"\$\{?[@*#1-9]")
_FIRST = re.compile(r"[\w./@%+:-]+(?=\s|$)")
_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.""", re.DOTALL)
_OPERATOR = re.compile(r"[;&|<>()`#'\"\n]|\$\(")
_SUBSTITUTED = re.compile(r"\$\(+[^()]*\)+|`[^`]*`|[<>]&")
_NEXT = re.compile(r"&&|\|\||[;&()\n]")
_LEADING = re.compile(r"(?:(?:exec|then|do|else|!|\{|\w+=\S*)\s+)*")
_BUILTINS = frozenset(
    "alias bg break case cd command continue eval exec exit export false fg for function if jobs "
    "local read readonly return set shift source test times trap true type ulimit umask unset "
    "until wait while . : [ { } do done elif else esac fi then".split()
)


def shell_script(
    command: str, *, args: Sequence[str], backend: str, path_first: str | None = None
) -> str:
    """The script that `/bin/sh` reads from a file, so that a command may have any length.

    `backend` is the rendezvous backend in use; `path_first` is a directory searched before PATH.
    """
    auto = ALONE if backend == "none" else AUTO.format(backend=backend)
    text = auto if command.strip() == "auto" else command
    text = with_rendezvous(text, backend)
    if args and takes_args(text):
        text = f'{text.rstrip()} "$@"'
    if is_simple(text):
        text = f"exec {text}"  # the rank is then the program itself, and its signals are its own
    lines = [text.replace(SHIPPED, '"$ATOLL_SHIPPED"')]
    if SHIPPED in text:
        lines.insert(0, OWN_FILE)
    if path_first is not None:
        lines.insert(0, f"PATH={shlex.quote(path_first)}:$PATH; export PATH")
    return "\n".join(lines) + "\n"


def with_rendezvous(text: str, backend: str) -> str:
    """The command with torchrun's own flags before the script's name, for `backend`."""
    if not _TORCHRUN.search(text):
        # The client adds it wherever it reads that word, `--launcher=torchrun` too.
        return text.removesuffix(INJECTED) if "torchrun" in text else text
    text = text.replace(INJECTED, "")
    if backend == "none":
        is_clients = "BASILICA_RDZV_ENDPOINT" in text
        text = _RENDEZVOUS_FLAGS.sub("", text) if is_clients else text
        return text.replace(_ELASTIC_NODES, "--standalone")
    if not _HAS_CONF.search(text):
        text = _TORCHRUN.sub(f"torchrun {CONF}", text)
    if backend == "static":
        return text.replace(_ELASTIC_NODES, _FIXED_NODES)
    return _ETCD.sub(lambda match: match[1] + backend, text)


def takes_args(text: str) -> bool:
    """Whether arguments appended to the command reach its last program.

    After `done`, a comment or the last line of a here-document they would break the script.
    """
    expanded = _QUOTED.sub(lambda match: "_" if match[0][0] == "'" else match[0], text)
    if _POSITIONAL.search(expanded):
        return False
    bare = _SUBSTITUTED.sub("_", _QUOTED.sub("_", text.rstrip()))
    if "<<" in bare or re.search(r"(?<!\S)#", bare):
        return False
    last = _NEXT.split(bare)[-1].strip()
    first = last[_LEADING.match(last).end() :].partition(" ")[0]  # type: ignore[union-attr]
    return bool(first) and first not in _BUILTINS and "|" not in last


def is_simple(text: str) -> bool:
    """Whether this is one program with its arguments. In doubt, it is not."""
    first = _FIRST.match(text)
    if first is None or first[0] in _BUILTINS:
        return False
    return not _OPERATOR.search(_QUOTED.sub("_", text))


class Gpus(SpecModel, frozen=True):
    count: int = 0
    model: list[str] = []
    min_gpu_memory_gb: int | None = None


class Needs(SpecModel, frozen=True):
    cpu: str | None = None
    memory: str | None = None
    gpus: Gpus | None = None


class RendezvousChoice(SpecModel, frozen=True):
    backend: str = "etcd-v2"


class Providers(SpecModel, frozen=True):
    include: list[str] = []
    exclude: list[str] = []


class Spread(SpecModel, frozen=True):
    strategy: str = "provider-aware"


class Nccl(SpecModel, frozen=True):
    env: dict[str, str] = {}


class Bench(SpecModel, frozen=True):
    mode: str = "off"
    placement: str | None = None


class DeploymentWorld(SpecModel, frozen=True):
    """Not checked here: `TrainingSpec` checks the bounds."""

    min: int
    target: int
    max: int


class Distributed(SpecModel, frozen=True):
    world_size: DeploymentWorld
    enabled: bool = True
    command: str = "auto"
    rendezvous: RendezvousChoice = RendezvousChoice()
    provider_filter: Providers = Providers()
    topology_spread: Spread = Spread()
    nccl: Nccl = Nccl()
    bench: Bench = Bench()


class Create(SpecModel, frozen=True):
    """The body of a create. `replicas`, `port` and `enable_billing` are accepted and ignored."""

    instance_name: str
    distributed: Distributed
    image: str | None = None
    replicas: int | None = None
    port: int | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: dict[str, str] | None = None
    resources: Needs = Needs()
    ttl_seconds: int | None = None
    enable_billing: bool | None = None


# Which field of the request a field of the training comes from.
FIELDS = {
    "name": "instanceName",
    "source": "distributed.command",
    "world_size.min": "distributed.worldSize.min",
    "world_size.target": "distributed.worldSize.target",
    "world_size.max": "distributed.worldSize.max",
    "rendezvous_backend": "distributed.rendezvous.backend",
    "provider_filter.include": "distributed.providerFilter.include",
    "provider_filter.exclude": "distributed.providerFilter.exclude",
    "topology_spread": "distributed.topologySpread.strategy",
    "nccl_env": "distributed.nccl.env",
    "bench": "distributed.bench.mode",
    "bench_placement": "distributed.bench.placement",
    "cpu": "resources.cpu",
    "memory": "resources.memory",
    "gpu_count": "resources.gpus.count",
    "gpu_models": "resources.gpus.model",
    "min_gpu_memory_gb": "resources.gpus.minGpuMemoryGb",
    "ttl_seconds": "ttlSeconds",
    "deadline_s": "ttlSeconds",
}


def spec_of(create: Create, *, backend: str, path_first: str | None = None) -> TrainingSpec:
    """The spec of the requested training. `backend` is the rendezvous backend in use.

    `ttlSeconds` limits the run, as on the Basilica platform; the record is then kept for as long
    again, so that nobody waits for a training and finds it deleted.
    """
    check_name("name", create.instance_name)
    distributed = create.distributed
    if not distributed.command.strip():
        raise ValidationError("source", distributed.command, "expected a command to run")
    if not is_text(distributed.command):
        raise ValidationError("source", distributed.command, TEXT)
    args = [*(create.command or ()), *(create.args or ())]
    script = shell_script(distributed.command, args=args, backend=backend, path_first=path_first)
    gpus = create.resources.gpus or Gpus()
    ttl_seconds = create.ttl_seconds or None
    check_as("ttl_seconds", ttl_seconds, IntegerSeconds | None)
    return TrainingSpec(
        name=create.instance_name,
        world_size=WorldSize(
            min=distributed.world_size.min,
            target=distributed.world_size.target,
            max=distributed.world_size.max,
        ),
        source=Source(kind="shell", content=script.encode(), filename="command.sh"),
        args=args,
        image=create.image,
        env=create.env or {},
        resources=Resources(
            cpu=create.resources.cpu,
            memory=create.resources.memory,
            gpu_count=gpus.count,
            gpu_models=gpus.model,
            min_gpu_memory_gb=gpus.min_gpu_memory_gb,
        ),
        provider_filter=ProviderFilter(
            include=distributed.provider_filter.include or None,
            exclude=distributed.provider_filter.exclude,
        ),
        topology_spread=distributed.topology_spread.strategy,  # type: ignore[arg-type]
        nccl_env=distributed.nccl.env,
        bench=BenchSpec(
            mode=distributed.bench.mode,  # type: ignore[arg-type]
            placement=distributed.bench.placement or "preferred",
        ),
        rendezvous=RendezvousSpec(backend=backend),  # type: ignore[arg-type]
        deadline_s=None if ttl_seconds is None else float(ttl_seconds),
        ttl_seconds=ttl_seconds,
    )


class Probe(msgspec.Struct):
    """The part of a create that only distributed trainings have."""

    distributed: Any = None


Json = dict[str, Any]

UNKNOWN_EXIT = -1  # the client accepts only integers, and 0 would mean success
GBIT_PER_GBYTE = 8.0  # the wire has gigabytes a second

STATES: dict[Phase, str] = {
    Phase.NONE: "Pending",
    Phase.PENDING: "Pending",
    Phase.READY: "Active",
    Phase.SUCCEEDED: "Succeeded",
    Phase.FAILED: "Failed",
    Phase.CANCELLED: "Cancelled",
}
RANK_PHASES = {"Stopped": "Failed"}  # the client does not know this phase
CONTAINER_STATES = {"Pending": "waiting", "Running": "running"}
DEFAULT_PORTS = {"etcd-v2": 2379, "c10d": 29_400, "static": 29_400, "none": 29_400}
OUTCOMES = {"Succeeded": "success", "Failed": "error", "TimedOut": "timeout", "Skipped": "skipped"}


def deployment(training: Training) -> Json:
    """The answer of create, get, scale and restart."""
    status = training.status
    ranks = status.ranks
    answer = {
        **list_item(training),
        "userId": training.namespace,
        "namespace": training.namespace,
        "phase": phase_of(training),
        "message": _message(status) or "accepted",
        "pods": [_pod(training, rank) for rank in ranks],
        "containerStatuses": [_container(training, rank) for rank in ranks],
        "distributed": distributed(training),
    }
    if training.spec.image is not None:
        answer["image"] = training.spec.image
    if status.ended_at is not None:
        answer["updatedAt"] = timestamp(status.ended_at)
    return answer


def _message(status: Status) -> str:
    """The status message; a failure begins with its reason, which has no field here."""
    if status.phase is Phase.FAILED and status.reason:
        return f"{status.reason}: {describe_phase(status)}"
    return status.message


def list_item(training: Training) -> Json:
    """One item of the list."""
    world = world_of(training)
    is_leaving = training.deletion_requested_at is not None
    return {
        "instanceName": training.name,
        "friendlyName": training.name,
        "state": "Terminating" if is_leaving else STATES[training.status.phase],
        "url": "",
        "replicas": {"desired": world["target"], "ready": world["ready"]},
        "createdAt": timestamp(training.created_at),
        "public": False,
        "publicMetadata": False,
    }


def phase_of(training: Training) -> str:
    phase = training.status.phase
    is_stopped = phase is Phase.CANCELLED and not training.spec.cancel  # by being deleted
    if training.deletion_requested_at is not None and (is_stopped or not phase.is_terminal):
        return "terminating"
    return phase.value or "pending"


def world_of(training: Training) -> Json:
    """The newest target, and a `ready` that makes the client's waits end correctly.

    The client compares `ready` with `min` and `target` and looks at nothing else. So a resize in
    progress always shows fewer ranks than its target. A training that is over shows the ranks that
    had started, so that one that ends before the first poll is not waited for. A failed training
    shows its target only where the target equals the minimum.
    """
    size, status = training.spec.world_size, training.status
    world = training.world
    if status.phase.is_terminal:
        ran = sum(r.rank < size.target and r.started_at is not None for r in status.ranks)
        world = WorldStatus.of(ran, size)
    ready = world.ready
    if status.phase in (Phase.FAILED, Phase.CANCELLED):
        ready = min(ready, max(size.min, size.target - 1))
    if not status.phase.is_terminal and _has_resize(training):
        ready = min(ready, size.target - 1)
    return {
        "ready": ready,
        "target": world.target,
        "min": world.min,
        "max": world.max,
        "belowMinimum": world.below_minimum,
    }


def is_settled(training: Training) -> bool:
    """Whether the client's waits would return."""
    world = world_of(training)
    is_there: bool = world["ready"] >= world["target"]
    return training.status.phase.is_terminal or is_there


def _has_resize(training: Training) -> bool:
    is_observed = training.status.observed_generation == training.generation
    return not is_observed or training.has_surplus


def distributed(training: Training) -> Json:
    spec, status = training.spec, training.status
    backend = spec.rendezvous.backend
    _, _, port = status.rendezvous_endpoint.rpartition(":")
    is_degraded = any(
        c.type == ConditionType.DEGRADED_MESH and c.status == "True" for c in status.conditions
    )
    answer: Json = {
        "worldSize": world_of(training),
        "transport": "hub-relay" if is_degraded else "direct-mesh",
        "ranks": [_rank(training, rank) for rank in status.ranks],
        "conditions": [
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
                "lastTransitionTime": timestamp(condition.last_transition_at),
            }
            for condition in status.conditions
        ],
        "rendezvous": {
            "backend": backend,
            "port": int(port) if port.isdigit() else DEFAULT_PORTS[backend],
        },
        "worldSizeHistory": [
            {"timestamp": timestamp(point.at), "target": point.target, "ready": point.ready}
            for point in status.world_size_history
        ],
        "milestones": [
            {"name": name, "timestamp": timestamp(at)}
            for name, at in _milestones(training)
            if at is not None
        ],
        "bench": _bench(spec.bench.mode, _final(training)),
        "rankExits": [
            {
                "rank": ended.rank,
                "exitCode": UNKNOWN_EXIT if ended.exit_code is None else ended.exit_code,
                "restartCount": ended.restart_count,
                "terminationReason": ended.termination_reason,
            }
            for ended in status.rank_exits
        ],
    }
    if (resize := status.last_resize) is not None:
        answer["lastResize"] = {
            "fromTarget": resize.from_target,
            "toTarget": resize.to_target,
            "timestamp": timestamp(resize.at),
            "reason": "ScaleRequested",
        }
    return answer


def _milestones(training: Training) -> list[tuple[str, float | None]]:
    status = training.status
    return [
        ("Created", training.created_at),
        ("Admitted", status.gate_opened_at),
        ("FirstRankStarted", status.started_at),
        ("Ended", status.ended_at),
    ]


def _rank(training: Training, rank: RankStatus) -> Json:
    return {
        "rank": rank.rank,
        "podName": _pod_name(training, rank),
        "phase": RANK_PHASES.get(rank.phase, rank.phase),
        "restarts": rank.restarts,
        "nodeName": rank.node,
        "provider": rank.provider,
        "region": rank.region,
    }


def _pod(training: Training, rank: RankStatus) -> Json:
    return {"name": _pod_name(training, rank), "status": rank.phase, "node": rank.node}


def _container(training: Training, rank: RankStatus) -> Json:
    ended = rank.exit
    return {
        "podName": _pod_name(training, rank),
        "containerName": "rank",
        "state": CONTAINER_STATES.get(rank.phase, "terminated"),
        "restartCount": rank.restarts,
        "reason": ended.reason if ended else None,
        "message": rank.message or None,
    }


def _pod_name(training: Training, rank: RankStatus) -> str:
    return rank.pod_name or f"{training.name}-{rank.rank}"


def _final(training: Training) -> BenchStatus:
    """The bench status; a bench that was unfinished when the training ended counts as skipped."""
    bench = training.status.bench
    if not training.status.phase.is_terminal or bench.phase in OUTCOMES:
        return bench
    message = bench.message or "the training ended before its link was measured"
    return replace(bench, phase="Skipped", message=message)


def _bench(mode: str, bench: BenchStatus) -> Json:
    if mode == "off":
        return {"mode": mode}
    answer: Json = {
        "mode": mode,
        "phase": bench.phase or "Pending",
        "message": bench.message or None,
        "startedAt": None if bench.started_at is None else timestamp(bench.started_at),
        "completedAt": None if bench.completed_at is None else timestamp(bench.completed_at),
    }
    if bench.phase in OUTCOMES:
        answer["lastAttemptOutcome"] = OUTCOMES[bench.phase]
        answer["lastAttemptAt"] = answer["completedAt"] or answer["startedAt"]
    if (result := bench.result) is not None:
        answer["result"] = {
            "measuredAt": timestamp(result.measured_at),
            "probeNodeA": result.probe_node_a,
            "probeNodeB": result.probe_node_b,
            "sizeBytesSwept": result.size_bytes_swept,
            "busbwGbpsP10": _gbytes(result.busbw_gbps_p10),
            "busbwGbpsP50": _gbytes(result.busbw_gbps_p50),
            "busbwGbpsP90": _gbytes(result.busbw_gbps_p90),
            "algbwGbpsP50": _gbytes(result.algbw_gbps_p50),
            "latencyUsAt1mib": result.latency_us_at_1mib,
        }
    return answer


def _gbytes(gbits: float | None) -> float | None:
    """Gbit/s as GB/s, which the client means where its field names say Gbps."""
    return None if gbits is None else gbits / GBIT_PER_GBYTE


def event_item(event: Event) -> Json:
    return {
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "count": event.count,
        "last_timestamp": timestamp(event.at),
    }


def timestamp(at: float) -> str:
    """A UTC time in ISO 8601, with three digits: Python 3.10 reads only 0, 3 or 6 of them."""
    text = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
