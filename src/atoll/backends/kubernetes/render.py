"""The objects of one training: a Job, a Service, a ConfigMap. Pure.

One Indexed Job is the gang: its completion index is the rank. The ConfigMap carries what a Job
may not change while it runs (the world's size now), so that a rank started later finds it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

from atoll.agent import machine_use, metric_sinks, process, unpack
from atoll.agent.metric_sinks import METRICS
from atoll.agent.result import IN_LOG, RESULT_VARIABLE
from atoll.backends.companions import agent_command
from atoll.backends.kubernetes.code import (
    code_layout,
    render_code_mounts,
    render_code_volumes,
)
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.names import (
    AGENT,
    BLOCKED_BY,
    CONTAINER,
    DESIRED,
    ELASTIC,
    ETCD,
    FAILURES,
    FINALIZER,
    GATE,
    INDEX,
    MANAGED,
    NAMESPACE,
    PART,
    PROVIDER,
    QUEUE,
    REGION,
    REPORT_DIR,
    REPORT_VOLUME,
    SOURCE,
    START,
    STOPPED,
    TRAINING,
    UID,
)
from atoll.backends.kubernetes.options import REQUIRED
from atoll.backends.kubernetes.options import KubernetesOptions as Options
from atoll.backends.kubernetes.pod import TURNED_AWAY
from atoll.backends.launch import (
    ETCD_BACKEND,
    NO_BACKEND,
    TOGETHER,
    Meeting,
    RankLaunch,
    RankLayout,
    render_launch,
)
from atoll.backends.metrics_token import token_for
from atoll.core.errors import Permanent
from atoll.core.mesh import DEFAULT_ETCD_PORT
from atoll.core.model import encode
from atoll.core.spec import Resources
from atoll.core.status import DesiredState, Training
from atoll.mesh.watch import fabric_folder

Json = dict[str, Any]

SOURCE_DIR = "/atoll/source"
TERMINATION_LOG = "/dev/termination-log"
SOURCE_MAX = 900_000  # a ConfigMap holds 1 MiB with everything in it
REPORT = "process.py"  # the key in the gang's ConfigMap
# What containers say of their end has 12 KiB in a pod, in equal shares of 4 KiB at the most: the
# rank's, the start gate's, the mesh agent's, one that somebody else may put there, and the patch's.
RECORDS_BYTES = 12_288
SHARES = 4
# Limits equal requests: anything else would change the pod's quality-of-service class.
AMOUNTS = {"cpu": "100m", "memory": "96Mi"}
RESTRICTED: Json = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}

GATE_DIR = "/atoll/gate"
GATE_OPEN = "open"  # the key in the gang's ConfigMap
# Process 1 of a container ignores SIGTERM unless it has a handler; and not every `sleep` takes
# fractions of a second.
WAIT = (
    f"trap 'exit {TURNED_AWAY}' TERM; "
    f'until [ -n "$ATOLL_START" ] || [ -s {GATE_DIR}/start ]; '
    "do sleep 0.1 || sleep 1 || exit 1; done"
)
# A waiting pod gets this annotation, which the kubelet passes on at once; a changed ConfigMap takes
# it a minute. Its value is how many ranks start together; it is empty for ranks that start later.
_START_FIELD = {"fieldPath": f"metadata.annotations['{START}']"}
# A pod deleted before it could start does not use up a restart of its rank.
TURNED_AWAY_RULE: Json = {
    "action": "Ignore",
    "onExitCodes": {"containerName": GATE, "operator": "In", "values": [TURNED_AWAY]},
}
HOST = "kubernetes.io/hostname"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
# The node label over which ranks are spread, by `topology_spread`.
SPREAD = {"provider-aware": PROVIDER, "region-aware": REGION}


def gang_name(training: Training) -> str:
    """The name of all its objects: a DNS label that leaves room for `-bench-<index>` behind it."""
    tail = hashlib.sha256(training.uid.encode()).hexdigest()[:8]
    head = training.name if training.name[0].isalpha() else f"t{training.name}"
    return f"{head[:46].rstrip('-')}-{tail}"


def gang_labels(training: Training) -> dict[str, str]:
    return {
        MANAGED: "atoll",
        TRAINING: training.name,
        NAMESPACE: training.namespace,
        UID: training.uid,
    }


def render_world(
    training: Training,
    desired: DesiredState,
    options: Options,
    owner: Json | None,
    *,
    is_opened: bool = False,
) -> Json:
    """What a rank reads when it starts, and the code it runs where that was sent along."""
    source = training.spec.source
    body: Json = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": gang_metadata(training, owner, options),
        "data": render_size(desired),
    }
    if options.gates_start(training.spec):
        body["data"] |= render_opened_world(is_opened=is_opened)
    body["data"] |= _own_files(training, options)
    if source is not None:
        if len(source.content) > SOURCE_MAX:
            raise Permanent(
                f"the source has {len(source.content)} bytes, a ConfigMap takes {SOURCE_MAX}: "
                "put it into the image"
            )
        body["binaryData"] = {"source": base64.b64encode(source.content).decode()}
    return body


def render_gang(training: Training, desired: DesiredState, options: Options) -> list[Json]:
    """All that a new gang is made of beside its code: ConfigMap, Service and Job."""
    return [
        render_world(training, desired, options, None),
        render_service(training, options, None),
        render_job(training, desired, options),
    ]


def render_size(desired: DesiredState) -> dict[str, str]:
    return {"size": str(desired.size)}


def render_service(training: Training, options: Options, owner: Json | None) -> Json:
    """Gives every rank the name `<gang>-<rank>.<gang>`."""
    metadata = gang_metadata(training, owner, options)
    return render_headless(metadata, training, CONTAINER, "rendezvous", options.master_port)


def render_headless(metadata: Json, training: Training, part: str, port: str, number: int) -> Json:
    """Names for the pods of one part of a training, known before they are ready too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {UID: training.uid, PART: part},
            "ports": [{"name": port, "port": number, "protocol": "TCP"}],
        },
    }


