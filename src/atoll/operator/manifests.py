"""What to apply so that a cluster runs trainings: the CRD, the rights, the operator. Pure.

The rights are those that the code uses and no more; each row has its reason.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.backends.kubernetes.names import GROUP, REPORT_KEY
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.core.errors import ValidationError
from atoll.core.model import decode
from atoll.operator.crd import render_crd
from atoll.operator.tokens import NAME as TOKENS

Json = dict[str, Any]

NAME = "atoll-operator"
HOME = "atoll-system"
LABELS = {"app.kubernetes.io/name": "atoll", "app.kubernetes.io/component": "operator"}
PORT = 8080  # above 1024: the operator is not root
DATA = "/data"
CONFIG = "/config"
CONFIG_MODE = 0o440  # for the group of the pod alone
# Seconds after which a pod on a lost node is replaced. Kubernetes waits 300 by default,
# in which no training would be observed.
LOST_NODE_S = 30

# (API group, resources, verbs), in every namespace that is served.
RIGHTS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (GROUP, ("trainings",), ("get", "list", "watch", "create", "patch", "delete")),
    (GROUP, ("trainings/status",), ("patch",)),
    ("batch", ("jobs",), ("get", "list", "watch", "create", "patch", "delete")),
    ("", ("pods",), ("list", "watch", "patch", "deletecollection")),
    ("", ("pods/status",), ("patch",)),  # ranks on lost nodes, gangs that give way
    ("", ("pods/log",), ("get",)),
    ("", ("services", "configmaps"), ("create", "patch", "delete")),
    ("apps", ("deployments",), ("create", "patch", "delete")),  # the etcd of a training
    ("", ("configmaps",), ("list", "deletecollection")),  # logs of ranks whose pods were deleted
    ("", ("events",), ("create", "list")),
    ("", ("namespaces",), ("get",)),  # whether a token would be of use
)
# In the operator's own namespace; the last part, where there is one, names the objects.
HOME_RIGHTS: tuple[tuple[Any, ...], ...] = (
    ("coordination.k8s.io", ("leases",), ("get", "create", "update")),
    ("", ("pods",), ("get",)),  # its own, for its image
    ("", ("secrets",), ("create",)),  # rules cannot limit this to a name
    ("", ("secrets",), ("get", "patch"), (TOKENS, REPORT_KEY)),
)

# What people of a namespace get with the cluster's own roles.
USER_ROLES = {
    "edit": ("get", "list", "watch", "create", "update", "patch", "delete"),
    "view": ("get", "list", "watch"),
}


def render_manifests(
    *,
    image: str,
    home: str = HOME,
    namespace: str | None = None,
    replicas: int = 1,
    options: str = "",
    volume: str | None = None,
    config: str | None = None,
) -> list[Json]:
    """In the order to apply them. With `namespace`, the operator has rights in that one only.

    `options` are the executor's, as JSON. `volume` is a PersistentVolumeClaim for metrics, `config`
    a Secret with an `atoll.toml`. Raises ValidationError if the options are no such JSON.
    """
    if options:
        read_options(options)
    return [
        render_crd(),
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": home}},
        _object("v1", "ServiceAccount", home),
        *_served(home, namespace),
        *_role(home, home, "Role", HOME_RIGHTS, f"{NAME}-home"),
        *(_user_role(name, verbs) for name, verbs in USER_ROLES.items()),
        _deployment(image, home, namespace, replicas, options, volume, config),
        _service(home),
    ]


def read_options(text: str) -> dict[str, Any]:
    """The options that the JSON names; the operator has its own defaults for the others."""
    try:
        options, raw = decode(text, KubernetesOptions), msgspec.json.decode(text)
    except ValidationError as error:
        field = "--options" if error.field == "body" else f"--options: {error.field}"
        raise ValidationError(field, error.value, error.expected) from error
    if "namespace" in raw:
        raise ValidationError("--options: namespace", raw["namespace"], "expected as --namespace")
    names = zip(
        KubernetesOptions.__struct_fields__, KubernetesOptions.__struct_encode_fields__, strict=True
    )
    return {name: getattr(options, name) for name, sent in names if sent in raw}


def _object(api: str, kind: str, namespace: str | None, name: str = NAME) -> Json:
    metadata: Json = {"name": name, "labels": LABELS}
    if namespace is not None:
        metadata["namespace"] = namespace
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _served(home: str, namespace: str | None) -> list[Json]:
    if namespace is None:
        return _role(home, None, "ClusterRole", RIGHTS, NAME)
    return _role(home, namespace, "Role", RIGHTS, NAME)


def _role(home: str, namespace: str | None, kind: str, rights: Any, name: str) -> list[Json]:
    api = "rbac.authorization.k8s.io/v1"
    rules = [
        {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}
        | ({"resourceNames": list(names[0])} if names else {})
        for group, resources, verbs, *names in rights
    ]
    role = _object(api, kind, namespace, name) | {"rules": rules}
    binding = _object(api, f"{kind}Binding", namespace, name) | {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": home}],
    }
    return [role, binding]


def _user_role(name: str, verbs: tuple[str, ...]) -> Json:
    api = "rbac.authorization.k8s.io/v1"
    role = _object(api, "ClusterRole", None, f"atoll-trainings-{name}")
    grown = ("edit", "admin") if name == "edit" else ("view",)
    marks = {f"rbac.authorization.k8s.io/aggregate-to-{r}": "true" for r in grown}
    role["metadata"]["labels"] = {**LABELS, **marks}
    resources = ["trainings", "trainings/scale"] if name == "edit" else ["trainings"]
    return role | {"rules": [{"apiGroups": [GROUP], "resources": resources, "verbs": list(verbs)}]}


def _deployment(
    image: str,
    home: str,
    namespace: str | None,
    replicas: int,
    options: str,
    volume: str | None,
    config: str | None,
) -> Json:
    command = ["python", "-m", "atoll.operator", "run", "--port", str(PORT), "--data", DATA]
    command += ["--reports-uri", f"http://{NAME}.{home}.svc"]  # the Service below
    if namespace is not None:
        command += ["--namespace", namespace]
    if options:
        command += ["--options", options.replace("$", "$$")]  # not to be expanded by Kubernetes
    # Without a volume, metrics go with the pod.
    # A bound, so that metrics cannot fill the disk of the node.
    data: Json = {"name": "data", "emptyDir": {"sizeLimit": "4Gi"}}
    if volume is not None:
        data = {"name": "data", "persistentVolumeClaim": {"claimName": volume}}
    volumes = [data]
    mounts: list[Json] = [{"name": "data", "mountPath": DATA}]
    if config is not None:
        command += ["--config", f"{CONFIG}/atoll.toml"]
        secret = {"secretName": config, "defaultMode": CONFIG_MODE}
        volumes.append({"name": "config", "secret": secret})
        mounts.append({"name": "config", "mountPath": CONFIG, "readOnly": True})
    by_field = {
        "POD_NAMESPACE": "metadata.namespace",
        "POD_NAME": "metadata.name",
    }
    container = {
        "name": "operator",
        "image": image,
        "command": command,
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in by_field.items()
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        # Only the leader is ready, so that the Service sends requests to no other.
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "http"},
            "periodSeconds": 2,  # a new leader is found within this
            "timeoutSeconds": 10,
        },
        # It answers between two passes; one over 10,000 ranks on a busy node takes seconds.
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "http"},
            "periodSeconds": 20,
            "timeoutSeconds": 10,
        },
        "resources": {
            # At 2,000 ranks it takes 97 MB, at 10,000 it takes 218 MB.
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"memory": "512Mi"},
        },
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod = {
        "serviceAccountName": NAME,
        "containers": [container],
        "volumes": volumes,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,  # nobody, as in distroless images
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 10,  # it gives its lease back within 2 s
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{state}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": LOST_NODE_S,
            }
            for state in ("not-ready", "unreachable")
        ],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": LABELS},
            }
        ],
    }
    return _object("apps/v1", "Deployment", home) | {
        "spec": {
            "replicas": replicas,
            # A new pod is not ready before the old leader has ended, so none can wait for it; and a
            # volume of one node is free only then.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": LABELS},
            "template": {"metadata": {"labels": LABELS}, "spec": pod},
        }
    }


def _service(home: str) -> Json:
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    return _object("v1", "Service", home) | {"spec": {"selector": LABELS, "ports": ports}}
