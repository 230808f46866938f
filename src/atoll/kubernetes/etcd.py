"""The etcd of one training: a Deployment of one pod, behind a headless Service. Pure.

It keeps nothing that is worth a disk: the keys of a training that runs are written again. The Job
is held until it answers, so that no rank starts before it can meet the others: it is suspended, or
its start gate stays shut where a queue decides when it runs.
"""

from __future__ import annotations

from typing import Any

from atoll.core.mesh import DEFAULT_ETCD_PORT
from atoll.core.status import Training
from atoll.kubernetes.fabric import RESTRICTED
from atoll.kubernetes.names import ETCD, PART, UID
from atoll.kubernetes.options import Options
from atoll.kubernetes.place import tolerations
from atoll.kubernetes.pod import Pod
from atoll.kubernetes.render import etcd_name, gang_metadata, render_headless

Json = dict[str, Any]


def render_etcd_service(training: Training, options: Options, owner: Json | None) -> Json:
    metadata = gang_metadata(training, owner, options, name=etcd_name(training))
    return render_headless(metadata, training, ETCD, "client", DEFAULT_ETCD_PORT)


def render_etcd(training: Training, options: Options, owner: Json | None) -> Json:
    metadata = gang_metadata(training, owner, options, name=etcd_name(training))
    labels = {**metadata["labels"], PART: ETCD}
    pod: Json = {
        "containers": [_container(training, options)],
        "tolerations": tolerations(training.spec.resources, options),
        "volumes": [{"name": "data", "emptyDir": {}}],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
    }
    if options.priority_class_name is not None:
        pod["priorityClassName"] = options.priority_class_name
    if options.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secrets]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": {UID: training.uid, PART: ETCD}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _container(training: Training, options: Options) -> Json:
    port = DEFAULT_ETCD_PORT
    return {
        "name": ETCD,
        "image": options.etcd_image,
        "command": [
            "etcd",
            "--data-dir=/data/etcd",
            "--enable-v2=true",
            f"--listen-client-urls=http://0.0.0.0:{port}",
            f"--advertise-client-urls=http://{etcd_name(training)}:{port}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
        ],
        "ports": [{"name": "client", "containerPort": port}],
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": "client"},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 5,
        },
        "resources": {
            "requests": {"cpu": "50m", "memory": "64Mi"},
            "limits": {"memory": "512Mi"},
        },
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "securityContext": RESTRICTED,
    }


def answering(pods: list[Pod]) -> Pod | None:
    """The pod of an etcd that is up."""
    for pod in pods:
        is_ready = pod.condition("Ready").get("status") == "True" and not pod.is_leaving
        if is_ready and pod.status.get("podIP"):
            return pod
    return None


def address(pod: Pod) -> str:
    """By its IP, which is known without asking and needs no name service where we run."""
    ip = str(pod.status["podIP"])
    return f"[{ip}]:{DEFAULT_ETCD_PORT}" if ":" in ip else f"{ip}:{DEFAULT_ETCD_PORT}"


def trouble_of(deployment: Json) -> str:
    """Why its pod cannot be made (quota, admission), as far as that is known."""
    conditions = deployment.get("status", {}).get("conditions") or ()
    said = (c.get("message", "") for c in conditions if c["type"] == "ReplicaFailure")
    return next(said, "")


def words(pods: list[Pod], trouble: str = "") -> str:
    """What a held Job waits for."""
    told = (pod.waits_for for pod in pods if pod.waits_for and not pod.is_leaving)
    waits = next(told, "" if pods else trouble)
    return f"waits for its etcd{f': {waits}' if waits else ''}"