def render_job(
    training: Training, desired: DesiredState, options: Options, owner: Json | None = None
) -> Json:
    """The gang: ranks `0..size-1`, each restarted on its own up to `max_restarts` times."""
    spec = training.spec
    metadata = gang_metadata(training, owner, options)
    metadata["annotations"] = {**options.annotations, DESIRED: encode(desired).decode()}
    is_blocked = options.has_own_etcd(spec)
    if is_blocked:  # until its etcd answers
        metadata["annotations"][BLOCKED_BY] = ETCD
    if options.kueue_queue is not None:
        metadata["labels"][QUEUE] = options.kueue_queue
        metadata["annotations"][ELASTIC] = "true"  # or it would be stopped for every resize
    body: Json = {
        "completions": desired.size,
        "parallelism": desired.size,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": spec.max_restarts,
        # A rank never runs twice: its successor waits until the last one has ended.
        "podReplacementPolicy": "Failed",
        # A rank that atoll had to stop, and wants again, has not used up a restart.
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": STOPPED, "status": "True"}]},
                *([TURNED_AWAY_RULE] if options.gates_start(training.spec) else ()),
            ]
        },
        "template": _template(training, options),
    }
    if options.kueue_queue is not None or is_blocked:
        body["suspend"] = True  # Kueue resumes it once the whole gang fits
    # A controller that takes exits sets it once ranks are let go: before that no time is used up.
    if spec.deadline_s is not None and not options.is_controlled:
        body["activeDeadlineSeconds"] = math.ceil(spec.deadline_s) + options.deadline_margin_s
    if options.ttl_seconds_after_finished is not None:
        body["ttlSecondsAfterFinished"] = options.ttl_seconds_after_finished
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body}


def owner_of(training: Training) -> Json:
    return reference_to("atoll.dev/v1", "Training", {"name": training.name, "uid": training.uid})


