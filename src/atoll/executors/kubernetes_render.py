"""What is asked of the cluster for one training: a Job, a Service, a ConfigMap. Pure.

One Indexed Job is the gang: its completion index is the rank. The ConfigMap carries what a Job
may not change while it runs (the world's size now), so that a rank started later finds it.
"""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from typing import Any

import msgspec

from atoll.core.errors import Permanent
from atoll.core.model import encode
from atoll.core.spec import Resources, TrainingSpec
from atoll.core.status import Training, Wish
from atoll.executors.environment import RANK_VARIABLES, gang_environment
from atoll.executors.kubernetes_options import Options

Json = dict[str, Any]

MANAGED = "app.kubernetes.io/managed-by"
TRAINING = "atoll.dev/training"
NAMESPACE = "atoll.dev/namespace"
UID = "atoll.dev/uid"
WISH = "atoll.dev/wish"
SHRINKS = "atoll.dev/shrinks"
YIELDED = "atoll.dev/yielded"
FINALIZER = "atoll.dev/exit"
INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE = "kueue.x-k8s.io/queue-name"
PROVIDER = "atoll.dev/provider"
REGION = "topology.kubernetes.io/region"
SELECTOR = f"{MANAGED}=atoll"

CONTAINER = "rank"
SOURCE_DIR = "/atoll/source"
SOURCE_MAX = 900_000  # a ConfigMap holds 1 MiB with everything in it
SIZE_VARIABLES = ("WORLD_SIZE", "ATOLL_WORLD_TARGET", "BASILICA_WORLD_TARGET")
SHRINKS_KEPT = 16

# How ranks lie in the cluster, by `topology_spread`: the node label they keep to or spread over.
SPREAD = {"provider-aware": PROVIDER, "region-aware": REGION}


def gang_name(training: Training) -> str:
    """The name of all its objects: a DNS label that leaves room for `-<index>` behind it."""
    tail = hashlib.sha256(training.uid.encode()).hexdigest()[:8]
    head = training.name[:46].rstrip("-")
    return f"{head}-{tail}" if head[0].isalpha() else f"t{head}-{tail}"


def gang_labels(training: Training) -> dict[str, str]:
    return {
        MANAGED: "atoll",
        TRAINING: training.name,
        NAMESPACE: training.namespace,
        UID: training.uid,
    }


def render_world(training: Training, wish: Wish, options: Options, owner: Json | None) -> Json:
    """What a rank reads when it starts, and the code it runs where that was sent along."""
    source = training.spec.source
    body: Json = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(training, owner, options),
        "data": {"size": str(wish.size)},
    }
    if source is not None:
        if len(source.content) > SOURCE_MAX:
            raise Permanent(
                f"the source has {len(source.content)} bytes, a ConfigMap takes {SOURCE_MAX}: "
                "put it into the image"
            )
        body["binaryData"] = {"source": base64.b64encode(source.content).decode()}
    return body