def owner_in(training: Training, job: Job | None, *, is_owner: bool) -> Json | None:
    """The object with which Kubernetes deletes what belongs to a training: the Training object if
    this cluster has one, else the Job."""
    if is_owner:
        return owner_of(training)
    return None if job is None else reference_to("batch/v1", "Job", job.metadata)


def reference_to(api: str, kind: str, metadata: Json) -> Json:
    return {"apiVersion": api, "kind": kind, "name": metadata["name"], "uid": metadata["uid"]}


def gang_metadata(
    training: Training, owner: Json | None, options: Options, name: str | None = None
) -> Json:
    metadata: Json = {
        "name": name or gang_name(training),
        "labels": {**options.labels, **gang_labels(training)},
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    return metadata


def _template(training: Training, options: Options) -> Json:
    spec = training.spec
    name = gang_name(training)
    pod = options.patched(
        {
            "restartPolicy": "Never",
            "subdomain": name,
            "terminationGracePeriodSeconds": math.ceil(spec.stop_grace_s),
            "containers": [_container(training, options)],
            "enableServiceLinks": False,
            "topologySpreadConstraints": spread(training),
            "volumes": _volumes(training, options),
        }
    )
    pod |= {
        "tolerations": tolerations(spec.resources, options),
        "nodeSelector": node_selector(spec.resources, options),
        "affinity": affinity(training, options),
    }
    rank, *_ = pod["containers"] = [_filled(container) for container in pod["containers"]]
    before = pod.pop("initContainers", [])
    if options.has_gate(spec):  # the first, so that the fabric is checked while ranks wait
        before = [render_agent(training, etcd_endpoint(training, options), options), *before]
    if options.gates_start(spec):  # the last: who waits there is ready to start
        before = [*before, render_gate(name, rank)]
    pod["initContainers"] = before
    metadata: Json = {"labels": {**options.labels, **gang_labels(training), PART: CONTAINER}}
    if options.annotations:
        metadata["annotations"] = options.annotations
    if options.has_exit_finalizer:
        metadata["finalizers"] = [FINALIZER]
    return {"metadata": metadata, "spec": _filled(pod)}


def _filled(fields: Json) -> Json:
    """Without those that say nothing."""
    return {field: value for field, value in fields.items() if value not in (None, [], {})}


def _container(training: Training, options: Options) -> Json:
    spec = training.spec
    launch = render_launch(training, rank_layout(training, options))
    command = launch.command
    if options.records_exits(spec):
        sidecars = len(options.pod.get("initContainers", ()))
        command = render_recorded(command, options.python, RECORDS_BYTES // (SHARES + sidecars))
    mounts = []
    if spec.source is not None:
        mounts.append({"name": SOURCE, "mountPath": SOURCE_DIR, "readOnly": True})
    if spec.code is not None:
        mounts += render_code_mounts()
    if _own_files(training, options):
        mounts.append({"name": REPORT_VOLUME, "mountPath": REPORT_DIR, "readOnly": True})
    return {
        "name": CONTAINER,
        "image": spec.image or options.image,
        "command": options.command or [_literal(argument) for argument in command],
        "env": _environment(training, launch, options),
        # The last lines of a rank that failed travel in its status, however soon it is deleted.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "workingDir": spec.working_dir,
        "resources": _resources(spec.resources, options),
        "volumeMounts": mounts,
    }


def render_recorded(
    command: list[str], python: str, limit: int = RECORDS_BYTES // SHARES
) -> list[str]:
    """The command under agent/process.py; exactly as it is where the image has no fit Python."""
    # What is called `python` may be of the second version.
    python = shlex.quote("python3" if python == "python" else python)
    wrapper = f"{python} -S -I {REPORT_DIR}/{REPORT}"
    message = f"{command[0]}: not found in the image"
    missing = {process.MARK: 1, "code": 127, "reason": "CommandNotFound", "message": message}
    script = (
        f"if command -v {python} >/dev/null && {wrapper} --check >/dev/null 2>&1; then "
        f'exec {wrapper} --record={TERMINATION_LOG} --limit={limit} -- "$@"; fi; '
        'command -v "$1" >/dev/null || { '
        f"printf '%s' {shlex.quote(json.dumps(missing))} >{TERMINATION_LOG}; "
        'echo "atoll: $1: not found" >&2; exit 127; }; '
        'exec "$@"'
    )
    return ["sh", "-c", script, "sh", *command]


def _own_files(training: Training, options: Options) -> dict[str, str]:
    """The files of atoll that a rank's container runs, by name."""
    modules: list[ModuleType] = []
    if options.records_exits(training.spec):
        modules.append(process)
        if options.reports_uri:  # the wrapper reports what its rank uses
            modules += [machine_use, metric_sinks]
    if training.spec.code is not None:
        modules.append(unpack)
    return {f"{part.__name__.rpartition('.')[2]}.py": _text_of(part) for part in modules}


@functools.cache
def _text_of(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text()


def rank_zero(training: Training) -> str:
    """Where ranks meet: the stable name of rank 0."""
    name = gang_name(training)
    return f"{name}-0.{name}"


def rendezvous_endpoint(training: Training, options: Options) -> str:
    """Where ranks meet, as their environment says; empty if they do not."""
    backend = training.spec.rendezvous.backend
    if backend == ETCD_BACKEND:
        return etcd_endpoint(training, options)
    return "" if backend == NO_BACKEND else f"{rank_zero(training)}:{options.master_port}"


def etcd_name(training: Training) -> str:
    return f"{gang_name(training)}-etcd"


def etcd_endpoint(training: Training, options: Options) -> str:
    """As ranks reach it; empty if the training has none."""
    spec = training.spec
    if not spec.needs_etcd:
        return ""
    return options.etcd_endpoint or f"{etcd_name(training)}:{DEFAULT_ETCD_PORT}"


def rank_layout(training: Training, options: Options) -> RankLayout:
    etcd = etcd_endpoint(training, options)
    metrics_uri, token = _metrics_address(training, options)
    # Without the gate's agent nobody would write the keys.
    mesh = etcd if options.has_gate(training.spec) else ""
    return RankLayout(
        python=options.python,
        shell="sh",
        source=SOURCE_DIR,
        packages=None,
        has_atoll=False,
        rendezvous_uri="",
        meeting=Meeting(rank_zero(training), options.master_port, etcd=etcd, mesh=mesh),
        code=code_layout(training.spec.code),
        metrics_uri=metrics_uri,
        report_token=token,
    )


def _metrics_address(training: Training, options: Options) -> tuple[str, str]:
    """Where ranks report to, and the token that they need there; empty if nowhere."""
    base = (options.reports_uri or "").rstrip("/")
    if not base:
        return "", ""
    if not base.startswith("http"):
        return f"{base}/atoll-ranks/{training.uid}/{METRICS}", ""
    token = token_for(bytes.fromhex(options.report_key), training.namespace, training.uid)
    return f"{base}/v1/trainings/{training.name}/metrics", token


def _environment(training: Training, launch: RankLaunch, options: Options) -> list[Json]:
    by_field = dict.fromkeys(launch.rank_variables, f"metadata.annotations['{INDEX}']")
    by_field |= dict.fromkeys(launch.node_variables, "spec.nodeName")
    by_field["ATOLL_ATTEMPT"] = f"metadata.annotations['{FAILURES}']"
    size = {"configMapKeyRef": {"name": gang_name(training), "key": "size"}}
    # The start gate knows how many start together, where they may be fewer than all.
    is_counted = options.gates_start(training.spec) and TOGETHER not in launch.env
    return [
        {"name": RESULT_VARIABLE, "value": IN_LOG},  # a pod has neither folder nor bucket
        *render_fields(by_field),
        *({"name": name, "valueFrom": size} for name in launch.size_variables),
        *([{"name": TOGETHER, "valueFrom": {"fieldRef": _START_FIELD}}] if is_counted else ()),
        *({"name": name, "value": _literal(value)} for name, value in launch.env.items()),
    ]


def render_fields(paths: dict[str, str]) -> list[Json]:
    """Variables that say what is in these fields of the pod itself."""
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in paths.items()
    ]


def _literal(text: str) -> str:
    """Kubernetes would put `$(NAME)` in place; a command means here what it means elsewhere."""
    return text.replace("$", "$$")


def _resources(needs: Resources, options: Options) -> Json:
    """Requests of a training are its limits too, so that a rank gets what it was promised."""
    wanted = {"cpu": needs.cpu, "memory": needs.memory}
    amounts = {name: value for name, value in wanted.items() if value is not None}
    if needs.gpu_count:
        amounts[options.gpu_resource_key] = str(needs.gpu_count)  # quantities travel as strings
    usual = {"cpu": options.cpu_request, "memory": options.memory_request}
    requests = {name: value for name, value in usual.items() if value is not None} | amounts
    return _filled({"requests": requests, "limits": amounts})


def _volumes(training: Training, options: Options) -> list[Json]:
    volumes: list[Json] = []
    if training.spec.source is not None:
        item = {"key": "source", "path": training.spec.source.filename}
        volumes.append(
            {"name": SOURCE, "configMap": {"name": gang_name(training), "items": [item]}}
        )
    if training.spec.code is not None:
        volumes += render_code_volumes(training.spec.code)
    if files := _own_files(training, options):
        # The command still runs if somebody deleted the ConfigMap.
        items = [{"key": name, "path": name} for name in files]
        volumes.append(
            {
                "name": REPORT_VOLUME,
                "configMap": {"name": gang_name(training), "items": items, "optional": True},
            }
        )
    if options.gates_start(training.spec):
        start = {"path": "start", "fieldRef": _START_FIELD}
        volumes.append({"name": GATE, "downwardAPI": {"items": [start]}})
    return volumes


def render_agent(training: Training, etcd: str, options: Options) -> Json:
    """A native sidecar: it starts before the rank, and ends after it without delaying it."""
    fields = {
        "RANK": f"metadata.annotations['{INDEX}']",
        "NODE_NAME": "spec.nodeName",
        "POD_IP": "status.podIP",
    }
    # Kubernetes replaces `$(NAME)` here.
    command = agent_command(
        *("python", "rank-$(RANK)@$(NODE_NAME)", "$(POD_IP)"),
        etcd=etcd,
        folder=fabric_folder(training.uid),
    )
    return {
        "name": AGENT,
        "image": options.agent_image,
        "restartPolicy": "Always",
        "command": command,
        "env": render_fields(fields),
        "resources": {"requests": AMOUNTS, "limits": AMOUNTS},
        "securityContext": RESTRICTED,
    }


def render_gate(gang: str, rank: Json) -> Json:
    """The start gate: an init container of the rank's own image, so that a waiting pod has both its
    node and its image.

    It has the same size: a smaller one would change the pod's quality-of-service class.
    """
    limits = (rank.get("resources") or {}).get("limits") or {}
    amounts = {name: value for name, value in limits.items() if name in ("cpu", "memory")}
    started = {"configMapKeyRef": {"name": gang, "key": GATE_OPEN, "optional": True}}
    container: Json = {
        "name": GATE,
        "image": rank["image"],
        "command": ["sh", "-c", WAIT],
        "env": [{"name": "ATOLL_START", "valueFrom": started}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": GATE, "mountPath": GATE_DIR, "readOnly": True}],
    }
    if amounts:
        container["resources"] = {"requests": amounts, "limits": amounts}
    return container | {f: rank[f] for f in ("imagePullPolicy", "securityContext") if f in rank}


def render_opened_world(*, is_opened: bool = True) -> dict[str, str]:
    """Data for the gang's ConfigMap: whether pods created from now on find the gate open."""
    return {GATE_OPEN: "true" if is_opened else ""}


def ranks_of(training: Training) -> dict[str, str]:
    """The labels of its ranks' pods, and of no others of its pods."""
    return {UID: training.uid, PART: CONTAINER}


def tolerations(needs: Resources, options: Options) -> list[Json]:
    own = options.own_pod.get("tolerations")
    merged: list[Json] = list(own or ())
    if own is None and needs.gpu_count:
        merged.append(
            {"key": options.gpu_resource_key, "operator": "Exists", "effect": "NoSchedule"}
        )
    keys = {t.get("key") for t in merged}
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if key not in keys:
            merged.append(
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": options.lost_node_s,
                }
            )
    return merged


def node_selector(needs: Resources, options: Options) -> dict[str, str]:
    """The table's labels under the caller's own, where there is one value for each."""
    rows = options.gpu_rows(needs.gpu_models)
    labels = {key: values[0] for key, values in rows[0].items()} if _is_one(rows) else {}
    return {**options.patched({"nodeSelector": labels}).get("nodeSelector", {})}


def _is_one(rows: list[dict[str, list[str]]]) -> bool:
    return len(rows) == 1 and all(len(values) == 1 for values in rows[0].values())


def _gpu_rules(needs: Resources, options: Options) -> list[list[Json]]:
    """Alternative lists of rules. One value for each label goes into the node selector instead."""
    rows = options.gpu_rows(needs.gpu_models)
    if not rows or _is_one(rows):
        return [[]]
    return [
        [{"key": key, "operator": "In", "values": values} for key, values in row.items()]
        for row in rows
    ]


def _node_rules(training: Training, options: Options) -> list[Json]:
    needs, providers = training.spec.resources, training.spec.provider_filter
    rules: list[tuple[str, str, list[str]]] = []
    if needs.min_gpu_memory_gb is not None and needs.gpu_count:
        mib = needs.min_gpu_memory_gb * 10**9 // 2**20
        rules.append((options.gpu_memory_label, "Gt", [str(mib - 1)]))
    if providers.include is not None:
        rules.append((PROVIDER, "In", providers.include))
    if providers.exclude:
        rules.append((PROVIDER, "NotIn", providers.exclude))
    return [{"key": key, "operator": how, "values": values} for key, how, values in rules]


def affinity(training: Training, options: Options) -> Json | None:
    merged: Json = {**options.own_pod.get("affinity", {})}
    rules = _node_rules(training, options)
    by_gpu = _gpu_rules(training.spec.resources, options)
    if rules or by_gpu != [[]]:
        node = {**merged.get("nodeAffinity", {})}
        # Terms are alternatives: each of the caller's own must meet our rules as well.
        terms = node.get(REQUIRED, {}).get("nodeSelectorTerms") or [{}]
        node[REQUIRED] = {
            "nodeSelectorTerms": [
                {**term, "matchExpressions": [*term.get("matchExpressions", ()), *gpu, *rules]}
                for term in terms
                for gpu in by_gpu
            ]
        }
        merged["nodeAffinity"] = node
    if training.spec.topology_spread == "pack" and "podAffinity" not in merged:
        near = ranks_of(training)
        merged["podAffinity"] = prefer((near, HOST, 100), (near, "topology.kubernetes.io/zone", 50))
    return merged or None


def term_of(labels: dict[str, str], key: str = HOST) -> Json:
    """Pods with these labels, on nodes that have one value of `key`."""
    return {"topologyKey": key, "labelSelector": {"matchLabels": labels}}


def prefer(*rows: tuple[dict[str, str], str, int]) -> Json:
    """Preferences for pods, with their weights."""
    return {
        PREFERRED: [
            {"weight": weight, "podAffinityTerm": term_of(labels, key)}
            for labels, key, weight in rows
        ]
    }


def spread(training: Training) -> list[Json] | None:
    key = SPREAD.get(training.spec.topology_spread)
    if key is None:
        return None
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": ranks_of(training)},
        }
    ]