def render_service(training: Training, options: Options, owner: Json | None) -> Json:
    """Headless: gives every rank the name `<gang>-<rank>.<gang>`, before it is ready too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(training, owner, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {UID: training.uid},
            "ports": [{"name": "rendezvous", "port": options.master_port, "protocol": "TCP"}],
        },
    }


def render_job(training: Training, wish: Wish, options: Options, owner: Json | None = None) -> Json:
    """The gang: ranks `0..size-1`, each restarted on its own up to `max_restarts` times."""
    spec = training.spec
    metadata = _metadata(training, owner, options)
    metadata["annotations"] = {**options.annotations, WISH: encode(wish).decode()}
    if options.kueue_queue is not None:
        metadata["labels"][QUEUE] = options.kueue_queue
    body: Json = {
        "completions": wish.size,
        "parallelism": wish.size,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": spec.max_restarts,
        # A rank never runs twice: its successor waits until the last one is gone.
        "podReplacementPolicy": "Failed",
        "template": _template(training, options),
    }
    if options.kueue_queue is not None:
        body["suspend"] = True  # Kueue lets it go once the whole gang fits
    if spec.deadline_s is not None:
        body["activeDeadlineSeconds"] = math.ceil(spec.deadline_s)
    if options.ttl_seconds_after_finished is not None:
        body["ttlSecondsAfterFinished"] = options.ttl_seconds_after_finished
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body}


def render_resize(wish: Wish, before: Json, now: float) -> Json:
    """A merge patch of the Job. Shrinking is noted, to tell stopped ranks from fallen ones."""
    annotations = {WISH: encode(wish).decode()}
    if wish.size < before["spec"]["completions"]:
        annotations |= _shrunk(before, wish.size, now)
    # Completions may never be 0, and may change only together with parallelism.
    spec: Json = {"parallelism": wish.size}
    if wish.size > 0:
        spec["completions"] = wish.size
    return {"metadata": {"annotations": annotations}, "spec": spec}


def render_yield(before: Json, now: float) -> Json:
    """A merge patch that stops half a gang; the Job is made anew once they are gone."""
    annotations = {YIELDED: str(now), **_shrunk(before, 0, now)}
    return {"metadata": {"annotations": annotations}, "spec": {"parallelism": 0}}


def yielded_at(job: Json) -> float | None:
    noted = (job["metadata"].get("annotations") or {}).get(YIELDED)
    return float(noted) if noted else None


def _shrunk(before: Json, size: int, now: float) -> dict[str, str]:
    noted = (before["metadata"].get("annotations") or {}).get(SHRINKS, "[]")
    shrinks = [*msgspec.json.decode(noted), [size, round(now, 3)]][-SHRINKS_KEPT:]
    return {SHRINKS: msgspec.json.encode(shrinks).decode()}


def _metadata(training: Training, owner: Json | None, options: Options) -> Json:
    made: Json = {
        "name": gang_name(training),
        "labels": {**options.labels, **gang_labels(training)},
    }
    if owner is not None:
        made["ownerReferences"] = [owner]
    return made


def _template(training: Training, options: Options) -> Json:
    spec = training.spec
    name = gang_name(training)
    pod: Json = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": math.ceil(spec.stop_grace_s),
        "containers": [_container(training, options)],
        "tolerations": _tolerations(spec.resources, options),
        "enableServiceLinks": False,
    }
    optional = {
        "serviceAccountName": options.service_account,
        "runtimeClassName": options.runtime_class_name,
        "priorityClassName": options.priority_class_name,
        "schedulerName": options.scheduler_name,
        "securityContext": options.security_context,
        "hostNetwork": options.is_host_network or None,
        # With the host's network, cluster names are looked up only if asked for.
        "dnsPolicy": "ClusterFirstWithHostNet" if options.is_host_network else None,
        "nodeSelector": _node_selector(spec.resources, options) or None,
        "affinity": _affinity(training, options),
        "topologySpreadConstraints": _spread(training),
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets] or None,
        "volumes": _volumes(training, options) or None,
    }
    pod |= {field: value for field, value in optional.items() if value is not None}
    metadata: Json = {"labels": {**options.labels, **gang_labels(training)}}
    if options.annotations:
        metadata["annotations"] = options.annotations
    if options.is_exit_held:
        metadata["finalizers"] = [FINALIZER]
    return {"metadata": metadata, "spec": pod}


def _container(training: Training, options: Options) -> Json:
    spec = training.spec
    made: Json = {
        "name": CONTAINER,
        "image": spec.image or options.image,
        "command": [_literal(word) for word in render_command(spec, options)],
        "env": _environment(training, options),
        # The last lines of a rank that failed travel in its status, however soon it is gone.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    mounts = list(options.volume_mounts)
    if options.shm_size is not None:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if spec.source is not None:
        mounts.append({"name": "source", "mountPath": SOURCE_DIR, "readOnly": True})
    optional = {
        "imagePullPolicy": options.image_pull_policy,
        "workingDir": spec.working_dir,
        "resources": _resources(spec.resources, options) or None,
        "volumeMounts": mounts or None,
        "envFrom": [{"secretRef": {"name": s}} for s in options.env_from_secrets] or None,
    }
    return made | {field: value for field, value in optional.items() if value is not None}


def render_command(spec: TrainingSpec, options: Options) -> list[str]:
    if spec.source is None:
        command = [*(spec.command or ()), *spec.args]
    else:
        path = f"{SOURCE_DIR}/{spec.source.filename}"
        entry = [] if spec.source.kind == "script" else ["-m", "atoll.worker.entrypoint"]
        kind = [] if spec.source.kind == "script" else [spec.source.kind]
        command = [options.python, *entry, *kind, path, *spec.args]
    if not spec.pip_packages:
        return command
    install = shlex.join([options.python, "-m", "pip", "install", "--quiet", *spec.pip_packages])
    return ["sh", "-c", f'{install} && exec "$@"', "sh", *command]


def rank_zero(training: Training) -> str:
    """Where ranks meet: the stable name of rank 0."""
    name = gang_name(training)
    return f"{name}-0.{name}"


def rendezvous_endpoint(training: Training, options: Options) -> str:
    if training.spec.rendezvous.backend == "etcd-v2" or training.spec.mesh:
        return options.etcd_endpoint or ""
    return f"{rank_zero(training)}:{options.master_port}"


def _environment(training: Training, options: Options) -> list[Json]:
    shared = gang_environment(
        training,
        host="",
        master=rank_zero(training),
        port=options.master_port,
        rendezvous_uri=training.spec.rendezvous.uri or "",
    )
    if endpoint := rendezvous_endpoint(training, options):
        shared["BASILICA_RDZV_ENDPOINT"] = endpoint
    by_field = dict.fromkeys(RANK_VARIABLES, f"metadata.annotations['{INDEX}']")
    by_field["NODE_NAME"] = "spec.nodeName"
    made: list[Json] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in by_field.items()
    ]
    world = {"configMapKeyRef": {"name": gang_name(training), "key": "size"}}
    made += [{"name": name, "valueFrom": world} for name in SIZE_VARIABLES]
    taken = {*by_field, *SIZE_VARIABLES}
    made += [
        {"name": name, "value": _literal(value)}
        for name, value in shared.items()
        if name not in taken
    ]
    return made


def _literal(text: str) -> str:
    """Kubernetes would put `$(NAME)` in place; a command means here what it means elsewhere."""
    return text.replace("$", "$$")


def _resources(needs: Resources, options: Options) -> Json:
    """Requests are limits too where they are given, so that a rank gets what it was promised."""
    wanted = {"cpu": needs.cpu, "memory": needs.memory}
    amounts = {name: value for name, value in wanted.items() if value is not None}
    if needs.gpu_count:
        amounts[options.gpu_resource_key] = str(needs.gpu_count)  # quantities travel as strings
    return {"requests": amounts, "limits": amounts} if amounts else {}


def _tolerations(needs: Resources, options: Options) -> list[Json]:
    made: list[Json] = []
    if options.tolerations is not None:
        made += options.tolerations
    elif needs.gpu_count:
        made.append({"key": options.gpu_resource_key, "operator": "Exists", "effect": "NoSchedule"})
    given = {t.get("key") for t in made}
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if key not in given:
            made.append(
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": options.lost_node_s,
                }
            )
    return made


def _node_selector(needs: Resources, options: Options) -> dict[str, str]:
    """The table's labels under the caller's own."""
    if len(needs.gpu_models) != 1:
        return dict(options.node_selector)
    return {**options.gpu_nodes[needs.gpu_models[0].upper()], **options.node_selector}


def _node_rules(training: Training, options: Options) -> list[Json]:
    needs, providers = training.spec.resources, training.spec.provider_filter
    rules: list[tuple[str, str, list[str]]] = []
    if len(needs.gpu_models) > 1:
        rows = [options.gpu_nodes[model.upper()] for model in needs.gpu_models]
        (key,) = rows[0]
        if key not in options.node_selector:
            rules.append((key, "In", [row[key] for row in rows]))
    if needs.min_gpu_memory_gb is not None and needs.gpu_count:
        mib = needs.min_gpu_memory_gb * 10**9 // 2**20
        rules.append((options.gpu_memory_label, "Gt", [str(mib - 1)]))
    if providers.include is not None:
        rules.append((PROVIDER, "In", providers.include))
    if providers.exclude:
        rules.append((PROVIDER, "NotIn", providers.exclude))
    return [{"key": key, "operator": how, "values": values} for key, how, values in rules]


def _affinity(training: Training, options: Options) -> Json | None:
    made: Json = {**(options.affinity or {})}
    if rules := _node_rules(training, options):
        node = {**made.get("nodeAffinity", {})}
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        # Terms are alternatives: each of the caller's own must meet our rules as well.
        terms = node.get(required, {}).get("nodeSelectorTerms") or [{}]
        node[required] = {
            "nodeSelectorTerms": [
                {**term, "matchExpressions": [*term.get("matchExpressions", ()), *rules]}
                for term in terms
            ]
        }
        made["nodeAffinity"] = node
    if training.spec.topology_spread == "pack" and "podAffinity" not in made:
        near = [
            {
                "weight": weight,
                "podAffinityTerm": {
                    "topologyKey": key,
                    "labelSelector": {"matchLabels": {UID: training.uid}},
                },
            }
            for key, weight in (
                ("kubernetes.io/hostname", 100),
                ("topology.kubernetes.io/zone", 50),
            )
        ]
        made["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": near}
    return made or None


def _spread(training: Training) -> list[Json] | None:
    key = SPREAD.get(training.spec.topology_spread)
    if key is None:
        return None
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {UID: training.uid}},
        }
    ]


def _volumes(training: Training, options: Options) -> list[Json]:
    made = list(options.volumes)
    if options.shm_size is not None:
        made.append(
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm_size}}
        )
    if training.spec.source is not None:
        item = {"key": "source", "path": training.spec.source.filename}
        made.append({"name": "source", "configMap": {"name": gang_name(training), "items": [item]}})
    return made
